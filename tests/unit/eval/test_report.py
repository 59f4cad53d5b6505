"""Comparison tables."""

import io

import pytest
from rich.console import Console

from retrail.data_prep.hits import Cost, Hits
from retrail.eval.metrics import Conventions, evaluate
from retrail.eval.report import SystemResult, compare_lines, compare_table, markdown_table


def result(name: str, ranks: list[int], metrics=("Hit@1", "MRR"), cost: Cost | None = None, **rules) -> SystemResult:
    """A system that puts the gold document of query i at ranks[i] of 3 (0: nothing found)."""
    run = {}
    for number, rank in enumerate(ranks):
        ids = ["x", "y"]
        ids.insert(rank - 1, "gold")
        run[f"q{number}"] = Hits(tuple(ids), (3.0, 2.0, 1.0)) if rank else Hits((), ())
    qrels = {query: {"gold": 1} for query in run}
    evaluation = evaluate(run, qrels, metrics, conventions=Conventions(**rules))
    return SystemResult(name=name, evaluation=evaluation, cost=cost or Cost(), searched=len(run))


def shown(table) -> str:
    console = Console(file=io.StringIO(), width=120, no_color=True)
    console.print(table)
    return console.file.getvalue()


def test_cost_is_given_a_query():
    cost = Cost(seconds=3, prompt_tokens=1000, generated_tokens=200, reused_tokens=900, requests=8, usd=0.5)
    one = result("a", [1, 2, 3, 1], cost=cost)
    assert (one.seconds_per_query, one.tokens_per_query) == (0.75, 300)
    as_dict = one.as_dict()
    assert as_dict["values"] == pytest.approx({"Hit@1": 0.5, "MRR": (1 + 1 / 2 + 1 / 3 + 1) / 4})
    assert (as_dict["requests_per_query"], as_dict["reused_tokens_per_query"], as_dict["usd_per_query"]) == (
        2,
        225,
        0.125,
    )


def test_markdown():
    results = [
        result("BM25", [1, 2, 2, 2], cost=Cost(seconds=0.004)),
        result("d0", [1, 1, 3, 3], cost=Cost(seconds=5, prompt_tokens=48_000)),
    ]
    assert markdown_table(results, command="retrail eval retriever=d0").splitlines() == [
        "| system | Hit@1 | MRR | queries | s/query | tokens/query |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| BM25 | 0.250 | 0.625 | 4 | 0.001 | 0 |",
        "| d0 | **0.500** | **0.667** | 4 | 1.25 | 12,000 |",
        "",
        "`retrail eval retriever=d0`",
    ]


def test_equal_values_are_all_best_and_a_missing_metric_is_a_dash():
    results = [result("a", [1, 1]), result("b", [1, 1], metrics=["Hit@1"])]
    lines = markdown_table(results).splitlines()
    assert lines[2].startswith("| a | **1.000** | **1.000** |")
    assert lines[3].startswith("| b | **1.000** | - |")


def test_a_single_row_is_not_best_of_anything():
    assert "**" not in markdown_table([result("a", [1])])


def test_terminal_table():
    text = shown(compare_table([result("BM25", [1, 2]), result("d0", [1, 1])], title="dev [set]"))
    assert "dev [set]" in text
    assert [line.split("│")[1:-1] for line in text.splitlines() if "BM25" in line] == [
        [" BM25     ", " 0.500 ", " 0.750 ", "       2 ", "       0 ", "            0 "]
    ]


def test_numbers_are_whole_on_a_narrow_terminal():
    metrics = ["Hit@1", "Hit@5", "Hit@10", "MRR@10", "nDCG@10", "Recall@10"]
    table = compare_table([result("a-rather-long-name", [1, 2, 3], metrics, Cost(seconds=0.000123))])
    console = Console(file=io.StringIO(), width=80, no_color=True)
    console.print(table)
    text = console.file.getvalue()
    assert "…" not in text
    for number in ("0.333", "1.000", "0.611", "0.710", "4.1e-05"):
        assert f" {number} " in text


def test_names_are_data():
    name = "[red]a|b[/red]\x1b[31m"
    text = shown(compare_table([result(name, [1])]))
    assert "[red]a|b[/red]\\x1b[31m" in text and "\x1b" not in text
    assert "| \\[red>a" not in markdown_table([result(name, [1])])
    assert markdown_table([result("a|b", [1])]).splitlines()[2].startswith("| a\\|b | 1.000 |")


def test_notes_say_what_the_means_hide():
    gappy = result("gappy", [1, 0, 0])
    assert "gappy: 2 rankings are empty and count 0." in markdown_table([gappy])
    missing = evaluate({"q": Hits(("a",), (1.0,))}, {"q": {"a": 1}, "r": {"a": 1}, "s": {}}, ["Hit@1"], corpus=set())
    notes = markdown_table([SystemResult(name="m", evaluation=missing, cost=Cost(), searched=1)])
    assert "m: 1 queries have no ranking and count 0." in notes
    assert "1 queries have no relevant document and are left out." in notes
    assert "2 relevant documents are not in the corpus." in notes
    assert "do not compare" in markdown_table([result("a", [1]), result("b", [1, 1])])
    assert "different conventions" in markdown_table([result("a", [1]), result("b", [1], ties="trec")])
    assert "Conventions: ties=trec." in shown(compare_table([result("b", [1], ties="trec")]))
    assert len(markdown_table([result("a", [1]), result("b", [2])]).splitlines()) == 4


def test_nothing_to_compare():
    with pytest.raises(ValueError, match="no results"):
        compare_table([])


def test_lines_compare_the_first_with_each_other():
    results = [result("ours", [1] * 20), result("BM25", [2] * 20), result("other", [1] * 3)]
    [line] = compare_lines(results, "Hit@1")
    assert line == "Hit@1, ours less BM25: +1.000 [+1.000, +1.000], p = 0.0001, 20 queries"
    assert compare_lines(results[:1], "Hit@1") == []
