"""Hard rivals from several retrievers and runs, lifted to every level."""

import random

import pytest
from decision_toy import toy_corpus, toy_queries

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.hits import Hits
from retrail.data_prep.task import Query
from retrail.train.objectives.decision_rivals import Rivals, from_run, gold_path_rows, rows_digest, searched


def ranking(*ids):
    return Hits(ids, tuple(float(-n) for n in range(len(ids))))


def ids_of(corpus, rows):
    return {row.level: [corpus.id(r) for r in row.rivals] for row in rows}


def test_a_run_of_leaves_gives_rivals_at_every_level():
    corpus = toy_corpus()
    run = {"q": ranking("p2s1", "p0s0", "p2s0", "p1s3", "p0s1", "p3s3")}
    rows = gold_path_rows(corpus, [Query("q", "words")], {"q": {"p0s0": 1}}, rivals=Rivals([from_run(run)]))
    # The gold leaf and its page are no rivals; a page stands where its best leaf does.
    assert ids_of(corpus, rows) == {0: ["p2", "p1", "p3"], 1: ["p2s1", "p2s0", "p1s3", "p0s1", "p3s3"]}


def test_lifting_against_brute_force():
    rng = random.Random(0)
    names = [str(i) for i in range(3)]
    for _ in range(40):
        names.append(f"{rng.choice(names)}.{len(names)}")
    corpus = Corpus.from_nodes(Node(n, n.rpartition(".")[0] or None, "", "x") for n in names)
    ids = rng.sample(names, 25)
    for level in range(corpus.num_levels):
        for k in (1, 4, 99):
            expected = []
            for node in ids:
                parts = node.split(".")
                above = ".".join(parts[: level + 1])
                if len(parts) > level and above not in expected:
                    expected.append(above)
            rank = from_run({"q": ranking(*ids)})(corpus, level)
            assert rank([Query("q", "x"), Query("unseen", "x")], k) == [expected[:k], []]


class Fixed:
    """Ranks the nodes of a level in reading order, or backwards."""

    built = []

    def __init__(self, corpus, rows, step):
        self.ids = [corpus.id(r) for r in rows][::step]
        Fixed.built.append(len(self.ids))

    def search(self, queries, *, k):
        return [ranking(*self.ids[:k]) for _ in queries]


def test_retrievers_take_turns_within_the_window():
    corpus = toy_corpus(pages=3, sections=2)
    sources = [searched(lambda c, rows, step=step: Fixed(c, rows, step)) for step in (1, -1)]
    queries, qrels = [Query("q", "words")], {"q": {"p1s0": 1}}
    Fixed.built.clear()
    rows = gold_path_rows(corpus, queries, qrels, rivals=Rivals(sources, (1, 3)))
    assert Fixed.built == [3, 3, 6, 6]  # one index a level and retriever
    # p0s0 p0s1 p1s0 and p2s1 p2s0 p1s1 in turn, without the gold one.
    assert ids_of(corpus, rows) == {0: ["p0", "p2"], 1: ["p0s0", "p2s1", "p0s1", "p2s0", "p1s1"]}
    later = gold_path_rows(corpus, queries, qrels, rivals=Rivals(sources, (2, 3)))
    assert ids_of(corpus, later)[1] == ["p0s1", "p2s0", "p1s1"]
    none = gold_path_rows(corpus, queries, qrels, rivals=Rivals([]))
    assert ids_of(corpus, none) == {0: [], 1: []}


def test_copies_and_relatives_of_an_answer_are_no_rivals():
    corpus = Corpus.from_nodes(
        [
            Node("gold", None, "jam", "jam and bread"),
            Node("copy", None, "jam", "Jam and  bread"),
            Node("near", None, "jam", "jam and honey"),
            Node("part", "gold", "", "inside"),
            Node("other", "near", "", "elsewhere"),
        ]
    )
    ids = ("copy", "part", "gold", "near", "other")
    rivals = Rivals(
        [from_run({"q": ranking(*ids)})], walked={0: {"q": ids[:1] + ids[2:4]}, 1: {"q": ("part", "other")}}
    )
    [row] = gold_path_rows(corpus, [Query("q", "jam and bread")], {"q": {"gold": 1}}, rivals=rivals)
    assert [corpus.id(r) for r in row.rivals] == ["near"] and [corpus.id(r) for r in row.walked] == ["near"]


def test_bm25_alone_unless_told_otherwise():
    corpus = toy_corpus()
    queries, qrels = toy_queries(corpus)
    assert gold_path_rows(corpus, queries, qrels) == gold_path_rows(corpus, queries, qrels, rivals=Rivals())
    assert any(row.rivals for row in gold_path_rows(corpus, queries, qrels))


@pytest.mark.parametrize("change", ["query", "gold", "rivals", "walked", "order"])
def test_the_digest_is_of_everything(change):
    corpus = toy_corpus()
    run = {"q0": ranking("p2s1", "p3s0")}

    def digest(query="words", gold="p0s0", run=run, walked=("p1", "p2"), order=1):
        queries = [Query("q0", query), Query("q1", "more words")]
        rivals = Rivals([from_run(run)], walked={0: {"q0": walked}})
        return rows_digest(
            gold_path_rows(corpus, queries, {"q0": {gold: 1}, "q1": {"p1s1": 1}}, rivals=rivals)[::order]
        )

    other = {"query": "word", "gold": "p0s1", "run": None, "walked": ("p2", "p1"), "order": -1}
    if change == "rivals":
        changed = digest(run={"q0": ranking("p3s0", "p2s1")})
    else:
        changed = digest(**{change: other[change]})
    assert changed != digest() == digest()
