"""The interfaces at which the families meet, and nothing else.

Shapes: C candidates of a slate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from ..data_prep.hits import Cost, Hits

# The most options of one choice, none-of-these included.
MAX_OPTIONS = 255


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


def check_ids(candidates: Sequence[Candidate]) -> None:
    """Raise ValueError that names the id which two candidates have."""
    if len({c.id for c in candidates}) == len(candidates):
        return
    seen: set[str] = set()
    for candidate in candidates:
        if candidate.id in seen:
            raise ValueError(
                f"candidate id {candidate.id!r} appears twice among {len(candidates)} candidates, whose answers go "
                "back to their ids: leave one out, or give it an id of its own"
            )
        seen.add(candidate.id)


@dataclass(frozen=True, slots=True)
class Slate:
    """Candidates that share one context, judged together for one query, in reading order.

    Raises:
        ValueError: two candidates have the same id.
    """

    query: str
    candidates: tuple[Candidate, ...]

    def __post_init__(self) -> None:
        check_ids(self.candidates)


@dataclass(frozen=True, slots=True)
class SlateScores:
    """Answers for one slate: `values_C` in the order of its candidates, float64.

    `none` is the probability that no candidate is right, where a choice was asked with that option. `notes` names every
    candidate whose text was cut to fit; `cost` is this slate's share.
    """

    values_C: np.ndarray
    notes: tuple[str, ...] = ()
    cost: Cost = Cost()
    none: float | None = None


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

    def choose(self, slates: Sequence[Slate], *, none: bool = False) -> list[SlateScores]:
        """One multiple-choice question a slate: probabilities that sum to 1 over its candidates.

        With `none` one more option says that no candidate is right: `SlateScores.none`, and the candidates'
        probabilities sum to 1 less that.

        Raises:
            ValueError: a slate with more than `MAX_OPTIONS` options.
        """
        ...


@dataclass(frozen=True, slots=True)
class State:
    """What one query vector is made of: instruction, query and observed documents (RDR Eq. 1, s = [i; q; ctx(O_s)]).

    `observed` are texts of documents, in the order in which they were observed. `role` chooses the instruction of the
    prompt (root, continuation, recovery, recovery_view, feedback, assembly); `instruction` stands in for the root
    instruction of the preset (None: the preset's own).
    """

    query: str
    observed: tuple[str, ...] = ()
    role: str = "root"
    instruction: str | None = None


@dataclass(frozen=True, slots=True)
class StateVectors:
    """Unit vectors of states, float32 (S, D); what each cost; and what a reader must know of each (a text was cut)."""

    vectors_SD: np.ndarray
    costs: tuple[Cost, ...]
    notes: tuple[tuple[str, ...], ...]


class EncoderSession(Protocol):
    """States of some queries, encoded one level after the other; what they share may be remembered in between."""

    def encode(self, states: Sequence[State], owners: Sequence[int]) -> StateVectors:
        """One vector a state. `owners` says which query each state belongs to: only states of one owner share."""
        ...

    def forget(self, owner: int) -> None:
        """Free what is remembered for a query; nothing where nothing is."""
        ...


class StateEncoder(Protocol):
    """Turns states and documents into unit vectors of one space: a causal LM, or any sentence-transformers model."""

    @property
    def dim(self) -> int:
        """D, the number of dimensions."""
        ...

    @property
    def contract(self) -> Mapping[str, object]:
        """Everything that a vector depends on, as plain JSON; an index is refused by an encoder of another contract."""
        ...

    def encode(self, states: Sequence[State]) -> StateVectors:
        """One vector a state, nothing remembered."""
        ...

    def encode_documents(self, texts: Sequence[str], *, progress: bool = False) -> np.ndarray:
        """Unit vectors of documents, float32 (N, D); documents carry no instruction."""
        ...

    def session(self) -> EncoderSession:
        """A fresh session, to be used by one search."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One turn for a language model: instructions of ours, and the user's words, which are data."""

    system: str
    user: str


@dataclass(frozen=True, slots=True)
class Completion:
    """What a language model wrote, and what it cost. `truncated`: it was stopped by the limit of tokens."""

    text: str
    cost: Cost = Cost()
    truncated: bool = False


class LanguageModel(Protocol):
    """Writes text, and says how probable fixed labels are: a local model, or any server."""

    @property
    def description(self) -> str:
        """Changes with everything that an answer depends on (model, revision, sampling), so that caches compare it."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], *, max_tokens: int, schema: Mapping[str, object] | None = None
    ) -> list[Completion]:
        """One completion a prompt, in their order. `schema`: a JSON schema that the text should obey where possible."""
        ...

    def label_logprobs(self, prompts: Sequence[Prompt], labels: Sequence[str]) -> np.ndarray:
        """Log-probability of each label as the beginning of the answer, unnormalised, shape (prompts, labels)."""
        ...
