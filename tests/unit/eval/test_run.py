"""Running a retriever over queries: results, resuming, and what is refused."""

import json
import math

import pytest

from retrail.data_prep.formats.trec import read_run
from retrail.data_prep.hits import Cost, Hits, Step
from retrail.data_prep.task import Query
from retrail.eval.run import hits_from_json, hits_to_json, read_hits, run_retriever, write_json

QUERIES = [Query(f"q{i}", f"text {i}") for i in range(7)]


class Echo:
    """Ranks documents named after the query; fails at the query `dies_at`."""

    description = "echo 1"

    def __init__(self, dies_at: str | None = None, cost: Cost | None = None) -> None:
        self.dies_at, self.cost = dies_at, cost or Cost()
        self.asked: list[str] = []

    def search(self, queries, *, k):
        if self.dies_at in queries:
            raise KeyboardInterrupt
        self.asked.extend(queries)
        step = Step(name="level 0", ids=("a",), scores=(0.1,), kept=("a",), notes=("n",), cost=Cost(requests=1))
        return [Hits((f"d-{q[5:]}", "x"), (0.1 + 0.2, 0.1), self.cost, (step,), True) for q in queries]


class Bad:
    description = "bad"

    def __init__(self, *rankings: Hits) -> None:
        self.rankings = list(rankings)

    def search(self, queries, *, k):
        return self.rankings


def test_rankings_by_query_in_order():
    run = run_retriever(Echo(), QUERIES, k=2, batch_size=3)
    assert list(run) == [query.id for query in QUERIES]
    assert run["q4"].ids == ("d-4", "x")


def test_seconds_are_measured_unless_the_retriever_did():
    assert run_retriever(Echo(), QUERIES, k=2)["q0"].cost.seconds > 0
    assert run_retriever(Echo(cost=Cost(seconds=9.0, requests=2)), QUERIES, k=2)["q0"].cost == Cost(
        seconds=9, requests=2
    )


def test_files(tmp_path):
    run = run_retriever(Echo(cost=Cost(seconds=1.5)), QUERIES, k=2, out=tmp_path / "out", batch_size=2, save_trace=True)
    assert read_hits(tmp_path / "out/hits.jsonl") == run  # scores bit for bit, traces, costs
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "hits.jsonl",
        "run.trec",
        "run.trec.scores.jsonl",
    ]
    assert {q: hits.ids for q, hits in read_run(tmp_path / "out/run.trec").items()} == {
        q: h.ids for q, h in run.items()
    }


def test_traces_are_left_out_by_default(tmp_path):
    run_retriever(Echo(), QUERIES, k=2, out=tmp_path)
    assert all(hits.trace == () for hits in read_hits(tmp_path / "hits.jsonl").values())


def test_a_stopped_evaluation_goes_on(tmp_path):
    stopped = Echo(dies_at="text 5")
    with pytest.raises(KeyboardInterrupt):
        run_retriever(stopped, QUERIES, k=2, out=tmp_path, batch_size=2, save_trace=True)
    assert stopped.asked == ["text 0", "text 1", "text 2", "text 3"]
    assert not (tmp_path / "run.trec").exists()
    second = Echo()
    run = run_retriever(second, QUERIES, k=2, out=tmp_path, batch_size=2, save_trace=True)
    assert second.asked == ["text 4", "text 5", "text 6"]
    whole = run_retriever(Echo(), QUERIES, k=2)
    assert {q: (h.ids, h.scores) for q, h in run.items()} == {q: (h.ids, h.scores) for q, h in whole.items()}
    third = Echo()
    assert run_retriever(third, QUERIES, k=2, out=tmp_path) == run
    assert third.asked == []


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_half_written_last_line_is_searched_again(tmp_path, cut):
    run_retriever(Echo(), QUERIES, k=2, out=tmp_path)
    file = tmp_path / "hits.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    again = Echo()
    run = run_retriever(again, QUERIES, k=2, out=tmp_path)
    assert again.asked == ["text 6"]
    assert read_hits(file).keys() == run.keys() == {query.id for query in QUERIES}


def test_a_file_cut_inside_its_header_starts_anew(tmp_path):
    file = tmp_path / "hits.jsonl"
    for content in (b"", b'{"format": "retr'):
        file.write_bytes(content)
        again = Echo()
        run_retriever(again, QUERIES, k=2, out=tmp_path)
        assert len(again.asked) == 7
        assert len(read_hits(file)) == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 3}, "its k is 2, not 3"),
        ({"description": "echo 2"}, "its retriever is 'echo 1', not 'echo 2'"),
        ({"queries": [*QUERIES[:6], Query("q6", "other text")]}, "its queries_sha256 is"),
        ({"queries": QUERIES[:6]}, "its queries is 7, not 6"),
    ],
)
def test_results_of_another_evaluation_are_refused(tmp_path, change, message):
    run_retriever(Echo(), QUERIES, k=2, out=tmp_path)
    before = (tmp_path / "hits.jsonl").read_bytes()
    settings = {"queries": QUERIES, "k": 2} | change
    with pytest.raises(ValueError, match=rf"hits.jsonl is of another evaluation: {message}"):
        run_retriever(Echo(), settings.pop("queries"), out=tmp_path, **settings)
    assert (tmp_path / "hits.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [
        b"{half\n",
        b"[]\n",
        b'{"query": "q1", "ids": ["a"], "scores": [], "cost": {}}\n',
        b'{"query": "q1", "ids": ["a"], "scores": [NaN], "cost": {}}\n',
        b'{"query": 1, "ids": [], "scores": [], "cost": {}}\n',
        b'{"query": "q1", "ids": [], "scores": [], "cost": {"euros": 1}}\n',
        b'{"query": "q1", "ids": []}\n',
    ],
)
def test_a_damaged_line_is_named(tmp_path, line):
    run_retriever(Echo(), QUERIES, k=2, out=tmp_path)
    file = tmp_path / "hits.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(ValueError, match=r"hits.jsonl:3: damaged"):
        run_retriever(Echo(), QUERIES, k=2, out=tmp_path)


def test_other_files_are_no_results(tmp_path):
    (tmp_path / "hits.jsonl").write_text('{"format": "other"}\n')
    with pytest.raises(ValueError, match=r"hits.jsonl:1: damaged \(no header"):
        run_retriever(Echo(), QUERIES, k=2, out=tmp_path)
    run_retriever(Echo(), QUERIES, k=2, out=tmp_path / "new")
    file = tmp_path / "new/hits.jsonl"
    file.write_bytes(file.read_bytes() + file.read_bytes().splitlines(keepends=True)[-1])
    with pytest.raises(ValueError, match=r"hits.jsonl:9: damaged \(query 'q6' is there twice\)"):
        read_hits(file)


def test_a_retriever_must_say_which_it_is(tmp_path):
    class Nameless:
        def search(self, queries, *, k):
            return [Hits((), ()) for _ in queries]

    with pytest.raises(ValueError, match="Nameless has no description"):
        run_retriever(Nameless(), QUERIES, k=2, out=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(run_retriever(Nameless(), QUERIES, k=2, out=tmp_path, description="n")) == 7
    assert len(run_retriever(Nameless(), QUERIES, k=2)) == 7


def test_broken_retrievers_and_bad_input():
    with pytest.raises(ValueError, match="Bad returned 1 rankings for 7 queries"):
        run_retriever(Bad(Hits((), ())), QUERIES, k=2)
    with pytest.raises(ValueError, match="3 ids for query 'q0', above k=2"):
        run_retriever(Bad(Hits(("a", "b", "c"), (3, 2, 1))), QUERIES[:1], k=2)
    with pytest.raises(ValueError, match="no queries"):
        run_retriever(Echo(), [], k=2)
    with pytest.raises(ValueError, match="query id 'a' appears twice"):
        run_retriever(Echo(), [Query("a", "x"), Query("a", "y")], k=2)
    for settings in ({"k": 0}, {"k": 1, "batch_size": 0}):
        with pytest.raises(ValueError, match="must be 1 or more"):
            run_retriever(Echo(), QUERIES, **settings)


def test_ids_that_trec_cannot_hold_do_not_lose_the_search(tmp_path):
    retriever = Bad(Hits(("two words",), (1.0,)))
    with pytest.warns(UserWarning, match=r"no run.trec: .*'two words'.*hits.jsonl has all rankings"):
        run = run_retriever(retriever, QUERIES[:1], k=2, out=tmp_path)
    assert (
        {q: h.ids for q, h in read_hits(tmp_path / "hits.jsonl").items()}
        == {"q0": ("two words",)}
        == {q: h.ids for q, h in run.items()}
    )


def test_an_id_that_is_no_unicode_does_not_lose_the_search(tmp_path):
    with pytest.warns(UserWarning, match=r"no run.trec"):
        run_retriever(Bad(Hits(("\ud800",), (1.0,))), QUERIES[:1], k=2, out=tmp_path)
    assert read_hits(tmp_path / "hits.jsonl")["q0"].ids == ("\ud800",)


def test_lines_survive_any_text():
    step = Step(name="\u2028", ids=("\ud800",), scores=(1e-300,), kept=(), notes=("line\nend",), cost=Cost(usd=0.25))
    hits = Hits(("日本", "\x1b"), (1 / 3, -0.0), Cost(prompt_tokens=3), (step,), False)
    line = json.dumps(hits_to_json("q", hits))
    assert hits_from_json(json.loads(line)) == ("q", hits)
    assert "trace" not in hits_to_json("q", hits, trace=False)
    assert "exact" not in hits_to_json("q", Hits((), ()))


def test_write_json_leaves_nothing_half_written(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1, "é": "ü"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1, "é": "ü"}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "b.json", math.nan)
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
