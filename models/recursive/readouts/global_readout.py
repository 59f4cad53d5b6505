"""The global readout (RDR Eq. 2), and the other readouts that average or compare over all states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...config import check_choice
from ..traversal import StateRecord, Traversal, probabilities
from .base import (
    OfStates,
    Ranking,
    Tools,
    add_up,
    backfilled,
    largest,
    minmax,
    need_proposals,
    ranked,
    state_weights,
    states_of,
)

NORMALIZATIONS = ("softmax", "raw", "minmax", "minmax_full", "softmax_minmax_full")


def normalised(state: StateRecord, how: str, temperature: float) -> np.ndarray:
    """What each candidate of a state counts (K,), float64.

    softmax: p_s(d) = exp(l_s(d) / tau) / sum over C_s; raw: l_s(d); minmax: over the own candidates; minmax_full: over
    the whole corpus, as recorded; softmax_minmax_full: the softmax of that.

    Raises:
        ValueError: the whole corpus' range was not recorded.
    """
    if how == "softmax":
        return probabilities(state.scores_K, temperature)
    if how == "raw":
        return np.asarray(state.scores_K, np.float64)
    if how == "minmax":
        return minmax(state.scores_K)
    if state.low is None or state.high is None:
        raise ValueError(f"normalization={how} needs each state's least and greatest score; search with ranges=True")
    scaled = minmax(state.scores_K, state.low, state.high)
    return scaled if how == "minmax_full" else probabilities(scaled, temperature)


@dataclass(frozen=True, slots=True)
class GlobalReadout:
    """r(d) = (1/L) sum over levels h of (1/|F_h|) sum over states s of the level of p_s(d)   (RDR Eq. 2).

    Attributes:
        level_balanced: False: the mean over all states (CombSUM).
        include_root: False leaves the root out.
        levels: only these levels, as if the search had formed no others (None: all).
        normalization: what a state gives its candidates; see `normalised`.
        restrict_to_selected: keep only documents that were proposed.
        backfill_root: after them the root's candidates.
        view: read the states of a view instead of the search's.
    """

    level_balanced: bool = True
    include_root: bool = True
    levels: tuple[int, ...] | None = None
    normalization: str = "softmax"
    restrict_to_selected: bool = False
    backfill_root: bool = False
    view: str | None = None

    def __post_init__(self) -> None:
        check_choice("readout.normalization", self.normalization, NORMALIZATIONS)
        if self.levels is not None:
            object.__setattr__(self, "levels", tuple(self.levels))

    @property
    def views(self) -> tuple[str, ...]:
        """The view that it reads."""
        return (self.view,) if self.view else ()

    @property
    def realised(self) -> bool:
        """Only where documents must have been proposed."""
        return self.restrict_to_selected

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """By r(d)."""
        rows, sums, _ = self.sums(traversal)
        if self.restrict_to_selected:
            need_proposals(traversal, self)
            selected = np.isin(rows, [proposal.document for proposal in traversal.proposals])
            rows, sums = rows[selected], sums[selected]
        return backfilled(ranked(rows, sums), traversal, self.backfill_root)

    def sums(self, traversal: Traversal) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rows, r, number of states that hold each)."""
        states = self.read(traversal)
        weights = state_weights(states, self.level_balanced)
        values = [
            weight * normalised(state, self.normalization, traversal.temperature)
            for weight, state in zip(weights, states, strict=True)
        ]
        return add_up(states, values)

    def read(self, traversal: Traversal) -> list[StateRecord]:
        """The states that count."""
        return [
            state
            for state in states_of(traversal, self.view)
            if (self.include_root or state.parent is not None) and (self.levels is None or state.level in self.levels)
        ]


def combsum() -> GlobalReadout:
    """The mean of p_s(d) over all states, whatever their level."""
    return GlobalReadout(level_balanced=False)


def recovery_view_readout() -> GlobalReadout:
    """The states of the recovery view, all alike, by the softmax of min-max scores over the whole corpus."""
    return GlobalReadout(view="recovery", include_root=False, level_balanced=False, normalization="softmax_minmax_full")


@dataclass(frozen=True, slots=True)
class CombMNZ(OfStates):
    """r(d) * #{s: d in C_s} (Fox and Shaw), r level-balanced or the flat mean."""

    level_balanced: bool = True

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """By the product."""
        rows, sums, counts = GlobalReadout(level_balanced=self.level_balanced).sums(traversal)
        return ranked(rows, sums * counts)


@dataclass(frozen=True, slots=True)
class MaxOverStates(OfStates):
    """max over states s of p_s(d)."""

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """By the greatest probability that any state gives."""
        values = [probabilities(state.scores_K, traversal.temperature) for state in traversal.states]
        rows_M = np.concatenate([state.candidates_K for state in traversal.states])
        return ranked(*largest(rows_M, np.concatenate(values)))
