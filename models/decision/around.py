"""A scorer around another one, whose limits and answers are the other's until a subclass says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocols import Candidate, DecisionScorer, Slate, SlateScores


class ScorerAround:
    """Passes everything on to `scorer`; a `DecisionScorer`."""

    def __init__(self, scorer: DecisionScorer) -> None:
        self.scorer = scorer

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
        return self.scorer.yes(slates)

    def choose(self, slates: Sequence[Slate], *, none: bool = False) -> list[SlateScores]:
        """As the other scorer's."""
        return self.scorer.choose(slates, none=none)
