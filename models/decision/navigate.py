"""Retrieval without a retriever: a decision model walks the corpus tree from its root level to the leaves.

At each level all candidates are judged together, the best stay and are opened, until only leaves are left; the best
leaves then meet in one multiple-choice request (DecisionRAG).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np

from ...data_prep.corpus import Corpus
from ...data_prep.hits import Cost, Hits, Step
from ..config import NavigateConfig
from ..protocols import DecisionScorer, Retriever, Slate
from .slates import Pool, PoolScores, node_candidate, ranked, score_pools


@dataclass(slots=True)
class _Walk:
    """One query on its way down: the rows to judge next, and what was done so far."""

    query: str
    rows: list[int]
    steps: list[Step] = field(default_factory=list)
    passed_by: list[tuple[float, int]] = field(default_factory=list)  # leaves dropped above the last level


class Navigator:
    """Walks one corpus with one scorer; a `Retriever`.

    Trade-off: `config.keep` buys recall with candidates of the next level (see `NavigateConfig`).
    """

    def __init__(
        self,
        scorer: DecisionScorer,
        corpus: Corpus,
        config: NavigateConfig | None = None,
        *,
        queries_at_once: int = 8,
    ) -> None:
        """`queries_at_once`: queries whose slates travel together; more fills a GPU better and costs memory."""
        self.scorer, self.corpus = scorer, corpus
        self.config = config or NavigateConfig()
        self.queries_at_once = queries_at_once

    def search(
        self, queries: Sequence[str], *, k: int = 10, watch: Callable[[str, Step], None] | None = None
    ) -> list[Hits]:
        """The best `k` leaves for each query.

        Scores: leaves of the final choice 1 + their probability there, other leaves of the last level their P(yes),
        leaves that were dropped d levels higher P(yes) - d; so the order is that of the stages.
        `watch` is called with (query, step) as soon as a step is done.

        Raises:
            ValueError: a query is empty, or k < 1.
        """
        check_queries(queries, k)
        hits: list[Hits] = []
        for start in range(0, len(queries), self.queries_at_once):
            walks = [_Walk(q, list(self.corpus.children(None))) for q in queries[start : start + self.queries_at_once]]
            hits += self._walk(walks, k, watch or _ignore)
        return hits

    def _walk(self, walks: list[_Walk], k: int, watch: Callable[[str, Step], None]) -> list[Hits]:
        last: dict[int, np.ndarray] = {}
        level = 0
        while len(last) < len(walks):
            active = [w for w in range(len(walks)) if w not in last]
            pools = [self._pool(walks[w]) for w in active]
            for w, scores in zip(active, score_pools(self.scorer, pools), strict=True):
                if all(self.corpus.is_leaf(row) for row in walks[w].rows):
                    last[w] = scores.values_C
                    self._note(walks[w], scores, range(min(k, len(scores.values_C))), "leaves", watch)
                else:
                    self._descend(walks[w], scores, level, watch)
            level += 1
        orders = choose_best(
            self.scorer,
            [self._pool(walk) for walk in walks],
            [last[w] for w in range(len(walks))],
            self.config.choose,
        )
        return [self._hits(walk, last[w], *orders[w], k, watch) for w, walk in enumerate(walks)]

    def _pool(self, walk: _Walk) -> Pool:
        return Pool(walk.query, tuple(node_candidate(self.corpus, row) for row in walk.rows))

    def _descend(self, walk: _Walk, scores: PoolScores, level: int, watch: Callable[[str, Step], None]) -> None:
        keep = self.config.keep[min(level, len(self.config.keep) - 1)]
        best = sorted(ranked(scores.values_C)[:keep])
        kept = set(best)
        self._note(walk, scores, best, f"level {level + 1}", watch)
        walk.passed_by = [(value - 1.0, row) for value, row in walk.passed_by] + [
            (float(scores.values_C[i]) - 1.0, row)
            for i, row in enumerate(walk.rows)
            if i not in kept and self.corpus.is_leaf(row)
        ]
        # A leaf that stays is judged again beside the deeper ones, so that the last level compares all that is left.
        walk.rows = [
            row for i in best for row in ([walk.rows[i]] if self.corpus.is_leaf(walk.rows[i]) else
                                          self.corpus.children(walk.rows[i]))
        ]  # fmt: skip

    def _note(
        self, walk: _Walk, scores: PoolScores, kept: Sequence[int], name: str, watch: Callable[[str, Step], None]
    ) -> None:
        notes = scores.notes
        if scores.values_C.max() < 0.5:
            notes = (*notes, f"no candidate is more likely yes than no; the best {len(kept)} go on")
        ids = tuple(self.corpus.id(row) for row in walk.rows)
        values = tuple(float(v) for v in scores.values_C)
        step = Step(name=name, ids=ids, scores=values, kept=tuple(ids[i] for i in kept), notes=notes, cost=scores.cost)
        walk.steps.append(step)
        watch(walk.query, step)

    def _hits(
        self,
        walk: _Walk,
        values_C: np.ndarray,
        order: list[tuple[int, float]],
        choice: Step | None,
        k: int,
        watch: Callable[[str, Step], None],
    ) -> Hits:
        if choice is not None:
            walk.steps.append(choice)
            watch(walk.query, choice)
        found = [(walk.rows[i], score) for i, score in order]
        found += [(row, value) for value, row in sorted(walk.passed_by, key=lambda pair: -pair[0])]
        cost = reduce(Cost.__add__, (step.cost for step in walk.steps), Cost())
        ids = tuple(self.corpus.id(row) for row, _ in found[:k])
        return Hits(ids, tuple(score for _, score in found[:k]), cost, tuple(walk.steps))


def check_queries(queries: Sequence[str], k: int) -> None:
    """Raise ValueError for an empty query or k below 1; for one string instead of a list, TypeError."""
    if isinstance(queries, str):
        raise TypeError("search takes a list of queries; put the one query into brackets")
    if k < 1:
        raise ValueError(f"k={k} must be 1 or more")
    for n, query in enumerate(queries):
        if not query.strip():
            raise ValueError(f"query number {n} is empty")


def choose_best(
    scorer: DecisionScorer, pools: Sequence[Pool], values: Sequence[np.ndarray], choose: int
) -> list[tuple[list[tuple[int, float]], Step | None]]:
    """For each pool: (position, score) in final order, and the step of the final choice (None where there was none).

    The best `choose` candidates share one multiple-choice request whose context holds only them, in reading order.
    """
    orders = [ranked(v) for v in values]
    chosen = [sorted(order[:choose]) if min(choose, len(order)) > 1 else [] for order in orders]
    asked = [w for w, best in enumerate(chosen) if best]
    slates = [Slate(pools[w].query, tuple(pools[w].candidates[i] for i in chosen[w])) for w in asked]
    answers = dict(zip(asked, scorer.choose(slates) if slates else [], strict=True))
    out: list[tuple[list[tuple[int, float]], Step | None]] = []
    for w, order in enumerate(orders):
        rest = [(int(i), float(values[w][i])) for i in order if i not in set(chosen[w])]
        if w not in answers:
            out.append((rest, None))
            continue
        answer = answers[w]
        top = [(int(chosen[w][j]), 1.0 + float(answer.values_C[j])) for j in ranked(answer.values_C)]
        ids = tuple(c.id for c in slates[asked.index(w)].candidates)
        best = ids[int(np.argmax(answer.values_C))]
        step = Step(
            name="final choice",
            ids=ids,
            scores=tuple(float(v) for v in answer.values_C),
            kept=(best,),
            notes=answer.notes,
            cost=answer.cost,
        )
        out.append((top + rest, step))
    return out


class Reranker:
    """The control of the text: the same scorer reads the top `depth` of another retriever, as at the last level."""

    def __init__(
        self, scorer: DecisionScorer, corpus: Corpus, first: Retriever, *, depth: int = 100, choose: int = 5
    ) -> None:
        """`depth`: how many candidates the other retriever hands over; more is slower and recalls more."""
        self.scorer, self.corpus, self.first = scorer, corpus, first
        self.depth, self.choose = depth, choose

    def search(self, queries: Sequence[str], *, k: int = 10) -> list[Hits]:
        """The best `k` of each query's candidates, grouped by page in reading order for the scorer.

        Raises:
            ValueError: a query is empty, or k < 1.
        """
        check_queries(queries, k)
        firsts = self.first.search(queries, k=self.depth)
        order_of = {int(row): n for n, row in enumerate(self.corpus.leaves())} if queries else {}
        rows = [sorted((self.corpus.row(i) for i in first.ids), key=order_of.__getitem__) for first in firsts]
        found = [w for w, r in enumerate(rows) if r]
        pools = [Pool(queries[w], tuple(node_candidate(self.corpus, row) for row in rows[w])) for w in found]
        scores = score_pools(self.scorer, pools) if pools else []
        orders = choose_best(self.scorer, pools, [s.values_C for s in scores], self.choose)
        hits = [replace(first.top(0), cost=first.cost) for first in firsts]
        for w, pool, score, (order, choice) in zip(found, pools, scores, orders, strict=True):
            ids = tuple(c.id for c in pool.candidates)
            kept = tuple(ids[i] for i, _ in order[:k])
            step = Step(
                name=f"top {len(ids)}", ids=ids, scores=tuple(map(float, score.values_C)), kept=kept,
                notes=score.notes, cost=score.cost,
            )  # fmt: skip
            steps = (step,) if choice is None else (step, choice)
            cost = reduce(Cost.__add__, (s.cost for s in steps), firsts[w].cost)
            hits[w] = Hits(kept, tuple(s for _, s in order[:k]), cost, steps)
        return hits


def _ignore(query: str, step: Step) -> None:
    """Nobody watches."""
