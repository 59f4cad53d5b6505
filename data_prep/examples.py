"""Typed training rows: ids and text, never rendered prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .corpus import Corpus
from .task import Qrels, Query


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One question of a walk along the gold path: which nodes of this level lead to the answer?

    gold: rows of the corpus on a gold path at `level`; siblings: other children of their parents;
    rivals: nodes of the same level that look right and are wrong (from any retriever), best first.
    """

    query_id: str
    query: str
    level: int
    gold: tuple[int, ...]
    siblings: tuple[int, ...]
    rivals: tuple[int, ...]

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.query_id}@level{self.level}"


def gold_paths(corpus: Corpus, judgements: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The path (rows, root level first) to each node judged relevant."""
    return [corpus.path(corpus.row(node)) for node, relevance in judgements.items() if relevance > 0]


def decision_rows(
    corpus: Corpus,
    queries: Sequence[Query],
    qrels: Qrels,
    rivals: Mapping[int, Mapping[str, Sequence[str]]],
) -> Iterator[DecisionRow]:
    """One row for each query and level of its gold paths, queries without a positive left out.

    `rivals[level][query_id]` are ids of that level, best first; relatives of a gold node must be gone already.
    A level at which nothing competes with the gold nodes gives no row.
    """
    for query in queries:
        paths = gold_paths(corpus, qrels.get(query.id, {}))
        for level in range(max(map(len, paths), default=0)):
            here = [path[: level + 1] for path in paths if len(path) > level]
            gold = tuple(sorted({path[-1] for path in here}))
            parents = {path[-2] if level else None for path in here}
            family = sorted({child for parent in parents for child in corpus.children(parent)} - set(gold))
            wrong = [corpus.row(node) for node in rivals.get(level, {}).get(query.id, ())]
            if family or wrong:
                yield DecisionRow(query.id, query.text, level, gold, tuple(family), tuple(wrong))
