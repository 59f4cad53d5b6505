"""Slates that the corpus fixes, not the query: each level is cut once, in reading order, into neighbours.

A walk then asks about those slates that hold a node it wants to judge. It reads neighbours that it did not want, but
all queries are shown the same slates: with the candidates first, one reading of a slate serves them all, and its keys
and values can be kept.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ...data_prep.corpus import Corpus
from ...data_prep.corpus_build import Ints
from ..protocols import Candidate, DecisionScorer, Slate
from .candidates import Candidates
from .slates import Cut, Pool, split


class FixedSlates:
    """The slates of a corpus for one scorer; a level is cut when it is first asked about (all its texts are read)."""

    def __init__(self, corpus: Corpus, scorer: DecisionScorer, cut: Cut, shown: Candidates) -> None:
        self._corpus = corpus
        self._scorer, self._cut, self._shown = scorer, cut, shown
        self._starts = cache(self._cut_level)
        self._candidates = cache(self._read)

    def ask(self, query: str, rows: Ints) -> tuple[list[Slate], Ints]:
        """The slates that hold these rows, and where each row stands among all their candidates, one after another."""
        slates: list[Slate] = []
        places = np.empty(len(rows), dtype=np.int64)
        before = 0
        level_C = np.array([self._corpus.level(row) for row in rows.tolist()])
        for level in np.unique(level_C):
            here = np.flatnonzero(level_C == level)
            starts = self._starts(int(level))
            slate_C = np.searchsorted(starts, rows[here], side="right") - 1
            stops = np.append(starts[1:], self._corpus.level_rows(int(level)).stop)
            for number in np.unique(slate_C):
                start, stop = int(starts[number]), int(stops[number])
                inside = here[slate_C == number]
                places[inside] = before + rows[inside] - start
                before += stop - start
                slates.append(Slate(query, self._candidates(start, stop)))
        return slates, places

    def _cut_level(self, level: int) -> Ints:
        rows = self._corpus.level_rows(level)
        pool = self._shown.pool("-", np.arange(rows.start, rows.stop))
        sizes = [len(slate.candidates) for slate in split(pool, self._scorer, self._cut)]
        return rows.start + np.cumsum([0, *sizes[:-1]])

    def _read(self, start: int, stop: int) -> tuple[Candidate, ...]:
        pool: Pool = self._shown.pool("-", np.arange(start, stop))
        return pool.candidates
