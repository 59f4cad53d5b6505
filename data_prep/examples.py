"""Typed training rows: ids and text, never rendered prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .corpus import Corpus
from .task import Qrels, Query


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One question of a walk along the gold path: which nodes of this level lead to the answer?

    All are rows of the corpus at `level`, and ranges of them, so that a row stays small whatever the level's width.

    gold: rows on a gold path.
    siblings: the other children of their parents.
    others: the rest of the level. Neither holds a node that a relevant node above holds: whether that one is right
        nobody said.
    rivals: wrong nodes that look right (from any retriever), best first.
    walked: wrong nodes that a model's own search judged at this level, what it liked best first.
    """

    query_id: str
    query: str
    level: int
    gold: tuple[int, ...]
    siblings: tuple[range, ...]
    others: tuple[range, ...]
    rivals: tuple[int, ...]
    walked: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.query_id}@level{self.level}"


def gold_paths(corpus: Corpus, judgements: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The path (rows, root level first) to each node judged relevant; nodes that the corpus lacks are left out."""
    return [corpus.path(corpus.row(node)) for node, value in judgements.items() if value > 0 and node in corpus]


def decision_rows(
    corpus: Corpus,
    queries: Sequence[Query],
    qrels: Qrels,
    rivals: Mapping[int, Mapping[str, Sequence[str]]],
    *,
    closed: Sequence[int] = (),
    walked: Mapping[int, Mapping[str, Sequence[str]]] | None = None,
) -> Iterator[DecisionRow]:
    """One row for each query and level of its gold paths, queries without a positive left out.

    `rivals[level][query_id]` and `walked[level][query_id]` are ids of that level, best first; those on a gold path or
    below a relevant node are left out. A level at which nothing competes with the gold nodes gives no row. The nodes
    `closed` (rows), and what is below them, are not shown.
    """
    shut = [
        [descendants(corpus, row, level) for row in closed if corpus.level(row) <= level]
        for level in range(corpus.num_levels)
    ]
    for query in queries:
        paths = gold_paths(corpus, qrels.get(query.id, {}))
        for level in range(max(map(len, paths), default=0)):
            gold = tuple(sorted({path[level] for path in paths if len(path) > level}))
            parents = {path[level - 1] if level else None for path in paths if len(path) > level}
            family = sorted((corpus.children(parent) for parent in parents), key=lambda rows: rows.start)
            held = [descendants(corpus, path[-1], level) for path in paths if len(path) <= level]
            taken = [range(row, row + 1) for row in gold] + held + shut[level]
            siblings = without(family, taken)
            others = without([corpus.level_rows(level)], [*taken, *family])
            if siblings or others:
                wrong, judged = (
                    _free(corpus, of.get(level, {}).get(query.id, ()), taken) for of in (rivals, walked or {})
                )
                yield DecisionRow(query.id, query.text, level, gold, siblings, others, wrong, judged)


def _free(corpus: Corpus, ids: Sequence[str], taken: Sequence[range]) -> tuple[int, ...]:
    """The rows of `ids` that are not `taken`."""
    return tuple(row for row in map(corpus.row, ids) if not any(row in rows for rows in taken))


def untrained_nodes(corpus: Corpus, queries: Sequence[Query], qrels: Qrels, level: int) -> list[int]:
    """Nodes of a level (rows) to which no relevant node of these queries belongs."""
    paths = (path for query in queries for path in gold_paths(corpus, qrels.get(query.id, {})))
    trained = {path[level] for path in paths if len(path) > level}
    return [row for row in corpus.level_rows(level) if row not in trained]


def descendants(corpus: Corpus, row: int, level: int) -> range:
    """The rows of `level` that are below `row`, which is on a level above it (they stand next to each other)."""
    rows = range(row, row + 1)
    for _ in range(level - corpus.level(row)):
        rows = range(corpus.children(rows.start).start, corpus.children(rows.stop - 1).stop) if rows else rows
    return rows


def without(rows: Sequence[range], holes: Sequence[range]) -> tuple[range, ...]:
    """What is left of `rows` (disjoint, ascending) when `holes` (which may overlap) are cut out, ascending."""
    left = []
    in_order = sorted((hole for hole in holes if hole), key=lambda hole: hole.start)
    for whole in rows:
        start = whole.start
        for hole in in_order:
            if hole.start >= whole.stop:
                break
            if hole.start > start:
                left.append(range(start, hole.start))
            start = max(start, hole.stop)
        left.append(range(start, whole.stop))
    return tuple(part for part in left if part)
