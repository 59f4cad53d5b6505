"""Levels above flat pages: k-means groups, and balanced trees of a branching factor.

Letters: P pages, G groups, D dimensions. Pages are the root level of the corpus that is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from .corpus import Corpus, Node
from .files import new_folder
from .formats.jsonio import read_json, require
from .sentences import first_sentence

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

FORMAT = "retrail-groups"
FORMAT_VERSION = 1
TITLES_IN_TITLE = 3
TITLES_IN_TEXT = 10
_BLOCK_SCORES = 16_000_000  # similarities held at once: 64 MB
_BALANCE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Tree:
    """A corpus with groups above its pages.

    `group_ids` are the G lowest groups, whose children are pages; `centroids_GD` are theirs, unit vectors;
    `encoder` names what made the vectors, so that later pages are encoded alike.
    """

    corpus: Corpus
    group_ids: tuple[str, ...]
    centroids_GD: Floats
    encoder: str

    def save(self, path: str | Path) -> None:
        """Write a corpus folder that also holds the centroids. Raises FileExistsError as `Corpus.save`."""
        with new_folder(path) as folder:
            self.corpus.write_into(folder)
            self.write_groups(folder)

    def write_groups(self, folder: Path) -> None:
        """Write `centroids.npy` and `groups.json` into a corpus folder that is not yet in its final place."""
        np.save(folder / "centroids.npy", self.centroids_GD, allow_pickle=False)
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "encoder": self.encoder,
            "corpus_fingerprint": self.corpus.fingerprint,
            "group_ids": list(self.group_ids),
        }
        (folder / "groups.json").write_text(json.dumps(manifest, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the corpus folder of a tree.

        Raises:
            FileNotFoundError: no folder, or no groups in it.
            ValueError: groups of another corpus or format, or centroids that do not fit them.
        """
        folder = Path(path)
        where = str(folder / "groups.json")
        corpus = Corpus.open(folder)
        if not Path(where).is_file():
            raise FileNotFoundError(f"{where}: no such file; `retrail prep data=tree` puts groups above pages")
        manifest = read_json(where)
        version = manifest.get("format_version") if isinstance(manifest, dict) else None
        if version != FORMAT_VERSION or manifest.get("format") != FORMAT:
            raise ValueError(f"{where}: not groups of format version {FORMAT_VERSION}; build the tree again")
        if require(manifest, "corpus_fingerprint", str, where) != corpus.fingerprint:
            raise ValueError(f"{where}: its groups are those of another corpus; build the tree again")
        ids = tuple(require(manifest, "group_ids", list, where))
        centroids = np.load(folder / "centroids.npy", allow_pickle=False)
        if centroids.ndim != 2 or len(centroids) != len(ids) or centroids.dtype != np.float32:
            raise ValueError(f"{folder / 'centroids.npy'}: not one float32 vector a group; build the tree again")
        return cls(corpus, ids, centroids, require(manifest, "encoder", str, where))


def page_text(title: str, text: str) -> str:
    """What an encoder reads of a page: its title and the first sentence of its text."""
    sentence = first_sentence(text)
    return sentence if not title or sentence == title else f"{title}. {sentence}"


def page_texts(corpus: Corpus) -> list[str]:
    """`page_text` of each node of the root level, in order."""
    return [page_text(corpus.title(row), corpus.text(row)) for row in corpus.children(None)]


def cluster_pages(
    corpus: Corpus, vectors: npt.ArrayLike, groups: int, *, balanced: bool = False, seed: int = 0, encoder: str = ""
) -> Tree:
    """One level of k-means groups above the root level of `corpus`.

    vectors: one a page, in the order of the root level, shape (P, D); their directions are compared.
    groups: how many; fewer come back where pages are alike and a group would stay empty.
    balanced: sizes differ by at most one.

    Raises:
        ValueError: more groups than pages or less than one; vectors that do not fit the pages.
    """
    vectors_PD = unit_vectors(vectors, len(corpus.children(None)))
    if not 1 <= groups <= len(vectors_PD):
        raise ValueError(
            f"groups={groups} must be from 1 to the number of pages, which is {len(vectors_PD)}; choose fewer groups"
        )
    label_P = _k_means(vectors_PD, groups, balanced, seed)
    members = [np.flatnonzero(label_P == group) for group in range(groups)]
    members = [pages for pages in members if len(pages)]
    ids = [f"{_prefix(corpus)}:{number}" for number in range(len(members))]
    parents = {page: group_id for pages, group_id in zip(members, ids, strict=True) for page in pages.tolist()}
    above = [_group_node(corpus, vectors_PD, i, None, pages) for i, pages in zip(ids, members, strict=True)]
    return _assemble(corpus, vectors_PD, above, parents, encoder)


def balanced_tree(corpus: Corpus, vectors: npt.ArrayLike, branching: int, *, seed: int = 0, encoder: str = "") -> Tree:
    """Levels of groups above the root level of `corpus`, each node with at most `branching` children.

    The depth is the least that holds the pages: ceil(log_branching P) levels, pages included.

    Raises:
        ValueError: branching below 2; no more pages than that, so that no group is needed; unfit vectors.
    """
    vectors_PD = unit_vectors(vectors, len(corpus.children(None)))
    if branching < 2:
        raise ValueError(f"branching={branching} must be 2 or more")
    if len(vectors_PD) <= branching:
        raise ValueError(f"branching={branching}: {len(vectors_PD)} pages need no level above them; choose less")
    above: list[Node] = []
    parents: dict[int, str] = {}
    prefix = _prefix(corpus)
    pending: list[tuple[str | None, Ints]] = [(None, np.arange(len(vectors_PD)))]
    while pending:
        parent, pages = pending.pop(0)
        if len(pages) <= branching:
            parents |= dict.fromkeys(pages.tolist(), str(parent))
            continue
        below = branching
        while below * branching < len(pages):
            below *= branching
        count = -(-len(pages) // below)
        label = _k_means(vectors_PD[pages], count, True, seed)
        for number in range(count):
            group_id = f"{prefix}:{number}" if parent is None else f"{parent}.{number}"
            inside = pages[label == number]
            above.append(_group_node(corpus, vectors_PD, group_id, parent, inside))
            pending.append((group_id, inside))
    return _assemble(corpus, vectors_PD, above, parents, encoder)


def unit_vectors(vectors: npt.ArrayLike, count: int) -> Floats:
    """`vectors` as float32 of length one (zero vectors stay), shape (count, D).

    Raises:
        ValueError: another shape, or a value that is not finite.
    """
    array = np.array(vectors, dtype=np.float32)
    if array.ndim != 2 or len(array) != count or not array.shape[1]:
        raise ValueError(f"vectors of shape {array.shape} for {count} pages; give one vector a page")
    if not np.isfinite(array).all():
        raise ValueError("vectors hold values that are not finite; check the encoder")
    array /= np.maximum(np.linalg.norm(array, axis=1, keepdims=True), 1e-12)
    return array


def nearest(vectors_PD: Floats, centroids_GD: Floats) -> Ints:
    """The most similar centroid of each vector, the first of equals, shape (P,)."""
    rows = max(1, _BLOCK_SCORES // len(centroids_GD))
    parts = [np.argmax(vectors_PD[i : i + rows] @ centroids_GD.T, axis=1) for i in range(0, len(vectors_PD), rows)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def balance(vectors_PD: Floats, centroids_GD: Floats) -> Ints:
    """A group a page, similar ones first, such that sizes differ by at most one, shape (P,).

    In rounds: each page that has no place asks its most similar group with room, and a group takes the most similar
    of those that ask. The larger size goes to the groups that most pages are nearest to.
    """
    count = len(centroids_GD)
    wishes = np.bincount(nearest(vectors_PD, centroids_GD), minlength=count)
    room_G = np.full(count, len(vectors_PD) // count)
    room_G[np.argsort(-wishes, kind="stable")[: len(vectors_PD) % count]] += 1
    label_P = np.full(len(vectors_PD), -1)
    while len(waiting := np.flatnonzero(label_P < 0)):
        open_groups = np.flatnonzero(room_G)
        wish = open_groups[nearest(vectors_PD[waiting], centroids_GD[open_groups])]
        similarity = np.einsum("pd,pd->p", vectors_PD[waiting], centroids_GD[wish])
        order = np.lexsort((waiting, -similarity, wish))
        wish, waiting = wish[order], waiting[order]
        rank = np.arange(len(wish)) - np.searchsorted(wish, wish)
        taken = rank < room_G[wish]
        label_P[waiting[taken]] = wish[taken]
        room_G -= np.bincount(wish[taken], minlength=count)
    return label_P


def _k_means(vectors_PD: Floats, groups: int, balanced: bool, seed: int) -> Ints:
    if groups == 1:
        return np.zeros(len(vectors_PD), np.int64)
    try:
        import faiss
    except ImportError as error:
        raise ImportError("grouping pages needs faiss: pip install 'retrail[dense]'") from error
    k_means = faiss.Kmeans(
        vectors_PD.shape[1], groups, niter=20, seed=seed, spherical=True, min_points_per_centroid=1, verbose=False
    )
    k_means.train(vectors_PD)
    centroids_GD = np.array(k_means.centroids, dtype=np.float32)
    if not balanced:
        return nearest(vectors_PD, centroids_GD)
    label_P = balance(vectors_PD, centroids_GD)
    for _ in range(_BALANCE_ROUNDS):
        label_P = balance(vectors_PD, _means(vectors_PD, label_P, groups))
    return label_P


def _means(vectors_PD: Floats, label_P: Ints, groups: int) -> Floats:
    """Directions of the groups' means, shape (G, D)."""
    order = np.argsort(label_P, kind="stable")
    starts = np.searchsorted(label_P[order], np.arange(groups))
    return unit_vectors(np.add.reduceat(vectors_PD[order], starts, axis=0), groups)


def _prefix(corpus: Corpus) -> str:
    """`group`, or with a number where a corpus has such ids already."""
    taken = {corpus.id(row).partition(":")[0] for row in range(len(corpus))}
    number = 1
    while (name := "group" if number == 1 else f"group{number}") in taken:
        number += 1
    return name


def _group_node(corpus: Corpus, vectors_PD: Floats, group_id: str, parent: str | None, pages: Ints) -> Node:
    """A group with the titles nearest its centroid: it says what is inside before any summary is written."""
    [centroid_D] = _means(vectors_PD[pages], np.zeros(len(pages), np.int64), 1)
    near = pages[np.argsort(-(vectors_PD[pages] @ centroid_D), kind="stable")].tolist()
    # The root level is rows 0 to P - 1, so that a page's number is its row.
    titles = list(dict.fromkeys(" ".join((corpus.title(row) or corpus.text(row)[:80]).split()) for row in near))
    return Node(group_id, parent, "; ".join(titles[:TITLES_IN_TITLE]), "; ".join(titles[:TITLES_IN_TEXT]))


def _assemble(corpus: Corpus, vectors_PD: Floats, above: Sequence[Node], parents: dict[int, str], encoder: str) -> Tree:
    """`above`, then the corpus with each page under its group."""

    def nodes() -> Iterator[Node]:  # one by one: what is below the pages may be millions of texts
        yield from above
        for row, node in enumerate(corpus):
            yield Node(node.id, parents.get(row, node.parent), node.title, node.text)

    used = set(parents.values())
    group_ids = tuple(node.id for node in above if node.id in used)
    number = {group_id: position for position, group_id in enumerate(group_ids)}
    label_P = np.array([number[parents[page]] for page in range(len(parents))])
    return Tree(Corpus.from_nodes(nodes()), group_ids, _means(vectors_PD, label_P, len(group_ids)), encoder)
