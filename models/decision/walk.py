"""What one query has seen of a corpus: the nodes to judge next, the leaves it found, and what it dropped on the way.

Shapes: C nodes to judge, F dropped nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Self

import numpy as np

from ...data_prep.corpus import Corpus
from ...data_prep.corpus_build import Ints
from ...data_prep.hits import Cost, Step
from .odds import log_sigmoid

Floats = np.ndarray


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes in reading order, and what the walk thought of the nodes above each.

    above_C: sum of the log-odds of yes; chain_C: sum of log P(yes).
    """

    rows_C: Ints
    above_C: Floats
    chain_C: Floats

    @classmethod
    def all(cls, rows: range) -> Self:
        """Nodes above which nothing was judged."""
        return cls(np.arange(rows.start, rows.stop), np.zeros(len(rows)), np.zeros(len(rows)))

    def at(self, places: np.ndarray) -> Nodes:
        """Those at these places."""
        return Nodes(self.rows_C[places], self.above_C[places], self.chain_C[places])

    def and_these(self, other: Nodes) -> Nodes:
        """These, then the other ones."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("rows_C", "above_C", "chain_C"))
        return Nodes(*(np.concatenate(pair) for pair in pairs))

    def __len__(self) -> int:
        return len(self.rows_C)


def opened(corpus: Corpus, nodes: Nodes, own_odds_C: Floats, own_log_p_C: Floats) -> Nodes:
    """The children of these nodes, which were judged with these answers; a leaf stays itself, to be judged again."""
    below, counts_C = corpus.open_rows(nodes.rows_C)
    leaf_C = counts_C == 0
    rows = np.empty(len(below) + leaf_C.sum(), dtype=np.int64)
    width_C = np.maximum(counts_C, 1)
    stays = np.zeros(len(rows), dtype=bool)
    stays[(np.cumsum(width_C) - width_C)[leaf_C]] = True
    rows[~stays], rows[stays] = below, nodes.rows_C[leaf_C]
    above_C = nodes.above_C + np.where(leaf_C, 0.0, own_odds_C)
    chain_C = nodes.chain_C + np.where(leaf_C, 0.0, own_log_p_C)
    return Nodes(rows, np.repeat(above_C, width_C), np.repeat(chain_C, width_C))


def joined(corpus: Corpus, nodes: Nodes, more: Nodes) -> Nodes:
    """Both, in reading order, those that stand in both once."""
    new = ~np.isin(more.rows_C, nodes.rows_C)
    both = nodes.and_these(more.at(np.flatnonzero(new)))
    return both.at(reading_order(corpus, both.rows_C))


def reading_order(corpus: Corpus, rows: Ints) -> Ints:
    """Places of `rows` as one reads the tree; rows follow that order among siblings only."""
    return np.array(sorted(range(len(rows)), key=lambda i: corpus.path(int(rows[i]))), dtype=np.int64)


@dataclass(slots=True)
class Walk:
    """One query on its way.

    nodes: what is judged next; None once the leaves below all that was kept are judged.
    leaves, value_L: the leaves that were judged, and their values in the last judgement of each.
    passed_by: (value less 1 for each level since, row) of leaves that were dropped above the last level.
    dropped: inner nodes that were not opened, for a search that comes back to them.
    """

    query: str
    nodes: Nodes | None
    steps: list[Step] = field(default_factory=list)
    judged: list[tuple[Ints, Floats]] = field(default_factory=list)
    leaves: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    value_L: Floats = field(default_factory=lambda: np.empty(0))
    passed_by: list[tuple[float, int]] = field(default_factory=list)
    dropped: Nodes = field(default_factory=lambda: Nodes.all(range(0)))
    started: float = field(default_factory=time.perf_counter)

    @property
    def cost(self) -> Cost:
        """Of all steps so far."""
        return reduce(Cost.__add__, (step.cost for step in self.steps), Cost())

    def judgement_above(self, corpus: Corpus, row: int) -> tuple[float, float]:
        """Sum of the log-odds, and of log P(yes), of those ancestors of `row` that this walk has judged."""
        odds = [float(o) for ancestor in corpus.path(row)[:-1] for o in self._judgements_of(ancestor)]
        return sum(odds), sum(float(log_sigmoid(np.array(o))) for o in odds)

    def _judgements_of(self, row: int) -> Iterator[Floats]:
        for rows_C, odds_C in self.judged:
            yield from odds_C[rows_C == row][:1]

    def found(self, corpus: Corpus, rows: Ints, value: Floats) -> None:
        """Add judged leaves, which come in reading order and are not there yet."""
        if len(self.leaves):
            rows, value = np.concatenate([self.leaves, rows]), np.concatenate([self.value_L, value])
            order = reading_order(corpus, rows)
            rows, value = rows[order], value[order]
        self.leaves, self.value_L = rows, value

    def drop(self, nodes: Nodes, own_odds_C: Floats, own_log_p_C: Floats) -> None:
        """Keep judged inner nodes for later; from now on their sums hold their own answers."""
        judged = Nodes(nodes.rows_C, nodes.above_C + own_odds_C, nodes.chain_C + own_log_p_C)
        self.dropped = self.dropped.and_these(judged)

    def take_dropped(self, count: int) -> Nodes:
        """The dropped nodes with the likeliest paths, in reading order; they are dropped no more."""
        order = np.argsort(-self.dropped.chain_C, kind="stable")
        taken = self.dropped.at(np.sort(order[:count]))
        self.dropped = self.dropped.at(np.sort(order[count:]))
        return taken
