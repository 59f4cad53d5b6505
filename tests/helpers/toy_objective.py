"""A tiny model and objective: rows of very different length, and two loss terms with different counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from retrail.train.config import FitConfig, LoopConfig, OptimConfig, RuntimeConfig
from retrail.train.objectives.base import LossParts

VOCABULARY = 23
WIDTH = 8


class ToyModel(nn.Module):
    """Next-token logits and one logit a row. Works on no rows at all."""

    def __init__(self, dropout: float = 0.0, seed: int = 5) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)
            self.body = nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, 1)
        self.dropout = nn.Dropout(dropout)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor, segment: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        if self.training:
            self.calls += 1
        x = self.dropout(torch.tanh(self.body(self.norm(self.embed(ids))))) * self.frozen
        pooled = torch.zeros(num_rows, WIDTH, dtype=x.dtype).index_add(0, segment, x)
        return x @ self.embed.weight.T, self.head(pooled)[:, 0]


@dataclass(frozen=True)
class ToyBatch:
    ids: Tensor
    segment: Tensor
    targets: Tensor
    labels: Tensor
    names: tuple[str, ...]

    @property
    def counts(self) -> Mapping[str, float]:
        return {"token": float((self.targets >= 0).sum()), "row": float(len(self.labels)), "correct": len(self.labels)}

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_padded_tokens(self) -> int:
        return 2 * len(self.ids)


class ToyObjective:
    """`num_rows` rows of 2 to 17 tokens. `poison` makes the loss of that row NaN from that epoch on."""

    weights: Mapping[str, float] = {"token": 0.7, "row": 1.3}

    def __init__(self, num_rows: int = 21, poison: int | None = None) -> None:
        self.num_rows = num_rows
        self.poison = poison

    def length(self, row: int, epoch: int) -> int:
        return 2 + (row * 7 + epoch) % 16

    def _ids(self, row: int, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * epoch + row)
        return torch.randint(VOCABULARY, (self.length(row, epoch),), generator=generator)

    def collate(self, rows: Sequence[tuple[int, int]]) -> ToyBatch:
        ids = [self._ids(*row) for row in rows]
        none = torch.zeros(0, dtype=torch.int64)
        last = torch.tensor([-100])
        return ToyBatch(
            ids=torch.cat([none, *ids]),
            segment=torch.cat([none, *(torch.full((len(x),), i) for i, x in enumerate(ids))]),
            targets=torch.cat([none, *(torch.cat([x[1:], last]) for x in ids)]),
            labels=torch.tensor([float(row % 2) for row, _ in rows]),
            names=tuple(f"row{row}" for row, _ in rows),
        )

    def loss(self, model: nn.Module, batch: ToyBatch) -> LossParts:
        tokens, rows = model(batch.ids, batch.segment, len(batch.labels))
        token = cross_entropy(tokens, batch.targets, ignore_index=-100, reduction="sum")
        row = binary_cross_entropy_with_logits(rows, batch.labels, reduction="sum")
        if not batch.names:
            # As an objective might: the forward has run, but the sums hang on no parameter.
            token, row = token.detach(), row.detach()
        if self.poison is not None and f"row{self.poison}" in batch.names:
            row = row * float("nan")
        correct = ((rows > 0) == (batch.labels > 0.5)).sum()
        return LossParts(sums={"token": token, "row": row}, logs={"correct": correct.detach()})


def toy_config(**loop: object) -> FitConfig:
    """Quick settings; keywords go to LoopConfig."""
    values: dict[str, object] = {"max_steps": 10, "batch_size": 8, "max_tokens": 60, "save_every": 0, "seed": 3}
    return FitConfig(
        optim=OptimConfig(lr=1e-2, head_lr=2e-2, weight_decay=0.1),
        loop=LoopConfig(**{**values, **loop}),  # type: ignore[arg-type]
        runtime=RuntimeConfig(device="cpu", threads=1),
    )
