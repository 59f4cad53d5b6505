"""A scorer that answers the same slate only once: for walks that are repeated with other budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...data_prep.hits import Cost
from ..protocols import DecisionScorer, Slate, SlateScores
from .around import ScorerAround


class MemoScorer(ScorerAround):
    """Another scorer, whose yes/no answers are remembered by query and candidate ids; choices never are.

    A remembered answer costs nothing, and its cost says so. Memory grows with every new slate (some 100 bytes a
    candidate). For one corpus, in which an id always shows the same text.
    """

    def __init__(self, scorer: DecisionScorer) -> None:
        super().__init__(scorer)
        self._known: dict[tuple[str, tuple[str, ...]], SlateScores] = {}

    def yes(self, slates: Sequence[Slate]) -> list[SlateScores]:
        """As the other scorer's."""
        keys = [(slate.query, tuple(c.id for c in slate.candidates)) for slate in slates]
        new = {key: slate for key, slate in zip(keys, slates, strict=True) if key not in self._known}
        fresh = dict(zip(new, self.scorer.yes(list(new.values())) if new else (), strict=True))
        self._known |= {key: replace(answer, cost=Cost()) for key, answer in fresh.items()}
        return [fresh.pop(key, self._known[key]) for key in keys]
