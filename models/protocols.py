"""The interfaces at which the families meet, and nothing else.

Shapes: C candidates of a slate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from ..data_prep.hits import Cost, Hits


@runtime_checkable
class Retriever(Protocol):
    """Anything that ranks ids for queries."""

    def search(self, queries: Sequence[str], *, k: int) -> list[Hits]:
        """One `Hits` a query, at most `k` ids each. A larger `k` costs no less and returns more."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the model is shown of one node: its title, its text, and the page (`group`) it stands on.

    Neighbours of one group share one heading in the slate; an empty group prints none. The id is never shown.
    A `brief` candidate (an inner node, judged by its heading) is cut sooner than a passage.
    """

    id: str
    title: str
    text: str
    group: str = ""
    brief: bool = False


@dataclass(frozen=True, slots=True)
class Slate:
    """Candidates that share one context, judged together for one query, in reading order."""

    query: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class SlateScores:
    """Answers for one slate: `values_C` in the order of its candidates, float64.

    `notes` names every candidate whose text was cut to fit; `cost` is this slate's share.
    """

    values_C: np.ndarray
    notes: tuple[str, ...] = ()
    cost: Cost = Cost()


class DecisionScorer(Protocol):
    """Answers questions about a slate: a local packed model, or a server that speaks a decision API."""

    @property
    def max_candidates(self) -> int:
        """How many candidates one slate may hold."""
        ...

    def num_tokens(self, candidate: Candidate) -> int:
        """How many tokens of a slate's budget this candidate takes (its text cut to the cap)."""
        ...

    @property
    def max_candidate_tokens_per_slate(self) -> int:
        """How many tokens of candidates one slate may hold."""
        ...

    def yes(self, slates: Sequence[Slate]) -> list[SlateScores]:
        """P(yes) of each candidate, normalised over yes and no only; candidates are independent questions."""
        ...

    def choose(self, slates: Sequence[Slate]) -> list[SlateScores]:
        """One multiple-choice question a slate: probabilities that sum to 1 over its candidates."""
        ...
