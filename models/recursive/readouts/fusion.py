"""Fusion by rank: what several states' lists agree on, whatever their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...config import check_positive
from ..traversal import Traversal
from .base import DEPTH, OfStates, Ranking, Tools, ranked, state_weights


@dataclass(frozen=True, slots=True)
class RRF(OfStates):
    """sum over states s of w_s / (k + rank_s(d)), ranks from 1, the first 200 of each state (Cormack et al. 2009).

    w_s is 1, or with `level_balanced` 1 / (L |F_h|). A larger k counts deep ranks more.
    """

    k: int = 60
    level_balanced: bool = False

    def __post_init__(self) -> None:
        check_positive("readout.k", self.k)

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """By the sum."""
        lists = [state.candidates_K for state in traversal.states]
        weights = state_weights(traversal.states, True) if self.level_balanced else np.ones(len(lists))
        return rrf(lists, self.k, weights)


def rrf(lists: Sequence[np.ndarray], k: int, weights: np.ndarray | None = None) -> Ranking:
    """Reciprocal rank fusion of lists of rows, the first 200 of each; `weights` of the lists (None: 1)."""
    cut = [rows[:DEPTH] for rows in lists]
    weights = np.ones(len(cut)) if weights is None else weights
    values = [weight / (k + np.arange(1, len(rows) + 1)) for rows, weight in zip(cut, weights, strict=True)]
    return _summed(cut, values)


@dataclass(frozen=True, slots=True)
class Borda(OfStates):
    """sum over states s of K_s - rank_s(d) + 1, where K_s = |C_s| and ranks count from 1."""

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """By the points."""
        lists = [state.candidates_K for state in traversal.states]
        return _summed(lists, [np.arange(len(rows), 0, -1, dtype=np.float64) for rows in lists])


@dataclass(frozen=True, slots=True)
class PostOrderRRF(OfStates):
    """As in COR: fused(i) is the own list of a leaf, else the RRF of [own list] and [fused(child) ...]; of the root.

    Every node's list is cut to 200.
    """

    k: int = 60

    def __post_init__(self) -> None:
        check_positive("readout.k", self.k)

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """The root's fused list."""
        children: dict[int, list[int]] = {}
        for number, state in enumerate(traversal.states):
            if state.parent is not None:
                children.setdefault(state.parent, []).append(number)
        fused: dict[int, Ranking] = {}
        for number in reversed(range(len(traversal.states))):  # children have larger numbers than their parents
            state = traversal.states[number]
            below = [fused[child].rows for child in children.get(number, ())]
            own = state.candidates_K[:DEPTH]
            if below:
                fused[number] = rrf([own, *below], self.k)
            else:
                fused[number] = Ranking(own, np.asarray(state.scores_K[:DEPTH], np.float64))
        return fused[0]


def _summed(lists: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> Ranking:
    rows, place = np.unique(np.concatenate(lists), return_inverse=True)
    return ranked(rows, np.bincount(place, np.concatenate(values), minlength=len(rows)))
