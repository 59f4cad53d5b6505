"""A scorer that answers the same slate only once: for walks that are repeated with other budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...data_prep.hits import Cost
from ..protocols import Candidate, DecisionScorer, Slate, SlateScores


class MemoScorer:
    """Another scorer, whose yes/no answers are remembered by query and candidate ids; a `DecisionScorer`.

    A remembered answer costs nothing, and its cost says so. Memory grows with every new slate (some 100 bytes a
    candidate). For one corpus, in which an id always shows the same text.
    """

    def __init__(self, scorer: DecisionScorer) -> None:
        self.scorer = scorer
        self._known: dict[tuple[str, tuple[str, ...]], SlateScores] = {}

    @property
    def max_candidates(self) -> int:
        """As the other scorer's."""
        return self.scorer.max_candidates

    @property
    def max_candidate_tokens_per_slate(self) -> int:
        """As the other scorer's."""
        return self.scorer.max_candidate_tokens_per_slate

    def num_tokens(self, candidate: Candidate) -> int:
        """As the other scorer's."""
        return self.scorer.num_tokens(candidate)

    def yes(self, slates: Sequence[Slate]) -> list[SlateScores]:
        """As the other scorer's."""
        keys = [(slate.query, tuple(c.id for c in slate.candidates)) for slate in slates]
        new = {key: slate for key, slate in zip(keys, slates, strict=True) if key not in self._known}
        fresh = dict(zip(new, self.scorer.yes(list(new.values())) if new else (), strict=True))
        self._known |= {key: replace(answer, cost=Cost()) for key, answer in fresh.items()}
        return [fresh.pop(key, self._known[key]) for key in keys]

    def choose(self, slates: Sequence[Slate], *, none: bool = False) -> list[SlateScores]:
        """As the other scorer's, never remembered."""
        return self.scorer.choose(slates, none=none)
