"""What a budget really keeps and spends on labelled queries, and what fixed budgets keep and spend beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...data_prep.corpus import Corpus
from .budget import Budget, KeepCount
from .calibrate import Labelled, Walk, at_risk, gold_positions, gold_score, opened
from .slates import ranked


@dataclass(frozen=True, slots=True)
class LevelSurvival:
    """One level: `reached` queries came here with their gold path and had to choose, and `survived` of them kept it.

    judged, kept: mean candidates of all queries that chose here.
    """

    reached: int
    survived: int
    judged: float
    kept: float


@dataclass(frozen=True, slots=True)
class Survival:
    """All levels that choose, of `queries` how many survived all, and the mean candidates judged by a whole walk."""

    levels: tuple[LevelSurvival, ...]
    queries: int
    survived: int
    candidates: float


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """A list for `NavigateConfig.keep`, how many queries survived with it, and the mean candidates judged."""

    keep: tuple[int, ...]
    survived: int
    candidates: float


def measure(walk: Walk, budget: Budget, corpus: Corpus, queries: Sequence[Labelled], *, gold: str = "any") -> Survival:
    """Survival and cost of a budget; each level is observed by a walk of its own (see `MemoScorer`).

    Raises:
        ValueError: no queries.
    """
    if not queries:
        raise ValueError("no labelled queries to measure survival with")
    observer, texts = walk(budget), [query.text for query in queries]
    alive_N = np.ones(len(queries), dtype=bool)
    judged_N = np.zeros(len(queries))
    levels = []
    for level in range(corpus.num_levels - 1):
        reached = survived = 0
        widths, kepts = [], []
        for n, (query, seen) in enumerate(zip(queries, observer.observe(texts, level), strict=True)):
            judged_N[n] += len(seen.rows)
            if not at_risk(corpus, seen):
                continue
            kept = budget.keep(level, seen.log_odds_C)
            reached += bool(alive_N[n])
            inside = [np.isin(gold_positions(corpus, seen, path, level), kept).any() for path in query.paths]
            alive_N[n] &= any(inside) if gold == "any" else all(inside)
            survived += bool(alive_N[n])
            widths.append(len(seen.rows))
            kepts.append(len(kept))
            if level == corpus.num_levels - 2:
                judged_N[n] += opened(corpus, seen, kept)
        levels.append(LevelSurvival(reached, survived, _mean(widths), _mean(kepts)))
    return Survival(tuple(levels), len(queries), int(alive_N.sum()), float(judged_N.mean()))


def fixed_budgets(
    walk: Walk, corpus: Corpus, queries: Sequence[Labelled], grid: Sequence[int], *, gold: str = "any"
) -> list[FixedBudget]:
    """Every list of numbers of `grid`, one a level that chooses, on the same queries.

    A number that no level's width reaches stands for all larger ones. The last level is read from one walk for all
    its numbers; the levels above cost a walk of all queries for each list of theirs.
    """
    texts, numbers = [query.text for query in queries], sorted(set(grid))

    def below(above: tuple[int, ...], alive_N: np.ndarray, judged_N: np.ndarray) -> Iterator[FixedBudget]:
        level = len(above)
        seen_N = walk(KeepCount(above or (1,))).observe(texts, level)
        judged_N = judged_N + [len(seen.rows) for seen in seen_N]
        pairs = zip(queries, seen_N, strict=True)
        rank_N = np.array([gold_score(corpus, seen, query.paths, level, "rank", gold) for query, seen in pairs])
        for keep in _distinct(numbers, max(len(seen.rows) for seen in seen_N)):
            alive = alive_N & (rank_N < keep)
            if level < corpus.num_levels - 2:
                yield from below((*above, keep), alive, judged_N)
            else:
                opened_N = [opened(corpus, seen, ranked(seen.log_odds_C)[:keep]) for seen in seen_N]
                yield FixedBudget((*above, keep), int(alive.sum()), float((judged_N + opened_N).mean()))

    return list(below((), np.ones(len(queries), dtype=bool), np.zeros(len(queries))))


def best_within(budgets: Sequence[FixedBudget], candidates: float) -> FixedBudget | None:
    """The one that survives most often among those that judge no more candidates; of equal ones the cheapest."""
    within = [budget for budget in budgets if budget.candidates <= candidates]
    return max(within, key=lambda budget: (budget.survived, -budget.candidates), default=None)


def cheapest_as_safe(budgets: Sequence[FixedBudget], survived: int) -> FixedBudget | None:
    """The one with fewest candidates among those that survive at least as often."""
    safe = [budget for budget in budgets if budget.survived >= survived]
    return min(safe, key=lambda budget: budget.candidates, default=None)


def _distinct(grid: Sequence[int], widest: int) -> list[int]:
    """The numbers of an ascending grid up to the first that keeps everything."""
    all_of_it = next((n for n, keep in enumerate(grid) if keep >= widest), len(grid))
    return list(grid[: all_of_it + 1])


def _mean(values: Sequence[int]) -> float:
    return float(np.mean(values)) if values else 0.0
