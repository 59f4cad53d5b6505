"""Several data sets in one run, each with its share of the rows.

An epoch of the mixture has as many rows as all data sets together. Each data set gives a fixed number of them: its
share by weight, rounded so that they add up. The rows of a data set are its own stream of per-epoch permutations, as if
it were trained on alone, taken in the order in which the mixture comes to them; so each of its rows comes once before
any comes twice, however small its share. All of it follows from (seed, epoch, row), like every objective's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ..sampler import epoch_permutation
from .base import Batch, LossParts
from .decision import DecisionBatch, DecisionObjective


class MixedObjective:
    """An `Objective` over decision objectives of the same layout and settings."""

    def __init__(self, parts: Sequence[DecisionObjective], shares: Sequence[float], *, seed: int) -> None:
        """`shares` are weights of `parts`, of any sum; `seed` is that of the loop, which orders the rows.

        Raises:
            ValueError: a share that is not above 0, or so small that an epoch has no row of its data set.
        """
        if not parts or len(parts) != len(shares) or not all(0.0 < share < float("inf") for share in shares):
            raise ValueError(f"{len(parts)} data sets need as many weights above 0, not {list(shares)}")
        self.parts, self.seed = list(parts), seed
        self.num_rows = sum(part.num_rows for part in parts)
        ends = np.cumsum(shares) / np.sum(shares) * self.num_rows
        self._ends = np.rint(ends).astype(np.int64)
        self.rows_of = np.diff(self._ends, prepend=0).tolist()
        """Rows of an epoch that each data set gives."""
        for part, count, share in zip(parts, self.rows_of, shares, strict=True):
            if count == 0:
                raise ValueError(
                    f"data.mix: the weight {share} of {part.name} gives it none of the {self.num_rows} rows of an "
                    "epoch; raise it or leave the data set out"
                )
        self._turns = lru_cache(maxsize=4)(self._taken)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each loss term."""
        return self.parts[0].weights

    def source(self, row: int, epoch: int) -> tuple[DecisionObjective, int, int]:
        """Which data set a row of the mixture is of, and which row in which of that data set's epochs."""
        which = int(np.searchsorted(self._ends, row, side="right"))
        part = self.parts[which]
        turn = epoch * self.rows_of[which] + int(self._turns(epoch)[row])
        inner = turn // part.num_rows
        order = epoch_permutation(self.seed, inner, part.num_rows)
        return part, int(order[turn % part.num_rows]), inner

    def length(self, row: int, epoch: int) -> int:
        """Tokens that the row's slate takes in that epoch."""
        part, inner_row, inner_epoch = self.source(row, epoch)
        return part.length(inner_row, inner_epoch)

    def collate(self, rows: Sequence[tuple[int, int]]) -> DecisionBatch:
        """The microbatch of these (row, epoch) pairs."""
        sources = [self.source(row, epoch) for row, epoch in rows]
        return self.parts[0].batch([part.example(row, epoch) for part, row, epoch in sources])

    def loss(self, model: nn.Module, batch: Batch) -> LossParts:
        """Sums of each term from one forward pass; `batch` comes from `collate`."""
        return self.parts[0].loss(model, batch)

    def _taken(self, epoch: int) -> NDArray[np.int64]:
        """For each row of an epoch, how many rows of the same data set the epoch takes before it."""
        order = epoch_permutation(self.seed, epoch, self.num_rows)
        which = np.searchsorted(self._ends, order, side="right")
        turns = np.empty_like(order)
        for n in range(len(self.parts)):
            rows = order[which == n]
            turns[rows] = np.arange(len(rows))
        return turns
