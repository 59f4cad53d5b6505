"""Training rows of the decision family, with hard rivals from any retrievers and any runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from ...data_prep.corpus import Corpus
from ...data_prep.examples import DecisionRow, decision_rows, gold_paths, untrained_nodes
from ...data_prep.hits import Hits
from ...data_prep.negatives import drop_relatives, drop_same_text, interleave, rank_window
from ...data_prep.task import Qrels, Query
from ...models.bm25 import BM25
from ...models.protocols import Retriever

Rank = Callable[[Sequence[Query], int], Sequence[Sequence[str]]]
"""(queries, k) -> at most k ids of one level for each query, best first."""
RivalSource = Callable[[Corpus, int], Rank]
"""(corpus, level) -> how the nodes of that level are ranked."""

_MINED_AT_ONCE = 256


def searched(index: Callable[[Corpus, Sequence[int]], Retriever]) -> RivalSource:
    """Rivals from a retriever that is built for each level over its nodes (rows of the corpus)."""

    def at_level(corpus: Corpus, level: int) -> Rank:
        retriever = index(corpus, corpus.level_rows(level))
        return lambda queries, k: [hits.ids for hits in retriever.search([query.text for query in queries], k=k)]

    return at_level


def from_run(run: Mapping[str, Hits]) -> RivalSource:
    """Rivals from a run: its nodes (of the corpus) on that level, and those above deeper ones, each by its best."""

    def at_level(corpus: Corpus, level: int) -> Rank:
        def lifted(query: Query, k: int) -> list[str]:
            paths = (corpus.path(corpus.row(node)) for node in (run[query.id].ids if query.id in run else ()))
            return list(dict.fromkeys(corpus.id(path[level]) for path in paths if len(path) > level))[:k]

        return lambda queries, k: [lifted(query, k) for query in queries]

    return at_level


BM25_RIVALS = searched(BM25.from_corpus)


@dataclass(frozen=True, slots=True)
class Rivals:
    """Where wrong nodes that look right come from.

    sources: what ranks them; their rankings are interleaved. ranks: first and last rank of each that is taken, from 1.
    walked: by level and query id, the ids that a model's own search judged, best first (`data_prep.walks`).
    """

    sources: Sequence[RivalSource] = (BM25_RIVALS,)
    ranks: tuple[int, int] = (1, 30)
    walked: Mapping[int, Mapping[str, Sequence[str]]] | None = None


def gold_path_rows(
    corpus: Corpus,
    queries: Sequence[Query],
    qrels: Qrels,
    *,
    trained_level: int | None = None,
    rivals: Rivals | None = None,
) -> list[DecisionRow]:
    """Training rows of every level, with the wrong favourites of retrievers at that level as cross-page rivals.

    trained_level: see `DecisionObjectiveConfig`. rivals: where they come from (None: BM25's first 30).

    BM25 takes one to seven milliseconds a query and level (seven at 100,000 nodes), on every rank for itself (the rows
    are the same).
    """
    rivals = rivals or Rivals()
    depth = {query.id: max(map(len, gold_paths(corpus, qrels.get(query.id, {}))), default=0) for query in queries}
    found: dict[int, dict[str, list[str]]] = {}
    silent = os.environ.get("RANK", "0") != "0"
    with tqdm(total=sum(depth.values()), desc="rivals", unit="query", disable=silent) as bar:
        for level in range(corpus.num_levels):
            asked = [query for query in queries if depth[query.id] > level]
            ranks = [source(corpus, level) for source in rivals.sources] if asked else []
            found[level] = {}
            for start in range(0, len(asked), _MINED_AT_ONCE):
                part = asked[start : start + _MINED_AT_ONCE]
                rankings = [rank(part, rivals.ranks[1]) for rank in ranks]
                for n, query in enumerate(part):
                    ids = interleave([rank_window(ranking[n], *rivals.ranks) for ranking in rankings])
                    found[level][query.id] = _wrong(corpus, level, ids, qrels[query.id])
                bar.update(len(part))
    walked = {
        level: {query_id: _wrong(corpus, level, ids, qrels.get(query_id, {})) for query_id, ids in judged.items()}
        for level, judged in (rivals.walked or {}).items()
    }
    closed = [] if trained_level is None else untrained_nodes(corpus, queries, qrels, trained_level)
    return list(decision_rows(corpus, queries, qrels, found, closed=closed, walked=walked))


def rows_digest(rows: Sequence[DecisionRow]) -> str:
    """Hex sha256 of the rows: the same only where every query, gold node and rival is."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode(errors="surrogatepass"))
    return digest.hexdigest()


def _wrong(corpus: Corpus, level: int, ids: Sequence[str], judgements: Mapping[str, int]) -> list[str]:
    """`ids` of a level without those on a gold path, below a relevant node, or with the words of a gold node there."""
    paths = gold_paths(corpus, judgements)
    ids = drop_relatives(ids, [corpus.id(path[-1]) for path in paths], corpus)
    return drop_same_text(ids, [corpus.id(path[level]) for path in paths if len(path) > level], corpus)
