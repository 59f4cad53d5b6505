"""The control of the paper: the same scorer, but another retriever chooses what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from ...data_prep.corpus import Corpus
from ...data_prep.hits import Cost, Hits, Step
from ..protocols import DecisionScorer, Retriever
from .choose import FinalOrder, choose_best
from .slates import Pool, PoolScores, check_queries, node_candidate, score_pools


class Reranker:
    """Reads the top `depth` of another retriever as if they were the last level of a walk; a `Retriever`."""

    def __init__(
        self, scorer: DecisionScorer, corpus: Corpus, first: Retriever, *, depth: int = 100, choose: int = 5
    ) -> None:
        """`depth`: how many candidates the other retriever hands over; more is slower and recalls more."""
        self.scorer, self.corpus, self.first = scorer, corpus, first
        self.depth, self.choose = depth, choose

    def search(self, queries: Sequence[str], *, k: int = 10) -> list[Hits]:
        """The best `k` of each query's candidates, shown to the scorer in reading order, grouped by page.

        Scores as `Navigator.search`. A query for which the other retriever finds nothing gets no hits.

        Raises:
            ValueError: a query is empty, or k < 1.
            KeyError: the other retriever found an id that is not in the corpus.
        """
        check_queries(queries, k)
        firsts = self.first.search(queries, k=self.depth)
        found = [n for n, first in enumerate(firsts) if first.ids]
        pools = [self._pool(queries[n], firsts[n]) for n in found]
        scores = score_pools(self.scorer, pools)
        orders = choose_best(self.scorer, pools, [s.values_C for s in scores], self.choose)
        hits = [Hits((), (), first.cost) for first in firsts]
        for n, pool, score, final in zip(found, pools, scores, orders, strict=True):
            hits[n] = _hits(pool, score, final, k, firsts[n].cost)
        return hits

    def _pool(self, query: str, first: Hits) -> Pool:
        # Rows follow reading order among siblings, so their paths sort like a reading of the whole tree.
        rows = sorted(map(self.corpus.row, first.ids), key=self.corpus.path)
        return Pool(query, tuple(node_candidate(self.corpus, row) for row in rows))


def _hits(pool: Pool, scores: PoolScores, final: FinalOrder, k: int, first_cost: Cost) -> Hits:
    ids = tuple(c.id for c in pool.candidates)
    kept = tuple(ids[i] for i, _ in final.order[:k])
    step = Step(
        name=f"top {len(ids)}",
        ids=ids,
        scores=tuple(map(float, scores.values_C)),
        kept=kept,
        notes=scores.notes,
        cost=scores.cost,
    )
    steps = (step,) if final.step is None else (step, final.step)
    cost = reduce(Cost.__add__, (s.cost for s in steps), first_cost)
    return Hits(kept, tuple(score for _, score in final.order[:k]), cost, steps)
