"""faiss may miss a document, but what it finds has exact scores, the right order, and nothing that is excluded."""

import json

import numpy as np
import pytest
from recursive_fakes import HashEncoder

from retrail.models.recursive.index import DocumentIndex, IndexMismatchError
from retrail.models.recursive.index_faiss import FaissIndex
from retrail.models.recursive.retriever import RecursiveRetriever, SearchIndex
from retrail.models.recursive.search import TreeSearch


def unit(seed, n, dim=16):
    vectors = np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def exact():
    return DocumentIndex([f"d{n}" for n in range(1000)], unit(0, 1000), contract={"model": "m"}, corpus="c")


QUERIES = unit(1, 12)
FACTORIES = ["HNSW16", "IVF16,Flat", "IVF8,SQfp16", "Flat"]


@pytest.mark.parametrize("factory", FACTORIES)
def test_finds_nearly_all_with_exact_scores(exact, factory):
    approximate = FaissIndex.build(exact, factory, probe=12)
    assert approximate.approximate and len(approximate) == 1000 and approximate.row("d7") == 7
    found, true = approximate.search(QUERIES, 20), exact.search(QUERIES, 1000)
    shared = 0
    for s in range(len(QUERIES)):
        rows, scores = found.rows_SK[s].tolist(), found.scores_SK[s]
        place = {row: n for n, row in enumerate(true.rows_SK[s].tolist())}
        places = [place[row] for row in rows]
        assert places == sorted(places)  # the order of exact search
        assert np.array_equal(scores, true.scores_SK[s, places])
        shared += sum(n < 20 for n in places)
    assert shared >= 0.9 * 20 * len(QUERIES)


def test_a_retriever_searches_it():
    documents = {f"d{n}": f"document {n}" for n in range(60)}
    retriever = RecursiveRetriever(HashEncoder(), strategy=TreeSearch(3, 2), candidate_k=10)
    exact = retriever.build_index(documents)
    graph = FaissIndex.build(exact.vectors, "Flat")  # misses nothing
    approximate = SearchIndex(graph, exact.text)
    assert approximate.identity == exact.identity and len(approximate) == 60
    excluded = [["d3"], []]
    for readout in ("global", "root_interpolation", "assembly"):
        found = retriever.search(["a", "b"], approximate, k=5, readout=readout, excluded=excluded)
        wanted = retriever.search(["a", "b"], exact, k=5, readout=readout, excluded=excluded)
        assert [(h.ids, h.scores) for h in found] == [(h.ids, h.scores) for h in wanted]
    with pytest.raises(ValueError, match="only exact search computes"):
        retriever.search(["a"], approximate, readout="recovery_fusion")


@pytest.mark.parametrize("factory", FACTORIES)
def test_excluded_documents_never_come_back(exact, factory):
    approximate = FaissIndex.build(exact, factory, probe=16)
    best = exact.search(QUERIES, 50).rows_SK
    excluded = [best[s, :30].tolist() for s in range(10)] + [range(1000), range(995)]
    found = approximate.search(QUERIES, 20, excluded=excluded)
    for s in range(12):
        assert not set(found.rows_SK[s].tolist()) & set(excluded[s])
    assert found.counts_S[10] == 0
    if factory != "HNSW16":  # its walk may not reach the few that are left
        assert sorted(found.rows_SK[11, :5].tolist()) == [995, 996, 997, 998, 999]
    assert len(set(found.rows_SK[0].tolist()) & set(best[0, 30:50].tolist())) >= 16


def test_saved_and_refused_with_another_index(exact, tmp_path):
    built = FaissIndex.build(exact, "IVF16,SQfp16", probe=16)
    folder = built.save(tmp_path / "faiss")
    again = FaissIndex.open(folder, exact, probe=16)
    assert np.array_equal(again.search(QUERIES, 20).rows_SK, built.search(QUERIES, 20).rows_SK)
    others = {
        "corpus was 'c' .* is 'd' here": {"corpus": "d"},
        "contract.model was 'm' .* is 'n' here": {"contract": {"model": "n"}},
        "count was 1000 .* is 999 here": {"ids": exact.ids[:999], "vectors_ND": exact.vectors(range(999))},
        "ids was": {"ids": exact.ids[::-1]},
    }
    for message, change in others.items():
        whole = {"ids": exact.ids, "vectors_ND": exact.vectors(range(1000)), "contract": {"model": "m"}, "corpus": "c"}
        with pytest.raises(IndexMismatchError, match=message):
            FaissIndex.open(folder, DocumentIndex(**whole | change))
    with pytest.raises(FileExistsError):
        built.save(folder)
    whole = (folder / "index.faiss").read_bytes()
    (folder / "index.faiss").unlink()  # the old one is still mapped
    (folder / "index.faiss").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"index.faiss is missing or cut off"):
        FaissIndex.open(folder, exact)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 9}))
    with pytest.raises(ValueError, match="no retrail-faiss-index of version 1"):
        FaissIndex.open(folder, exact)
    with pytest.raises(FileNotFoundError, match="no faiss index"):
        FaissIndex.open(tmp_path, exact)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("PCA8,Flat", "cannot leave out documents"),
        ("IVF16,Nonsense", "is not one that faiss knows"),
        ("IVF4096,Flat", "asks for 4096 lists, more than the 1000 documents"),
    ],
)
def test_factories_that_do_not_serve(exact, factory, message):
    with pytest.raises(ValueError, match=message):
        FaissIndex.build(exact, factory)


def test_what_cannot_be_searched(exact):
    approximate = FaissIndex.build(exact, "Flat")
    with pytest.raises(ValueError, match="ranges=True needs the score of every document"):
        approximate.search(QUERIES, 5, ranges=True)
    with pytest.raises(ValueError, match="k=0 must be 1 or more"):
        approximate.search(QUERIES, 0)


def test_more_asked_for_than_there_is_and_none_at_all():
    few = FaissIndex.build(DocumentIndex(["a", "b"], unit(2, 2)), "HNSW8")
    assert few.search(QUERIES[:1], 9).counts_S.tolist() == [2]
    none = FaissIndex.build(DocumentIndex([], unit(2, 0)), "IVF4,Flat")
    assert none.search(QUERIES[:1], 9).counts_S.tolist() == [0]
