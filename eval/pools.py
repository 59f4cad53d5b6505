"""The fixed-pool test of DecisionRAG: the same candidates, judged with fewer or more rivals in the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np
from tqdm import tqdm

from ..data_prep.corpus import Corpus
from ..data_prep.hits import Hits
from ..data_prep.task import Qrels, Query
from ..models.config import NavigateConfig
from ..models.decision.candidates import Candidates
from ..models.decision.slates import Cut, ranked, score_pools
from ..models.decision.walk import reading_order
from ..models.protocols import DecisionScorer, Retriever
from .metrics import Evaluation, evaluate


@dataclass(frozen=True, slots=True)
class FixedPool:
    """One query, and the rows it is asked about: all its gold nodes and hard negatives, in reading order."""

    query: Query
    rows: np.ndarray


def fixed_pools(
    corpus: Corpus, queries: Sequence[Query], qrels: Qrels, retrievers: Sequence[Retriever], size: int
) -> list[FixedPool]:
    """A pool of `size` for each query with a gold node: these, then the best of each retriever in turn.

    Raises:
        ValueError: no query has a gold node in the corpus, or one has more than fit.
    """
    asked = [q for q in queries if any(v > 0 and node in corpus for node, v in qrels.get(q.id, {}).items())]
    if not asked:
        raise ValueError("no query has a relevant node in the corpus, so there is nothing to look for in a pool")
    rankings = [retriever.search([q.text for q in asked], k=size) for retriever in retrievers]
    pools = []
    for n, query in enumerate(asked):
        gold = [node for node, value in qrels[query.id].items() if value > 0 and node in corpus]
        if len(gold) > size:
            raise ValueError(f"query {query.id!r} has {len(gold)} relevant nodes, more than a pool of {size}")
        in_turn = chain.from_iterable(zip_longest(*(hits[n].ids for hits in rankings)))
        ids = list(dict.fromkeys([*gold, *(node for node in in_turn if node is not None)]))[:size]
        rows = np.array([corpus.row(node) for node in ids], dtype=np.int64)
        pools.append(FixedPool(query, rows[reading_order(corpus, rows)]))
    return pools


def judge_pools(
    scorer: DecisionScorer, corpus: Corpus, pools: Sequence[FixedPool], per_request: int, *, at_once: int = 8
) -> dict[str, Hits]:
    """The ranking of each pool by P(yes), with at most `per_request` candidates side by side."""
    shown = Candidates(corpus)
    config = NavigateConfig(scoring="pointwise") if per_request == 1 else NavigateConfig(slate_size=per_request)
    cut = Cut.of(scorer, config)
    run = {}
    with tqdm(total=len(pools), desc=f"{per_request} a request", unit="query") as bar:
        for start in range(0, len(pools), at_once):
            part = pools[start : start + at_once]
            asked = [shown.pool(pool.query.text, pool.rows) for pool in part]
            for pool, scores in zip(part, score_pools(scorer, asked, cut), strict=True):
                best = ranked(scores.values_C)
                ids = tuple(corpus.id(int(pool.rows[i])) for i in best)
                run[pool.query.id] = Hits(ids, tuple(scores.values_C[best].tolist()), scores.cost)
            bar.update(len(part))
    return run


def pool_evaluation(run: Mapping[str, Hits], qrels: Qrels, metrics: Sequence[str]) -> Evaluation:
    """Measures over the pools' queries alone."""
    return evaluate(run, {query: qrels[query] for query in run}, metrics)
