"""The walk as text."""

import io

import pytest
from rich.console import Console

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.hits import Cost, Hits, Step
from retrail.eval.trace_view import trace_text, visible

CORPUS = Corpus.from_nodes(
    [
        Node("d1", None, "Fruit", "about fruit"),
        Node("d2", None, "Stone", "about stones"),
        Node("d3", None, "Water", "about water"),
        Node("p1", "d1", "Apple", "a red one"),
        Node("p2", "d1", "", "a   green\none"),
        Node("p3", "d2", "Marble", "a white one"),
    ]
)
HITS = Hits(
    ("p2", "p1"),
    (0.7, 0.3),
    Cost(requests=3, prompt_tokens=1200, seconds=1.5),
    (
        Step(
            name="level 0",
            ids=("d1", "d2", "d3"),
            scores=(0.25, 0.0004, 0.91),
            kept=("d3", "d1"),
            notes=("1 text was cut",),
            cost=Cost(requests=1, prompt_tokens=400, reused_tokens=90),
        ),
        Step(name="level 1", ids=("p1", "p2"), scores=(0.3, 0.7), kept=("p2", "p1")),
    ),
)


def test_a_walk():
    text = trace_text(HITS, corpus=CORPUS, gold={"p2"}, query="what is green?").plain
    assert text.splitlines() == [
        "query: what is green?",
        "1. level 0: 3 candidates, 1 cut (1 requests, 400 tokens read, 90 reused)",
        "  >     1   0.910  Water  [d3]",
        "  >*    2   0.250  Fruit  [d1]",
        "        3  0.0004  Stone  [d2]",
        "       note: 1 text was cut",
        "2. level 1: 2 candidates, 0 cut",
        "  >*    1   0.700  a green one  [p2]",
        "  >     2   0.300  Apple  [p1]",
        "result: 2 hits (3 requests, 1,200 tokens read, 1.5 s)",
        "   *    1   0.700  a green one  [p2]",
        "        2   0.300  Apple  [p1]",
    ]


def test_only_the_top_and_the_gold_below_it():
    ids = tuple(f"n{i}" for i in range(30))
    step = Step(name="s", ids=ids, scores=tuple(1 - i / 100 for i in range(30)), kept=("n0",))
    lines = trace_text(Hits((), (), trace=(step,)), gold={"n20"}, top=3).plain.splitlines()
    assert lines == [
        "1. s: 30 candidates, 29 cut",
        "  >     1   1.000  n0",
        "        2   0.990  n1",
        "        3   0.980  n2",
        "   *   21   0.800  n20",
        "       ... 26 more",
        "result: 0 hits",
    ]


def test_lost_gold_is_said():
    assert "no candidate is gold or leads to it" in trace_text(HITS, corpus=CORPUS, gold={"p3"}).plain.split("2. ")[1]
    assert "no candidate is gold" not in trace_text(HITS, corpus=CORPUS).plain
    assert "no trace was kept" in trace_text(Hits(("a",), (1.0,))).plain
    with pytest.raises(ValueError, match="top=0"):
        trace_text(HITS, top=0)


def test_ids_outside_the_corpus_and_no_corpus():
    step = Step(name="s", ids=("elsewhere",), scores=(-12.5,), kept=())
    hits = Hits(("elsewhere",), (3.25,), trace=(step,))
    for corpus in (CORPUS, None):
        assert "        1   -12.5  elsewhere\n" in trace_text(hits, corpus=corpus, gold={"nowhere"}).plain


HOSTILE = "[red]x[/red] \x1b[31m\x1b]0;title\x07\x9b2J\r\b\u202egnp\u2066\u2028end\x00 \ud800 \U000e0041"


def hostile_console_output() -> str:
    step = Step(name=HOSTILE, ids=("a",), scores=(0.5,), kept=("a",), notes=(HOSTILE,))
    corpus = Corpus.from_nodes([Node("a", None, HOSTILE.replace("\x00", "").replace("\ud800", ""), "t")])
    hits = Hits(("a", HOSTILE), (2.0, 1.0), trace=(step,))
    console = Console(file=io.StringIO(), width=400, force_terminal=True, color_system="truecolor")
    console.print(trace_text(hits, corpus=corpus, gold={HOSTILE}, query=HOSTILE))
    return console.file.getvalue()


def test_nothing_in_a_title_steers_the_terminal():
    written = hostile_console_output()
    own_styles = {f"\x1b[{style}m" for style in ("0", "1", "2", "32", "33", "31")}
    for style in own_styles:
        written = written.replace(style, "")
    for character in "\x1b\x07\x9b\r\b\u202e\u2066\u2028\x00\ud800\U000e0041":
        assert character not in written, hex(ord(character))
    assert written.count("[red]x[/red] \\x1b[31m\\x1b]0;title\\x07\\x9b2J") >= 5
    written.encode("utf-8")


def test_visible():
    assert visible("a\n b\t c  ") == "a b c"
    assert visible("naïve 日本 🙂 می\u200cخواهم") == "naïve 日本 🙂 می\u200cخواهم"
    assert visible("abcdef", 4) == "abc…"
    assert visible("abcd", 4) == "abcd"
    assert visible("\x1b" * 9, 4) == "\\x1b\\x1b\\x1b…"
    assert visible("\u202e\ue000\ud800\U000e0041") == "\\u202e\\ue000\\ud800\\U000e0041"
