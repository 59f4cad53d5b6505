"""A `DecisionScorer` whose answers are known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from retrail.data_prep.hits import Cost
from retrail.models.protocols import Candidate, Slate, SlateScores

COST = Cost(requests=1, forwards=1, prompt_tokens=10, max_concurrency=1)


class FakeScorer:
    """P(yes) is `believe(query, candidate)`; the choice is its softmax, unless `prefer` says otherwise.

    None-of-these counts as a candidate of value 0.

    `asked` and `chosen` hold every slate in the order in which it was asked about.
    """

    def __init__(
        self,
        believe: Callable[[str, Candidate], float],
        *,
        prefer: Callable[[str, Candidate], float] | None = None,
        max_candidates: int = 50,
        max_tokens: int = 10_000,
        size: Callable[[Candidate], int] = lambda candidate: 10,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.believe, self.prefer = believe, prefer or believe
        self.max_candidates, self.max_candidate_tokens_per_slate = max_candidates, max_tokens
        self.num_tokens, self.notes = size, notes
        self.asked: list[Slate] = []
        self.chosen: list[Slate] = []

    def yes(self, slates: Sequence[Slate]) -> list[SlateScores]:
        self.asked += slates
        return [self._answer(slate, self.believe) for slate in slates]

    def choose(self, slates: Sequence[Slate], *, none: bool = False) -> list[SlateScores]:
        self.chosen += slates
        scores = [self._answer(slate, self.prefer) for slate in slates]
        totals = [np.exp(s.values_C).sum() + none for s in scores]
        return [
            SlateScores(np.exp(s.values_C) / total, s.notes, s.cost, float(1 / total) if none else None)
            for s, total in zip(scores, totals, strict=True)
        ]

    def _answer(self, slate: Slate, value: Callable[[str, Candidate], float]) -> SlateScores:
        assert 0 < len(slate.candidates) <= self.max_candidates
        values = np.array([value(slate.query, c) for c in slate.candidates], dtype=float)
        return SlateScores(values, self.notes, COST)


WORDS = "alpha beta gamma delta forms taxes benefit deadline office appeal yes no colour".split()


def make_slate(size: int, seed: int = 0, words: int = 12) -> Slate:
    """A slate of `size` candidates of different length on a few pages, the same for the same seed."""
    rng = np.random.default_rng([seed, size])

    def text(longest: int) -> str:
        return " ".join(rng.choice(WORDS, size=int(rng.integers(1, longest + 1))))

    candidates = tuple(
        Candidate(f"n{n}", text(3) if n % 4 else "", text(words), f"page {n // 3}" if n % 5 else "")
        for n in range(size)
    )
    return Slate(f"{text(6)}?", candidates)
