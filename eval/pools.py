"""The fixed-pool test of DecisionRAG: the same candidates, judged with fewer or more rivals in the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tqdm import tqdm

from ..data_prep.corpus import Corpus
from ..data_prep.hits import Hits
from ..data_prep.negatives import interleave
from ..data_prep.task import Qrels, Query
from ..models.config import NavigateConfig
from ..models.decision.candidates import Candidates
from ..models.decision.compare import fit_slate_temperature
from ..models.decision.navigate import Navigator
from ..models.decision.odds import log_odds
from ..models.decision.slates import Cut, ranked, split
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
        ids = list(dict.fromkeys([*gold, *interleave([hits[n].ids for hits in rankings])]))[:size]
        rows = np.array([corpus.row(node) for node in ids], dtype=np.int64)
        pools.append(FixedPool(query, rows[reading_order(corpus, rows)]))
    return pools


def judge_pools(
    scorer: DecisionScorer, corpus: Corpus, pools: Sequence[FixedPool], config: NavigateConfig, *, at_once: int = 8
) -> dict[str, Hits]:
    """The ranking of each pool by P(yes), judged as `config` says (`scoring`, `slate_size`, `anchors` ...)."""
    navigator = Navigator(scorer, corpus, config)
    run = {}
    with tqdm(total=len(pools), desc="pools", unit="query") as bar:
        for start in range(0, len(pools), at_once):
            part = pools[start : start + at_once]
            answers = navigator.judge([(pool.query.text, pool.rows) for pool in part])
            for pool, scores in zip(part, answers, strict=True):
                best = ranked(scores.values_C)
                ids = tuple(corpus.id(int(pool.rows[i])) for i in best)
                run[pool.query.id] = Hits(ids, tuple(scores.values_C[best].tolist()), scores.cost)
            bar.update(len(part))
    return run


def cooled_pools(
    scorer: DecisionScorer, corpus: Corpus, pools: Sequence[FixedPool], qrels: Qrels, config: NavigateConfig
) -> dict[str, Hits]:
    """As `judge_pools`, with a temperature by slate size that was fitted on the other half of the pools.

    So every pool is held out. The answers are read twice, which costs as much again.
    """
    halves = [list(pools[n::2]) for n in range(2)]
    run: dict[str, Hits] = {}
    for half, other in (halves, halves[::-1]):
        temperature = _temperature(scorer, corpus, other, qrels, config)
        run |= judge_pools(scorer, corpus, half, replace(config, slate_temperature=list(temperature)))
    return run


def _temperature(
    scorer: DecisionScorer, corpus: Corpus, pools: Sequence[FixedPool], qrels: Qrels, config: NavigateConfig
) -> tuple[float, float]:
    run, shown, cut = judge_pools(scorer, corpus, pools, config), Candidates(corpus), Cut.of(scorer, config)
    odds, sizes, labels = [], [], []
    for pool in pools:
        value = dict(zip(run[pool.query.id].ids, run[pool.query.id].scores, strict=True))
        for slate in split(shown.pool(pool.query.text, pool.rows), scorer, cut):
            for candidate in slate.candidates:
                odds.append(value[candidate.id])
                sizes.append(len(slate.candidates))
                labels.append(int(qrels[pool.query.id].get(candidate.id, 0) > 0))
    return fit_slate_temperature(log_odds(np.array(odds)), np.array(sizes), np.array(labels))


def pool_evaluation(run: Mapping[str, Hits], qrels: Qrels, metrics: Sequence[str]) -> Evaluation:
    """Measures over the pools' queries alone."""
    return evaluate(run, {query: qrels[query] for query in run}, metrics)
