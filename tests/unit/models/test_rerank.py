"""The reranking control: another retriever chooses, the scorer judges."""

import pytest
from fakes import COST, FakeScorer

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.hits import Cost, Hits
from retrail.models.decision.rerank import Reranker
from retrail.models.protocols import Retriever

# In row order the leaf "z" comes first; in reading order it is the last but one.
CORPUS = Corpus.from_nodes(
    Node(i, i.rpartition("/")[0] or None, f"title {i}", f"text {i}")
    for i in ["a", "z", "zz", "a/1", "a/2", "a/2/x", "a/2/y", "zz/1"]
)
FIRST_COST = Cost(requests=1, seconds=0.5)


class Fixed:
    """Finds what it is told to."""

    def __init__(self, found):
        self.found, self.asked = found, []

    def search(self, queries, *, k):
        self.asked.append((list(queries), k))
        return [
            Hits(tuple(self.found[q][:k]), tuple(-float(n) for n in range(len(self.found[q][:k]))), FIRST_COST)
            for q in queries
        ]


VALUES = {"a/1": 0.2, "a/2/x": 0.9, "a/2/y": 0.4, "z": 0.6, "zz/1": 0.1}


def reranker(found, *, choose=0, depth=100, prefer=None, **options):
    scorer = FakeScorer(lambda q, c: VALUES[c.id], prefer=prefer, **options)
    return Reranker(scorer, CORPUS, Fixed(found), depth=depth, choose=choose), scorer


def test_candidates_are_read_in_reading_order_under_their_pages():
    system, scorer = reranker({"q": ["zz/1", "z", "a/2/y", "a/1", "a/2/x"]})
    assert isinstance(system, Retriever)
    [hits] = system.search(["q"], k=3)
    [slate] = scorer.asked
    assert [(c.id, c.group) for c in slate.candidates] == [
        ("a/1", "title a"), ("a/2/x", "title a > title a/2"), ("a/2/y", "title a > title a/2"), ("z", ""),
        ("zz/1", "title zz"),
    ]  # fmt: skip
    assert hits.ids == ("a/2/x", "z", "a/2/y") and hits.scores == (0.9, 0.6, 0.4)
    [step] = hits.trace
    assert step.name == "top 5" and step.kept == hits.ids and step.scores == (0.2, 0.9, 0.4, 0.6, 0.1)
    assert hits.cost == FIRST_COST + COST


def test_final_choice_leads():
    system, scorer = reranker(
        {"q": ["zz/1", "z", "a/2/y", "a/1", "a/2/x"]}, choose=3, prefer=lambda q, c: {"a/2/y": 5.0}.get(c.id, 0.0)
    )
    [hits] = system.search(["q"], k=10)
    assert [c.id for c in scorer.chosen[0].candidates] == ["a/2/x", "a/2/y", "z"]
    assert hits.ids == ("a/2/y", "a/2/x", "z", "a/1", "zz/1")
    assert hits.scores[0] > 1.9 and hits.scores[3:] == (0.2, 0.1)
    assert [step.name for step in hits.trace] == ["top 5", "final choice"]
    assert hits.cost == FIRST_COST + COST + COST


def test_queries_without_hits_get_none():
    system, scorer = reranker({"nothing": [], "q": ["z", "a/1"], "nothing either": []})
    empty, full, also_empty = system.search(["nothing", "q", "nothing either"], k=5)
    assert empty == also_empty == Hits((), (), FIRST_COST)
    assert full.ids == ("z", "a/1")
    assert len(scorer.asked) == 1
    assert system.search(["nothing"], k=5) == [Hits((), (), FIRST_COST)]
    assert system.search([], k=5) == []


def test_depth_is_handed_on():
    system, scorer = reranker({"q": ["zz/1", "z", "a/1"]}, depth=2)
    [hits] = system.search(["q"], k=10)
    assert system.first.asked == [(["q"], 2)]
    assert hits.ids == ("z", "zz/1")


def test_inner_nodes_may_be_found_too():
    found = {"q": ["zz", "a/1", "a"]}
    scorer = FakeScorer(lambda q, c: {"zz": 0.5, "a/1": 0.2, "a": 0.7}[c.id])
    [hits] = Reranker(scorer, CORPUS, Fixed(found), choose=0).search(["q"])
    assert [c.id for c in scorer.asked[0].candidates] == ["a", "a/1", "zz"]
    assert hits.ids == ("a", "zz", "a/1")


def test_more_candidates_than_a_slate_holds():
    system, scorer = reranker({"q": ["zz/1", "z", "a/2/y", "a/1", "a/2/x"]}, max_candidates=2)
    [hits] = system.search(["q"])
    assert len(scorer.asked) == 3 and hits.ids == ("a/2/x", "z", "a/2/y", "a/1", "zz/1")
    assert hits.trace[0].notes == ("split into 3 slates",) and hits.cost.requests == 4


def test_several_queries_equal_one_at_a_time():
    found = {"one": ["z", "a/1"], "two": ["a/2/x", "zz/1", "a/2/y"], "три": ["a/1"]}
    system, _ = reranker(found, choose=2)
    assert system.search(list(found)) == [system.search([query])[0] for query in found]


def test_unknown_id_is_named():
    system, _ = reranker({"q": ["z", "gone"]})
    with pytest.raises(KeyError, match="gone"):
        system.search(["q"])


@pytest.mark.parametrize(
    ("queries", "k", "error"), [([" "], 5, ValueError), (["q"], 0, ValueError), ("q", 5, TypeError)]
)
def test_bad_queries_are_refused_before_any_work(queries, k, error):
    system, _ = reranker({})
    with pytest.raises(error):
        system.search(queries, k=k)
    assert system.first.asked == []
