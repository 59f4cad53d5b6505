"""Candidates made in bulk are those made one by one, however they are asked for and forgotten."""

import numpy as np
import pytest

from retrail.data_prep import corpus_build
from retrail.data_prep.corpus import Corpus, Node, build_corpus
from retrail.models.decision.candidates import Candidates
from retrail.models.decision.slates import node_candidate

NODES = [
    Node(name, name.rpartition("/")[0] or None, f"tïtle {name}" if n % 3 else "", f"text {name} \N{SNOWMAN}")
    for n, name in enumerate(
        [*"abcd"] + [f"{a}/{x}" for a in "abd" for x in range(5)] + [f"a/{x}/{y}" for x in (0, 3) for y in range(4)]
    )
]
CORPUS = Corpus.from_nodes(NODES)


@pytest.mark.parametrize("most", [1, 5, 12, 1_000])
def test_as_one_by_one(most):
    rng = np.random.default_rng(0)
    candidates = Candidates(CORPUS, most=most)
    for size in (1, 5, 27, 13, 3, 27):
        rows = sorted(rng.choice(len(CORPUS), size, replace=False).tolist())
        assert candidates.of(rows) == tuple(node_candidate(CORPUS, row) for row in rows)
        assert len(candidates._known) <= most
    assert candidates.of([5, 2, 5]) == tuple(node_candidate(CORPUS, row) for row in (5, 2, 5))
    assert candidates.of([]) == ()


def test_remembered_ones_are_not_read_again(monkeypatch):
    candidates = Candidates(CORPUS)
    first = candidates.of(range(10))
    monkeypatch.setattr(Corpus, "strings", None)
    assert all(a is b for a, b in zip(first, candidates.of(range(10)), strict=True))


def test_strings_across_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_build, "ROWS_PER_BATCH", 4)
    corpus = build_corpus(NODES, tmp_path / "corpus")
    assert len(corpus._batches) > 3
    for column, one in (("id", corpus.id), ("title", corpus.title), ("text", corpus.text)):
        for start, stop in ((0, len(corpus)), (3, 9), (4, 8), (7, 7), (26, 27)):
            assert corpus.strings(column, range(start, stop)) == [one(row) for row in range(start, stop)]
    rows = np.array([26, 0, 3, 4, 9])
    assert corpus.are_leaves(rows).tolist() == [corpus.is_leaf(row) for row in rows.tolist()]
    assert corpus.are_leaves(np.arange(len(corpus))).tolist() == list(map(corpus.is_leaf, range(len(corpus))))
    with pytest.raises(IndexError, match="row 27 is outside this corpus of 27 nodes"):
        corpus.strings("id", range(20, 28))
    with pytest.raises(IndexError, match="row -1"):
        corpus.strings("id", range(-1, 3))
    with pytest.raises(ValueError, match="has gaps"):
        corpus.strings("id", range(0, 9, 2))
    with pytest.raises(ValueError, match="body"):
        corpus.strings("body", range(3))
