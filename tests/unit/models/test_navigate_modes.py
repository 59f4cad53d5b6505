"""What a walk can do beyond keeping k a level: scoring modes, limits, coming back, joining, prices."""

import math

import numpy as np
import pytest
from fakes import COST, FakeScorer
from hypothesis import given, settings
from hypothesis import strategies as st
from small_trees import believing, corpus_of, guess, trees

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.hits import Cost, Hits
from retrail.models.config import NavigateConfig, PriceConfig
from retrail.models.decision.candidates import Candidates
from retrail.models.decision.navigate import Navigator
from retrail.models.decision.odds import log_odds, log_sigmoid
from retrail.models.decision.slates import Cut, Pool, split
from retrail.models.decision.walk import Nodes, joined, opened
from retrail.models.protocols import Candidate

GUIDE = corpus_of("a", "b", "c", "a/1", "a/2", "b/1", "b/1/x", "b/1/y", "b/2")  # "c" is a leaf at the top
VALUES = {"a": 0.3, "b": 0.9, "c": 0.6, "a/1": 0.95, "a/2": 0.05, "b/1": 0.8, "b/2": 0.4, "b/1/x": 0.2, "b/1/y": 0.7}


@given(trees(), st.data())
@settings(max_examples=100, deadline=None)
def test_opening_rows_equals_one_at_a_time(corpus, data):
    rows = sorted(data.draw(st.sets(st.integers(0, len(corpus) - 1))))
    below, counts = corpus.open_rows(np.array(rows, dtype=np.int64))
    assert below.tolist() == [c for row in rows for c in corpus.children(row)]
    assert counts.tolist() == [len(corpus.children(row)) for row in rows]
    nodes = Nodes(np.array(rows, dtype=np.int64), np.arange(len(rows)) * 1.0, np.arange(len(rows)) * -2.0)
    own = np.full(len(rows), 0.5)
    after = opened(corpus, nodes, own, -own)
    expected = []
    for n, row in enumerate(rows):
        children = corpus.children(row)
        expected += [(c, n + 0.5, -2 * n - 0.5) for c in children] if children else [(row, n * 1.0, n * -2.0)]
    assert list(zip(after.rows_C.tolist(), after.above_C.tolist(), after.chain_C.tolist(), strict=True)) == expected


def test_opening_a_row_that_is_not_there():
    with pytest.raises(IndexError, match="rows 3 to 99 are not all in this corpus of 9"):
        GUIDE.open_rows(np.array([3, 99]))
    assert [len(part) for part in GUIDE.open_rows(np.array([], dtype=np.int64))] == [0, 0]


def test_log_odds_and_back():
    p = np.array([0.25, 0.5, 0.9, 1.0, 0.0])
    odds = log_odds(p, 1e-9)
    assert odds[:3] == pytest.approx([math.log(1 / 3), 0.0, math.log(9)])
    assert odds[3] == pytest.approx(-odds[4]) and odds[3] == pytest.approx(math.log(1e9), rel=1e-6)
    assert np.exp(log_sigmoid(odds))[:3] == pytest.approx(p[:3])


def test_different_probabilities_keep_different_log_odds():
    p = np.array([0.0, 1e-300, 1e-30, 1e-16, 0.5, 1 - 1e-15, 1.0])
    odds = log_odds(p)
    assert np.isfinite(odds).all() and (np.diff(odds) > 0).all()
    assert odds[1:4] == pytest.approx(np.log(p[1:4])) and odds[4] == 0.0


@pytest.mark.parametrize(
    ("scoring", "slates"),
    [
        ("shared", [["a", "b", "c"], ["a/1", "a/2", "b/1", "b/2", "c"], ["a/1", "b/1/x", "b/1/y", "c"]]),
        ("page_by_page", [["a", "b", "c"], ["a/1", "a/2"], ["b/1", "b/2"], ["c"], ["a/1"], ["b/1/x", "b/1/y"], ["c"]]),
        ("pointwise", [[i] for i in ["a", "b", "c", "a/1", "a/2", "b/1", "b/2", "c", "a/1", "b/1/x", "b/1/y", "c"]]),
    ],
)
def test_what_stands_side_by_side(scoring, slates):
    scorer = FakeScorer(believing(VALUES))
    config = NavigateConfig(keep=[3], choose=0, scoring=scoring)
    [hits] = Navigator(scorer, GUIDE, config).search(["q"])
    assert [[c.id for c in slate.candidates] for slate in scorer.asked] == slates
    # With answers that do not depend on rivals, the ranking is the same.
    assert hits.ids[:3] == ("a/1", "b/1/y", "c")


def test_pages_with_the_same_name_stay_apart():
    nodes = [Node("x", None, "Same", "x"), Node("y", None, "Same", "y")]
    nodes += [Node(f"{p}{n}", p, f"{n}", "text") for p in "xy" for n in range(2)]
    scorer = FakeScorer(lambda q, c: 0.5)
    Navigator(scorer, Corpus.from_nodes(nodes), NavigateConfig(scoring="page_by_page", choose=0)).search(["q"])
    assert [[c.id for c in s.candidates] for s in scorer.asked[1:]] == [["x0", "x1"], ["y0", "y1"]]


def test_smaller_slates_than_the_scorer_takes():
    leaves = corpus_of(*map(str, range(10)))
    scorer = FakeScorer(lambda q, c: int(c.id) / 100, size=lambda c: 7)
    Navigator(scorer, leaves, NavigateConfig(slate_size=4, choose=0)).search(["q"])
    assert [len(s.candidates) for s in scorer.asked] == [4, 3, 3]
    scorer.asked.clear()
    Navigator(scorer, leaves, NavigateConfig(slate_tokens=20, choose=0)).search(["q"])
    assert [len(s.candidates) for s in scorer.asked] == [2, 2, 2, 2, 2]
    for key in ("slate_size", "slate_tokens"):
        with pytest.raises(ValueError, match=f"navigate.{key}=20000 is more than the scorer takes"):
            Navigator(scorer, leaves, NavigateConfig(**{key: 20000}))


def test_cut_of_a_scorer_alone():
    scorer = FakeScorer(guess, max_candidates=3)
    assert Cut.of(scorer) == Cut("shared", 3, 10_000)
    pool = Pool("q", tuple(Candidate(str(n), "", "x") for n in range(7)))
    assert [len(s.candidates) for s in split(pool, scorer)] == [3, 2, 2]


def test_candidates_are_made_once():
    shown = Candidates(GUIDE)
    rows = np.array([GUIDE.row("b/1/x"), GUIDE.row("b/2")])
    first, second = shown.pool("q", rows), shown.pool("other", rows)
    assert all(a is b for a, b in zip(first.candidates, second.candidates, strict=True))
    assert first.candidates[0] == Candidate("b/1/x", "title b/1/x", "text b/1/x", "title b > title b/1", False)
    assert first.pages == (GUIDE.row("b/1"), GUIDE.row("b"))


def test_best_first_by_hand():
    scorer = FakeScorer(believing(VALUES))
    config = NavigateConfig(keep=[1], choose=0, search="best_first", expand=1, max_tokens=10_000)
    [hits] = Navigator(scorer, GUIDE, config).search(["q"])
    # Down: b, b/1, its leaves; then a, the one dropped inner node, with its leaves.
    assert [step.name for step in hits.trace] == ["level 1", "level 2", "leaves", "round 1, level 2", "left"]
    assert hits.trace[3].ids == ("a/1", "a/2")
    assert hits.ids == ("a/1", "b/1/y", "b/1/x", "a/2", "b/2", "c")
    assert hits.scores == pytest.approx((0.95, 0.7, 0.2, 0.05, 0.4 - 1, 0.6 - 2))
    left = hits.trace[-1]
    assert left.ids == () and left.notes == ("nothing more to open; 0 nodes were not opened",)
    assert hits.cost == COST + COST + COST + COST
    [levels] = Navigator(FakeScorer(believing(VALUES)), GUIDE, NavigateConfig(keep=[1], choose=0)).search(["q"])
    assert "a/1" not in levels.ids


def test_the_likeliest_path_is_taken_up_first():
    ids = [*"abcd", *(f"{p}/{n}" for p in "abcd" for n in range(2)), *(f"{p}/{n}/x" for p in "abcd" for n in range(2))]
    values = {"a": 0.9, "b": 0.8, "c": 0.5, "d": 0.1, "a/0": 0.9, "a/1": 0.7, "b/0": 0.9, "b/1": 0.2, "c/0": 0.99}
    scorer = FakeScorer(believing(values))
    config = NavigateConfig(keep=[1], choose=0, search="best_first", expand=1, max_requests=6)
    [hits] = Navigator(scorer, corpus_of(*ids), config).search(["q"])
    rounds = [step.ids for step in hits.trace if step.name.startswith("round")]
    # Chains: b .8, a/1 .9 * .7 = .63; after b is opened b/0 .72 comes before a/1.
    assert rounds == [("b/0", "b/1"), ("b/0/x",), ("a/1/x",)]
    left = hits.trace[-1]
    assert left.ids == ("c", "b/1", "d") and left.scores == pytest.approx((0.5, 0.16, 0.1))
    assert left.notes == ("max_requests=6 reached; 3 nodes were not opened",)
    assert hits.cost.requests == 6


@pytest.mark.parametrize("limit", [{"max_tokens": 10}, {"max_requests": 1}, {"max_seconds": 1e-9}])
def test_a_limit_during_the_descent_still_finds_something(limit):
    scorer = FakeScorer(believing(VALUES))
    [hits] = Navigator(scorer, GUIDE, NavigateConfig(keep=[3], choose=0, **limit)).search(["q"])
    assert len(hits.trace) == 3
    assert hits.trace[0].kept == ("b",) and hits.trace[1].kept == ("b/1",)
    [(key, value)] = limit.items()
    assert f"{key}={value} reached: the descent goes on with the best node alone" in hits.trace[0].notes
    assert hits.ids[:2] == ("b/1/y", "b/1/x")


def test_best_first_needs_a_limit():
    with pytest.raises(ValueError, match="reads the whole corpus without a limit"):
        NavigateConfig(search="best_first")


@given(trees(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 9))
@settings(max_examples=80, deadline=None)
def test_without_a_bound_best_first_judges_every_leaf_once(corpus, keep, expand, seed):
    scorer = FakeScorer(lambda q, c: guess(f"{seed}", c), max_candidates=4)
    config = NavigateConfig(keep=[keep], choose=0, search="best_first", expand=expand, max_tokens=10**9)
    [hits] = Navigator(scorer, corpus, config).search(["q"], k=100)
    assert set(hits.ids) == {corpus.id(int(row)) for row in corpus.leaves()}
    last = {i: s for i, s in zip(hits.ids, hits.scores, strict=True) if s >= 0}
    assert last == {i: pytest.approx(guess(f"{seed}", Candidate(i, "", ""))) for i in last}


class Fixed:
    """A retriever that always finds the same."""

    def __init__(self, *ids):
        self.ids, self.asked = ids, []

    def search(self, queries, *, k):
        self.asked.append((list(queries), k))
        scores = tuple(-float(n) for n in range(len(self.ids)))
        return [Hits(self.ids, scores, Cost(seconds=1.0)).top(k) for _ in queries]


def test_the_best_of_another_retriever_join_the_last_level():
    scorer, other = FakeScorer(believing(VALUES)), Fixed("a/1", "b/1/x", "c")
    config = NavigateConfig(keep=[1], choose=0, join_depth=2)
    seen = []
    navigator = Navigator(scorer, GUIDE, config, join=other)
    [hits] = navigator.search(["q"], k=5, watch=lambda query, step: seen.append(step))
    assert tuple(seen) == hits.trace
    assert other.asked == [(["q"], 2)]
    assert [c.id for c in scorer.asked[-1].candidates] == ["a/1", "b/1/x", "b/1/y"]  # in reading order
    assert hits.ids[:3] == ("a/1", "b/1/y", "b/1/x")
    join = hits.trace[2]
    assert (join.name, join.kept, join.notes) == (
        "join", ("a/1", "b/1/x"), ("1 of the other retriever's best 2 are new",)
    )  # fmt: skip
    assert hits.cost.seconds == 1.0
    nobody = Navigator(scorer, GUIDE, config, join=Fixed()).search(["q"], k=5)[0]
    assert nobody.ids[0] == "b/1/y"
    off = Navigator(scorer, GUIDE, NavigateConfig(keep=[1], choose=0, join_depth=0), join=other)
    assert off.search(["q"])[0].ids[0] == "b/1/y" and len(other.asked) == 1


def test_who_joins_remembers_what_was_judged_above():
    scorer = FakeScorer(believing(VALUES))
    config = NavigateConfig(keep=[1], choose=0, path_weight=1.0)
    [hits] = Navigator(scorer, GUIDE, config, join=Fixed("a/1")).search(["q"], k=5)
    expected = 0.95 / 0.05 * 0.3 / 0.7  # odds of a/1 and of a, which was dropped
    assert dict(zip(hits.ids, hits.scores, strict=True))["a/1"] == pytest.approx(expected / (1 + expected))


def test_a_joined_leaf_that_was_passed_by_counts_once():
    scorer = FakeScorer(believing(VALUES))
    [hits] = Navigator(scorer, GUIDE, NavigateConfig(keep=[1], choose=0), join=Fixed("c")).search(["q"], k=9)
    assert hits.ids.count("c") == 1 and hits.scores[hits.ids.index("c")] == 0.6


def test_best_first_does_not_judge_a_joined_leaf_again():
    scorer = FakeScorer(believing(VALUES))
    config = NavigateConfig(keep=[1], choose=0, search="best_first", max_tokens=10**6)
    [hits] = Navigator(scorer, GUIDE, config, join=Fixed("a/1", "a/2")).search(["q"], k=9)
    assert hits.ids[:2] == ("a/1", "b/1/y") and len(set(hits.ids)) == len(hits.ids)
    assert [c.id for s in scorer.asked for c in s.candidates].count("a/1") == 1


def test_joining_equals_sorting_by_path():
    nodes = Nodes.all(range(3, 5))
    more = Nodes.all(range(0, 9))
    both = joined(GUIDE, nodes, more)
    assert both.rows_C.tolist() == sorted(range(9), key=GUIDE.path)


def test_flat_titles_start_below_the_root():
    scorer = FakeScorer(believing(VALUES))
    config = NavigateConfig(keep=[1, 2], choose=0, start_level=1)
    [hits] = Navigator(scorer, GUIDE, config).search(["q"])
    assert [c.id for c in scorer.asked[0].candidates] == ["a/1", "a/2", "b/1", "b/2"]
    assert hits.trace[0].name == "level 2" and set(hits.trace[0].kept) == {"a/1", "b/1"}
    with pytest.raises(ValueError, match="navigate.start_level=3: this corpus has the levels 0 to 2"):
        Navigator(scorer, GUIDE, NavigateConfig(start_level=3))


def test_observe_sees_a_level_before_anything_is_dropped():
    scorer = FakeScorer(believing(VALUES))
    navigator = Navigator(scorer, GUIDE, NavigateConfig(keep=[1]))
    [root] = navigator.observe(["q"], 0)
    assert root.rows == (0, 1, 2) and root.cost == COST
    assert root.log_odds_C == pytest.approx(log_odds(np.array([0.3, 0.9, 0.6])))
    [second] = navigator.observe(["q"], 1)
    assert [GUIDE.id(row) for row in second.rows] == ["b/1", "b/2"]
    [third] = navigator.observe(["q"], 2)
    assert [GUIDE.id(row) for row in third.rows] == ["b/1/x", "b/1/y"]
    assert len(scorer.asked) == 6
    with pytest.raises(ValueError, match="level 0 is above navigate.start_level=1"):
        Navigator(scorer, GUIDE, NavigateConfig(start_level=1)).observe(["q"], 0)


def test_observe_below_the_leaves_is_empty():
    scorer = FakeScorer(believing({"c": 0.9}))
    [seen] = Navigator(scorer, GUIDE, NavigateConfig(keep=[1])).observe(["q"], 2)
    assert seen.rows == () and len(seen.log_odds_C) == 0


def test_money_by_hand():
    scorer = FakeScorer(believing(VALUES))
    price = PriceConfig(prompt=2.0, request=0.5)
    [hits] = Navigator(scorer, GUIDE, NavigateConfig(keep=[1], price=price)).search(["q"])
    assert len(hits.trace) == 4  # three levels and the final choice, 10 tokens each
    assert all(step.cost.usd == pytest.approx(0.5 + 20e-6) for step in hits.trace)
    assert hits.cost.usd == pytest.approx(4 * (0.5 + 20e-6))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"search": "depth"}, "navigate.search='depth' is not a choice"),
        ({"budget": "many"}, "navigate.budget='many'"),
        ({"scoring": "paired"}, "navigate.scoring='paired'"),
        ({"share": [1.5]}, "navigate.share=.*at most 1"),
        ({"threshold": []}, "navigate.threshold=.*at least one number"),
        ({"budget": "calibrated"}, "retrail calibrate"),
        ({"anchors": -1}, "navigate.anchors=-1"),
        ({"slate_temperature": [1.0]}, "must be two numbers"),
        ({"max_seconds": 0}, "navigate.max_seconds=0 must be above 0"),
        ({"choose_orders": 0}, "navigate.choose_orders=0"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NavigateConfig(**settings)


def test_impossible_price():
    with pytest.raises(ValueError, match="navigate.price.prompt=-1"):
        PriceConfig(prompt=-1)


@given(trees(), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9))
@settings(max_examples=80, deadline=None)
def test_fixed_slates_rank_as_others_where_rivals_do_not_matter(corpus, size, keep, seed):
    def search(scoring):
        scorer = FakeScorer(lambda q, c: guess(f"{seed}", c), max_candidates=size)
        [hits] = Navigator(scorer, corpus, NavigateConfig(keep=[keep], choose=0, scoring=scoring)).search(["q"], k=50)
        return scorer, hits

    fixed, hits = search("fixed")
    shared, expected = search("shared")
    assert (hits.ids, hits.scores) == (expected.ids, expected.scores)
    assert [step.ids for step in hits.trace] == [step.ids for step in expected.trace]
    cut = {slate.candidates for slate in fixed.asked}
    for level in range(corpus.num_levels):
        # Slates of a level never overlap, stand in reading order, and lie wholly on that level.
        ids = [[c.id for c in candidates] for candidates in cut if corpus.level(corpus.row(candidates[0].id)) == level]
        rows = [[corpus.row(i) for i in part] for part in ids]
        assert all(part == list(range(part[0], part[-1] + 1)) for part in rows)
        assert all(corpus.level(row) == level for part in rows for row in part)
        assert len({row for part in rows for row in part}) == sum(map(len, rows))


def test_fixed_slates_are_the_same_for_every_query():
    scorer = FakeScorer(guess, max_candidates=2)
    navigator = Navigator(scorer, GUIDE, NavigateConfig(keep=[2], choose=0, scoring="fixed"))
    navigator.search(["one", "two"])
    navigator.search(["three"])
    level = {slate.candidates for slate in scorer.asked if slate.candidates[0].id.count("/") == 1}
    assert [[c.id for c in part] for part in sorted(level, key=lambda part: part[0].id)] == [
        ["a/1", "a/2"], ["b/1", "b/2"],
    ]  # fmt: skip
    root = {slate.candidates for slate in scorer.asked if "/" not in slate.candidates[0].id}
    assert [[c.id for c in part] for part in sorted(root, key=lambda part: part[0].id)] == [["a", "b"], ["c"]]
