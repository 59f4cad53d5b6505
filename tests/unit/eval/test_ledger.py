"""The ledger against hand-made traces."""

import io

import pytest
from rich.console import Console

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.hits import Cost, Hits, Step
from retrail.eval.ledger import latency_estimate, latency_line, ledger, ledger_table

CORPUS = Corpus.from_nodes(
    [Node(p, None, p, p) for p in "abc"] + [Node(f"{p}{n}", p, "", f"{p}{n}") for p in "abc" for n in range(4)]
)


def step(name, ids, kept, **cost):
    return Step(name=name, ids=tuple(ids), scores=(0.5,) * len(ids), kept=tuple(kept), cost=Cost(**cost))


RUN = {
    "q1": Hits(
        ("a1",),
        (1.0,),
        trace=(
            step("level 1", "abc", "a", requests=1, prompt_tokens=30, seconds=1.0),
            step("leaves", ["a0", "a1"], ["a1"], requests=2, prompt_tokens=20, usd=0.5),
            step("round 1, level 2", ["b0"], ["b0"], requests=1),
            step("round 2, level 2", ["c0"], ["c0"], requests=1),
        ),
    ),
    "q2": Hits(("b2",), (1.0,), trace=(step("level 1", "abc", "ab", requests=1, prompt_tokens=10, reused_tokens=7),)),
    "q3": Hits(("b2",), (1.0,), trace=(step("level 1", "abc", "c", requests=1),)),
}


def test_by_hand():
    rows = ledger(RUN, {"q1": {"a1": 1, "c0": 0}, "q2": {"c1": 1}, "q3": {"gone": 1}}, CORPUS)
    assert [row.name for row in rows] == ["level 1", "leaves", "rounds"]
    first, leaves, rounds = rows
    assert (first.queries, first.candidates, first.kept) == (3, 9, 4)
    # q1 keeps a, which leads to a1; q2 loses c; the right node of q3 is not in the corpus.
    assert (first.survived, first.reachable, first.survival) == (1, 2, 0.5)
    assert first.cost == Cost(requests=3, prompt_tokens=40, reused_tokens=7, seconds=1.0)
    assert (leaves.queries, leaves.candidates, leaves.survival, leaves.cost.usd) == (1, 2, 1.0, 0.5)
    assert (rounds.queries, rounds.candidates, rounds.cost.requests, rounds.survived) == (1, 2, 2, 0)


def test_nobody_reachable():
    [row, *_] = ledger({"q3": RUN["q3"]}, {}, CORPUS)
    assert row.survival is None and row.reachable == 0
    assert ledger({"q": Hits((), ())}, {}, CORPUS) == []


def test_table():
    console = Console(file=io.StringIO(), width=140, no_color=True)
    rows = ledger(RUN, {"q1": {"a1": 1}, "q2": {"c1": 1}}, CORPUS)
    console.print(ledger_table(rows, title="what it \x1b[31mcost"))
    lines = console.file.getvalue().splitlines()
    assert "\x1b" not in console.file.getvalue().replace("\\x1b", "")
    [first] = [line for line in lines if "level 1" in line]
    assert first.replace("│", " ").split() == ["level", "1", "3", "3.0", "1.3", "50.0%", "1.0", "13", "2", "0.333", "0"]
    [total] = [line for line in lines if "in all" in line]
    assert total.replace("│", " ").split() == ["in", "all", "7.0", "60", "7", "1", "0.5"]


def test_latency_by_hand():
    # 12 leaves, at most 4 children: 4^2 >= 12, so two levels.
    assert latency_estimate(CORPUS, 0.2) == pytest.approx(0.4)
    flat = Corpus.from_nodes(Node(str(n), None, "", "x") for n in range(16))
    assert latency_estimate(flat, 0.2) == pytest.approx(0.2)
    square = Corpus.from_nodes(
        [Node(str(n), None, "", "x") for n in range(4)]
        + [Node(f"{n}.{m}", str(n), "", "x") for n in range(4) for m in range(4)]
    )
    assert latency_estimate(square, 1.0) == pytest.approx(2.0)  # log_4 16 is 2, whatever floating point says
    one = Corpus.from_nodes([Node("a", None, "", "x")])
    assert latency_estimate(one, 0.2) == pytest.approx(0.2)


def test_latency_in_words():
    line = latency_line(CORPUS, Cost(requests=10, seconds=5.0), 2)
    assert line.startswith("T(N) = t_req * ceil(log_b N) = 0.5 s * ceil(log_4 12) = 1 s a query")
    assert line.endswith("one after the other they took 2.5 s")
    assert latency_line(CORPUS, Cost(), 2) == "no request was made"
