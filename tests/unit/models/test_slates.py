"""Splitting pools into slates, and putting the answers together again."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import COST, FakeScorer
from hypothesis import given, settings
from hypothesis import strategies as st

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.hits import Cost
from retrail.models.backbone import tiny_twin
from retrail.models.config import DecisionConfig
from retrail.models.decision.layout import SlateLayout
from retrail.models.decision.slates import (
    Cut,
    Pool,
    _farthest_ends,
    check_queries,
    node_candidate,
    ranked,
    score_pools,
    split,
)
from retrail.models.protocols import Candidate
from retrail.models.tokenizer import SafeTokenizer

SAFE = SafeTokenizer(tiny_twin("llama", torch.device("cpu"), torch.float32, "sdpa")[1])


def pool_of(count):
    return Pool("q", tuple(Candidate(str(n), "t", "x") for n in range(count)))


def sizes_of(slates):
    return [len(slate.candidates) for slate in slates]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [1]), (50, [50]), (51, [26, 25]), (52, [26, 26]), (101, [34, 34, 33]), (150, [50] * 3), (7, [7])],
)
def test_slates_are_even(count, expected):
    assert sizes_of(split(pool_of(count), FakeScorer(None))) == expected


def test_ten_thousand_children():
    slates = split(pool_of(10_000), FakeScorer(None, max_tokens=10**9))
    assert sizes_of(slates) == [50] * 200
    assert [c.id for slate in slates for c in slate.candidates] == list(map(str, range(10_000)))


def test_token_cap_splits_too():
    sizes = dict(zip("abcdef", [60, 30, 30, 30, 30, 60], strict=True))
    scorer = FakeScorer(None, max_tokens=90, size=lambda c: sizes[c.id])
    slates = split(Pool("q", tuple(Candidate(i, "", i) for i in sizes)), scorer)
    assert ["".join(c.id for c in slate.candidates) for slate in slates] == ["ab", "cd", "ef"]


def fewest(sizes, most, cap):
    """The least number of runs within both caps, by trying every end (dynamic programming over all cuts)."""
    best = [0] + [10**9] * len(sizes)
    for end in range(1, len(sizes) + 1):
        for start in range(max(0, end - most), end):
            if sum(sizes[start:end]) <= cap:
                best[end] = min(best[end], best[start] + 1)
    return best[-1]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 20), st.integers(100, 400))
@settings(max_examples=150, deadline=None)
def test_every_candidate_once_in_order_within_the_caps(sizes, most, cap):
    scorer = FakeScorer(None, max_candidates=most, max_tokens=cap, size=lambda c: sizes[int(c.id)])
    slates = split(pool_of(len(sizes)), scorer)
    assert [c.id for slate in slates for c in slate.candidates] == [str(n) for n in range(len(sizes))]
    assert {slate.query for slate in slates} == {"q"}
    for slate in slates:
        assert 1 <= len(slate.candidates) <= most
        assert sum(scorer.num_tokens(c) for c in slate.candidates) <= cap
    assert len(slates) == fewest(sizes, most, cap)
    if sum(sizes) <= cap:  # tokens forbid nothing: no two slates differ by more than one
        assert max(sizes_of(slates)) - min(sizes_of(slates)) <= 1


words = st.integers(0, 60).map(lambda n: "word " * n)


@given(
    st.lists(st.builds(Candidate, st.just("x"), words, words, words, st.booleans()), min_size=1, max_size=30),
    st.integers(0, 60),
    st.sampled_from(["pointer", "yes_no"]),
)
@settings(max_examples=40, deadline=None)
def test_no_slate_exceeds_its_tokens(candidates, query, head):
    config = DecisionConfig(
        head=head, max_slate_tokens=1100, max_candidate_tokens=90, max_brief_tokens=30, max_query_tokens=70,
        max_candidates=9,
    )  # fmt: skip
    layout = SlateLayout(SAFE, config)
    scorer = FakeScorer(
        None, max_candidates=9, max_tokens=layout.max_candidate_tokens_per_slate, size=layout.num_tokens
    )
    unique = tuple(replace(c, id=str(n)) for n, c in enumerate(candidates))
    slates = split(Pool("w " * query, unique), scorer)
    assert sum(len(slate.candidates) for slate in slates) == len(candidates)
    for slate in slates:
        packed = layout.render(slate)
        assert packed.num_tokens <= 1100
        assert layout.render_choice(slate, none=True).num_tokens <= 1100
        texts = ((c.brief, f"{c.title}: {c.text}" if c.title else c.text) for c in slate.candidates)
        cut = sum(len(SAFE.data(f" {text}")) > (30 if brief else 90) for brief, text in texts)
        assert cut == sum("text of" in note for note in packed.notes[0])


def test_every_part_repeats_its_heading():
    layout = SlateLayout(SAFE, DecisionConfig(head="yes_no"))
    pool = Pool("q", tuple(Candidate(str(n), "", "x", "the page") for n in range(4)))
    slates = split(pool, FakeScorer(None, max_candidates=2))
    assert len(slates) == 2
    for slate in slates:
        assert SAFE.hf.decode(layout.render(slate).trunk).count("# the page\n[1] x\n[2] x\n") == 1


def test_empty_pool_is_refused():
    with pytest.raises(ValueError, match="nothing to judge for the query 'q'"):
        split(Pool("q", ()), FakeScorer(None))


def test_scores_of_split_pools_come_back_in_order():
    scorer = FakeScorer(lambda q, c: int(c.id) / 100 + (q == "b") / 2, max_candidates=3, notes=("cut",))
    pools = [Pool("a", pool_of(7).candidates), Pool("b", pool_of(2).candidates)]
    first, second = score_pools(scorer, pools)
    np.testing.assert_allclose(first.values_C, np.arange(7) / 100)
    np.testing.assert_allclose(second.values_C, [0.5, 0.51])
    assert (first.num_slates, second.num_slates) == (3, 1)
    assert first.notes == ("split into 3 slates", "cut") and second.notes == ("cut",)
    assert first.cost == Cost(requests=3, forwards=3, prompt_tokens=30, max_concurrency=3)
    assert second.cost == COST
    assert len(scorer.asked) == 4
    assert score_pools(scorer, []) == []


def test_many_notes_are_shortened():
    scorer = FakeScorer(lambda q, c: 0.5, max_candidates=1)
    scorer.notes = ()
    plain = scorer._answer
    scorer._answer = lambda slate, value: type(plain(slate, value))(
        plain(slate, value).values_C, (f"text of {slate.candidates[0].id} cut",)
    )
    [scores] = score_pools(scorer, [pool_of(9)])
    assert scores.notes == (
        "split into 9 slates", "text of 0 cut", "text of 1 cut", "and 7 more notes like these",
    )  # fmt: skip


def test_node_is_shown_under_the_titles_above_it():
    corpus = Corpus.from_nodes(
        [Node("r", None, "Book", "all"), Node("s", "r", "", "part"), Node("l", "s", "Leaf", "text")]
    )
    assert node_candidate(corpus, corpus.row("l")) == Candidate("l", "Leaf", "text", "Book", False)
    assert node_candidate(corpus, corpus.row("s")) == Candidate("s", "", "part", "Book", True)
    assert node_candidate(corpus, corpus.row("r")) == Candidate("r", "Book", "all", "", True)


def test_ties_keep_reading_order():
    assert ranked(np.array([0.2, 0.9, 0.2, 0.9, 0.9])).tolist() == [1, 3, 4, 0, 2]
    many = np.tile([0.5, 0.25, 0.75], 40)  # too many for the sort that NumPy uses on a handful
    assert ranked(many).tolist() == [*range(2, 120, 3), *range(0, 120, 3), *range(1, 120, 3)]


@pytest.mark.parametrize(
    ("queries", "k", "error", "message"),
    [
        ("one", 1, TypeError, "into brackets"), (["a", " \n"], 1, ValueError, "query number 1 is empty"),
        (["a"], 0, ValueError, "k=0 must be 1 or more"),
    ],
)  # fmt: skip
def test_bad_queries_are_refused(queries, k, error, message):
    with pytest.raises(error, match=message):
        check_queries(queries, k)


@given(st.lists(st.integers(0, 12), max_size=40), st.integers(1, 6), st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_farthest_ends_against_counting(sizes, most, tokens):
    expected = []
    for start in range(len(sizes)):
        end = start + 1
        while end < len(sizes) and end - start < most and sum(sizes[start : end + 1]) <= tokens:
            end += 1
        expected.append(end)
    assert _farthest_ends(sizes, Cut("shared", most, tokens)) == expected
