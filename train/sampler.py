"""Which rows an optimiser step takes, and which rank runs which of them in which microbatch.

The plan has no state: rows are a stream of per-epoch permutations, step s takes rows [s * B, (s + 1) * B) of it, and
everything follows from (seed, step, world size). So resuming needs the step number alone, every rank computes
the whole plan without a word to the others, and any number of ranks trains on the same rows in the same step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Row = tuple[int, int]


# Epochs whose orders are remembered: one or two of each data set of a mixture.
_REMEMBERED = 32


@lru_cache(maxsize=_REMEMBERED)
def epoch_permutation(seed: int, epoch: int, num_rows: int) -> NDArray[np.int64]:
    """Order of the rows in an epoch, shape (num_rows,).

    Sorted raw 64-bit draws of PCG64, whose bit stream NumPy promises to keep; `Generator.permutation` carries no
    such promise between versions.
    """
    draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    order = np.argsort(draws, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def step_rows(step: int, *, seed: int, num_rows: int, batch_size: int) -> list[Row]:
    """The (row, epoch) pairs of a step (counted from 0), in stream order; `batch_size` of them."""
    position = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epoch, offset = position // num_rows, position % num_rows
    row = np.empty_like(position)
    for e in np.unique(epoch):
        here = epoch == e
        row[here] = epoch_permutation(seed, int(e), num_rows)[offset[here]]
    return list(zip(row.tolist(), epoch.tolist(), strict=True))


@lru_cache(maxsize=_REMEMBERED)
def _places(seed: int, epoch: int, num_rows: int) -> NDArray[np.int64]:
    """Place of each row in the order of an epoch, shape (num_rows,)."""
    order = epoch_permutation(seed, epoch, num_rows)
    places = np.empty_like(order)
    places[order] = np.arange(num_rows)
    places.flags.writeable = False
    return places


def stream_position(row: int, epoch: int, *, seed: int, num_rows: int) -> int:
    """How many rows the stream holds before this one: the inverse of `step_rows`."""
    return epoch * num_rows + int(_places(seed, epoch, num_rows)[row])


def spread(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Positions of `lengths` for each rank, longest first, with close token totals.

    Longest-processing-time rule (Graham 1969): no rank has more than 4/3 of the best possible largest total.
    """
    loads = [(0, 0, rank) for rank in range(num_ranks)]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for i in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        load, rows, rank = heapq.heappop(loads)
        shares[rank].append(i)
        heapq.heappush(loads, (load + lengths[i], rows + 1, rank))
    return shares


def pack(share: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Microbatches of at most `max_tokens` with the padding of each row to the longest; `share` comes longest first.

    Neighbours in length stay together, so that little is padded. A row that alone is longer than `max_tokens` is a
    microbatch of its own.
    """
    bins: list[list[int]] = []
    for i in share:
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= max_tokens:
            bins[-1].append(i)
        else:
            bins.append([i])
    return bins


class Sampler:
    """Plans steps of `batch_size` rows over `num_ranks` ranks.

    length: tokens of (row, epoch). It is asked for every row of a step on every rank.
    """

    def __init__(
        self, *, num_rows: int, length: Callable[[int, int], int], seed: int, batch_size: int, max_tokens: int
    ) -> None:
        if num_rows < 1:
            raise ValueError(
                "the objective has no rows: there is nothing to train on (look at data.path and the split)"
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self._length = length
        self._seed = seed
        self._max_tokens = max_tokens

    def epoch(self, step: int) -> float:
        """Epochs done before step `step` (counted from 0), as a fraction."""
        return step * self.batch_size / self.num_rows

    def plan(self, step: int, num_ranks: int) -> list[list[list[Row]]]:
        """Rows of step `step` (counted from 0) as [rank][microbatch][row].

        All ranks have the same number of microbatches; those of ranks that are short of rows are empty.
        """
        rows = step_rows(step, seed=self._seed, num_rows=self.num_rows, batch_size=self.batch_size)
        lengths = [self._length(row, epoch) for row, epoch in rows]
        packed = [pack(share, lengths, self._max_tokens) for share in spread(lengths, num_ranks)]
        num_microbatches = max(len(bins) for bins in packed)
        return [
            [[rows[i] for i in bins[m]] if m < len(bins) else [] for m in range(num_microbatches)] for bins in packed
        ]
