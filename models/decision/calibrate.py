"""Fit per-level thresholds so that the gold path survives a walk with a promised probability.

The promise: for a query that comes from where the labelled ones came, the chance that the walk loses its gold path is
at most alpha. It is made level by level, alpha / L for each of L levels that choose (union bound), from folds that
share no query: the walks of fold l use thresholds that were fitted on the folds above only. To these thresholds a new
query looks like one of fold l, and the conformal quantile holds for it: that it comes to level l with its gold path and
loses it there has probability <= alpha / L. The promise is an average over labelled sets: with few queries a set may be
luckier or unluckier than promised (`wilson`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...data_prep.corpus import Corpus
from ...data_prep.examples import descendants, gold_paths
from ...data_prep.task import Qrels, Query
from ..config import check_choice
from .budget import Budget, Calibrated
from .calibration import GOLD, LevelThreshold
from .conformal import SCORES, conformal_threshold, nonconformity, queries_needed
from .navigate import LevelScores
from .slates import ranked

# The least share that `auto` compares scores on at the root level; below, the folds of the levels above help. A level's
# own fold must not, or the choice would break the promise.
TUNING_SHARE = 0.1


class Observer(Protocol):
    """A walk that shows what it judged: `Navigator.observe`."""

    def observe(self, queries: Sequence[str], level: int) -> list[LevelScores]:
        """What the walk of each query judges on a level; no rows where it had ended above."""
        ...


Walk = Callable[[Budget], Observer]


@dataclass(frozen=True, slots=True)
class Labelled:
    """A query and the paths (rows, root level first) to its gold nodes, at least one."""

    id: str
    text: str
    paths: tuple[tuple[int, ...], ...]


def labelled(corpus: Corpus, queries: Sequence[Query], qrels: Qrels) -> list[Labelled]:
    """The queries with a relevant node in the corpus, in their order."""
    pairs = ((query, gold_paths(corpus, qrels.get(query.id, {}))) for query in queries)
    return [Labelled(query.id, query.text, tuple(paths)) for query, paths in pairs if paths]


def shuffled(queries: Sequence[Labelled], seed: int) -> list[Labelled]:
    """An order that depends on the ids and the seed only."""
    return sorted(queries, key=lambda q: hashlib.sha256(f"{seed}:{q.id}".encode(errors="surrogatepass")).digest())


def fit(
    walk: Walk,
    corpus: Corpus,
    queries: Sequence[Labelled],
    alpha: float,
    *,
    confidence: float | None = None,
    score: str = "auto",
    gold: str = "any",
    seed: int = 0,
) -> tuple[LevelThreshold, ...]:
    """Thresholds of each level that chooses, from the root level down.

    Args:
        walk: the walk with a budget, such as `lambda budget: Navigator(scorer, corpus, config, budget=budget)`.
        corpus: what is walked.
        queries: labelled; each sets the threshold of one level only.
        alpha: the share of queries that may lose their gold path; smaller opens more candidates and needs more queries.
        confidence: how surely these queries give thresholds that keep the promise; None promises it on average over
            sets of queries, of which some then fall short. Surer opens more candidates and needs more queries.
        score: one of `SCORES`, or `auto`: on each level the one that opens fewest candidates for queries of no fold
            (a tenth or more) and of the folds above.
        gold: a query with several gold nodes survives if `any` path does, or only if `all` do. A gold node that is not
            a leaf stands for whatever is below it.
        seed: which query is used for which level.

    Raises:
        ValueError: the corpus is flat, alpha or confidence is not between 0 and 1, an unknown `score` or `gold`, or
            too few queries for this alpha; says how many it takes.
    """
    _check(corpus, alpha, score, gold)
    count = corpus.num_levels - 1
    each = alpha / count
    if confidence is not None:
        if not 0 < confidence < 1:
            raise ValueError(f"confidence={confidence} must be above 0 and below 1")
        confidence = 1 - (1 - confidence) / count  # as alpha, shared by the levels
    need = queries_needed(each, confidence)
    spare = tuning_size(len(queries), count, each, need if confidence else None) if score == "auto" else 0
    tuning, folds = folds_of(shuffled(queries, seed), count, spare)
    if min(map(len, folds)) < need:
        raise ValueError(
            f"alpha={alpha:g} over {count} levels is {each:.3g} a level, which takes at least {need} queries a level: "
            f"{_total(need, count, score)} labelled queries to calibrate with, and there are {len(queries)}; "
            "label more, or promise less with a larger alpha"
        )
    done: list[LevelThreshold] = []
    for level, fold in enumerate(folds):
        observer = walk(Calibrated(tuple(done)))
        name = score
        if score == "auto":
            known = [*tuning, *(query for above in folds[:level] for query in above)]
            name = _cheapest(corpus, _observed(observer, known, level), level, each, gold)
        observed = _observed(observer, fold, level)
        scores = [gold_score(corpus, seen, query.paths, level, name, gold) for query, seen in observed]
        done.append(LevelThreshold(name, _threshold(scores, each, confidence), each, len(scores)))
    return tuple(done)


def _check(corpus: Corpus, alpha: float, score: str, gold: str) -> None:
    if corpus.num_levels < 2:
        raise ValueError("the corpus has one level, where a walk never chooses what to open: nothing to calibrate")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha} must be above 0 and below 1")
    check_choice("score", score, ("auto", *SCORES))
    check_choice("gold", gold, GOLD)


def tuning_size(total: int, levels: int, alpha: float, need: int | None = None) -> int:
    """How many queries to spare for `auto`; all of them where the folds would get too few.

    need: what each fold takes for a promise with a confidence; every further query then makes it less cautious, and
        the share that is spared is `TUNING_SHARE`.

    A fold of ceil(j / alpha) - 1 queries gives a threshold that is exact on average, and any more up to the next j a
    cautious one. So the folds get such a number each, the largest that leaves a share of `TUNING_SHARE`.
    """
    if need is not None:
        spare = math.ceil(total * TUNING_SHARE)
        return spare if total - spare >= levels * need else total
    for j in range(math.floor(total // levels * alpha) + 1, 0, -1):
        spare = total - levels * queries_needed(alpha / j)
        if spare >= total * TUNING_SHARE:
            return spare
    return total


def folds_of(queries: Sequence[Labelled], count: int, tuning: int) -> tuple[list[Labelled], list[list[Labelled]]]:
    """Disjoint parts of ordered queries: the first for tuning, and the rest in `count` parts of similar size."""
    rest = list(queries[tuning:])
    return list(queries[:tuning]), [rest[len(rest) * n // count : len(rest) * (n + 1) // count] for n in range(count)]


def at_risk(corpus: Corpus, seen: LevelScores) -> bool:
    """Whether the walk chooses on this level: it had not ended above, and not all that it judged are leaves."""
    return not all(map(corpus.is_leaf, seen.rows))


def gold_positions(corpus: Corpus, seen: LevelScores, path: Sequence[int], level: int) -> np.ndarray:
    """Positions among the judged of the node on this gold path, or of what is below a gold node that was opened."""
    rows_C = np.array(seen.rows)
    if len(path) > level:
        return np.flatnonzero(rows_C == path[level])
    # A leaf that stayed is judged again beside deeper nodes.
    ranges = [descendants(corpus, path[-1], depth) for depth in range(len(path) - 1, level + 1)]
    inside = [(rows_C >= rows.start) & (rows_C < rows.stop) for rows in ranges if rows]
    return np.flatnonzero(np.logical_or.reduce(inside))


def gold_score(
    corpus: Corpus, seen: LevelScores, paths: Sequence[Sequence[int]], level: int, score: str, gold: str
) -> float:
    """The threshold that keeps the gold path on this level: inf if it was lost above, -inf where nothing is chosen."""
    if not at_risk(corpus, seen):
        return -math.inf
    scores_C = nonconformity(score, seen.log_odds_C)
    found = (scores_C[gold_positions(corpus, seen, path, level)] for path in paths)
    each = [float(part.min()) if len(part) else math.inf for part in found]
    return min(each) if gold == "any" else max(each)


def opened(corpus: Corpus, seen: LevelScores, kept: np.ndarray) -> int:
    """How many candidates the next level judges; 0 where the walk ends with this level."""
    if not at_risk(corpus, seen):
        return 0
    return sum(max(1, len(corpus.children(seen.rows[i]))) for i in kept)


def _observed(observer: Observer, queries: Sequence[Labelled], level: int) -> list[tuple[Labelled, LevelScores]]:
    return list(zip(queries, observer.observe([query.text for query in queries], level), strict=True))


def _cheapest(
    corpus: Corpus, observed: Sequence[tuple[Labelled, LevelScores]], level: int, alpha: float, gold: str
) -> str:
    """The score that opens fewest candidates with the threshold that these queries ask for."""
    costs = dict.fromkeys(SCORES, 0)
    for name in SCORES:
        scores = [gold_score(corpus, seen, query.paths, level, name, gold) for query, seen in observed]
        enough = len(scores) >= queries_needed(alpha)
        bar = _threshold(scores, alpha if enough else 1 / (len(scores) + 1))
        for _, seen in observed:
            if seen.rows:
                passing = int((nonconformity(name, seen.log_odds_C) <= bar).sum())
                costs[name] += opened(corpus, seen, ranked(seen.log_odds_C)[: max(1, passing)])
    return min(SCORES, key=costs.__getitem__)


def _threshold(scores: Sequence[float], alpha: float, confidence: float | None = None) -> float:
    """The conformal threshold; where it may be as low as one likes, the lowest score that any query asked for."""
    # What was lost above cannot be lost here, whatever the threshold.
    scores_N = np.array([-math.inf if value == math.inf else value for value in scores])
    asked = scores_N[scores_N > -math.inf]
    lowest = float(asked.min()) if len(asked) else 0.0
    return max(lowest, conformal_threshold(scores_N, alpha, confidence))


def _total(need: int, levels: int, score: str) -> int:
    """The fewest queries whose folds are all large enough."""
    return math.ceil(need * levels / (1 - TUNING_SHARE)) if score == "auto" else need * levels
