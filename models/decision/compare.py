"""Make the answers of split slates comparable: shared anchors with an offset a slate, or a temperature by slate size.

A probability depends on the rivals in its slate, so a pool that was split is ranked by numbers from different scales.
Shapes: S slates, A anchors, C candidates of a pool, N candidates in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from ...data_prep.hits import Cost
from ..protocols import DecisionScorer, Slate, SlateScores
from .around import ScorerAround
from .odds import log_odds, sigmoid
from .slates import Cut, Pool, PoolScores, short_notes, split

# Where a fit has no end (every answer right, or none), the scale stops here.
_SCALES = (1 / 20, 20.0)
_SLOPES = (-2.0, 2.0)
_GOLDEN = (math.sqrt(5) - 1) / 2


def anchor_offsets(log_odds_SA: np.ndarray) -> np.ndarray:
    """The offset of each slate (S,): the least-squares fit of log-odds = anchor + offset, offsets summing to 0.

    NaN where a slate did not judge an anchor.

    Raises:
        ValueError: some slates share no anchor with the others, not even by way of a third.
    """
    slate, anchor = np.nonzero(~np.isnan(log_odds_SA))
    slates, (present, anchor) = len(log_odds_SA), np.unique(anchor, return_inverse=True)
    design = np.zeros((len(slate), slates + len(present)))
    design[np.arange(len(slate)), slate] = 1
    design[np.arange(len(slate)), slates + anchor] = 1
    values = log_odds_SA[~np.isnan(log_odds_SA)]
    solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    # One direction is free: all offsets up and all anchors down. A second one is a slate that hangs on nothing.
    if rank < slates + len(present) - 1:
        raise ValueError(
            f"the {slates} slates fall into groups that share no anchor; give every slate the same anchors"
        )
    return np.asarray(solution[:slates] - solution[:slates].mean())


def spread_anchors(count: int, anchors: int) -> list[int]:
    """Positions of `anchors` candidates (all, if there are fewer), evenly spaced in reading order."""
    anchors = min(anchors, count)
    return [(2 * n + 1) * count // (2 * anchors) for n in range(anchors)]


def slate_temperature(size: int, temperature: Sequence[float]) -> float:
    """T(n) = exp(a + b ln n) of a slate with n candidates, by which its log-odds are divided."""
    a, b = temperature
    return math.exp(a + b * math.log(size))


def fit_slate_temperature(log_odds_N: np.ndarray, sizes_N: np.ndarray, labels_N: np.ndarray) -> tuple[float, float]:
    """(a, b) of T(n) = exp(a + b ln n) with the least log-loss of the answers (1 gold, 0 wrong).

    For a fixed b the loss is convex in exp(-a); over b it is searched on a grid and then finely. T stays between 1/20
    and 20 for the mean size, b between -2 and 2; with slates of one size b is 0.

    Raises:
        ValueError: the arrays differ in length or are empty, a size below 1, or labels other than 0 and 1.
    """
    if not len(log_odds_N) == len(sizes_N) == len(labels_N) > 0:
        raise ValueError(f"{len(log_odds_N)} log-odds, {len(sizes_N)} sizes and {len(labels_N)} labels do not match")
    if sizes_N.min() < 1 or not np.isin(labels_N, (0, 1)).all():
        raise ValueError("sizes must be 1 or more, and labels 0 or 1")
    logs_N = np.log(sizes_N)
    middle = float(logs_N.mean())
    signed_N = np.where(labels_N == 1, -log_odds_N, log_odds_N)

    def best_scale(slope: float) -> tuple[float, float]:
        shaped_N = signed_N * np.exp(-slope * (logs_N - middle))
        return _golden(lambda s: float(np.logaddexp(0.0, math.exp(s) * shaped_N).mean()), *map(math.log, _SCALES))

    slope = 0.0
    if np.ptp(logs_N) > 0:
        grid = np.linspace(*_SLOPES, 41)
        start = float(grid[int(np.argmin([best_scale(b)[1] for b in grid]))])
        slope, _ = _golden(lambda b: best_scale(b)[1], max(_SLOPES[0], start - 0.1), min(_SLOPES[1], start + 0.1))
    return -best_scale(slope)[0] - slope * middle, slope


class CooledScorer(ScorerAround):
    """Another scorer whose yes/no log-odds are divided by the temperature of their slate's size.

    Finalists of a choice share one slate, so there is nothing to make comparable.
    """

    def __init__(self, scorer: DecisionScorer, temperature: Sequence[float]) -> None:
        super().__init__(scorer)
        self._temperature = tuple(temperature)

    def yes(self, slates: Sequence[Slate]) -> list[SlateScores]:
        """As the other's, cooled."""
        return [
            replace(answer, values_C=sigmoid(log_odds(answer.values_C) / self._of(len(slate.candidates))))
            for slate, answer in zip(slates, self.scorer.yes(slates), strict=True)
        ]

    def _of(self, size: int) -> float:
        return slate_temperature(size, self._temperature)


def score_pools_anchored(
    scorer: DecisionScorer,
    pools: Sequence[Pool],
    anchors: int,
    *,
    cut: Cut | None = None,
) -> list[PoolScores]:
    """As `score_pools`, but slates of a split pool share anchors, and each loses its offset to them in log-odds.

    anchors: how many; more compares better and leaves each slate less room, so that a pool takes more slates.

    A candidate that is an anchor keeps the value of its own slate. A pool of one slate is scored as `score_pools` does.

    Raises:
        ValueError: a pool is empty, or the anchors leave no room in a slate.
    """
    cut = cut or Cut.of(scorer)
    plans = [_plan(scorer, pool, spread_anchors(len(pool.candidates), anchors), cut) for pool in pools]
    answers = iter(scorer.yes([slate for plan in plans for slate in plan.slates]))
    return [_pooled(plan, [next(answers) for _ in plan.slates]) for plan in plans]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Slates of a pool, and where in each of them its own candidates and the anchors stand."""

    slates: list[Slate]
    own: list[list[int]]
    anchors: list[list[int]]


def _plan(scorer: DecisionScorer, pool: Pool, chosen: Sequence[int], cut: Cut) -> _Plan:
    slates = split(pool, scorer, cut)
    if len(slates) == 1 or not chosen:
        return _Plan(slates, [list(range(len(slate.candidates))) for slate in slates], [[] for _ in slates])
    places = set(chosen)
    sizes = [scorer.num_tokens(candidate) for candidate in pool.candidates]
    room = replace(
        cut,
        max_candidates=cut.max_candidates - len(places),
        max_tokens=cut.max_tokens - sum(sizes[place] for place in places),
    )
    if room.max_candidates < 1 or room.max_tokens < max(sizes):
        raise ValueError(
            f"{len(places)} anchors fill a slate of {cut.max_candidates} candidates and {cut.max_tokens} tokens of "
            "them; take fewer anchors, or larger slates"
        )
    plan, start = _Plan([], [], []), 0
    for part in split(pool, scorer, room):
        own = range(start, start + len(part.candidates))
        shown = sorted(places.union(own))
        plan.slates.append(Slate(pool.query, tuple(pool.candidates[place] for place in shown)))
        plan.own.append([n for n, place in enumerate(shown) if place in own])
        plan.anchors.append([n for n, place in enumerate(shown) if place in places])
        start = own.stop
    return plan


def _pooled(plan: _Plan, parts: Sequence[SlateScores]) -> PoolScores:
    cost = reduce(Cost.__add__, (part.cost for part in parts), Cost(max_concurrency=len(parts)))
    notes = [note for part in parts for note in part.notes]
    values_C = np.concatenate([part.values_C[own] for part, own in zip(parts, plan.own, strict=True)])
    shared = len(plan.anchors[0])
    if len(parts) > 1:
        notes.insert(0, f"split into {len(parts)} slates" + (f" that share {shared} anchors" if shared else ""))
    if shared:
        odds = [log_odds(part.values_C) for part in parts]
        offsets = anchor_offsets(np.stack([o[where] for o, where in zip(odds, plan.anchors, strict=True)]))
        own_C = [o[where] - offset for o, where, offset in zip(odds, plan.own, offsets, strict=True)]
        values_C = sigmoid(np.concatenate(own_C))
    return PoolScores(values_C, len(parts), short_notes(notes), cost)


def _golden(loss: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """(place, loss) of the minimum of a function with one valley, to 1e-6."""
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = loss(a), loss(b)
    while high - low > 1e-6:
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = loss(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = loss(b)
    middle = (low + high) / 2
    return middle, loss(middle)
