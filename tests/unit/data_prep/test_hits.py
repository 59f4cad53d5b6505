import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrail.data_prep.hits import Cost, Hits, Step


def test_costs_add_up_but_concurrency_is_the_larger():
    first = Cost(requests=1, forwards=2, prompt_tokens=3, reused_tokens=4, generated_tokens=5, max_concurrency=6)
    second = Cost(requests=10, forwards=20, prompt_tokens=30, max_concurrency=4, seconds=0.5, usd=0.25)
    assert first + second == Cost(
        requests=11,
        forwards=22,
        prompt_tokens=33,
        reused_tokens=4,
        generated_tokens=5,
        max_concurrency=6,
        seconds=0.5,
        usd=0.25,
    )
    assert sum([first, second], Cost()) == first + second


@pytest.mark.parametrize(
    ("ids", "scores", "message"),
    [
        (("a", "b"), (1.0,), "2 ids but 1 scores"),
        (("a", "b", "a"), (3.0, 2.0, 1.0), "id 'a' appears twice"),
        (("a", "b"), (1.0, math.nan), "score of 'b' is nan"),
        (("a",), (math.inf,), "score of 'a' is inf"),
        (("a", "b", "c"), (2.0, 1.0, 1.5), r"increase from rank 2 \(1.0\) to 3 \(1.5\)"),
    ],
)
def test_refuses_what_is_no_ranking(ids, scores, message):
    with pytest.raises(ValueError, match=message):
        Hits(ids, scores)


def test_equal_scores_and_no_hits_are_rankings():
    assert len(Hits(("a", "b"), (1.0, 1.0))) == 2
    assert len(Hits((), ())) == 0


def test_from_scores_keeps_the_order_of_ties():
    hits = Hits.from_scores(["a", "b", "c", "d"], [1, 3, 1, 3], exact=True)
    assert hits == Hits(("b", "d", "a", "c"), (3.0, 3.0, 1.0, 1.0), exact=True)
    assert Hits.from_scores(["a", "b", "c"], [1, 3, 2], k=2).ids == ("b", "c")
    assert Hits.from_scores(["a"], [1], k=0).ids == ()


@pytest.mark.parametrize(
    ("ids", "scores", "k", "message"),
    [
        (["a"], [1, 2], None, "1 ids but 2 scores"),
        (["a", "b"], [1, 2], -1, "k=-1"),
        (["a", "b", "c"], [1, math.nan, 2], 1, "score of 'b' is nan"),
    ],
)
def test_from_scores_refuses(ids, scores, k, message):
    with pytest.raises(ValueError, match=message):
        Hits.from_scores(ids, scores, k=k)


def test_top_keeps_cost_and_trace():
    trace = (Step(name="level 0", ids=("a", "b"), scores=(0.5, 0.25), kept=("a",)),)
    hits = Hits(("a", "b"), (2.0, 1.0), Cost(forwards=3), trace, True)
    assert hits.top(1) == Hits(("a",), (2.0,), Cost(forwards=3), trace, True)
    assert hits.top(9) == hits
    with pytest.raises(ValueError, match="k=-1"):
        hits.top(-1)


@given(st.lists(st.floats(-10, 10), max_size=20), st.integers(0, 25))
def test_from_scores_as_a_stable_sort(scores, k):
    ids = [f"d{i}" for i in range(len(scores))]
    pairs = sorted(zip(ids, scores, strict=True), key=lambda pair: pair[1], reverse=True)[:k]
    hits = Hits.from_scores(ids, scores, k)
    assert list(zip(hits.ids, hits.scores, strict=True)) == pairs
