"""The whole way through the command line: prep, train, export, eval, search."""

import json
import re

import pytest
from decision_toy import toy_task

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.task import Query, write_task
from retrail.models.decision.scorer import LocalScorer
from retrail.scripts import search as search_command
from retrail.scripts.cli import main

LETTERS = "abcdefgh"
# Chosen so that a two-layer byte model learns it: which title repeats the letter of the query? The query first, because
# without it in their light the candidates match it untrained.
LEARNABLE = ["objective.min_candidates=2", "objective.max_candidates=4", "objective.none_share=0", "loop.batch_size=8"]
LEARNABLE += ["decision.order=query_first", "decision.instruction=navigate", "objective.queries=1"]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RETRAIL_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


def write_beir(folder, documents, queries):
    """Raw files in BEIR's layout; `queries`: {split: [(id, text, gold)]}."""
    (folder / "qrels").mkdir(parents=True)

    def lines(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    lines("corpus.jsonl", [{"_id": i, "title": title, "text": text} for i, title, text in documents])
    lines("queries.jsonl", [{"_id": i, "text": text} for rows in queries.values() for i, text, _ in rows])
    for split, rows in queries.items():
        judged = "".join(f"{i}\t{gold}\t1\n" for i, _, gold in rows)
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return folder


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A prepared folder, and an export of a model that was trained on it."""
    root = tmp_path_factory.mktemp("learned")
    documents = [(f"d{n}", c * 4, c * 4) for n, c in enumerate(LETTERS)]
    queries = {
        split: [(f"{split}{n}", c * length, f"d{n}") for n, c in enumerate(LETTERS)]
        for split, length in (("train", 4), ("dev", 5))  # the dev queries are other texts
    }
    raw = write_beir(root / "raw", documents, queries)
    assert main(["prep", "data=beir", f"path={raw}", f"out={root / 'task'}"]) == 0
    arguments = ["experiment=decision_tiny", f"data.path={root / 'task'}", "name=r", f"run_dir={root / 'run'}"]
    arguments += [*LEARNABLE, "loop.max_steps=70", "loop.max_tokens=8192", "loop.save_every=0", "runtime.threads=1"]
    assert main(["train", *arguments]) == 0
    assert main(["export", f"run={root / 'run'}", f"to={root / 'export'}"]) == 0
    return root


def evaluated(root, retriever, out, capsys, *more):
    """What is printed, and Hit@1 by the folder of each system."""
    capsys.readouterr()
    arguments = [f"retriever={retriever}", "suite=beir", f"data.path={root / 'task'}", "split=dev", f"out={out}", *more]
    assert main(["eval", *arguments, "suite.metrics=[Hit@1,MRR@10]", "k=10"]) == 0
    found = {file.parent.name: json.loads(file.read_text())["values"]["Hit@1"] for file in out.glob("*/metrics.json")}
    return capsys.readouterr().out, found


def test_training_beats_no_training_on_queries_it_never_saw(learned, tmp_path, capsys):
    baselines = "baselines=[untrained,bm25,rerank]"
    printed, hit = evaluated(learned, learned / "export", tmp_path, capsys, baselines)
    assert hit["navigation__trained"] >= 0.75, hit
    assert hit["navigation__trained"] >= hit["navigation__untrained"] + 0.25, hit
    # One table for the walk and its controls. The words of the queries are no words of the titles, so that BM25 finds
    # nothing, and nothing is left to rerank.
    for row in ("navigation, trained", "navigation, untrained", "BM25", "rerank BM25's 100"):
        assert re.search(rf"{row}\s*│\s*{hit[''.join(c if c.isalnum() else '_' for c in row.lower())]:.3f}", printed)
    assert (hit["bm25"], hit["rerank_bm25_s_100"]) == (0, 0)
    assert (tmp_path / "table.md").read_text().count("|") > 20
    assert all((tmp_path / name / "run.trec").is_file() for name in hit)


def test_the_loss_fell(learned):
    log = [json.loads(line) for line in (learned / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < 0.5 * log[0]["loss"]
    result = json.loads((learned / "run" / "result.json").read_text())
    assert result["steps"] == 70 and result["metrics"]["Hit@1"] >= 0.75


def test_the_card_has_the_numbers_of_the_run(learned):
    card = (learned / "export" / "README.md").read_text()
    metrics = json.loads((learned / "run" / "result.json").read_text())["metrics"]
    assert f"| Hit@1 | {metrics['Hit@1']:.4f} |" in card


def test_bm25_is_not_measured_twice(learned, tmp_path, capsys):
    printed, hit = evaluated(learned, "bm25", tmp_path, capsys)
    assert list(hit) == ["bm25"]
    assert len(re.findall("│ bm25", printed, re.IGNORECASE)) == 1


def test_search_finds_what_training_taught(learned, capsys):
    corpus, retriever = learned / "task", learned / "export"
    capsys.readouterr()
    assert main(["search", f"retriever={retriever}", f"corpus={corpus}", "query=ccccc", "show=json", "k=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    found = json.loads(lines[0])
    assert found["query"] == "ccccc" and found["ids"][0] == "d2" and len(found["ids"]) == 3
    assert [step["name"] for step in found["trace"]] == ["leaves", "final choice"]
    assert found["cost"]["requests"] == 2


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A prepared tree, and an export of a model that was trained on it for two steps."""
    root = tmp_path_factory.mktemp("tree")
    toy_task(root / "task")
    arguments = ["experiment=decision_tiny", f"data.path={root / 'task'}", "name=t", f"run_dir={root / 'run'}"]
    assert main(["train", *arguments, "debug=two_steps", "loop.best_metric=", "runtime.threads=1"]) == 0
    assert main(["export", f"run={root / 'run'}", f"to={root / 'export'}"]) == 0
    return root


def searched(tree, capsys, *arguments, retriever=None):
    capsys.readouterr()
    status = main(["search", f"retriever={retriever or tree / 'export'}", f"corpus={tree / 'task'}", *arguments])
    return status, capsys.readouterr()


def test_the_walk_is_printed_as_it_goes(tree, capsys, monkeypatch):
    seen = []
    yes, choose = LocalScorer.yes, LocalScorer.choose

    def watched(original):
        def call(self, slates, **options):
            seen.append(capsys.readouterr().out)
            return original(self, slates, **options)

        return call

    monkeypatch.setattr(LocalScorer, "yes", watched(yes))
    monkeypatch.setattr(LocalScorer, "choose", watched(choose))
    status, after = searched(tree, capsys, "query=where is jam?", "navigate.keep=[2]", "navigate.choose=3", "k=4")
    assert status == 0
    first, second, third = seen  # what had been printed before each request
    assert first == "query: where is jam?\n"
    assert second.startswith("1. level 1: 4 candidates, 2 cut") and "Page 0  [p0]" in second
    assert third.startswith("2. leaves: 8 candidates")
    last = after.out
    assert last.startswith("3. final choice: 3 candidates, 2 cut")
    result = last[last.index("result: 4 hits") :]
    assert len(result.splitlines()) == 5
    assert "".join([*seen, last]).count("query: ") == 1


def test_only_the_hits(tree, capsys):
    status, shown = searched(tree, capsys, "query=jam", "show=hits", "k=2")
    assert status == 0 and "level 1" not in shown.out
    assert [line[:6] for line in shown.out.splitlines()[:2]] == ["query:", "result"]
    assert len(shown.out.splitlines()) == 4


def test_bm25_has_no_walk(tree, capsys):
    status, shown = searched(tree, capsys, "query=jam", "k=3", retriever="bm25")
    assert status == 0 and "jam  [p2s1]" in shown.out


QUERIES = ["wo steht der Käse?", "خبز", "パンはどこですか", "где хлеб 🍞", ":smile: [bold]x[/bold] $(ls)"]


@pytest.mark.parametrize("query", QUERIES)
def test_queries_in_any_script(tree, capsys, query):
    status, shown = searched(tree, capsys, f"query={query}")
    assert status == 0 and shown.out.startswith(f"query: {query}\n")
    status, shown = searched(tree, capsys, f"query={query}", "show=json")
    assert json.loads(shown.out)["query"] == query and query in shown.out


def test_a_query_that_is_no_text(tree, capsys):
    status, shown = searched(tree, capsys, "query=a\udcff")
    assert status == 2 and "not valid UTF-8" in shown.err


TRAIN = ["train", "experiment=decision_tiny", "name=x"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["search", "retriever=nowhere", "corpus=TASK", "query=x"], "nowhere is not an exported retriever"),
        (["search", "retriever=EXPORT", "corpus=nowhere", "query=x"], "nowhere: no such folder"),
        (["search", "retriever=EXPORT", "corpus=TASK", "query= "], "query"),
        (["search", "retriever=TASK", "corpus=TASK", "query=x"], "is not an exported retriever"),
        (["search", "retriver=EXPORT", "corpus=TASK", "query=x"], "Did you mean retriever?"),
        (["search", "retriever=EXPORT", "corpus=TASK", "query=x", "navigate.keep=[0]"], "navigate.keep"),
        (["search", "retriever=EXPORT", "corpus=EMPTY", "query=x"], "manifest.json"),
        (["eval", "retriever=EXPORT", "suite=beir", "data.path=nowhere"], "nowhere"),
        (["eval", "retriever=EXPORT", "suite=beir", "data.path=TASK"], "has: train, dev"),
        (["eval", "retriever=EXPORT", "suite=beir", "data.path=TASK", "split=dev", "k=5"], "looks below k=5"),
        (["eval", "retriever=bm25", "suite=beir", "data.path=TASK", "split=dev", "baselines=[rerank]"], "decision"),
        ([*TRAIN, "data.path=nowhere"], "nowhere"),
        ([*TRAIN, "data.path=TASK", "data.split=tset"], "tset"),
        ([*TRAIN, "data.path=TASK", "eval.split=test"], "eval.split=test"),
        ([*TRAIN, "data.path=TASK", "loop.best_metric=Hit@3"], "use one of: Hit@1"),
        ([*TRAIN, "data.path=TASK", "eval.k=2"], "looks below k=2"),
        ([*TRAIN, "data.path=TASK", "objective.max_candidates=99"], "decision.max_candidates=50"),
        (["export", "run=nowhere", "to=x"], "nowhere is not a run folder"),
        (["prep", "data=beir", "path=EMPTY", "out=x"], "corpus.jsonl"),
    ],
)
def test_mistakes_get_one_message(tree, tmp_path, capsys, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    places = {"EXPORT": tree / "export", "TASK": tree / "task", "EMPTY": "empty"}
    real = [re.sub("EXPORT|TASK|EMPTY", lambda found: str(places[found[0]]), argument) for argument in arguments]
    capsys.readouterr()
    assert main(real) == 2
    error = capsys.readouterr().err
    message = error[error.rindex("retrail: ") :]
    assert part in message and "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["empty"], "something was left behind"


def test_an_empty_corpus_is_refused(tmp_path, capsys):
    raw = write_beir(tmp_path / "raw", [], {"train": [("q", "x", "d")]})
    assert main(["prep", "data=beir", f"path={raw}", f"out={tmp_path / 'task'}"]) == 2
    assert "the corpus is empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_a_corpus_of_one_document(tree, tmp_path, capsys):
    corpus = Corpus.from_nodes([Node("only", None, "Jam", "All about jam.")])
    split = ([Query("q", "jam?")], {"q": {"only": 1}})
    task = tmp_path / "task"
    write_task(task, name="one", corpus=corpus, splits={"train": split, "dev": split}, source={})
    assert main(["search", f"retriever={tree / 'export'}", f"corpus={task}", "query=jam?"]) == 0
    assert "Jam  [only]" in capsys.readouterr().out
    out = tmp_path / "eval"
    arguments = [f"retriever={tree / 'export'}", "suite=beir", f"data.path={task}", "split=dev", f"out={out}"]
    assert main(["eval", *arguments, "baselines=[bm25,rerank]"]) == 0
    assert json.loads((out / "navigation__trained" / "metrics.json").read_text())["values"]["nDCG@10"] == 1.0
    capsys.readouterr()
    run_dir = tmp_path / "run"
    assert main(["train", "experiment=decision_tiny", f"data.path={task}", "name=o", f"run_dir={run_dir}"]) == 2
    assert "nothing to train on" in capsys.readouterr().err
    assert not run_dir.exists()


def test_nobody_watches_a_control(tree, monkeypatch):
    """A retriever without steps is searched once, as any other."""
    from retrail.scripts.config import SearchRun

    calls = []

    class Control:
        def search(self, queries, *, k):
            calls.append((queries, k))
            return []

    run = SearchRun(retriever="bm25", corpus="x", query="jam", k=7)
    assert search_command._watched(run, Control(), None, None) == []
    assert calls == [(["jam"], 7)]
