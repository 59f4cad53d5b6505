"""`retrail curve` and `retrail pools` from arguments to files, on a model of known beliefs."""

import json

import pytest
from decision_oracle import made_queries, made_tree, oracle

from retrail.data_prep.task import write_task
from retrail.models import exports, load
from retrail.scripts import curve, pools


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A prepared folder and an export whose weights nobody opens."""
    corpus = made_tree(10, 6, 4)
    queries, qrels = made_queries(corpus, 30)
    write_task(tmp_path / "data", name="made", corpus=corpus, splits={"dev": (queries, qrels)}, source={})
    export = tmp_path / "export"
    export.mkdir()
    manifest = {"format_version": 1, "family": "decision", "navigate": {"keep": [2], "choose": 0}}
    (export / exports.RETRIEVAL).write_text(json.dumps(manifest))
    monkeypatch.setattr(load, "load_scorer", lambda path, **_: oracle())
    monkeypatch.setattr(pools, "_scorer", lambda run: oracle())
    return [f"retriever={export}", f"data.path={tmp_path / 'data'}"], tmp_path


def test_curve_writes_table_numbers_and_picture(folders, capsys):
    arguments, root = folders
    out = root / "new" / "curve"
    assert curve.main([*arguments, "suite=pydocs", "shares=[0.1,0.5,1.0]", f"out={out}"]) == 0
    assert "share of the first level that stays" in capsys.readouterr().out
    rows = json.loads((out / "curve.json").read_text())
    assert [row["name"] for row in rows] == ["0.1 kept", "0.5 kept", "1 kept", "flat"]
    kept = [row["ledger"][0]["kept"] / row["ledger"][0]["queries"] for row in rows[:3]]
    assert kept == [1.0, 5.0, 10.0]
    survival = [row["ledger"][0]["survival"] for row in rows[:3]]
    assert survival == sorted(survival) and survival[0] < survival[2] == 1.0
    assert rows[3]["ledger"][0]["name"] == "level 2" and rows[3]["ledger"][0]["candidates"] == 60 * 30
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "curve.md").read_text().count("| ") > 10


def test_a_curve_needs_levels(folders, capsys):
    arguments, _ = folders
    assert curve.main(["retriever=bm25", arguments[1]]) == 2
    assert "keeps no levels" in capsys.readouterr().err
    assert curve.main([*arguments, "shares=[0.0]"]) == 2
    assert "shares=[0.0] must list" in capsys.readouterr().err


def test_pools_with_fewer_and_more_rivals(folders, capsys):
    arguments, root = folders
    out = root / "new" / "pools"
    settings = ["negatives=[bm25]", "depth=20", "sizes=[1,5,20]", "anchors=2", "limit=6", "metrics=[Hit@1]"]
    assert pools.main([*arguments, *settings, f"out={out}"]) == 0
    text = (out / "pools.md").read_text()
    rows = [line.split("|")[1].strip(" *") for line in text.splitlines() if line.startswith("| ")][2:]
    assert rows == [
        "page by page", "page by page, temperature of the other half", "5 a request, 2 anchors",
        "1 a request", "5 a request", "20 a request",
    ]  # fmt: skip
    assert "Hit@1, 20 a request less page by page: " in text
    assert "1 a request: 20.0; 5 a request: 4.0; 20 a request: 1.0" in text


def test_pools_that_cannot_be(folders, capsys):
    arguments, _ = folders
    for setting, message in (("depth=1", "depth=1 must be 2 or more"), ("anchors=-1", "anchors=-1 must be 0 or more")):
        assert pools.main([*arguments, setting]) == 2
        assert message in capsys.readouterr().err
