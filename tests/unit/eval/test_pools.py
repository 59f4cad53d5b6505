"""Fixed pools by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeScorer

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.hits import Hits
from retrail.data_prep.task import Query
from retrail.eval.pools import cooled_pools, fixed_pools, judge_pools, pool_evaluation
from retrail.models.config import NavigateConfig
from retrail.models.decision.odds import log_odds, sigmoid

CORPUS = Corpus.from_nodes(
    [Node(p, None, p, p) for p in "ab"] + [Node(f"{p}{n}", p, "", f"{p}{n}") for p in "ab" for n in range(5)]
)


class Fixed:
    def __init__(self, *ids):
        self.ids = ids

    def search(self, queries, *, k):
        return [Hits(self.ids, tuple(-float(n) for n in range(len(self.ids)))).top(k) for _ in queries]


QUERIES = [Query("q1", "one"), Query("q2", "two")]
QRELS = {"q1": {"b3": 1, "a0": 0}, "q2": {"gone": 1}}


def test_gold_first_then_in_turn_in_reading_order():
    [pool] = fixed_pools(CORPUS, QUERIES, QRELS, [Fixed("b4", "a1", "a2"), Fixed("a4", "b3", "b0")], 5)
    assert pool.query.id == "q1"
    # b3 (gold), b4, a4, a1, and b3 again, a2.
    assert [CORPUS.id(int(row)) for row in pool.rows] == ["a1", "a2", "a4", "b3", "b4"]


def test_a_pool_may_stay_smaller():
    [pool] = fixed_pools(CORPUS, QUERIES, QRELS, [Fixed("b3")], 5)
    assert [CORPUS.id(int(row)) for row in pool.rows] == ["b3"]


def test_what_cannot_be_a_pool():
    with pytest.raises(ValueError, match="no query has a relevant node"):
        fixed_pools(CORPUS, QUERIES[1:], QRELS, [Fixed("a1")], 5)
    with pytest.raises(ValueError, match="'q1' has 2 relevant nodes, more than a pool of 1"):
        fixed_pools(CORPUS, QUERIES, {"q1": {"b3": 1, "a0": 1}}, [Fixed("a1")], 1)


@pytest.mark.parametrize(("size", "slates"), [(1, [1] * 5), (2, [2, 2, 1]), (5, [5])])
def test_judged_with_so_many_rivals(size, slates):
    pools = fixed_pools(CORPUS, QUERIES, QRELS, [Fixed("b4", "a1", "a2", "a4")], 5)
    scorer = FakeScorer(lambda q, c: {"b3": 0.8, "a1": 0.9}.get(c.id, 0.1))
    run = judge_pools(scorer, CORPUS, pools, NavigateConfig(slate_size=size))
    assert [len(slate.candidates) for slate in scorer.asked] == slates
    assert run["q1"].ids == ("a1", "b3", "a2", "a4", "b4")
    evaluation = pool_evaluation(run, QRELS, ["Hit@1", "MRR"])
    assert evaluation.values == pytest.approx({"Hit@1": 0.0, "MRR": 0.5})


def test_a_temperature_of_the_other_half_undoes_what_slate_size_does():
    # The scorer is right about every candidate but twice as sure in slates of two as alone: log-odds times two.
    rng = np.random.default_rng(0)
    pages = [Node(f"p{n}", None, "", "x") for n in range(60)]
    leaves = [Node(f"p{n}l{m}", f"p{n}", "", "x") for n in range(60) for m in range(1 + n % 2)]
    corpus = Corpus.from_nodes([*pages, *leaves])
    odds = {leaf.id: float(rng.normal()) for leaf in leaves}
    gold = [[i for i, z in odds.items() if rng.random() < 1 / (1 + math.exp(-z))] for _ in range(40)]
    queries = [Query(f"q{n}", "words") for n in range(40)]
    qrels = {query.id: dict.fromkeys(ids, 1) for query, ids in zip(queries, gold, strict=True)}
    pools = fixed_pools(corpus, queries, qrels, [Fixed(*odds)], len(leaves))

    class Sure(FakeScorer):
        def yes(self, slates):
            return [replace(s, values_C=sigmoid(log_odds(s.values_C) * len(s.values_C))) for s in super().yes(slates)]

    scorer = Sure(lambda q, c: float(sigmoid(np.array(odds[c.id]))))
    config = NavigateConfig(scoring="page_by_page")
    plain = judge_pools(scorer, corpus, pools, config)["q0"]
    cooled = cooled_pools(scorer, corpus, pools, qrels, config)
    assert set(cooled) == set(qrels)
    right = sorted(odds, key=lambda i: -odds[i])
    assert list(plain.ids) != right
    places = [abs(list(cooled["q0"].ids).index(i) - n) for n, i in enumerate(right)]
    before = [abs(list(plain.ids).index(i) - n) for n, i in enumerate(right)]
    assert sum(places) < 0.5 * sum(before)
