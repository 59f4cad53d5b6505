"""What a readout is, and the few operations that all of them are made of.

Shapes: R ranked documents, M (state, document) pairs, K candidates of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from ...protocols import State
from ..index import Found
from ..traversal import StateRecord, Traversal

# How deep rankings go, unless a formula says otherwise.
DEPTH = 200
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Ranking:
    """Rows of the index, best first (R,), and their scores in float64 (R,); None: the formula gives an order alone."""

    rows: np.ndarray
    scores: np.ndarray | None

    def top(self, count: int) -> Ranking:
        """Its first `count`."""
        return Ranking(self.rows[:count], None if self.scores is None else self.scores[:count])


class Tools(Protocol):
    """What readouts that ask the model again need; pure ones never touch it."""

    def encode(self, states: Sequence[State], owners: Sequence[int]) -> np.ndarray:
        """Unit vectors of states, float32 (S, D); `owners` as in `EncoderSession`."""
        ...

    def search(self, vectors_SD: np.ndarray, k: int, excluded: Sequence[Sequence[int]]) -> Found:
        """Search the index."""
        ...

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """Stored vectors of documents, float32 (n, D)."""
        ...

    def text(self, row: int) -> str:
        """The text of a document."""
        ...


@runtime_checkable
class Readout(Protocol):
    """A ranking of documents from a traversal; a frozen value, so that it can be written down.

    Attributes:
        views: names of views that the traversal must hold.
        realised: whether it reads proposals, which joint feedback has none of.
    """

    @property
    def views(self) -> tuple[str, ...]:
        """See the class."""
        ...

    @property
    def realised(self) -> bool:
        """See the class."""
        ...

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """The ranking, at most 200 deep unless the formula says otherwise; excluded documents are never in it."""
        ...


class OfStates:
    """A readout that reads the states of the search, and nothing else."""

    __slots__ = ()
    views: ClassVar[tuple[str, ...]] = ()
    realised: ClassVar[bool] = False


class OfPaths:
    """A readout that reads proposals."""

    __slots__ = ()
    views: ClassVar[tuple[str, ...]] = ()
    realised: ClassVar[bool] = True


def ranked(rows: np.ndarray, scores: np.ndarray, depth: int = DEPTH) -> Ranking:
    """The best `depth` by (-score, row)."""
    order = np.lexsort((rows, -scores))[:depth]
    return Ranking(rows[order], np.asarray(scores[order], np.float64))


def add_up(states: Sequence[StateRecord], values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows, sum of the values of each row over the states, number of states that hold it); rows ascend."""
    if not states:
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64)
    rows_M = np.concatenate([state.candidates_K for state in states])
    rows, place_M = np.unique(rows_M, return_inverse=True)
    sums = np.bincount(place_M, np.concatenate(values), minlength=len(rows))
    return rows, sums, np.bincount(place_M, minlength=len(rows))


def largest(rows_M: np.ndarray, values_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, greatest value of each); rows ascend."""
    rows, place_M = np.unique(rows_M, return_inverse=True)
    best = np.full(len(rows), -np.inf)
    np.maximum.at(best, place_M, values_M)
    return rows, best


def state_weights(states: Sequence[StateRecord], level_balanced: bool) -> np.ndarray:
    """1 / (L |F_h|) of each state, or 1 / S: what it counts in a mean over levels, or over states."""
    if not level_balanced:
        return np.full(len(states), 1.0 / max(1, len(states)))
    levels = np.array([state.level for state in states])
    _, place, counts = np.unique(levels, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / (len(counts) * counts[place])) if len(states) else np.zeros(0)


def minmax(values: np.ndarray, low: float | None = None, high: float | None = None) -> np.ndarray:
    """(value - min) / (max - min + 1e-12), of the values themselves unless told otherwise."""
    values = np.asarray(values, np.float64)
    if len(values) == 0:
        return values
    least = values.min() if low is None else low
    most = values.max() if high is None else high
    return (values - least) / (most - least + _TINY)


def backfilled(ranking: Ranking, traversal: Traversal, backfill_root: bool, depth: int = DEPTH) -> Ranking:
    """The ranking, then the root's candidates that it lacks; what has been filled up is an order alone."""
    if not backfill_root:
        return ranking.top(depth)
    root = traversal.states[0].candidates_K
    more = root[~np.isin(root, ranking.rows)]
    if len(more) == 0:
        return ranking.top(depth)
    return Ranking(np.concatenate([ranking.rows, more])[:depth], None)


def unique_rows(rows: np.ndarray) -> np.ndarray:
    """Each row once, where it stands first."""
    _, first = np.unique(rows, return_index=True)
    return rows[np.sort(first)]


def need_proposals(traversal: Traversal, readout: object) -> None:
    """Raise ValueError where the search makes no proposals, so that there are no paths to read."""
    if not traversal.realised:
        raise ValueError(
            f"{readout} reads the paths of a search, and {traversal.search} makes none; read it with global, root, "
            "terminal or a fusion, or search with a tree, chain or beam"
        )


def states_of(traversal: Traversal, view: str | None) -> tuple[StateRecord, ...]:
    """The states of the search, or of a view. Raises ValueError where that view was not formed."""
    if view is None:
        return traversal.states
    if view not in traversal.views:
        known = ", ".join(traversal.views) or "none"
        raise ValueError(f"this traversal has no view {view!r} (it has: {known}); form it when you search")
    return traversal.views[view]


def rank_all(readout: Readout, traversals: Sequence[Traversal], tools: Tools) -> list[Ranking]:
    """One ranking a traversal; readouts that ask the model do so for all of them together where they can."""
    together: Callable[[Sequence[Traversal], Tools], list[Ranking]] | None = getattr(readout, "rank_together", None)
    if together is not None:
        return together(traversals, tools)
    return [readout.rank(traversal, tools) for traversal in traversals]
