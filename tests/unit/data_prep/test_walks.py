"""Walks of a model's own searches as files: what is kept of a trace, and files that are refused."""

import json

import pytest
from decision_toy import toy_corpus

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.hits import Step
from retrail.data_prep.task import Query
from retrail.data_prep.walks import (
    JudgedLevel,
    Walk,
    judged_nodes,
    read_header,
    read_walks,
    walk_of,
    walk_to_json,
    walks_header,
)

CORPUS = toy_corpus(pages=3, sections=3)
WALKS = [
    Walk("q0", "apple?", (JudgedLevel(0, ("p1", "p0"), (0.9, 0.25)), JudgedLevel(1, ("p1s2", "p1s0"), (0.5, 0.5)))),
    Walk("q1", "<|im_end|>\n“bread”", (JudgedLevel(0, ("p2",), (0.125,)),)),
]


def step(name, ids, scores, kept=()):
    return Step(name=name, ids=tuple(ids), scores=tuple(scores), kept=tuple(kept))


def test_a_walk_is_what_was_judged_at_each_level_best_first():
    trace = [
        step("level 1", ["p0", "p1", "p2"], [0.2, 0.9, 0.4], ["p1", "p2"]),
        step("leaves", ["p1s0", "p1s1", "p2s0", "p2s2"], [0.1, 0.7, 0.7, 0.3], ["p1s1"]),
        step("final choice", ["p2s0", "p1s1"], [0.99, 0.01], ["p2s0"]),  # another question: its scores are no P(yes)
    ]
    walk = walk_of(Query("q", "text"), trace, CORPUS, 3)
    top, leaves = walk.levels
    assert (walk.query_id, walk.query) == ("q", "text")
    assert (top.level, top.ids, top.scores) == (0, ("p1", "p2", "p0"), (0.9, 0.4, 0.2))
    assert (leaves.level, leaves.ids, leaves.scores) == (1, ("p1s1", "p2s0", "p2s2"), (0.7, 0.7, 0.3))


def test_leaves_of_upper_levels_stay_with_their_level():
    corpus = Corpus.from_nodes([Node("a", None, "", "x"), Node("b", None, "", "x"), Node("b1", "b", "", "x")])
    trace = [step("level 1", ["a", "b"], [0.6, 0.5], ["a", "b"]), step("leaves", ["a", "b1"], [0.1, 0.8])]
    assert [(part.level, part.ids) for part in walk_of(Query("q", "t"), trace, corpus, 9).levels] == [
        (0, ("a", "b")),
        (1, ("b1",)),
    ]


def lines(walks=WALKS):
    return [walks_header(CORPUS, "d0", split="train"), *map(walk_to_json, walks)]


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_what_is_written_is_read(tmp_path):
    file = write(tmp_path / "w.jsonl", lines())
    header, walks = read_walks(file, CORPUS)
    assert walks == WALKS
    assert header == read_header(file) and header["split"] == "train"
    assert (header["retriever"], header["corpus_fingerprint"]) == ("d0", CORPUS.fingerprint)


def bad(n, **change):
    rows = json.loads(json.dumps(lines()))
    rows[n].update(change)
    return rows


def level(**change):
    return bad(1, levels=[{"level": 0, "ids": ["p1", "p0"], "scores": [0.5, 0.25], **change}])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty; write it with `retrail walks`"),
        (lines()[1:], ":1: no header"),
        (bad(0, format="retrail-hits"), ":1: no header"),
        (bad(0, format_version=2), ":1: format version 2, but this code reads 1"),
        (bad(0, corpus_fingerprint="0" * 64), "walks over another corpus .0000000000000000, not"),
        ([{"format": "retrail-walks", "format_version": 1, "retriever": "x"}], "has no key 'corpus_fingerprint'"),
        (["{", *lines()], ":1: not JSON"),
        ([*lines(), '{"query": "q9"'], ":4: not JSON"),
        ([*lines(), lines()[1]], ":4: query 'q0' is there twice"),
        (bad(1, query=7), r":2\['query'\] must be a string"),
        (bad(2, levels={}), r":3\['levels'\] must be an array"),
        (level(ids=["p1", "nowhere"]), ":2.*no node 'nowhere'"),
        (level(ids=["p1", "p0s0"]), ":2.*'p0s0' is not on level 0"),
        (level(ids=["p1", "p1"]), ":2.*an id is there twice"),
        (level(ids=["p1"]), ":2.*1 ids but 2 scores"),
        (level(ids=["p1", 3]), ":2.*must be a string"),
        (level(scores=[0.25, 0.5]), ":2.*scores must be finite and best first"),
        (level(scores=["a", 0.5]), ":2.*must be a number"),
        (level(level="0"), ":2.*must be an integer"),
        (bad(1, levels=[{"level": 1, "ids": [], "scores": []}] * 2), ":2.*level 1 comes after level 1"),
    ],
)
def test_files_that_are_refused(tmp_path, rows, message):
    file = write(tmp_path / "w.jsonl", rows)
    with pytest.raises(ValueError, match=message) as error:
        read_walks(file, CORPUS)
    assert str(file) in str(error.value)


def test_walks_of_the_training_queries():
    queries = [Query("q0", "apple?"), Query("q7", "jam?")]
    assert judged_nodes(WALKS, queries, "w.jsonl") == {0: {"q0": ("p1", "p0")}, 1: {"q0": ("p1s2", "p1s0")}}
    with pytest.raises(ValueError, match="w.jsonl holds no walk of any of the 1 training queries"):
        judged_nodes(WALKS, queries[1:], "w.jsonl")
    with pytest.raises(ValueError, match="w.jsonl: query 'q0' was 'apple.' when it was searched and is now 'pear"):
        judged_nodes(WALKS, [Query("q0", "pear")], "w.jsonl")
