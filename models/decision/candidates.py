"""What a model is shown of nodes, made once: a walk that opens 150 clusters judges 16,000 titles a query."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data_prep.corpus import Corpus
from ...data_prep.corpus_build import Ints
from ..protocols import Candidate
from .slates import Pool


class Candidates:
    """The candidate of each row, as `slates.node_candidate` makes it, read in bulk and remembered.

    most: how many are remembered; more repeats less work, for about 400 bytes a candidate and its text.
    """

    def __init__(self, corpus: Corpus, *, most: int = 150_000) -> None:
        self.corpus, self.most = corpus, most
        self._known: dict[int, Candidate] = {}

    def of(self, rows: Sequence[int]) -> tuple[Candidate, ...]:
        """Candidates of these rows, in their order."""
        known = self._known
        missing = [row for row in rows if row not in known]
        if missing:
            if len(known) + len(missing) > self.most:
                known = {row: known[row] for row in rows if row in known}
            for run in _runs(self.corpus, sorted(set(missing))):
                known.update(zip(run, self._made(run), strict=True))
            self._known = known if len(known) <= self.most else {}
        return tuple(map(known.__getitem__, rows))

    def pool(self, query: str, rows: Ints) -> Pool:
        """The pool of these rows."""
        return Pool(query, self.of(rows.tolist()), tuple(self.corpus.parents[rows].tolist()))

    def _made(self, run: range) -> list[Candidate]:
        corpus = self.corpus
        above = corpus.path(run.start)[:-1]
        group = " > ".join(title for row in above if (title := corpus.title(row)))
        columns = (corpus.strings(name, run) for name in ("id", "title", "text"))
        brief = (~corpus.are_leaves(np.arange(run.start, run.stop))).tolist()
        return [Candidate(i, title, text, group, b) for i, title, text, b in zip(*columns, brief, strict=True)]


def _runs(corpus: Corpus, rows: Sequence[int]) -> list[range]:
    """Ascending rows as ranges of neighbours with one parent."""
    runs: list[range] = []
    for row in rows:
        if runs and runs[-1].stop == row and corpus.parent(row) == corpus.parent(row - 1):
            runs[-1] = range(runs[-1].start, row + 1)
        else:
            runs.append(range(row, row + 1))
    return runs
