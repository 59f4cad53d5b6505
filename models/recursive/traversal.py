"""What a recursive search leaves behind: the states it formed, what each retrieved, and what was proposed.

A traversal holds all that any readout needs, so that one search serves a whole table of readouts, now or read again
from a file. Documents are rows of the index; ids come back only in `Hits`.

Shapes: S states, P proposals, K candidates of a state (at most `candidate_k`), D dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ...data_prep.hits import Cost

ROLES = ("root", "continuation", "recovery", "recovery_view", "feedback", "assembly")


@dataclass(frozen=True, slots=True)
class StateRecord:
    """One state s = (role, query, observed documents O_s) and its candidates C_s.

    Attributes:
        role: one of `ROLES`; a document-as-query state has role `document`.
        level: 1 + |O_s|; the root is level 1 (joint feedback: level 2 whatever it observes).
        parent: number of the state that proposed its last document (None: the root).
        observed: rows of the observed documents, oldest first.
        path_score: cumulative score of its path, as the search ranks paths (`cum` of its proposal; 1 for the root).
        candidates_K: rows of C_s by (-score, row); excluded documents are never among them.
        scores_K: their l_s(d) = <z_s, v_d>, float32, non-increasing.
        low, high: least and greatest l_s(d) over the whole corpus, before any exclusion (None: not recorded).
        vector_D: z_s, float32.
        cost: what encoding and searching it took together.
        search_seconds: the part of `cost.seconds` that the index took.
        notes: what a reader must know of it.
    """

    role: str
    level: int
    parent: int | None
    observed: tuple[int, ...]
    path_score: float
    candidates_K: np.ndarray
    scores_K: np.ndarray
    vector_D: np.ndarray
    low: float | None = None
    high: float | None = None
    cost: Cost = Cost()
    search_seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """A document that a state selected; it becomes a state of the next level unless that is too deep, or it is pruned.

    Attributes:
        document: its row.
        parent: number of the state that selected it.
        level: the level of that state.
        path: observed documents of the parent, then this document.
        score: v, the score of the selection (l_s(d), or its min-max form).
        cum: parent's cum * v (the root's is 1).
        path_sum: parent's sum + v.
        logp: parent's logp + log max(p_s(d), 1e-300).
        kept: whether it became a state.
    """

    document: int
    parent: int
    level: int
    path: tuple[int, ...]
    score: float
    cum: float
    path_sum: float
    logp: float
    kept: bool


@dataclass(frozen=True, slots=True)
class Traversal:
    """One query's search. `states[0]` is the root; proposals are in the order of their selection.

    Attributes:
        search: name and settings of the search, as `str` of it.
        candidate_k: K, how many candidates a state keeps at most.
        temperature: tau of the softmax p_s (RDR: 0.05).
        excluded: rows that were never to be seen.
        realised: whether proposals exist at all (joint feedback makes none), so that realised readouts are defined.
        views: further states by the name of the view, made for readouts; they never changed the search.
        notes: what a reader must know of the search as a whole (a cap was reached).
    """

    query: str
    instruction: str | None
    search: str
    candidate_k: int
    temperature: float
    states: tuple[StateRecord, ...]
    proposals: tuple[Proposal, ...]
    excluded: tuple[int, ...] = ()
    realised: bool = True
    views: Mapping[str, tuple[StateRecord, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels that have states, ascending: the h of F_h."""
        return tuple(sorted({state.level for state in self.states}))

    @property
    def cost(self) -> Cost:
        """What all its states and views took together."""
        total = Cost()
        for states in (self.states, *self.views.values()):
            for state in states:
                total = total + state.cost
        return total


def probabilities(scores_K: np.ndarray, temperature: float) -> np.ndarray:
    """p_s over C_s: softmax of l_s / tau in float64 (RDR 1, "sparse softmax"); empty for an empty C_s."""
    if len(scores_K) == 0:
        return np.zeros(0)
    scaled = np.asarray(scores_K, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum())
