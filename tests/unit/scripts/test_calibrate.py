"""`retrail calibrate` from arguments to file and table, and a search with its file, on a model of known beliefs."""

import json

import pytest
from decision_oracle import made_queries, made_tree, oracle

from retrail.data_prep.task import Task, write_task
from retrail.models import exports, load
from retrail.scripts import calibrate
from retrail.scripts.config import SearchBudget
from retrail.scripts.systems import controls, open_retriever


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A prepared folder and an export whose weights nobody opens."""
    corpus = made_tree(6, 8, 4)
    queries, qrels = made_queries(corpus, 400)
    write_task(tmp_path / "data", name="made", corpus=corpus, splits={"dev": (queries, qrels)}, source={})
    export = tmp_path / "export"
    export.mkdir()
    manifest = {"format_version": 1, "family": "decision", "navigate": {"keep": [2], "choose": 3}}
    (export / exports.RETRIEVAL).write_text(json.dumps(manifest))
    monkeypatch.setattr(load, "load_scorer", lambda path, **_: oracle())
    return tmp_path


def run(folders, *arguments):
    known = [f"retriever={folders / 'export'}", f"data.path={folders / 'data'}", f"to={folders / 'c.json'}"]
    return calibrate.main([*known, *arguments])


def test_command_fits_writes_and_reports(folders, capsys):
    assert run(folders, "alpha=0.1", "confidence=null") == 0
    out = capsys.readouterr().out
    assert "survival of the gold path, alpha 0.1, 200 queries held out" in out
    assert "best fixed budget at no more candidates: keep=[" in out
    assert "cheapest fixed budget that is as safe:   keep=[" in out
    assert out.rstrip().endswith(f"navigate.budget=calibrated navigate.calibration={folders / 'c.json'}")
    stored = json.loads((folders / "c.json").read_text())
    task = Task.open(folders / "data")
    assert (stored["alpha"], stored["gold"], stored["corpus"]) == (0.1, "any", task.corpus.fingerprint)
    assert [level["alpha"] for level in stored["levels"]] == [0.05, 0.05]
    first = (folders / "c.json").read_bytes()
    assert run(folders, "alpha=0.1", "confidence=null", "fixed_k=[]", "holdout=0.5") == 0
    assert (folders / "c.json").read_bytes() == first
    assert "fixed budget" not in capsys.readouterr().out


def test_without_holdout_nothing_is_measured(folders, capsys):
    assert run(folders, "holdout=0", "score=gap", "gold=all") == 0
    assert "survival" not in capsys.readouterr().out
    stored = json.loads((folders / "c.json").read_text())
    assert [(level["score"], level["queries"]) for level in stored["levels"]] == [("gap", 200), ("gap", 200)]
    assert stored["gold"] == "all"


def test_a_search_uses_the_file(folders, capsys):
    run(folders, "alpha=0.1", "fixed_k=[]")
    corpus = Task.open(folders / "data").corpus
    budget = SearchBudget(budget="calibrated", calibration=str(folders / "c.json"))
    retriever, description = open_retriever(str(folders / "export"), corpus, budget, "cpu")
    assert '"budget": "calibrated"' in description
    assert "note" not in capsys.readouterr().err
    hits = retriever.search(["q0 0/0/0", "q1 5/1/2"], k=5)
    assert len({len(h.trace[0].kept) for h in hits} | {len(h.trace[1].kept) for h in hits}) > 1
    with pytest.raises(ValueError, match="cannot walk with thresholds of the trained model"):
        list(controls(["untrained"], corpus, retriever, str(folders / "export"), description))
    # On another corpus with a word of warning, and with another model not at all.
    open_retriever(str(folders / "export"), made_tree(3, 3, 2), budget, "cpu")
    assert "fitted on another corpus" in capsys.readouterr().err
    file = folders / "export" / exports.RETRIEVAL
    file.write_text(file.read_text() + " ")
    with pytest.raises(ValueError, match="thresholds of one model mean nothing for another"):
        open_retriever(str(folders / "export"), corpus, budget, "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["alpha=0.001", "confidence=null"], "takes at least 1999 queries a level"),
        (["alpha=0.001"], "takes at least 5990 queries a level"),
        (["confidence=1"], "confidence=1.0 must be above 0 and below 1, or null"),
        (["alpha=2"], "alpha=2.0 must be above 0 and below 1"),
        (["holdout=1"], "holdout=1.0 must be 0 or more and below 1"),
        (["score=luck"], "score='luck' is not a choice"),
        (["gold=some"], "gold='some' is not a choice"),
        (["fixed_k=[0]"], "fixed_k=[0] must list numbers of 1 or more"),
        (["split=test"], "has no split 'test'"),
        (["retriever=bm25"], "bm25 is not an exported retriever"),
        (["to="], "to='' must not be empty"),
    ],
)
def test_bad_requests_write_nothing(folders, capsys, arguments, message):
    assert run(folders, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (folders / "c.json").exists()
