"""Retrieval without a retriever: a decision model walks the corpus tree from its root level to the leaves.

At each level all candidates are judged together, the best stay and are opened, until only leaves are left; the best
leaves then meet in one multiple-choice request (DecisionRAG).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from ...data_prep.corpus import Corpus
from ...data_prep.hits import Cost, Hits, Step
from ..config import NavigateConfig
from ..protocols import DecisionScorer
from .budget import Budget, make_budget
from .candidates import Candidates
from .choose import FinalOrder, choose_best
from .slates import Pool, PoolScores, check_queries, ranked, score_pools

Watch = Callable[[str, Step], None]

# Probabilities nearer to 0 and 1 count as this: the odds of one certain level must not drown all others.
_LEAST = 1e-9


@dataclass(slots=True)
class _Walk:
    """One query on its way down: the rows to judge next, and what was done so far."""

    query: str
    rows: list[int]
    above: list[float]  # sum of the log-odds of what is above each row
    steps: list[Step] = field(default_factory=list)
    passed_by: list[tuple[float, int]] = field(default_factory=list)  # leaves dropped above the last level
    last_values_C: np.ndarray | None = None  # value of `rows` (see `Navigator.search`) once they are all leaves


@dataclass(frozen=True, slots=True)
class LevelScores:
    """What a walk judged on one level, before it chose: rows and their log-odds (C,), none if it had ended above."""

    rows: tuple[int, ...]
    log_odds_C: np.ndarray
    cost: Cost


_NOTHING = LevelScores((), np.empty(0), Cost())


class Navigator:
    """Walks one corpus with one scorer; a `Retriever`.

    Trade-off: `config.keep` buys recall with candidates of the next level (see `NavigateConfig`).
    """

    def __init__(
        self,
        scorer: DecisionScorer,
        corpus: Corpus,
        config: NavigateConfig | None = None,
        *,
        budget: Budget | None = None,
        queries_at_once: int = 32,
    ) -> None:
        """`budget`: None takes that of `config`.

        `queries_at_once`: queries whose slates travel together; more fills a GPU better and costs memory.
        """
        self.scorer, self.corpus = scorer, corpus
        self.config = config or NavigateConfig()
        self.budget = make_budget(self.config) if budget is None else budget
        self.queries_at_once = queries_at_once
        self._candidates = Candidates(corpus)

    def search(self, queries: Sequence[str], *, k: int = 10, watch: Watch | None = None) -> list[Hits]:
        """The best `k` leaves for each query; fewer where the walk reached fewer.

        A candidate's value is its P(yes), or with `path_weight` w sigmoid(logit P(yes) + w * sum of logit P(yes) above
        it). Scores: leaves of the final choice 1 + their probability there, other leaves of the last level their value,
        leaves that were dropped d levels higher their value - d; so the order is that of the stages.
        `watch` is called with (query, step) as soon as a step is done.

        Raises:
            ValueError: a query is empty, or k < 1.
        """
        check_queries(queries, k)
        hits: list[Hits] = []
        for start in range(0, len(queries), self.queries_at_once):
            root = list(self.corpus.children(None))
            walks = [_Walk(q, root, [0.0] * len(root)) for q in queries[start : start + self.queries_at_once]]
            hits += self._walk(walks, k, watch or _ignore)
        return hits

    def observe(self, queries: Sequence[str], level: int) -> list[LevelScores]:
        """What the walk of each query judges on `level` (0: the root level), where the levels above chose as always.

        The log-odds are those that the budget is given.
        """
        check_queries(queries, 1)
        root = list(self.corpus.children(None))
        walks = [_Walk(query, root, [0.0] * len(root)) for query in queries]
        out: list[LevelScores] = []
        for start in range(0, len(walks), self.queries_at_once):
            together = walks[start : start + self.queries_at_once]
            for above in range(level):
                for walk in together:
                    walk.rows = [] if all(map(self.corpus.is_leaf, walk.rows)) else walk.rows
                active = [walk for walk in together if walk.rows]
                for walk, scores in zip(active, score_pools(self.scorer, map(self._pool, active)), strict=True):
                    self._descend(walk, scores, above, _ignore)
            judged = iter(score_pools(self.scorer, [self._pool(walk) for walk in together if walk.rows]))
            out += [self._observed(walk, next(judged)) if walk.rows else _NOTHING for walk in together]
        return out

    def _observed(self, walk: _Walk, scores: PoolScores) -> LevelScores:
        return LevelScores(tuple(walk.rows), _log_odds(self._values(walk, scores)), scores.cost)

    def _walk(self, walks: list[_Walk], k: int, watch: Watch) -> list[Hits]:
        level = 0
        while active := [walk for walk in walks if walk.last_values_C is None]:
            for walk, scores in zip(active, score_pools(self.scorer, map(self._pool, active)), strict=True):
                if self.corpus.are_leaves(np.array(walk.rows)).all():
                    walk.last_values_C = self._values(walk, scores)
                    self._note(walk, scores, ranked(walk.last_values_C)[:k], "leaves", watch)
                else:
                    self._descend(walk, scores, level, watch)
            level += 1
        values = [walk.last_values_C for walk in walks if walk.last_values_C is not None]
        orders = choose_best(self.scorer, [self._pool(walk) for walk in walks], values, self.config.choose)
        return [self._hits(walk, final, k, watch) for walk, final in zip(walks, orders, strict=True)]

    def _pool(self, walk: _Walk) -> Pool:
        return Pool(walk.query, self._candidates.of(walk.rows))

    def _values(self, walk: _Walk, scores: PoolScores) -> np.ndarray:
        weight = self.config.path_weight
        if weight == 0:
            return scores.values_C
        return 1 / (1 + np.exp(-(_logit(scores.values_C) + weight * np.array(walk.above))))

    def _descend(self, walk: _Walk, scores: PoolScores, level: int, watch: Watch) -> None:
        values_C = self._values(walk, scores)
        best = self.budget.keep(level, _log_odds(values_C))
        self._note(walk, scores, best, f"level {level + 1}", watch)
        kept = np.sort(best).tolist()
        passed_C = self.corpus.are_leaves(np.array(walk.rows))
        passed_C[best] = False
        dropped = [(float(values_C[i]), walk.rows[i]) for i in np.flatnonzero(passed_C)]
        walk.passed_by = [(value - 1.0, row) for value, row in walk.passed_by + dropped]
        # Opened in reading order. A leaf that stays is judged again beside the deeper ones, so that the last level
        # compares all that is left.
        odds_C = _logit(scores.values_C)
        opened: list[tuple[int, float]] = []
        for i in kept:
            below = self.corpus.children(walk.rows[i])
            above = walk.above[i] + float(odds_C[i])
            opened += [(row, above) for row in below] if below else [(walk.rows[i], walk.above[i])]
        walk.rows, walk.above = [row for row, _ in opened], [above for _, above in opened]

    def _note(self, walk: _Walk, scores: PoolScores, best: np.ndarray, name: str, watch: Watch) -> None:
        notes = scores.notes
        if scores.values_C.max() < 0.5:
            notes = (*notes, f"no candidate is more likely yes than no; the best {len(best)} are kept all the same")
        if self.config.path_weight:
            notes = (*notes, f"ranked by the log-odds along the path (path_weight={self.config.path_weight:g})")
        ids = tuple(candidate.id for candidate in self._candidates.of(walk.rows))
        step = Step(
            name=name,
            ids=ids,
            scores=tuple(scores.values_C.tolist()),
            kept=tuple(ids[i] for i in best),
            notes=notes,
            cost=scores.cost,
        )
        walk.steps.append(step)
        watch(walk.query, step)

    def _hits(self, walk: _Walk, final: FinalOrder, k: int, watch: Watch) -> Hits:
        if final.step is not None:
            walk.steps.append(final.step)
            watch(walk.query, final.step)
        found = [(walk.rows[i], score) for i, score in final.order]
        found += [(row, value) for value, row in sorted(walk.passed_by, key=lambda pair: -pair[0])]
        cost = reduce(Cost.__add__, (step.cost for step in walk.steps), Cost())
        ids = tuple(self.corpus.id(row) for row, _ in found[:k])
        return Hits(ids, tuple(score for _, score in found[:k]), cost, tuple(walk.steps))


def _ignore(query: str, step: Step) -> None:
    """Nobody watches."""


def _logit(values_C: np.ndarray) -> np.ndarray:
    safe_C = np.clip(values_C, _LEAST, 1 - _LEAST)
    return np.log(safe_C / (1 - safe_C))  # type: ignore[no-any-return]


def _log_odds(values_C: np.ndarray) -> np.ndarray:
    """Finite, and as far apart as the probabilities are."""
    tiny = np.finfo(float).tiny
    return np.log(np.maximum(values_C, tiny)) - np.log(np.maximum(1 - values_C, tiny))  # type: ignore[no-any-return]
