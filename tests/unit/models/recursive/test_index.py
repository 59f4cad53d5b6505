"""Exact search against brute force in float64 and against faiss; files that are refused."""

import json

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrail.models.protocols import StateVectors
from retrail.models.recursive.index import DocumentIndex, IndexMismatchError


def unit(rng, n, dim=8):
    vectors = rng.standard_normal((n, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def index_of(vectors, **options):
    return DocumentIndex([f"d{n}" for n in range(len(vectors))], vectors, **options)


def brute(vectors, query, k, excluded=()):
    """(rows, scores) by explicit sums in float64, rounded to float32 and sorted by (-score, row)."""
    scored = []
    for row, vector in enumerate(vectors):
        if row not in excluded:
            scored.append((-float(np.float32(sum(float(a) * float(b) for a, b in zip(vector, query)))), row))  # noqa: B905
    scored.sort()
    return [row for _, row in scored[:k]], [-score for score, _ in scored[:k]]


def check(found, s, rows, scores):
    assert found.counts_S[s] == len(rows)
    assert found.rows_SK[s, : len(rows)].tolist() == rows
    assert found.scores_SK[s, : len(rows)] == pytest.approx(scores, abs=1e-7)
    assert (found.rows_SK[s, len(rows) :] == -1).all() and (found.scores_SK[s, len(rows) :] == -np.inf).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_brute_force(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    n, s, k = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))
    vectors = unit(rng, n)
    for _ in range(data.draw(st.integers(0, 3))):  # runs of duplicates, at the cut too
        one, other = sorted(rng.integers(0, n, 2))
        vectors[one:other] = vectors[one]
    queries = unit(rng, s)
    queries[0] = vectors[0]
    excluded = [rng.choice(n, rng.integers(0, n + 1), replace=False).tolist() for _ in range(s)]
    devices = ["cpu"] * data.draw(st.integers(1, 3))
    found = index_of(vectors, devices=devices).search(queries, k, excluded=excluded, ranges=True)
    for q in range(s):
        check(found, q, *brute(vectors, queries[q], k, excluded[q]))
        _, all_scores = brute(vectors, queries[q], n)
        assert (found.low_S[q], found.high_S[q]) == (np.float32(all_scores[-1]), np.float32(all_scores[0]))


def test_small_blocks_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    vectors, queries = unit(rng, 500), unit(rng, 6)
    vectors[100:300] = vectors[99]
    queries[1] = vectors[99]
    excluded = [list(range(0, 500, 3))] * 6
    whole = index_of(vectors).search(queries, 150, excluded=excluded, ranges=True)
    monkeypatch.setattr("retrail.models.recursive.coarse_pass._BLOCK_ROWS", {"cpu": (7, 7)})
    small = index_of(vectors).search(queries, 150, excluded=excluded, ranges=True)
    for name in ("rows_SK", "scores_SK", "counts_S", "low_S", "high_S"):
        assert np.array_equal(getattr(whole, name), getattr(small, name))


def test_a_query_finds_the_same_alone_and_among_many():
    rng = np.random.default_rng(1)
    vectors, queries = unit(rng, 3000, 96), unit(rng, 300, 96)
    vectors[500:900] = vectors[3]
    queries[17] = vectors[3]
    index = index_of(vectors)
    many = index.search(queries, 50, ranges=True)
    for s in (0, 17, 299):
        alone = index.search(queries[s : s + 1], 50, ranges=True)
        assert np.array_equal(alone.rows_SK[0], many.rows_SK[s])
        assert np.array_equal(alone.scores_SK[0], many.scores_SK[s])
        assert (alone.low_S[0], alone.high_S[0]) == (many.low_S[s], many.high_S[s])
    # Hundreds of equal documents at the cut come in the order of the corpus.
    assert many.rows_SK[17].tolist() == [3, *range(500, 549)]


def test_equals_faiss():
    rng = np.random.default_rng(2)
    vectors, queries = unit(rng, 5000, 64), unit(rng, 40, 64)
    flat = faiss.IndexFlatIP(64)
    flat.add(vectors)
    scores, rows = flat.search(queries, 30)
    found = index_of(vectors).search(queries, 30)
    assert np.array_equal(found.rows_SK, rows)
    assert found.scores_SK == pytest.approx(scores, abs=1e-6)


@pytest.mark.parametrize(("dtype", "within"), [("float16", 2e-3), ("bfloat16", 2e-2), ("float32", 0)])
def test_types_round_vectors_and_nothing_else(tmp_path, dtype, within):
    rng = np.random.default_rng(3)
    vectors, queries = unit(rng, 200, 32), unit(rng, 4, 32)
    stored = torch.from_numpy(vectors).to(getattr(torch, dtype))
    index = index_of(stored)
    rounded = stored.float().numpy()
    assert np.abs(rounded - vectors).max() <= within
    found = index.search(queries, 20)
    for q in range(4):
        check(found, q, *brute(rounded, queries[q], 20))
    again = DocumentIndex.open(index.save(tmp_path / "index"))
    assert again.dtype == dtype and np.array_equal(again.vectors([5, 0, 199]), rounded[[5, 0, 199]])
    assert np.array_equal(again.search(queries, 20).rows_SK, found.rows_SK)


def test_all_excluded_and_fewer_than_asked():
    vectors = unit(np.random.default_rng(4), 5)
    index = index_of(vectors)
    nothing = index.search(vectors[:2], 3, excluded=[range(5), [0, 1, 2]])
    assert nothing.counts_S.tolist() == [0, 2] and set(nothing.rows_SK[1, :2]) == {3, 4}
    assert nothing.rows_SK[0].tolist() == [-1, -1]
    assert index.search(vectors[:1], 100).counts_S.tolist() == [5]
    assert index.search(np.zeros((0, 8), np.float32), 3).rows_SK.shape == (0, 0)


@pytest.mark.parametrize("ids", [["7", "x", "a b"], [7, -1, 10**12]])
def test_ids_keep_their_type(tmp_path, ids):
    index = DocumentIndex(ids, unit(np.random.default_rng(5), 3))
    again = DocumentIndex.open(index.save(tmp_path / "index"))
    assert again.ids == tuple(ids) and again.row(ids[1]) == 1
    with pytest.raises(KeyError, match=f"its ids are {type(ids[0]).__name__}"):
        again.row(str(ids[0]) if isinstance(ids[0], int) else 7)


def damaged(value):
    vectors = unit(np.random.default_rng(6), 4)
    vectors[2] = value
    return vectors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: index_of(damaged(np.nan)), "the vector of document 'd2' has length nan, not 1"),
        (lambda: index_of(damaged(np.inf)), "the vector of document 'd2' has length inf"),
        (lambda: index_of(damaged(0.0)), "the vector of document 'd2' has length 0, not 1"),
        (lambda: index_of(damaged(2.0)), "the vector of document 'd2' has length"),
        (lambda: DocumentIndex(["a", 1], damaged(1)[:2]), "ids must all be str or all int, not"),
        (lambda: DocumentIndex(["a", "a"], damaged(1)[:2]), "id 'a' appears twice"),
        (lambda: DocumentIndex([2**63], damaged(1)[:1]), "id 9223372036854775808 does not fit 64 bits; use a str"),
        (lambda: DocumentIndex(["\ud800"], damaged(1)[:1]), "is no valid Unicode and fits no file"),
        (lambda: DocumentIndex([True, False], damaged(1)[:2]), "ids must all be str or all int, not True"),
        (lambda: DocumentIndex(["a"], damaged(1)[:2]), r"1 ids but vectors of shape \(2, 8\)"),
        (lambda: index_of(damaged(1)[:2].astype(np.float64)), "vectors of type torch.float64; use one of"),
        (lambda: index_of(damaged(1)[:2], devices=[]), "devices must name at least one device"),
    ],
)
def test_what_cannot_be_an_index(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (lambda index, q: index.search(q, 0), "k=0 must be 1 or more"),
        (lambda index, q: index.search(q[:, :4], 1), r"vectors of shape \(2, 4\), but the documents have 8 dimensions"),
        (lambda index, q: index.search(q * np.nan, 1), "query vector 0 is not finite"),
        (lambda index, q: index.search(q, 1, excluded=[[]]), "exclusions for 1 vectors, but there are 2"),
    ],
)
def test_what_cannot_be_searched(search, message):
    vectors = unit(np.random.default_rng(7), 3)
    with pytest.raises(ValueError, match=message):
        search(index_of(vectors), vectors[:2])


class Letters:
    """An encoder that counts what it encodes."""

    dim, contract = 8, {"model": "letters", "prompt": {"version": 1}}

    def __init__(self):
        self.seen = []

    def encode_documents(self, texts, *, progress=False):
        self.seen += texts
        return np.stack([unit(np.random.default_rng(sum(map(ord, text)) + len(text)), 1)[0] for text in texts])

    def encode(self, states) -> StateVectors:
        raise NotImplementedError


def test_built_from_texts_and_refused_elsewhere(tmp_path):
    encoder = Letters()
    index = DocumentIndex.build(["a", "b", "c"], ["x", "y", "x"], encoder, corpus="c1", dtype="float16")
    assert encoder.seen == ["x", "y"] and np.array_equal(index.vectors([0]), index.vectors([2]))
    folder = index.save(tmp_path / "index")
    DocumentIndex.open(folder, contract=encoder.contract, corpus="c1", dtype="float16")
    for wrong, message in [
        ({"contract": {"model": "other", "prompt": {"version": 1}}}, "contract.model was 'letters' .* is 'other' here"),
        ({"contract": {"model": "letters", "prompt": {"version": 2}}}, "contract.prompt.version was 1 .* is 2 here"),
        ({"corpus": "c2"}, "corpus was 'c1' .* is 'c2' here"),
        ({"dtype": "float32"}, "dtype was 'float16' .* is 'float32' here"),
    ]:
        with pytest.raises(IndexMismatchError, match=message):
            DocumentIndex.open(folder, **wrong)
    with pytest.raises(FileExistsError):
        index.save(folder)


def test_damaged_files_are_named(tmp_path):
    folder = index_of(unit(np.random.default_rng(8), 3)).save(tmp_path / "index")
    whole = (folder / "vectors.npy").read_bytes()
    (folder / "vectors.npy").write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=r"vectors.npy is missing or cut off; build the index again"):
        DocumentIndex.open(folder)
    (folder / "vectors.npy").write_bytes(whole)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))
    with pytest.raises(ValueError, match="no retrail-document-index of version 1"):
        DocumentIndex.open(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="it holds no finished index"):
        DocumentIndex.open(folder)
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        DocumentIndex.open(tmp_path / "nowhere")
