"""Which nodes stand on a training slate, and which queries ask about it.

Everything random about a row in an epoch (size, rivals, order) follows from (seed, epoch, row), so any rank can draw
any slate and a resumed run sees the same ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ...data_prep.corpus import Corpus
from ...data_prep.examples import DecisionRow
from ...models.decision.layout import SlateLayout
from ...models.decision.slates import node_candidate
from ..config import DecisionObjectiveConfig
from ..sampler import stream_position


class SlateDraw:
    """Draws the slates of one data set's rows.

    `seed` must be that of the order in which the rows are taken (`loop.seed`): what is shown early follows from it.
    """

    def __init__(
        self,
        rows: Sequence[DecisionRow],
        corpus: Corpus,
        layout: SlateLayout,
        config: DecisionObjectiveConfig,
        seed: int,
    ) -> None:
        self.rows, self.corpus, self.layout, self.config, self.seed = rows, corpus, layout, config, seed
        self._gold_of_level = _gold_of_level(rows)
        self._asked_at = _asked_at(rows)
        self._nodes_of = {level: sorted(nodes) for level, nodes in self._asked_at.items()}

    def __call__(self, row: int, epoch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a row in an epoch: the rows of the corpus on its slate, as the model reads them, and who asks."""
        source, config = self.rows[row], self.config
        rng = np.random.default_rng([self.seed, epoch, row])
        size = int(rng.integers(config.min_candidates, config.max_candidates + 1))
        gold = [int(r) for r in rng.permutation(source.gold)[: max(1, size // 2)]]
        if rng.random() < config.none_share:
            gold = []
        count = size - len(gold)
        own = self._own(source, count, rng)
        easy = self.random_share(row, epoch)
        company = self._company(row, count, own, easy, rng) if config.queries > 1 else {}
        rivals = self._rivals(source, count, own, easy, rng)
        free = [r for r in rivals if all(_open_to(self.rows[other], r) for other in company)]
        chosen = self._within_tokens(list(dict.fromkeys([*gold, *company.values(), *free]))[:size])
        asking = (row, *(other for other, node in company.items() if node in chosen))
        return tuple(self._ordered(chosen, rng)), asking

    def random_share(self, row: int, epoch: int) -> float:
        """The share of what is random at this row's place in the stream of rows: less and less, where it falls."""
        config = self.config
        if not config.easy_rows:
            return config.random_share
        before = stream_position(row, epoch, seed=self.seed, num_rows=len(self.rows))
        done = min(1.0, before / config.easy_rows)
        return config.first_random_share + done * (config.random_share - config.first_random_share)

    def _own(self, source: DecisionRow, count: int, rng: np.random.Generator) -> list[int]:
        """What a search judged, where this slate is to show it: the half that it liked best, the rest at random."""
        if not source.walked or not self.config.own_share or rng.random() >= self.config.own_share:
            return []
        best = -(-count // 2)
        return [*source.walked[:best], *rng.permutation(source.walked[best:]).tolist()]

    def _company(
        self, row: int, count: int, own: Sequence[int], easy: float, rng: np.random.Generator
    ) -> dict[int, int]:
        """Other rows that ask about the slate of this one, each with a right node of its own.

        As every candidate is then right for some query, a model gains nothing from knowing which are asked for most.
        First comes what a search judged, where this slate shows it; else nodes under the same parent, then wrong
        favourites of a retriever; then any.
        """
        source = self.rows[row]
        asked_at = self._asked_at[source.level]
        nodes = self._nodes_of[source.level]
        if own:
            wanted = [r for r in own if r in asked_at]
        else:
            near = [range(bisect_left(nodes, part.start), bisect_left(nodes, part.stop)) for part in source.siblings]
            hard = [r for r in source.rivals if r in asked_at]
            wanted = [nodes[i] for i in draw(rng, near, round(self.config.sibling_share * count))]
            wanted += [hard[i] for i in draw(rng, [range(len(hard))], round((1 - easy) * count))]
        wanted += [nodes[i] for i in draw(rng, [range(len(nodes))], 2 * count)]
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

    def _rivals(
        self, source: DecisionRow, count: int, own: Sequence[int], easy: float, rng: np.random.Generator
    ) -> list[int]:
        """At most `count` wrong rows: what a search judged, or siblings and cross-page rivals, or random ones.

        Half of the random ones are right for other queries: drawn as often as they are right, so that a model gains
        nothing from knowing which nodes are asked for most.
        """
        if own:
            more = draw(rng, source.siblings, count) + draw(rng, source.others, count)
            return list(dict.fromkeys([*own, *more]))[:count]
        if rng.random() < easy:
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
