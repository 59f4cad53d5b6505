"""What the loop needs of an objective: lengths to plan with, batches, and one loss from one forward.

The loss of an optimiser step is sum over terms of weight * (sum of the term over all rows of the step) /
(count of the term over all rows of the step), where *all* means all microbatches and all ranks. A batch
therefore carries its counts, known before the forward pass, and the loss returns sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


class Batch(Protocol):
    """One microbatch. If it has a `.to(device)` it is moved before the forward pass."""

    @property
    def counts(self) -> Mapping[str, float]:
        """What each loss term is divided by, for this batch's rows alone.

        A further count with the name of a value in `LossParts.logs` makes that value be logged as a mean.
        """
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that carry meaning (no padding)."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rows, for error messages."""
        ...


@runtime_checkable
class PaddedBatch(Protocol):
    """A batch that also tells how many token positions it computes, so that the padding share is logged."""

    @property
    def num_padded_tokens(self) -> int:
        """Token positions of the forward pass, padding included."""
        ...


@dataclass(frozen=True, slots=True)
class LossParts:
    """Summed (not averaged) loss terms, differentiable; and summed detached values to log."""

    sums: Mapping[str, Tensor]
    logs: Mapping[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """What is trained. Everything random about row r in epoch e follows from (seed, e, r) alone."""

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        ...

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight of each loss term."""
        ...

    def length(self, row: int, epoch: int) -> int:
        """Tokens that row takes in that epoch."""
        ...

    def collate(self, rows: Sequence[tuple[int, int]]) -> Batch:
        """The microbatch of these (row, epoch) pairs.

        `rows` may be empty (a rank that is short of rows in a step): counts are then zero, `names` is empty, and
        `loss` must still run one forward of the model, because the ranks' gradients meet in its backward pass.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> LossParts:
        """Loss sums from one forward of `model` (wrapped for several ranks or not).

        Every term of `weights` has a sum, for an empty batch too (zero). Sums are of this rank's rows alone.
        """
        ...


@runtime_checkable
class ContrastiveObjective(Protocol):
    """An `Objective` whose loss compares everything of a step: all microbatches and all ranks.

    A step asks for the vectors of each microbatch, puts those of all ranks together, and asks once for the loss of this
    rank's rows as a function of all vectors (`train/contrast.py`). `loss` is then never called.
    """

    def facts(self, batch: Batch) -> object:
        """What the other ranks must know of a microbatch before any vector is: plain JSON."""
        ...

    def represent(self, model: nn.Module, batch: Batch) -> Tensor:
        """The vectors of a microbatch, float32 (R, D), from one forward pass; none (0, D) for an empty one."""
        ...

    def contrast(
        self, vectors: Tensor, facts: Sequence[Sequence[object]], rank: int, batches: Sequence[Batch]
    ) -> LossParts:
        """Loss sums of this rank's rows.

        vectors: those of all ranks, rank after rank, microbatch after microbatch. facts: of every rank's microbatches.
        """
        ...
