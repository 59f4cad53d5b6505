"""Realised readouts: what the paths of a search themselves say, or the list of one of its states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...config import check_choice
from ..traversal import Proposal, StateRecord, Traversal
from .base import OfPaths, OfStates, Ranking, Tools, backfilled, largest, need_proposals, ranked, unique_rows

CHAIN_SCORES = ("logprob", "sum", "product")


@dataclass(frozen=True, slots=True)
class PathProduct(OfPaths):
    """score(d) = max over proposals of d of the product of the scores along the path.

    Two negative cosines multiply to a positive score; with `clipped` each counts as 0 then. backfill_root: after what
    was proposed, the root's candidates.
    """

    clipped: bool = False
    backfill_root: bool = False

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """By the best path of each document."""
        need_proposals(traversal, self)
        products = _clipped(traversal) if self.clipped else [proposal.cum for proposal in traversal.proposals]
        rows = np.array([proposal.document for proposal in traversal.proposals], np.int64)
        best = ranked(*largest(rows, np.array(products, np.float64)))
        return backfilled(best, traversal, self.backfill_root)


def _clipped(traversal: Traversal) -> list[float]:
    """The products of max(score, 0) along each proposal's path."""
    numbers = {(state.parent, state.observed): n for n, state in enumerate(traversal.states)}
    by_number = {0: 1.0}  # the root
    found = []
    for proposal in traversal.proposals:
        product = by_number[proposal.parent] * max(proposal.score, 0.0)
        found.append(product)
        child = numbers.get((proposal.parent, proposal.path))
        if child is not None:
            by_number[child] = product
    return found


@dataclass(frozen=True, slots=True)
class ChainOrder(OfPaths):
    """The paths of the deepest level one after the other, best first by (-key, path), each in the order of its hops.

    score: the key: `logprob`, the sum of log p_s (BeamDR's probability chain); `sum`, that of the scores (MDR); or
    their `product`. A document stands where it comes first. An order alone.
    """

    score: str = "logprob"
    backfill_root: bool = False

    def __post_init__(self) -> None:
        check_choice("readout.score", self.score, CHAIN_SCORES)

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """In the order of the chains."""
        need_proposals(traversal, self)
        deepest = max((proposal.level for proposal in traversal.proposals), default=0)
        chains = [proposal for proposal in traversal.proposals if proposal.level == deepest]
        chains.sort(key=lambda proposal: (-self._key(proposal), proposal.path))
        rows = np.array([row for proposal in chains for row in proposal.path], np.int64)
        return backfilled(Ranking(unique_rows(rows), None), traversal, self.backfill_root)

    def _key(self, proposal: Proposal) -> float:
        return {"logprob": proposal.logp, "sum": proposal.path_sum, "product": proposal.cum}[self.score]


def sequence_sum(backfill_root: bool = False) -> ChainOrder:
    """MDR's ranking of chains: the sum of the scores of their hops."""
    return ChainOrder(score="sum", backfill_root=backfill_root)


def probability_chain(backfill_root: bool = False) -> ChainOrder:
    """BeamDR's: the sum of the log-probabilities of their hops, each among the candidates of its state."""
    return ChainOrder(score="logprob", backfill_root=backfill_root)


@dataclass(frozen=True, slots=True)
class SelectedSet(OfPaths):
    """E, every document that was proposed, in the order of selection. An order alone."""

    backfill_root: bool = False

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """In the order of selection."""
        need_proposals(traversal, self)
        rows = unique_rows(np.array([proposal.document for proposal in traversal.proposals], np.int64))
        return backfilled(Ranking(rows, None), traversal, self.backfill_root)


@dataclass(frozen=True, slots=True)
class StateReadout(OfStates):
    """The raw list of one state: of those of `level` (None: the deepest), the one with the best path score.

    Raises:
        ValueError: the search formed no state of that level.
    """

    level: int | None = None
    backfill_root: bool = False

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """By l_s(d)."""
        level = max(traversal.levels) if self.level is None else self.level
        of_level = [state for state in traversal.states if state.level == level]
        if not of_level:
            levels = ", ".join(map(str, traversal.levels))
            raise ValueError(f"readout.level={level}: this search formed no such level; it has: {levels}")
        return backfilled(state_list(best_state(of_level)), traversal, self.backfill_root)


def terminal(backfill_root: bool = False) -> StateReadout:
    """The list of the deepest level's best state: what a chain that reads out its last state returns."""
    return StateReadout(backfill_root=backfill_root)


@dataclass(frozen=True, slots=True)
class RootReadout(OfStates):
    """The root's list: plain dense retrieval."""

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """By the cosine with the root."""
        return state_list(traversal.states[0])


def best_state(states: Sequence[StateRecord]) -> StateRecord:
    """The one with the largest path score, the first of equal ones."""
    return max(states, key=lambda state: state.path_score)


def state_list(state: StateRecord) -> Ranking:
    """A state's candidates by l_s(d), 200 at most."""
    return ranked(state.candidates_K, np.asarray(state.scores_K, np.float64))
