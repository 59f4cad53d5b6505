"""The walk against a brute-force twin, on trees of every shape."""

import math

import numpy as np
import pytest
from fakes import COST, FakeScorer
from hypothesis import given, settings
from hypothesis import strategies as st
from small_trees import believing, corpus_of, guess, trees

from retrail.data_prep.hits import Cost
from retrail.models.config import NavigateConfig
from retrail.models.decision.choose import choose_best
from retrail.models.decision.navigate import Navigator
from retrail.models.decision.slates import Pool
from retrail.models.protocols import Candidate, Retriever

GUIDE = corpus_of("a", "b", "c", "a/1", "a/2", "b/1", "b/1/x", "b/1/y", "b/2")  # "c" is a leaf at the top


def test_walk_by_hand():
    values = {"a": 0.3, "b": 0.9, "c": 0.6, "b/1": 0.8, "b/2": 0.4, "b/1/x": 0.2, "b/1/y": 0.7}
    scorer = FakeScorer(believing(values))
    navigator = Navigator(scorer, GUIDE, NavigateConfig(keep=[2], choose=0))
    assert isinstance(navigator, Retriever)
    [hits] = navigator.search(["where?"], k=10)
    # Level 1 keeps b and c (a leaf, which is judged again); level 2 keeps b/1 and c and passes the leaf b/2 by.
    first, second, last = hits.trace
    assert (first.name, first.ids, set(first.kept)) == ("level 1", ("a", "b", "c"), {"b", "c"})
    assert (second.name, second.ids, set(second.kept)) == ("level 2", ("b/1", "b/2", "c"), {"b/1", "c"})
    assert (last.name, last.ids) == ("leaves", ("b/1/x", "b/1/y", "c"))
    assert last.kept == ("b/1/y", "c", "b/1/x")
    assert first.scores == (0.3, 0.9, 0.6)
    assert hits.ids == ("b/1/y", "c", "b/1/x", "b/2")
    assert hits.scores == pytest.approx((0.7, 0.6, 0.2, 0.4 - 1))
    assert hits.cost == COST + COST + COST == Cost(requests=3, forwards=3, prompt_tokens=30, max_concurrency=1)
    assert all(step.cost == COST for step in hits.trace)
    assert navigator.search(["where?"], k=2)[0].ids == ("b/1/y", "c")
    assert navigator.search(["where?"], k=2)[0].trace[-1].kept == ("b/1/y", "c")


def test_path_weight_remembers_the_page_by_hand():
    corpus = corpus_of("a", "b", "a/1", "a/2", "b/1")
    values = {"a": 0.8, "b": 0.2, "a/1": 0.5, "a/2": 0.1, "b/1": 0.6}

    def search(weight):
        scorer = FakeScorer(believing(values))
        return Navigator(scorer, corpus, NavigateConfig(choose=0, path_weight=weight)).search(["q"], k=3)[0]

    assert search(0.0).ids == ("b/1", "a/1", "a/2")
    hits = search(0.5)
    # Odds 1 * sqrt(4) = 2, (1/9) * sqrt(4) = 2/9 and 1.5 * sqrt(1/4) = 3/4.
    assert hits.ids == ("a/1", "b/1", "a/2")
    assert hits.scores == pytest.approx((2 / 3, 3 / 7, 2 / 11))
    assert hits.trace[1].scores == (0.5, 0.1, 0.6)  # what the model said
    assert hits.trace[1].notes == ("ranked by the log-odds along the path (path_weight=0.5)",)


def test_certain_levels_do_not_drown_the_others():
    corpus = corpus_of("a", "b", "a/1", "b/1")
    scorer = FakeScorer(believing({"a": 1.0, "b": 0.0, "a/1": 0.0, "b/1": 1.0}))
    [hits] = Navigator(scorer, corpus, NavigateConfig(choose=0, path_weight=1.0)).search(["q"])
    assert hits.scores == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("weight", [-0.1, float("inf"), float("nan")])
def test_impossible_path_weight_is_refused(weight):
    with pytest.raises(ValueError, match="navigate.path_weight=.* must be a number of 0 or more"):
        NavigateConfig(path_weight=weight)


def test_final_choice_reorders_the_best_and_shows_only_them():
    leaves = corpus_of("a", "b", "c", "d", "e", "f")
    yes = believing({"a": 0.9, "b": 0.8, "c": 0.1, "d": 0.7, "e": 0.6, "f": 0.2})
    scorer = FakeScorer(yes, prefer=believing({"a": 1.0, "b": 2.0, "d": 3.0, "e": 0.0}))
    [hits] = Navigator(scorer, leaves, NavigateConfig(choose=4)).search(["q"], k=6)
    assert hits.ids == ("d", "b", "a", "e", "f", "c")
    total = sum(math.exp(x) for x in (3, 2, 1, 0))
    expected = [1 + math.exp(x) / total for x in (3, 2, 1, 0)]
    assert hits.scores == pytest.approx((*expected, 0.2, 0.1))
    [slate] = scorer.chosen
    assert [c.id for c in slate.candidates] == ["a", "b", "d", "e"]  # reading order, and nobody else
    step = hits.trace[-1]
    assert (step.name, step.ids, step.kept) == ("final choice", ("a", "b", "d", "e"), ("d",))
    assert sum(step.scores) == pytest.approx(1)
    assert hits.cost == COST + COST


def test_choice_is_five_by_default():
    scorer = FakeScorer(lambda q, c: int(c.id) / 100)
    Navigator(scorer, corpus_of(*map(str, range(30)))).search(["q"])
    assert [c.id for c in scorer.chosen[0].candidates] == ["25", "26", "27", "28", "29"]


@pytest.mark.parametrize("choose", [0, 1])
def test_nothing_to_choose(choose):
    scorer = FakeScorer(lambda q, c: 0.7)
    [hits] = Navigator(scorer, corpus_of("a", "b"), NavigateConfig(choose=choose)).search(["q"])
    assert hits.scores == (0.7, 0.7) and hits.ids == ("a", "b") and scorer.chosen == []


def test_choice_never_exceeds_a_slate():
    scorer = FakeScorer(lambda q, c: int(c.id) / 100, max_candidates=4, max_tokens=30)
    pool = Pool("q", tuple(Candidate(str(n), "", "x") for n in range(9)))
    [final] = choose_best(scorer, [pool], [np.arange(9) / 100], 5)
    assert [c.id for c in scorer.chosen[0].candidates] == ["6", "7", "8"]
    assert final.step.notes == ("one slate holds only 3 of the best 5",)
    assert [i for i, _ in final.order] == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    few = FakeScorer(lambda q, c: int(c.id) / 100, max_candidates=2)
    choose_best(few, [pool], [np.arange(9) / 100], 5)
    assert [c.id for c in few.chosen[0].candidates] == ["7", "8"]
    alone = FakeScorer(lambda q, c: 0.5, max_tokens=15)
    [final] = choose_best(alone, [pool], [np.arange(9) / 100], 5)
    assert final.step is None and alone.chosen == []
    assert choose_best(alone, [], [], 5) == []


def test_keep_list_goes_level_by_level_and_its_last_repeats():
    ids = [f"{a}" for a in "abc"]
    ids += [f"{p}/{x}" for p in ids for x in "abc"]
    ids += [f"{p}/{x}" for p in ids[3:] for x in "abc"]
    ids += [f"{p}/{x}" for p in ids[12:] for x in "ab"]
    corpus = corpus_of(*ids)
    scorer = FakeScorer(lambda q, c: 0.5)
    [hits] = Navigator(scorer, corpus, NavigateConfig(keep=[1, 3, 2], choose=0)).search(["q"])
    assert [len(step.ids) for step in hits.trace] == [3, 3, 9, 4]
    assert [len(step.kept) for step in hits.trace] == [1, 3, 2, 4]
    [hits] = Navigator(scorer, corpus, NavigateConfig(keep=[2], choose=0)).search(["q"])
    assert [len(step.ids) for step in hits.trace] == [3, 6, 6, 4]


def test_one_document():
    scorer = FakeScorer(lambda q, c: 0.9)
    [hits] = Navigator(scorer, corpus_of("only")).search(["q"])
    assert hits.ids == ("only",) and hits.scores == (0.9,) and [s.name for s in hits.trace] == ["leaves"]


def test_chain_of_single_children():
    scorer = FakeScorer(lambda q, c: 0.9)
    [hits] = Navigator(scorer, corpus_of("a", "a/b", "a/b/c", "a/b/c/d")).search(["q"], k=3)
    assert hits.ids == ("a/b/c/d",)
    assert [s.name for s in hits.trace] == ["level 1", "level 2", "level 3", "leaves"]


def test_flat_corpus_wider_than_a_slate():
    scorer = FakeScorer(lambda q, c: int(c.id) / 1000)
    [hits] = Navigator(scorer, corpus_of(*map(str, range(120)))).search(["q"], k=500)
    assert len(hits) == 120 and len(scorer.asked) == 3
    assert hits.ids[5:] == tuple(map(str, range(114, -1, -1)))
    assert hits.trace[0].notes[0] == "split into 3 slates" and hits.trace[0].cost.max_concurrency == 3


def test_nobody_above_one_half_is_said_and_the_best_stay():
    scorer = FakeScorer(believing({"b": 0.4, "b/2": 0.45}), notes=("text of b cut",))
    [hits] = Navigator(scorer, GUIDE, NavigateConfig(keep=[1])).search(["q"])
    assert hits.ids[0] == "b/2" or "b/2" in hits.ids
    for step in hits.trace[:-1]:
        assert step.notes[0] == "text of b cut"
        assert f"no candidate is more likely yes than no; the best {len(step.kept)} are kept" in step.notes[1]
    sure = FakeScorer(lambda q, c: 0.5)
    [hits] = Navigator(sure, GUIDE).search(["q"])
    assert all(step.notes == () for step in hits.trace)


def test_candidates_keep_reading_order_under_their_page():
    values = {"a": 0.5, "b": 0.9}
    scorer = FakeScorer(believing(values))
    Navigator(scorer, GUIDE, NavigateConfig(keep=[2], choose=0)).search(["q"])
    shown = [(c.id, c.group, c.brief) for c in scorer.asked[1].candidates]
    assert shown == [
        ("a/1", "title a", False), ("a/2", "title a", False), ("b/1", "title b", True), ("b/2", "title b", False),
    ]  # fmt: skip
    assert scorer.asked[0].candidates[0] == Candidate("a", "title a", "text a", "", True)


def test_watch_sees_every_step_in_order():
    seen = []
    scorer = FakeScorer(believing({"a": 0.3, "b": 0.9}))
    hits = Navigator(scorer, GUIDE, NavigateConfig(keep=[1])).search(
        ["one", "two"], watch=lambda query, step: seen.append((query, step))
    )
    for query, found in zip(["one", "two"], hits, strict=True):
        assert tuple(step for q, step in seen if q == query) == found.trace
    assert [step.name for _, step in seen[:4]] == ["level 1", "level 1", "level 2", "level 2"]
    assert [step.name for _, step in seen[-2:]] == ["final choice", "final choice"]


def test_several_queries_equal_one_at_a_time():
    queries = ["one", "two words", "три слова", "質問", "x" * 3000] * 3
    config = NavigateConfig(keep=[1, 2])
    together = Navigator(FakeScorer(guess), GUIDE, config, queries_at_once=4).search(queries, k=4)
    alone = [Navigator(FakeScorer(guess), GUIDE, config).search([query], k=4)[0] for query in queries]
    assert together == alone
    assert len({hits.ids for hits in together}) > 1
    assert Navigator(FakeScorer(guess), GUIDE).search([], k=3) == []


@pytest.mark.parametrize(
    ("queries", "k", "error"),
    [([""], 5, ValueError), (["q", "  "], 5, ValueError), (["q"], 0, ValueError), ("q", 5, TypeError)],
)
def test_bad_queries_are_refused_before_any_work(queries, k, error):
    scorer = FakeScorer(guess)
    with pytest.raises(error):
        Navigator(scorer, GUIDE).search(queries, k=k)
    assert scorer.asked == []


def odds(p):
    return math.log(p / (1 - p))


def twin(corpus, believe, prefer, keep, choose, weight, k):
    """The same search written over ids and dicts, one candidate at a time."""

    def value(i):
        *above, own = (odds(believe(corpus.id(row))) for row in corpus.path(corpus.row(i)))
        return 1 / (1 + math.exp(-own - weight * sum(above)))

    children = {corpus.id(r): [corpus.id(c) for c in corpus.children(r)] for r in range(len(corpus))}
    level, dropped, depth = [corpus.id(r) for r in corpus.children(None)], {}, 0
    while any(children[i] for i in level):
        values = {i: value(i) for i in level}
        width = keep[depth] if depth < len(keep) else keep[-1]
        best = sorted(level, key=lambda i: -values[i])[:width]
        dropped = {i: v - 1 for i, v in dropped.items()}
        dropped |= {i: values[i] - 1 for i in level if i not in best and not children[i]}
        level = [j for i in level if i in best for j in (children[i] or [i])]
        depth += 1
    final = {i: value(i) for i in level}
    top = sorted(level, key=lambda i: -final[i])[:choose] if min(choose, len(level)) > 1 else []
    weights = {i: math.exp(prefer(i)) for i in top}
    final |= {i: 1 + w / sum(weights.values()) for i, w in weights.items()}
    final |= dropped
    return sorted(final.items(), key=lambda pair: -pair[1])[:k]


@given(
    trees(),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.integers(1, 12),
    st.integers(0, 9),
)
@settings(max_examples=150, deadline=None)
def test_ranking_equals_the_twin(corpus, keep, choose, weight, k, seed):
    def believe(node_id):
        return guess(f"yes{seed}", Candidate(node_id, "", ""))

    def prefer(node_id):
        return guess(f"choice{seed}", Candidate(node_id, "", ""))

    scorer = FakeScorer(lambda q, c: believe(c.id), prefer=lambda q, c: prefer(c.id), max_candidates=6)
    config = NavigateConfig(keep=keep, choose=choose, path_weight=weight)
    [hits] = Navigator(scorer, corpus, config).search(["q"], k=k)
    expected = twin(corpus, believe, prefer, keep, choose, weight, k)
    assert list(hits.ids) == [node_id for node_id, _ in expected]
    assert hits.scores == pytest.approx([score for _, score in expected])
    assert len(set(hits.ids)) == len(hits.ids) and sorted(hits.scores, reverse=True) == list(hits.scores)
    assert all(corpus.is_leaf(corpus.row(i)) for i in hits.ids)


@given(trees(), st.data(), st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_oracle_finds_every_leaf(corpus, data, choose):
    gold = int(data.draw(st.sampled_from(corpus.leaves().tolist())))
    path = {corpus.id(row) for row in corpus.path(gold)}
    scorer = FakeScorer(lambda q, c: 0.9 if c.id in path else 0.2, max_candidates=3)
    [hits] = Navigator(scorer, corpus, NavigateConfig(keep=[1], choose=choose)).search(["q"], k=1)
    assert hits.ids == (corpus.id(gold),)
