"""The decision objective: slates along the gold path, one packed forward a batch for all their labels.

Everything random about a row in an epoch (size, rivals, order) follows from (seed, epoch, row), so any rank can build
any slate and a resumed run sees the same ones.
"""

from __future__ import annotations

import os
from bisect import bisect_left
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
from ...models.decision.batch import SlateBatch
from ...models.decision.layout import PackedSlate, SlateLayout
from ...models.decision.slates import node_candidate
from ...models.protocols import Slate
from ..config import DecisionObjectiveConfig
from ..losses import bce_sum, listwise_sum, none_sum
from .base import Batch, LossParts

_RIVALS = 30
_MINED_AT_ONCE = 256
_REMEMBERED_DRAWS = 4096


@dataclass(frozen=True, slots=True)
class DecisionBatch:
    """Slates with one label a question (a query about a candidate); an empty batch carries one slate of weight zero."""

    slates: SlateBatch
    choices: SlateBatch | None
    labels_Q: Tensor
    query_Q: Tensor
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
    (term `choice`, weight `choice_weight`), whose slate holds the same candidates. With `none_weight` the choice is
    also trained with none-of-these as an option (term `none`): a pointer head's log-odds against 0, another question of
    a yes/no head.
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
            ValueError: there are no rows, or `config` does not fit the model's (`DecisionObjectiveConfig.check_fits`).
        """
        if not rows:
            raise ValueError(
                "there is nothing to train on: no query of this split has a relevant node in the corpus that any other "
                "node competes with"
            )
        config.check_fits(layout.config)
        self.rows, self.corpus, self.layout, self.config = list(rows), corpus, layout, config
        self.seed = seed
        yes_no = layout.config.head == "yes_no"
        self._asks_choice = yes_no and config.choice_weight > 0
        self._asks_none = yes_no and config.none_weight > 0
        self._gold_of_level = _gold_of_level(self.rows)
        self._asked_at = _asked_at(self.rows)
        self._nodes_of = {level: sorted(nodes) for level, nodes in self._asked_at.items()}
        self._draw = lru_cache(maxsize=_REMEMBERED_DRAWS)(self._drawn)

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
        drawn = [self.shared(row, epoch) for row, epoch in (rows or [(0, 0)])]
        labels_of = [labels_C for _, labels_NC in drawn for labels_C in labels_NC]
        query_Q = np.repeat(np.arange(len(labels_of)), [len(y) for y in labels_of])
        with_gold = float(sum(bool(y.any()) for y in labels_of))
        labels_Q = torch.tensor(np.concatenate(labels_of), dtype=torch.float32)
        counts = {"bce": float(len(labels_Q)), "listwise": with_gold}
        if self._asks_choice:
            counts["choice"] = with_gold
        if self.config.none_weight > 0:
            counts["none"] = float(len(labels_of))
        slates, *choices = zip(*(self._packed(slates) for slates, _ in drawn), strict=True)
        return DecisionBatch(
            SlateBatch.of(slates),
            SlateBatch.of([packed for asked in choices for packed in asked]) if choices else None,
            labels_Q,
            torch.from_numpy(query_Q),
            counts if rows else dict.fromkeys(counts, 0.0),
            tuple(f"{self.rows[row].name} (epoch {epoch})" for row, epoch in rows),
        )

    def loss(self, model: nn.Module, batch: Batch) -> LossParts:
        """Sums of each term from one forward pass; `batch` comes from `collate`."""
        assert isinstance(batch, DecisionBatch)
        device = next(model.parameters()).device
        yes_Q, choice_Q = model(batch.slates.to(device), batch.choices.to(device) if batch.choices else None)
        labels_Q, query_Q = batch.labels_Q.to(device), batch.query_Q.to(device)
        N = sum(len(slate.queries) for slate in batch.slates.slates)
        sums = {"bce": bce_sum(yes_Q, labels_Q), "listwise": listwise_sum(yes_Q, labels_Q, query_Q, N)}
        asked = [] if choice_Q is None else list(choice_Q.split(len(labels_Q)))  # as `_packed` asks
        if self._asks_choice:
            sums["choice"] = listwise_sum(asked[0], labels_Q, query_Q, N)
        if self.config.none_weight > 0:
            sums["none"] = none_sum(asked[-1] if self._asks_none else yes_Q, labels_Q, query_Q, N)
        if not batch.names:
            return LossParts({name: value * 0.0 for name, value in sums.items()})
        return LossParts(sums)

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

    def _packed(self, slates: Sequence[Slate]) -> list[PackedSlate]:
        """The yes/no slate and, where they are trained, the multiple-choice one and that with none-of-these."""
        queries, candidates = [slate.query for slate in slates], slates[0].candidates
        packed = [self.layout.pack(queries, candidates)]
        if self._asks_choice:
            packed.append(self.layout.pack_choice(queries, candidates))
        if self._asks_none:
            packed.append(self.layout.pack_choice(queries, candidates, none=True))
        return packed

    def _drawn(self, row: int, epoch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a row in an epoch: the rows of the corpus on its slate, as the model reads them, and who asks."""
        source = self.rows[row]
        rng = np.random.default_rng([self.seed, epoch, row])
        size = int(rng.integers(self.config.min_candidates, self.config.max_candidates + 1))
        gold = [int(r) for r in rng.permutation(source.gold)[: max(1, size // 2)]]
        if rng.random() < self.config.none_share:
            gold = []
        count = size - len(gold)
        company = self._company(row, count, rng) if self.config.queries > 1 else {}
        free = [r for r in self._rivals(source, count, rng) if all(_open_to(self.rows[other], r) for other in company)]
        chosen = self._within_tokens(list(dict.fromkeys([*gold, *company.values(), *free]))[:size])
        asking = (row, *(other for other, node in company.items() if node in chosen))
        return tuple(self._ordered(chosen, rng)), asking

    def _company(self, row: int, count: int, rng: np.random.Generator) -> dict[int, int]:
        """Other rows that ask about the slate of this one, each with a right node of its own.

        As every candidate is then right for some query, a model gains nothing from knowing which are asked for most.
        First come nodes under the same parent, then wrong favourites of a retriever, then any.
        """
        source = self.rows[row]
        asked_at = self._asked_at[source.level]
        nodes = self._nodes_of[source.level]
        near = [range(bisect_left(nodes, part.start), bisect_left(nodes, part.stop)) for part in source.siblings]
        hard = [r for r in source.rivals if r in asked_at]
        wanted = [
            *(nodes[i] for i in draw(rng, near, round(self.config.sibling_share * count))),
            *(hard[i] for i in draw(rng, [range(len(hard))], round((1 - self.config.random_share) * count))),
            *(nodes[i] for i in draw(rng, [range(len(nodes))], 2 * count)),
        ]
        company: dict[int, int] = {}
        shown, words = list(source.gold), {source.query}
        for node in dict.fromkeys(wanted):
            if len(company) == min(count, self.config.queries - 1):
                break
            other = int(rng.choice(asked_at[node]))
            wrong_for_all = all(_open_to(self.rows[r], node) for r in (row, *company))
            all_wrong = all(_open_to(self.rows[other], r) for r in shown)
            if wrong_for_all and all_wrong and self.rows[other].query not in words:
                company[other] = node
                shown.append(node)
                words.add(self.rows[other].query)
        return company

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


def _asked_at(rows: Sequence[DecisionRow]) -> dict[int, dict[int, list[int]]]:
    """For each level and right node there, which training rows it is right for."""
    asked: dict[int, dict[int, list[int]]] = {}
    for n, row in enumerate(rows):
        for node in row.gold:
            asked.setdefault(row.level, {}).setdefault(node, []).append(n)
    return asked


def _open_to(row: DecisionRow, node: int) -> bool:
    """Whether the node is known to be wrong for the row's query."""
    return any(node in part for part in (*row.siblings, *row.others))


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
