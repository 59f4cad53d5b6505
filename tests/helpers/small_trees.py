"""Small trees whose ids are their paths, random trees, and beliefs about their nodes."""

import zlib

from hypothesis import strategies as st

from retrail.data_prep.corpus import Corpus, Node


def corpus_of(*ids):
    """A tree whose ids are its paths: "a/b" stands under "a"."""
    return Corpus.from_nodes(Node(i, i.rpartition("/")[0] or None, f"title {i}", f"text {i}") for i in ids)


def believing(values, default=0.1):
    return lambda query, candidate: values.get(candidate.id, default)


def guess(query, candidate):
    """Pseudo-random but fixed P(yes)."""
    return zlib.crc32(f"{query}|{candidate.id}".encode()) / 2**32


@st.composite
def trees(draw):
    """Random trees of 1 to 40 nodes, leaves at any level."""
    parents = [None]
    for n in range(1, draw(st.integers(1, 40))):
        parents.append(draw(st.one_of(st.none(), st.integers(max(0, n - 6), n - 1))))
    return Corpus.from_nodes(
        Node(f"n{n}", None if p is None else f"n{p}", f"t{n}", f"x{n}") for n, p in enumerate(parents)
    )
