"""The tiny SPLADE model, against its own vectors multiplied by hand."""

import numpy as np
import pytest

from retrail.data_prep.corpus import Corpus, Node
from retrail.eval.sparse import SparseRetriever

TEXTS = {
    "cats": "Cats purr when they are content.",
    "tax": "Property tax is due in April.",
    "ship": "The container ship left the harbour.",
    "plain": "Purring is a sound made by cats.",
}


@pytest.fixture(scope="module")
def retriever():
    return SparseRetriever.from_corpus(Corpus.from_nodes(Node(i, None, "", text) for i, text in TEXTS.items()))


def test_finds_what_is_meant(retriever):
    first, second = retriever.search(["why does a cat purr", "when do I pay my taxes"], k=2)
    assert set(first.ids) == {"cats", "plain"}
    assert second.ids[0] == "tax"
    assert "splade" in retriever.description and "4 texts" in retriever.description


def test_scores_are_dot_products_of_the_models_vectors(retriever):
    encoder = retriever._model
    dense = encoder.encode_document(list(TEXTS.values()), convert_to_sparse_tensor=False)
    query = encoder.encode_document(["a cat in the harbour"], convert_to_sparse_tensor=False)
    expected = np.asarray(query) @ np.asarray(dense).T
    [hits] = retriever.search(["a cat in the harbour"], k=4)
    ids = list(TEXTS)
    assert hits.scores == pytest.approx([expected[0, ids.index(i)] for i in hits.ids], rel=1e-4)
    assert list(hits.scores) == sorted(hits.scores, reverse=True)


def test_nothing_to_do(retriever):
    assert retriever.search([], k=3) == []
    with pytest.raises(ValueError, match="k=0"):
        retriever.search(["x"], k=0)
