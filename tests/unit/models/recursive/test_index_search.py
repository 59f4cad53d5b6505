"""The coarse pass misses nothing, equal vectors are one, and no score depends on what is asked beside it."""

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrail.models.recursive import coarse_pass, duplicates, exact_search
from retrail.models.recursive.index import DocumentIndex

FIELDS = ("rows_SK", "scores_SK", "counts_S", "low_S", "high_S")


def unit(rng, n, dim):
    vectors = rng.standard_normal((n, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def index_of(vectors, **options):
    return DocumentIndex(range(len(vectors)), vectors, **options)


def brute(stored, queries, k, excluded=None):
    """(rows, scores) of each query: every score in float64, rounded, sorted by (-score, row)."""
    scores = (queries.astype(np.float64) @ stored.astype(np.float64).T).astype(np.float32)
    found = []
    for s, line in enumerate(scores):
        out = set() if excluded is None else set(excluded[s])
        rows = [row for row in np.lexsort((np.arange(len(line)), -line)).tolist() if row not in out][:k]
        found.append((rows, line[rows]))
    return found


def check(found, expected):
    for s, (rows, scores) in enumerate(expected):
        count = found.counts_S[s]
        assert found.rows_SK[s, :count].tolist() == rows
        assert np.array_equal(found.scores_SK[s, :count], scores)


def same(one, other):
    for name in FIELDS:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


@pytest.fixture(params=[True, False], ids=["coarse bfloat16", "float32"])
def coarse(request, monkeypatch):
    monkeypatch.setattr(coarse_pass, "native_bf16", lambda: request.param)
    monkeypatch.setattr(coarse_pass, "_COARSE_ROWS", 256)
    return request.param


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_equals_brute_force_in_float64(coarse, dtype):
    rng = np.random.default_rng(0)
    stored = torch.from_numpy(unit(rng, 3000, 64)).to(getattr(torch, dtype))
    queries = unit(rng, 24, 64)
    excluded = [rng.choice(3000, n, replace=False).tolist() for n in rng.integers(0, 2990, 24)]
    found = index_of(stored).search(queries, 50, excluded=excluded, ranges=True)
    check(found, brute(stored.float().numpy(), queries, 50, excluded))
    every = brute(stored.float().numpy(), queries, 3000)
    assert np.array_equal(found.low_S, [scores[-1] for _, scores in every])
    assert np.array_equal(found.high_S, [scores[0] for _, scores in every])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_size_type_and_duplicates(data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    n, dim, k = draw(st.integers(1, 80)), draw(st.sampled_from([1, 2, 3, 5, 8, 33])), draw(st.integers(1, 90))
    vectors = unit(rng, n, dim)[rng.integers(0, draw(st.integers(1, n)), n)]  # few distinct ones, scattered
    stored = torch.from_numpy(vectors).to(getattr(torch, draw(st.sampled_from(["float32", "float16", "bfloat16"]))))
    s = draw(st.integers(1, 20))
    queries = unit(rng, s, dim)
    excluded = [rng.choice(n, rng.integers(0, n + 1), replace=False).tolist() for _ in range(s)]
    devices = ["cpu"] * draw(st.integers(1, 4))
    found = index_of(stored, devices=devices).search(queries, k, excluded=excluded, ranges=True)
    check(found, brute(stored.float().numpy(), queries, k, excluded))
    same(found, index_of(stored).search(queries, k, excluded=excluded, ranges=True))
    for q in range(s):
        assert not set(found.rows_SK[q].tolist()) & set(excluded[q])


def test_a_coarse_score_that_is_off_by_its_whole_bound_loses_nothing(monkeypatch):
    """The worst that a product may do within its bound: the best rows come out lower, all others higher."""
    rng = np.random.default_rng(1)
    vectors, queries = unit(rng, 800, 16), unit(rng, 5, 16)
    expected = brute(vectors, queries, 30)
    product, bound = coarse_pass._Products.__call__, coarse_pass._error_bound
    off = 0.05

    def wrong(self, start, stop):
        scores = product(self, start, stop)
        for s, (rows, _) in enumerate(expected):
            best = torch.tensor([start <= row < stop for row in rows])
            scores[s] += off
            scores[s, torch.tensor(rows)[best] - start] -= 2 * off
        return scores

    monkeypatch.setattr(coarse_pass._Products, "__call__", wrong)
    monkeypatch.setattr(coarse_pass, "_BLOCK_ROWS", {"cpu": (100, 100)})
    wider = lambda *a: (bound(*a)[0] + off, bound(*a)[1])  # noqa: E731
    monkeypatch.setattr(coarse_pass, "_error_bound", wider)
    check(index_of(vectors).search(queries, 30), expected)
    monkeypatch.setattr(coarse_pass, "_error_bound", lambda *a: (bound(*a)[0] + off / 2, 0.0))
    with pytest.raises(AssertionError):
        check(index_of(vectors).search(queries, 30), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bound_holds_for_rounded_products(dtype):
    rng = np.random.default_rng(2)
    vectors, queries = torch.from_numpy(unit(rng, 4096, 128)), torch.from_numpy(unit(rng, 32, 128))
    part = coarse_pass.Part(vectors, 0, 1.0)
    bound_S, share = coarse_pass._error_bound(part, queries, dtype)
    scores = coarse_pass._Products(part, queries.to(dtype), 1024)
    off = []
    for start, stop in scores.blocks():
        computed = scores(start, stop).double()
        true = queries.double() @ vectors[start:stop].double().T
        off.append(((computed - true).abs() - share * computed.abs()).amax(1))
    worst_S = torch.stack(off).amax(0)
    assert (worst_S <= bound_S).all()
    assert (worst_S > bound_S / 40).any()  # and is not so wide that it chooses nothing


@pytest.mark.parametrize("side", ["query", "documents", "output"])
def test_the_bound_holds_where_all_roundings_go_one_way(side):
    """Each of its three parts has to be there: the others are 0 here, and D is small."""
    even = np.full((1, 64), 0.125, np.float32)  # of length 1, exact in bfloat16
    # Rounded down and up so that every change counts against a score of nearly 0.
    uneven = even * np.repeat(np.float32([1 + 0.95 * 2**-8, -1 - 1.05 * 2**-8]), 32)
    queries = {"query": uneven, "documents": even, "output": even}[side]
    vectors = {"query": even, "documents": uneven, "output": even}[side].repeat(4096, axis=0)
    if side == "output":
        vectors[:, 0] = 0.1251220703125 - 0.125 / 32 + 0.0078125 * 0.99  # a score between two of bfloat16
        vectors = torch.from_numpy(vectors).bfloat16().float().numpy()
    part = coarse_pass.Part(torch.from_numpy(vectors), 0, 1.01)
    queries = torch.from_numpy(queries).repeat(16, 1)
    bound_S, share = coarse_pass._error_bound(part, queries, torch.bfloat16)
    computed = coarse_pass._Products(part, queries.bfloat16(), 4096)(0, 4096).double()
    off = (computed - queries.double() @ part.vectors_ND.double().T).abs()
    assert off.max() > {"query": 2**-9, "documents": 2**-9, "output": 2**-12}[side]
    assert (off <= bound_S[:, None] + share * computed.abs()).all()


@pytest.mark.parametrize(("allowed", "factor"), [("tf32", 2**-11), ("bf16", 2**-8)])
def test_float32_products_may_be_allowed_to_round(allowed, factor):
    """Training code often turns this on for the whole process."""
    rng = np.random.default_rng(3)
    vectors, queries = unit(rng, 3000, 96), unit(rng, 8, 96)
    part = coarse_pass.Part(torch.from_numpy(vectors), 0, 1.0)
    plain_S, _ = coarse_pass._error_bound(part, torch.from_numpy(queries), torch.float32)
    settings_of = torch.backends.mkldnn.matmul
    before = settings_of.fp32_precision
    try:
        settings_of.fp32_precision = allowed
        bound_S, _ = coarse_pass._error_bound(part, torch.from_numpy(queries), torch.float32)
        found = index_of(vectors).search(queries, 50, ranges=True)
    finally:
        settings_of.fp32_precision = before
    assert (bound_S > plain_S + 2 * factor).all()
    same(found, index_of(vectors).search(queries, 50, ranges=True))


def test_a_query_finds_the_same_alone_and_among_three_hundred(coarse):
    rng = np.random.default_rng(4)
    vectors, queries = unit(rng, 3000, 96), unit(rng, 300, 96)
    vectors[500:900] = vectors[3]
    queries[17] = vectors[3]
    excluded = [[n, 3, 501] for n in range(300)]
    index = index_of(vectors)
    many = index.search(queries, 50, excluded=excluded, ranges=True)
    for s in (0, 17, 299):
        alone = index.search(queries[s : s + 1], 50, excluded=excluded[s : s + 1], ranges=True)
        for name in FIELDS:
            assert np.array_equal(getattr(alone, name)[0], getattr(many, name)[s])
    # Hundreds of equal documents at the cut come in the order of the corpus, less those that are excluded.
    assert many.rows_SK[17].tolist() == [500, *range(502, 551)]


def test_queries_in_several_goes_are_those_in_one(monkeypatch):
    rng = np.random.default_rng(5)
    vectors, queries = unit(rng, 200, 8), unit(rng, 10, 8)
    excluded = [list(range(n * 20)) for n in range(10)]
    whole = index_of(vectors).search(queries, 30, excluded=excluded, ranges=True)
    monkeypatch.setattr(exact_search, "_QUERIES_AT_ONCE", 3)
    same(whole, index_of(vectors).search(queries, 30, excluded=excluded, ranges=True))


def test_ten_thousand_equal_documents_are_scored_once(monkeypatch):
    rng = np.random.default_rng(6)
    vectors = np.repeat(unit(rng, 2, 16), [10_000, 5], axis=0)
    scored = []
    exact = exact_search.exact_dots
    monkeypatch.setattr(exact_search, "exact_dots", lambda rows, query: scored.append(len(rows)) or exact(rows, query))
    index = index_of(vectors)
    found = index.search(vectors[:3], 40, excluded=[[], range(9_990), range(10_000)])
    assert [row[:count].tolist() for row, count in zip(found.rows_SK, found.counts_S, strict=True)] == [
        list(range(40)), list(range(9_990, 10_005)), list(range(10_000, 10_005)),
    ]  # fmt: skip
    assert sum(scored) <= 2 * 3


def test_groups_of_equal_documents_with_one_score_are_in_the_order_of_the_corpus():
    axes = np.eye(4, dtype=np.float32)[[0, 1, 1, 0, 2, 1, 0]]
    query = np.float32([[0.6, 0.6, 0.5, 0.0]])
    found = index_of(axes, devices=["cpu", "cpu"]).search(query, 5, excluded=[[2]])
    assert found.rows_SK.tolist() == [[0, 1, 3, 5, 6]]


def test_a_hash_that_two_vectors_share_loses_none(monkeypatch):
    rng = np.random.default_rng(7)
    vectors = unit(rng, 60, 8)
    vectors[:, :2] = vectors[0, :2]  # the same first bytes
    vectors /= np.linalg.norm(vectors[:, 2:], axis=1, keepdims=True)
    vectors[:, :2] = 0.0
    vectors[40] = vectors[7]
    monkeypatch.setattr(duplicates, "_hashes", lambda words: np.zeros(len(words), np.uint64))
    check(index_of(vectors).search(vectors[:9], 60), brute(vectors, vectors[:9], 60))
    monkeypatch.undo()
    groups = duplicates.find_groups([coarse_pass.Part(torch.from_numpy(vectors), 0, 1.0)])
    assert groups.members_M.tolist() == [7, 40] and groups.repeated.tolist() == [40]


@pytest.mark.parametrize("dim", [1, 7, 768, 1000, 4097, 8193, 12_000])
def test_a_score_does_not_depend_on_the_rows_beside_it(dim):
    rng = np.random.default_rng(8)
    rows, query = rng.standard_normal((40, dim)), rng.standard_normal(dim)
    alone = np.concatenate([exact_search.exact_dots(rows[n : n + 1].copy(), query) for n in range(40)])
    assert alone == pytest.approx(rows @ query)
    for start, stop in ((0, 40), (0, 33), (5, 21), (1, 3)):
        assert np.array_equal(exact_search.exact_dots(rows[start:stop].copy(), query), alone[start:stop])


def test_the_sum_of_a_gpu_is_that_of_a_cpu():
    rng = np.random.default_rng(9)
    vectors, queries = unit(rng, 50, 33), unit(rng, 2, 33).astype(np.float64)
    place, query = rng.integers(0, 50, 20), rng.integers(0, 2, 20)
    scores = exact_search._dots_on_gpu(torch.from_numpy(vectors), place, queries, query)
    expected = [np.float32(vectors[p].astype(np.float64) @ queries[q]) for p, q in zip(place, query, strict=True)]
    assert scores == pytest.approx(expected, abs=1e-7)


def test_rows_that_are_not_there_cannot_be_excluded():
    index = index_of(unit(np.random.default_rng(10), 3, 8))
    with pytest.raises(ValueError, match="excluded rows -1 to 1 are not all in this index of 3"):
        index.search(index.vectors([0]), 1, excluded=[[-1, 1]])


def test_equals_faiss_but_for_its_rounding(coarse):
    rng = np.random.default_rng(11)
    vectors, queries = unit(rng, 5000, 64), unit(rng, 40, 64)
    flat = faiss.IndexFlatIP(64)
    flat.add(vectors)
    scores, rows = flat.search(queries, 100)
    found = index_of(vectors).search(queries, 100)
    assert found.scores_SK == pytest.approx(scores, abs=1e-6)
    for s in range(40):  # only neighbours whose scores faiss cannot tell apart may change places
        for ours, theirs in zip(found.rows_SK[s], rows[s], strict=True):
            assert ours == theirs or abs(float((vectors[ours] - vectors[theirs]) @ queries[s])) < 1e-6
