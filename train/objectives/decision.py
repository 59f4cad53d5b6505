"""The decision objective: slates along the gold path, one packed forward a batch for all their labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from ...data_prep.corpus import Corpus
from ...data_prep.examples import DecisionRow
from ...models.decision.batch import SlateBatch
from ...models.decision.layout import PackedSlate, SlateLayout
from ...models.decision.slates import node_candidate
from ...models.protocols import Slate
from ..config import DecisionObjectiveConfig
from ..losses import bce_sum, listwise_sum, none_sum, question_weights
from .base import Batch, LossParts
from .decision_rivals import gold_path_rows
from .decision_slates import SlateDraw, draw

__all__ = ["DecisionBatch", "DecisionObjective", "Example", "draw", "gold_path_rows"]

_REMEMBERED_DRAWS = 4096


@dataclass(frozen=True, slots=True)
class Example:
    """One training slate as each of its N queries sees it, the row's own first, with labels (N, C) in float32.

    teacher_NC: a teacher's log-odds of yes, where that is distilled.
    """

    slates: tuple[Slate, ...]
    labels_NC: np.ndarray
    level: int
    name: str
    teacher_NC: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class DecisionBatch:
    """Slates with one label a question (a query about a candidate); an empty batch carries one slate of weight zero.

    weight_Q: what each question counts in `bce`. weight_N: what each query of a slate counts in the other terms.
    teacher_Q: a teacher's log-odds of yes, where that is distilled.
    """

    slates: SlateBatch
    choices: SlateBatch | None
    labels_Q: Tensor
    query_Q: Tensor
    weight_Q: Tensor
    weight_N: Tensor
    counts: Mapping[str, float]
    names: tuple[str, ...]
    teacher_Q: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that carry meaning."""
        if not self.names:
            return 0
        return self.slates.num_tokens + (self.choices.num_tokens if self.choices else 0)

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return self.slates.num_padded_tokens + (self.choices.num_padded_tokens if self.choices else 0)


class DecisionObjective:
    """Binary cross-entropy on every candidate, listwise cross-entropy on every slate, and the final choice.

    For a pointer head the choice *is* the listwise softmax; a yes/no head answers a separate multiple-choice question
    (term `choice`, weight `choice_weight`), whose slate holds the same candidates. With `none_weight` the choice is
    also trained with none-of-these as an option (term `none`): a pointer head's log-odds against 0, another question of
    a yes/no head.

    Each term is a weighted mean over the step: a slate counts the weight of its level in sum and count alike, and a
    right candidate counts `positive_weights` times in `bce`.
    """

    def __init__(
        self,
        rows: Sequence[DecisionRow],
        corpus: Corpus,
        layout: SlateLayout,
        config: DecisionObjectiveConfig,
        *,
        seed: int = 0,
        name: str = "",
    ) -> None:
        """`rows` from `gold_path_rows`; `seed` is that of the loop (see `SlateDraw`); `name` of the data set.

        Raises:
            ValueError: there are no rows, or `config` does not fit the model's (`DecisionObjectiveConfig.check_fits`).
        """
        if not rows:
            raise ValueError(
                f"there is nothing to train on{f' in {name}' if name else ''}: no query of this split has a relevant "
                "node in the corpus that any other node competes with"
            )
        config.check_fits(layout.config)
        self.rows, self.corpus, self.layout, self.config = list(rows), corpus, layout, config
        self.seed, self.name = seed, name
        yes_no = layout.config.head == "yes_no"
        self._asks_choice = yes_no and config.choice_weight > 0
        self._asks_none = yes_no and config.none_weight > 0
        self._draw = lru_cache(maxsize=_REMEMBERED_DRAWS)(SlateDraw(self.rows, corpus, layout, config, seed))

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self.rows)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each loss term."""
        terms = {"bce": self.config.bce_weight, "listwise": self.config.listwise_weight}
        if self._asks_choice:
            terms["choice"] = self.config.choice_weight
        if self.config.none_weight > 0:
            terms["none"] = self.config.none_weight
        return terms

    def length(self, row: int, epoch: int) -> int:
        """Tokens that the row's slate takes in that epoch."""
        return sum(packed.num_tokens for packed in self._packed(self.shared(row, epoch)[0]))

    def collate(self, rows: Sequence[tuple[int, int]]) -> DecisionBatch:
        """The microbatch of these (row, epoch) pairs."""
        return self.batch([self.example(row, epoch) for row, epoch in rows])

    def batch(self, drawn: Sequence[Example]) -> DecisionBatch:
        """The microbatch of these slates, which may be of other data sets of the same layout and settings."""
        examples = drawn or [self.example(0, 0)]
        labels_of = [labels_C for example in examples for labels_C in example.labels_NC]
        sizes = [len(labels_C) for labels_C in labels_of]
        level_N = [example.level for example in examples for _ in example.slates]
        weight_N = torch.tensor([_at(self.config.level_weights, level) for level in level_N])
        positive_N = torch.tensor([_at(self.config.positive_weights, level) for level in level_N])
        query_Q = torch.from_numpy(np.repeat(np.arange(len(labels_of)), sizes))
        labels_Q = torch.tensor(np.concatenate(labels_of), dtype=torch.float32)
        weight_Q = question_weights(labels_Q, weight_N[query_Q], positive_N[query_Q])
        has_gold_N = torch.tensor([bool(labels_C.any()) for labels_C in labels_of])
        with_gold = float(weight_N[has_gold_N].double().sum())
        counts = {"bce": float(weight_Q.double().sum()), "listwise": with_gold}
        if self._asks_choice:
            counts["choice"] = with_gold
        if self.config.none_weight > 0:
            counts["none"] = float(weight_N.double().sum())
        slates, *choices = zip(*(self._packed(example.slates) for example in examples), strict=True)
        return DecisionBatch(
            slates=SlateBatch.of(slates),
            choices=SlateBatch.of([packed for asked in choices for packed in asked]) if choices else None,
            labels_Q=labels_Q,
            query_Q=query_Q,
            weight_Q=weight_Q,
            weight_N=weight_N,
            counts=counts if drawn else dict.fromkeys(counts, 0.0),
            names=tuple(example.name for example in drawn),
        )

    def loss(self, model: nn.Module, batch: Batch) -> LossParts:
        """Sums of each term from one forward pass; `batch` comes from `collate`."""
        assert isinstance(batch, DecisionBatch)
        device = next(model.parameters()).device
        yes_Q, choice_Q = model(batch.slates.to(device), batch.choices.to(device) if batch.choices else None)
        labels_Q, query_Q = batch.labels_Q.to(device), batch.query_Q.to(device)
        weight_Q, weight_N = batch.weight_Q.to(device), batch.weight_N.to(device)
        N = len(weight_N)
        sums = {"bce": bce_sum(yes_Q, labels_Q, weight_Q), "listwise": self.listwise(yes_Q, batch)}
        asked = [] if choice_Q is None else list(choice_Q.split(len(labels_Q)))  # as `_packed` asks
        if self._asks_choice:
            sums["choice"] = self.listwise(asked[0], batch)
        if self.config.none_weight > 0:
            sums["none"] = none_sum(asked[-1] if self._asks_none else yes_Q, labels_Q, query_Q, N, weight_N)
        if not batch.names:
            return LossParts({name: value * 0.0 for name, value in sums.items()})
        return LossParts(sums)

    def listwise(self, logits_Q: Tensor, batch: DecisionBatch) -> Tensor:
        """What the candidates of a slate are compared by: cross-entropy to its right ones."""
        labels_Q, query_Q, weight_N = (x.to(logits_Q.device) for x in (batch.labels_Q, batch.query_Q, batch.weight_N))
        return listwise_sum(logits_Q, labels_Q, query_Q, len(weight_N), weight_N)

    def slate(self, row: int, epoch: int) -> tuple[Slate, np.ndarray]:
        """The slate of a row in an epoch as its own query sees it, and its labels (C,) in float32."""
        slates, labels_NC = self.shared(row, epoch)
        return slates[0], labels_NC[0]

    def shared(self, row: int, epoch: int) -> tuple[tuple[Slate, ...], np.ndarray]:
        """The slate of a row in an epoch as each of its queries sees it, the row's own first; labels (N, C)."""
        chosen, asking = self._draw(row, epoch)
        candidates = tuple(node_candidate(self.corpus, r) for r in chosen)
        slates = tuple(Slate(self.rows[r].query, candidates) for r in asking)
        labels_NC = np.stack([np.isin(chosen, self.rows[r].gold) for r in asking])
        return slates, labels_NC.astype(np.float32)

    def example(self, row: int, epoch: int) -> Example:
        """The slate of a row in an epoch, with what its loss needs."""
        source = self.rows[row]
        name = f"{self.name}/{source.name}" if self.name else source.name
        return Example(*self.shared(row, epoch), source.level, f"{name} (epoch {epoch})")

    def _packed(self, slates: Sequence[Slate]) -> list[PackedSlate]:
        """The yes/no slate and, where they are trained, the multiple-choice one and that with none-of-these."""
        queries, candidates = [slate.query for slate in slates], slates[0].candidates
        packed = [self.layout.pack(queries, candidates)]
        if self._asks_choice:
            packed.append(self.layout.pack_choice(queries, candidates))
        if self._asks_none:
            packed.append(self.layout.pack_choice(queries, candidates, none=True))
        return packed


def _at(values: Sequence[float], level: int) -> float:
    """The value of a level; the last one holds for all deeper ones too."""
    return values[min(level, len(values) - 1)]
