"""Pages put into a tree of groups and taken out of it, without k-means; which groups' summaries no longer fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from .corpus import Corpus, Node
from .tree import Tree, nearest, unit_vectors


@dataclass(frozen=True, slots=True)
class StaleGroup:
    """A group whose pages changed: how many it held before, how many came and went."""

    id: str
    before: int
    added: int
    removed: int

    @property
    def change(self) -> float:
        """Pages that came or went, as a share of those before."""
        return (self.added + self.removed) / self.before


@dataclass(frozen=True, slots=True)
class Update:
    """The new tree, the groups whose summaries are stale (upper ones too), and the empty groups that were dropped."""

    tree: Tree
    stale: tuple[StaleGroup, ...]
    dropped: tuple[str, ...]


def add_documents(tree: Tree, nodes: Iterable[Node], vectors: npt.ArrayLike) -> Update:
    """Put pages, with what is below them, under the groups with the nearest centroids. Centroids stay as they are.

    nodes: as for `Corpus.from_nodes`; those without a parent are the pages.
    vectors: one a page, in their order, of the encoder that made the tree's.

    Raises:
        ValueError: an id that the tree has already, as `Corpus.from_nodes`, or vectors that do not fit.
    """
    new = list(nodes)
    if taken := next((node.id for node in new if node.id in tree.corpus), None):
        raise ValueError(f"document {taken!r} is in the tree already; remove it first to replace it")
    Corpus.from_nodes(new)  # an orphan is refused by what was given, not by what the tree holds
    pages = [node for node in new if node.parent is None]
    vectors_PD = unit_vectors(vectors, len(pages))
    if vectors_PD.shape[1] != tree.centroids_GD.shape[1]:
        raise ValueError(
            f"vectors have {vectors_PD.shape[1]} dimensions, the tree's {tree.centroids_GD.shape[1]}; "
            f"encode with {tree.encoder or 'the same encoder'}"
        )
    groups = [tree.group_ids[group] for group in nearest(vectors_PD, tree.centroids_GD)]
    group_of = {page.id: group for page, group in zip(pages, groups, strict=True)}
    placed = [Node(n.id, n.parent or group_of[n.id], n.title, n.text) for n in new]
    corpus = Corpus.from_nodes(chain(tree.corpus, placed))
    after = Tree(corpus, tree.group_ids, tree.centroids_GD, tree.encoder)
    return Update(after, _stale(tree, Counter(groups), Counter(), set()), ())


def remove_documents(tree: Tree, ids: Sequence[str]) -> Update:
    """Take pages out, with what is below them, and groups that are then empty.

    Raises:
        KeyError: an id that the tree lacks.
        ValueError: an id that is no page, or no page would be left.
    """
    corpus, groups = tree.corpus, set(tree.group_ids)
    gone: set[int] = set()
    removed: Counter[str] = Counter()
    for page_id in dict.fromkeys(ids):
        row = corpus.row(page_id)
        parent = corpus.parent(row)
        if parent < 0 or corpus.id(parent) not in groups:
            raise ValueError(f"{page_id!r} is no page (a child of a lowest group); remove whole pages")
        removed[corpus.id(parent)] += 1
        gone.add(row)
    for row in range(len(corpus)):  # parents have smaller rows
        if corpus.parent(row) in gone:
            gone.add(row)
    dropped = _empty_groups(tree, gone)
    if len(dropped & groups) == len(groups):
        raise ValueError("no page would be left; a corpus needs one")
    kept = (node for row, node in enumerate(corpus) if row not in gone and node.id not in dropped)
    stay = [number for number, group_id in enumerate(tree.group_ids) if group_id not in dropped]
    left = tuple(tree.group_ids[number] for number in stay)
    after = Tree(Corpus.from_nodes(kept), left, np.ascontiguousarray(tree.centroids_GD[stay]), tree.encoder)
    return Update(after, _stale(tree, Counter(), removed, dropped), tuple(sorted(dropped)))


def group_rows(tree: Tree) -> dict[int, None]:
    """Rows of all groups, upper ones included, in row order."""
    rows = {row for group_id in tree.group_ids for row in tree.corpus.path(tree.corpus.row(group_id))}
    return dict.fromkeys(sorted(rows))


def _empty_groups(tree: Tree, gone: set[int]) -> set[str]:
    empty = set(gone)
    for row in reversed(list(group_rows(tree))):
        if all(child in empty for child in tree.corpus.children(row)):
            empty.add(row)
    return {tree.corpus.id(row) for row in empty - gone}


def _stale(tree: Tree, added: Counter[str], removed: Counter[str], dropped: set[str]) -> tuple[StaleGroup, ...]:
    """Changed groups in row order; an upper group counts all pages below it."""
    corpus = tree.corpus
    before, came, went = Counter[int](), Counter[int](), Counter[int]()
    for group_id in tree.group_ids:
        row = corpus.row(group_id)
        for above in corpus.path(row):
            before[above] += len(corpus.children(row))
            came[above] += added[group_id]
            went[above] += removed[group_id]
    changed = [row for row in sorted(before) if (came[row] or went[row]) and corpus.id(row) not in dropped]
    return tuple(StaleGroup(corpus.id(row), before[row], came[row], went[row]) for row in changed)
