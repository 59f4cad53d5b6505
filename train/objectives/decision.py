"""The decision objective: slates along the gold path, one packed forward a batch for all their labels.

Everything random about a row in an epoch (size, rivals, order) follows from (seed, epoch, row), so any rank can build
any slate and a resumed run sees the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ...data_prep.corpus import Corpus
from ...data_prep.examples import DecisionRow, decision_rows, gold_paths, untrained_nodes
from ...data_prep.negatives import drop_relatives, drop_same_text
from ...data_prep.task import Qrels, Query
from ...models.bm25 import BM25
from ...models.decision.layout import SlateLayout
from ...models.decision.model import SlateBatch
from ...models.decision.slates import node_candidate
from ...models.protocols import Slate
from ..config import DecisionObjectiveConfig
from ..losses import bce_sum, listwise_sum
from .base import Batch, LossParts

_RIVALS = 30
_MINED_AT_ONCE = 256
_REMEMBERED_DRAWS = 4096


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
    ) -> None:
        """`rows` from `gold_path_rows`.

        Raises:
            ValueError: there are no rows, or slates would be larger than the model's own.
        """
        if not rows:
            raise ValueError(
                "there is nothing to train on: no query of this split has a relevant node in the corpus that any other "
                "node competes with"
            )
        if config.max_candidates > layout.config.max_candidates:
            raise ValueError(
                f"objective.max_candidates={config.max_candidates} is more than decision.max_candidates="
                f"{layout.config.max_candidates}, the most that a search puts on a slate; lower the first or raise "
                "the second"
            )
        self.rows, self.corpus, self.layout, self.config = list(rows), corpus, layout, config
        self.seed = seed
        self._asks_choice = layout.config.head == "yes_no" and config.choice_weight > 0
        self._gold_of_level = _gold_of_level(self.rows)
        self._draw = lru_cache(maxsize=_REMEMBERED_DRAWS)(self._drawn)

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
            SlateBatch.of(packed),
            choices,
            labels,
            slate_Q,
            counts if rows else dict.fromkeys(counts, 0.0),
            tuple(f"{self.rows[row].name} (epoch {epoch})" for row, epoch in rows),
        )

    def loss(self, model: nn.Module, batch: Batch) -> LossParts:
        """Sums of each term from one forward pass; `batch` comes from `collate`."""
        assert isinstance(batch, DecisionBatch)
        device = next(model.parameters()).device
        yes_Q, choice_Q = model(batch.slates.to(device), batch.choices.to(device) if batch.choices else None)
        labels_Q, slate_Q, S = batch.labels_Q.to(device), batch.slate_Q.to(device), len(batch.slates.slates)
        sums = {"bce": bce_sum(yes_Q, labels_Q), "listwise": listwise_sum(yes_Q, labels_Q, slate_Q, S)}
        if choice_Q is not None:
            sums["choice"] = listwise_sum(choice_Q, labels_Q, slate_Q, S)
        if not batch.names:
            return LossParts({name: value * 0.0 for name, value in sums.items()})
        return LossParts(sums)

    def slate(self, row: int, epoch: int) -> tuple[Slate, np.ndarray]:
        """The slate of a row in an epoch, and its labels (C,) in float32."""
        chosen = self._draw(row, epoch)
        slate = Slate(self.rows[row].query, tuple(node_candidate(self.corpus, r) for r in chosen))
        return slate, np.isin(chosen, self.rows[row].gold).astype(np.float32)

    def _choices(self, slates: Sequence[Slate]) -> SlateBatch:
        return SlateBatch.of([self.layout.render_choice(slate) for slate in slates])

    def _drawn(self, row: int, epoch: int) -> tuple[int, ...]:
        """The rows of the corpus on the slate of a row in an epoch, as the model reads them."""
        source = self.rows[row]
        rng = np.random.default_rng([self.seed, epoch, row])
        size = int(rng.integers(self.config.min_candidates, self.config.max_candidates + 1))
        gold = [int(r) for r in rng.permutation(source.gold)[: max(1, size // 2)]]
        if rng.random() < self.config.none_share:
            gold = []
        chosen = self._within_tokens([*gold, *self._rivals(source, size - len(gold), rng)])
        return tuple(self._ordered(chosen, rng))

    def _rivals(self, source: DecisionRow, count: int, rng: np.random.Generator) -> list[int]:
        """At most `count` wrong rows: siblings and cross-page rivals, or random ones of the same level.

        Half of the random ones are right for other queries: drawn as often as they are right, so that a model gains
        nothing from knowing which nodes are asked for most.
        """
        if rng.random() < self.config.random_share:
            open_rows = (*source.siblings, *source.others)
            popular = rng.choice(self._gold_of_level[source.level], size=count)
            wanted = [row for row in popular.tolist() if any(row in part for part in open_rows)]
            half = list(dict.fromkeys(wanted))[: -(-count // 2)]
            return list(dict.fromkeys([*half, *draw(rng, open_rows, count)]))[:count]
        siblings = draw(rng, source.siblings, count)
        near = siblings[: round(self.config.sibling_share * count)]
        far = [int(r) for r in rng.permutation(source.rivals)]
        strangers = draw(rng, source.others, count)
        return list(dict.fromkeys([*near, *far, *siblings, *strangers]))[:count]

    def _within_tokens(self, rows: list[int]) -> list[int]:
        """The first of `rows`, at least one, that fit a slate's token cap."""
        sizes = accumulate(self.layout.num_tokens(node_candidate(self.corpus, row)) for row in rows)
        fitting = sum(size <= self.layout.max_candidate_tokens_per_slate for size in sizes)
        return rows[: max(1, fitting)]

    def _ordered(self, rows: list[int], rng: np.random.Generator) -> list[int]:
        """Reading order, which inside a level is the order of rows; half of the time the pages change places."""
        rows = sorted(rows)
        if rng.random() < 0.5:
            pages = list(dict.fromkeys(self.corpus.parent(r) for r in rows))
            place = dict(zip(pages, rng.permutation(len(pages)), strict=True))
            rows.sort(key=lambda r: place[self.corpus.parent(r)])
        return rows


def _gold_of_level(rows: Sequence[DecisionRow]) -> dict[int, np.ndarray]:
    """The right nodes of each level, each as often as it is right."""
    gold: dict[int, list[int]] = {}
    for row in rows:
        gold.setdefault(row.level, []).extend(row.gold)
    return {level: np.array(nodes) for level, nodes in gold.items()}


def draw(rng: np.random.Generator, ranges: Sequence[range], count: int) -> list[int]:
    """At most `count` different numbers of disjoint ranges, in random order. Wide ranges take no longer."""
    ends = list(accumulate(map(len, ranges)))
    total = ends[-1] if ends else 0
    places = rng.choice(total, size=min(count, total), replace=False) if total else np.empty(0, dtype=np.int64)
    which = np.searchsorted(ends, places, side="right")
    return [ranges[i][place - ends[i]] for i, place in zip(which.tolist(), places.tolist(), strict=True)]


def gold_path_rows(
    corpus: Corpus, queries: Sequence[Query], qrels: Qrels, *, trained_level: int | None = None
) -> list[DecisionRow]:
    """Training rows of every level, with BM25's wrong favourites of that level as cross-page rivals.

    trained_level: see `DecisionObjectiveConfig`.

    Takes one to seven milliseconds a query and level (seven at 100,000 nodes), on every rank for itself (the rows are
    the same).
    """
    depth = {query.id: max(map(len, gold_paths(corpus, qrels.get(query.id, {}))), default=0) for query in queries}
    rivals: dict[int, dict[str, list[str]]] = {}
    silent = os.environ.get("RANK", "0") != "0"
    with tqdm(total=sum(depth.values()), desc="rivals", unit="query", disable=silent) as bar:
        for level in range(corpus.num_levels):
            asked = [query for query in queries if depth[query.id] > level]
            bm25 = BM25.from_corpus(corpus, corpus.level_rows(level) if asked else ())
            rivals[level] = {}
            for start in range(0, len(asked), _MINED_AT_ONCE):
                part = asked[start : start + _MINED_AT_ONCE]
                for query, hits in zip(part, bm25.search([q.text for q in part], k=_RIVALS), strict=True):
                    rivals[level][query.id] = _wrong(corpus, level, hits.ids, qrels[query.id])
                bar.update(len(part))
    closed = [] if trained_level is None else untrained_nodes(corpus, queries, qrels, trained_level)
    return list(decision_rows(corpus, queries, qrels, rivals, closed=closed))


def _wrong(corpus: Corpus, level: int, ids: Sequence[str], judgements: Mapping[str, int]) -> list[str]:
    """`ids` of a level without those on a gold path, below a relevant node, or with the words of a gold node there."""
    paths = gold_paths(corpus, judgements)
    ids = drop_relatives(ids, [corpus.id(path[-1]) for path in paths], corpus)
    return drop_same_text(ids, [corpus.id(path[level]) for path in paths if len(path) > level], corpus)
