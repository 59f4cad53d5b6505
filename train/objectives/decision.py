"""The decision objective: slates along the gold path, one packed forward a batch for all their labels.

Everything random about a row in an epoch (size, rivals, order) follows from (seed, epoch, row), so any rank can build
any slate and a resumed run sees the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from ...data_prep.corpus import Corpus
from ...data_prep.examples import DecisionRow, decision_rows
from ...data_prep.negatives import drop_relatives
from ...data_prep.task import Qrels, Query
from ...models.bm25 import BM25
from ...models.decision.layout import PackedSlate, SlateLayout
from ...models.decision.model import SlateBatch
from ...models.decision.slates import node_candidate
from ...models.protocols import Slate
from ..config import DecisionObjectiveConfig
from ..losses import bce_sum, listwise_sum
from .base import LossParts

_RIVALS = 30


@dataclass(frozen=True, slots=True)
class DecisionBatch:
    """Slates with one label a candidate; an empty batch carries one slate of weight zero."""

    slates: SlateBatch
    choices: SlateBatch | None
    labels_Q: Tensor
    slate_Q: Tensor
    counts: Mapping[str, float]
    names: tuple[str, ...]

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
    (term `choice`, weight `choice_weight`), whose slate holds the same candidates.
    """

    def __init__(
        self,
        rows: Sequence[DecisionRow],
        corpus: Corpus,
        layout: SlateLayout,
        config: DecisionObjectiveConfig,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`rows` from `gold_path_rows`; slates go to `device`.

        Raises:
            ValueError: there are no rows.
        """
        if not rows:
            raise ValueError("there is nothing to train on: no query of this split has a relevant node in the corpus")
        self.rows, self.corpus, self.layout, self.config = list(rows), corpus, layout, config
        self.seed, self.device = seed, device
        self._asks_choice = layout.config.head == "yes_no" and config.choice_weight > 0
        self._reading_order = _reading_order(corpus)
        self.slate = lru_cache(maxsize=4096)(self._slate)

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self.rows)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each loss term."""
        terms = {"bce": self.config.bce_weight, "listwise": self.config.listwise_weight}
        return {**terms, "choice": self.config.choice_weight} if self._asks_choice else terms

    def length(self, row: int, epoch: int) -> int:
        """Tokens that the row's slate takes in that epoch."""
        slate, _ = self.slate(row, epoch)
        return self.layout.render(slate).num_tokens + (
            self.layout.render_choice(slate).num_tokens if self._asks_choice else 0
        )

    def collate(self, rows: Sequence[tuple[int, int]]) -> DecisionBatch:
        """The microbatch of these (row, epoch) pairs."""
        drawn = [self.slate(row, epoch) for row, epoch in (rows or [(0, 0)])]
        labels = torch.tensor(np.concatenate([y for _, y in drawn]), dtype=torch.float32)
        packed = [self.layout.render(slate) for slate, _ in drawn]
        slate_Q = torch.repeat_interleave(torch.arange(len(drawn)), torch.tensor([len(p.ends) for p in packed]))
        with_gold = float(sum(bool(y.any()) for _, y in drawn))
        counts = {"bce": float(len(labels)), "listwise": with_gold}
        choices = self._choices([slate for slate, _ in drawn]) if self._asks_choice else None
        if self._asks_choice:
            counts["choice"] = with_gold
        return DecisionBatch(
            SlateBatch.of(packed, self.device),
            choices,
            labels.to(self.device),
            slate_Q.to(self.device),
            counts if rows else dict.fromkeys(counts, 0.0),
            tuple(f"{self.rows[row].name} (epoch {epoch})" for row, epoch in rows),
        )

    def loss(self, model: nn.Module, batch: DecisionBatch) -> LossParts:
        """Sums of each term from one forward pass."""
        yes_Q, choice_Q = model(batch.slates, batch.choices)
        S = len(batch.slates.slates)
        sums = {
            "bce": bce_sum(yes_Q, batch.labels_Q),
            "listwise": listwise_sum(yes_Q, batch.labels_Q, batch.slate_Q, S),
        }
        if choice_Q is not None:
            sums["choice"] = listwise_sum(choice_Q, batch.labels_Q, batch.slate_Q, S)
        if not batch.names:
            return LossParts({name: value * 0.0 for name, value in sums.items()})
        with torch.no_grad():
            first = torch.stack([part.argmax() for part in yes_Q.split(_sizes(batch.slates.slates))])
            starts = torch.cumsum(torch.tensor([0, *_sizes(batch.slates.slates)[:-1]], device=first.device), 0)
            hit_at_1 = batch.labels_Q[starts + first].sum()
        return LossParts(sums, {"slate_hit@1": hit_at_1})

    def _choices(self, slates: Sequence[Slate]) -> SlateBatch:
        return SlateBatch.of([self.layout.render_choice(slate) for slate in slates], self.device)

    def _slate(self, row: int, epoch: int) -> tuple[Slate, np.ndarray]:
        """The slate of a row in an epoch and its labels (C,)."""
        source = self.rows[row]
        rng = np.random.default_rng([self.seed, epoch, row])
        size = int(rng.integers(self.config.min_candidates, self.config.max_candidates + 1))
        gold = list(rng.permutation(source.gold)[: max(1, size // 2)])
        if rng.random() < self.config.none_share:
            gold = []
        chosen = [*gold, *self._rivals(source, size - len(gold), rng)]
        chosen = self._ordered(chosen, rng)
        slate = Slate(source.query, tuple(node_candidate(self.corpus, r) for r in chosen))
        return slate, np.isin(chosen, source.gold).astype(np.float32)

    def _rivals(self, source: DecisionRow, count: int, rng: np.random.Generator) -> list[int]:
        """`count` wrong rows: siblings and cross-page rivals, or random ones of the same level."""
        level = self.corpus.level_rows(source.level)
        strangers = level.start + rng.choice(len(level), size=min(len(level), 2 * count + len(source.gold)), replace=False)
        if rng.random() < self.config.random_share:
            sources: list[Sequence[int]] = [strangers]
        else:
            near = rng.permutation(source.siblings)[: round(self.config.sibling_share * count)]
            far = rng.permutation(source.rivals)
            sources = [near, far, rng.permutation(source.siblings), strangers]
        wrong = dict.fromkeys(int(r) for rows in sources for r in rows)
        return [r for r in wrong if r not in source.gold][:count]

    def _ordered(self, rows: list[int], rng: np.random.Generator) -> list[int]:
        """Reading order inside a page; half of the time the pages change places."""
        rows = sorted((int(r) for r in rows), key=self._reading_order.__getitem__)
        if rng.random() < 0.5:
            pages = list(dict.fromkeys(self.corpus.parent(r) for r in rows))
            place = dict(zip(pages, rng.permutation(len(pages)), strict=True))
            rows.sort(key=lambda r: place[self.corpus.parent(r)])
        return rows


def gold_path_rows(corpus: Corpus, queries: Sequence[Query], qrels: Qrels) -> list[DecisionRow]:
    """Training rows of every level, with BM25's wrong favourites of that level as cross-page rivals."""
    rivals: dict[int, dict[str, list[str]]] = {}
    judged = [q for q in queries if any(r > 0 for r in qrels.get(q.id, {}).values())]
    for level in range(corpus.num_levels):
        bm25 = BM25.from_corpus(corpus, corpus.level_rows(level))
        hits = bm25.search([q.text for q in judged], k=_RIVALS)
        rivals[level] = {
            q.id: drop_relatives(h.ids, [node for node, r in qrels[q.id].items() if r > 0], corpus)
            for q, h in zip(judged, hits, strict=True)
        }
    return list(decision_rows(corpus, judged, qrels, rivals))


def _reading_order(corpus: Corpus) -> np.ndarray:
    """Rank of every row in depth-first order (N,)."""
    order = np.empty(len(corpus), dtype=np.int64)
    stack = list(reversed(corpus.children(None)))
    rank = 0
    while stack:
        row = stack.pop()
        order[row] = rank
        rank += 1
        stack.extend(reversed(corpus.children(row)))
    return order


def _sizes(slates: Sequence[PackedSlate]) -> list[int]:
    return [len(slate.ends) for slate in slates]
