"""How one level of a recursive search becomes the next: what each state selects, what is merged, what goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .search import AdaptiveSearch, TreeSearch
from .traversal import Proposal, StateRecord, probabilities

_COMPARED = 10  # candidates of state and parent whose overlap is looked at
_LEAST_P = 1e-300


@dataclass(slots=True)
class Growth:
    """A query's tree while it grows.

    temperature: tau of p_s. used: rows that were selected, or must never be. sums, logps: those of each state's path.
    """

    temperature: float
    states: list[StateRecord] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    sums: list[float] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)


def select(growth: Growth, frontier: Sequence[int], search: TreeSearch) -> None:
    """Add the proposals of the states `frontier` (numbers), all of one level; `kept` says which become states.

    Their documents become used. With a beam those that are pruned do too, and stay proposals.
    """
    level = growth.states[frontier[0]].level if frontier else 0
    found: list[Proposal] = []
    for number in frontier:
        picks = _picks(growth, number, search)
        found += _proposals(growth, number, picks, search)
        if search.dedup == "sequential":
            growth.used.update(growth.states[number].candidates_K[picks].tolist())
    if search.dedup == "level":
        found = _merge(found)
        growth.used.update(proposal.document for proposal in found)
    if level == search.depth:
        kept: set[int] = set()
    elif search.beam is None or len(found) <= search.beam:
        kept = set(range(len(found)))
    else:
        kept = set(sorted(range(len(found)), key=lambda n: -found[n].cum)[: search.beam])
    growth.proposals += [replace(proposal, kept=n in kept) for n, proposal in enumerate(found)]


def _picks(growth: Growth, number: int, search: TreeSearch) -> np.ndarray:
    """Places among its candidates of what a state selects."""
    state = growth.states[number]
    wanted = search.branching_at(state.level)
    if wanted == 0:
        return np.arange(len(state.candidates_K))
    open_K = np.arange(len(state.candidates_K))
    if search.dedup != "none" and growth.used:
        open_K = open_K[~np.isin(state.candidates_K, list(growth.used))]
    if isinstance(search, AdaptiveSearch):
        wanted = _adapted(growth, state, open_K, search, wanted)
    return open_K[:wanted]


def _adapted(growth: Growth, state: StateRecord, open_K: np.ndarray, search: AdaptiveSearch, wanted: int) -> int:
    """How many documents an adaptive search lets a state select."""
    if search.stop_entropy is not None and normalised_entropy(state, growth.temperature) >= search.stop_entropy:
        return 0
    if search.stop_overlap is not None and state.parent is not None:
        if overlap(state, growth.states[state.parent]) >= search.stop_overlap:
            return 0
    if search.widen_margin is not None and len(open_K) > 1:
        if float(state.scores_K[open_K[0]] - state.scores_K[open_K[1]]) >= search.widen_margin:
            return 1
    return wanted


def normalised_entropy(state: StateRecord, temperature: float) -> float:
    """H(p_s) / ln |C_s|, from 0 (one candidate takes all) to 1 (all alike); 1 where there is no choice."""
    p_K = probabilities(state.scores_K, temperature)
    if len(p_K) < 2:
        return 1.0
    p_K = p_K[p_K > 0]
    return float(-(p_K * np.log(p_K)).sum() / np.log(len(state.scores_K)))


def overlap(state: StateRecord, parent: StateRecord) -> float:
    """The share of a state's first ten candidates that are among its parent's first ten; 1 where it has none."""
    own, its = state.candidates_K[:_COMPARED], parent.candidates_K[:_COMPARED]
    return float(np.isin(own, its).mean()) if len(own) else 1.0


def _proposals(growth: Growth, number: int, picks: np.ndarray, search: TreeSearch) -> Iterable[Proposal]:
    state = growth.states[number]
    if len(picks) == 0:
        return
    values = np.asarray(state.scores_K[picks], dtype=np.float64)
    if search.path_score == "minmax":
        assert state.low is not None and state.high is not None
        values = (values - state.low) / (state.high - state.low + 1e-12)
    logp_K = np.log(np.maximum(probabilities(state.scores_K, growth.temperature)[picks], _LEAST_P))
    for place, value, logp in zip(picks.tolist(), values.tolist(), logp_K.tolist(), strict=True):
        document = int(state.candidates_K[place])
        yield Proposal(
            document=document,
            parent=number,
            level=state.level,
            path=(*state.observed, document),
            score=value,
            cum=state.path_score * value,
            path_sum=growth.sums[number] + value,
            logp=growth.logps[number] + logp,
            kept=False,
        )


def _merge(proposals: Sequence[Proposal]) -> list[Proposal]:
    """One proposal a document, the one with the largest path score (the first of equal ones), where the first stood."""
    best: dict[int, Proposal] = {}
    for proposal in proposals:
        known = best.get(proposal.document)
        if known is None or proposal.cum > known.cum:
            best[proposal.document] = proposal
    return list(best.values())
