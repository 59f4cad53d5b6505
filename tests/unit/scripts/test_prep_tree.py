import json

import numpy as np
import pytest

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.task import Query, Task, write_task
from retrail.data_prep.tree import Tree
from retrail.scripts import prep, prep_tree
from retrail.scripts.config import PrepData


@pytest.fixture
def encoder(monkeypatch):
    """Stands in for MiniLM: a vector a text from its letters."""
    pytest.importorskip("faiss")

    def encode(texts):
        return np.array([np.bincount([ord(c) % 16 for c in text], minlength=16) for text in texts], dtype=float)

    monkeypatch.setattr(prep_tree, "open_encode", lambda name: encode)


@pytest.fixture
def task(tmp_path):
    corpus = Corpus.from_nodes(Node(f"d{i}", None, f"title {i}", f"text {'abcdefgh'[i]}") for i in range(8))
    splits = {"dev": ([Query("q", "which")], {"q": {"d3": 1}})}
    write_task(tmp_path / "flat", name="flat", corpus=corpus, splits=splits, source={})
    return tmp_path / "flat"


def run(*arguments):
    return prep.main(list(arguments))


def test_a_task_keeps_its_queries(task, tmp_path, encoder, capsys):
    out = tmp_path / "tree"
    assert run("data=tree", f"path={task}", f"out={out}", "data.groups=4", "data.balanced=true") == 0
    made = Task.open(out)
    assert made.qrels("dev") == {"q": {"d3": 1}} and made.corpus.num_levels == 2
    assert "12 nodes on 2 levels, 8 of them leaves" in capsys.readouterr().out

    (tmp_path / "add.jsonl").write_text(
        json.dumps({"_id": "new", "title": "New"})
        + "\n"
        + json.dumps({"_id": "part", "parent": "new", "text": "of it"})
    )
    command = ("data=update", f"path={out}", f"out={out}", "overwrite=true", f"data.add={tmp_path / 'add.jsonl'}")
    assert run(*command, "data.remove=[d3]") == 0
    said = capsys.readouterr().out
    assert "stale: group:" in said and "-1 of 2 pages (50.0%)" in said
    updated = Tree.open(out / "corpus").corpus
    assert "new" in updated and "d3" not in updated


def test_a_corpus_becomes_a_deeper_tree(task, tmp_path, encoder):
    Corpus.open(task / "corpus").save(tmp_path / "plain")
    command = ("data=tree", f"path={tmp_path / 'plain'}", f"out={tmp_path / 'deep'}", "data.branching=2")
    assert run(*command) == 0
    assert Corpus.open(tmp_path / "deep").num_levels == 3
    assert run(*command) == 2  # already there
    assert run(*command, "overwrite=true") == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("data=tree", "data.groups=9"), "has 8 pages; choose fewer groups"),
        (("data=tree",), "either data.groups=N or data.branching=N"),
        (("data=tree", "data.branching=1"), "data.branching=1 must be 2 or more"),
        (("data=tree", "data.branching=3", "data.balanced=true"), "always balanced"),
        (("data=update",), "data.add=FILE.jsonl or data.remove"),
        (("data=update", "data.remove=[d1]"), "data=tree` puts groups"),
        (("data=html",), "no file ending in .html"),
        (("data=conditionalqa",), "has no documents.json"),
        (("data=markdown", "data.groups=2"), "data.groups has no meaning for data=markdown"),
    ],
)
def test_bad_input(task, tmp_path, encoder, capsys, arguments, said):
    assert run(*arguments, f"path={task}", f"out={tmp_path / 'x'}") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_chains_go_with_their_queries(tmp_path, encoder):
    from state_toy import toy_multihop_task

    from retrail.data_prep.task import Task

    flat = toy_multihop_task(tmp_path / "flat")
    assert run("data=tree", "data.groups=3", f"path={tmp_path / 'flat'}", f"out={tmp_path / 'tree'}") == 0
    grouped = Task.open(tmp_path / "tree")
    assert grouped.chains("train") == flat.chains("train") != {} and grouped.chains("dev") == flat.chains("dev")
    gone = flat.chains("train")["q1"].distractors[0]
    update = ["data=update", f"data.remove=[{gone}]", f"path={tmp_path / 'tree'}", f"out={tmp_path / 'less'}"]
    assert run(*update) == 0
    left = Task.open(tmp_path / "less").chains("train")["q1"]
    assert gone not in left.distractors and left.gold == flat.chains("train")["q1"].gold


def test_markdown_is_searchable(tmp_path, capsys):
    from retrail.models.load import open_corpus

    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "p.md").write_text("# P\n\nwords")
    assert run("data=markdown", f"path={tmp_path / 'raw'}", f"out={tmp_path / 'out'}") == 0
    assert "p.md#body" in open_corpus(tmp_path / "out")


def test_conditionalqa_splits(tmp_path):
    with pytest.raises(ValueError, match="has no night"):
        prep._read_conditionalqa(PrepData(name="conditionalqa", documents="d", splits=["night"]), tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("row", "match"),
    [({"title": "no id"}, "add.jsonl:1 has no key '_id'"), ({"_id": "x"}, "neither title nor text"), ({}, "neither")],
)
def test_bad_additions(tmp_path, row, match):
    (tmp_path / "add.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=match):
        prep_tree.read_nodes(tmp_path / "add.jsonl")


def test_a_language_model_writes_the_groups_once(task, tmp_path, encoder, capsys, monkeypatch):
    from retrail.models import lm
    from retrail.models.protocols import Completion

    class Writer:
        description = "writer"
        asked = 0

        def generate(self, prompts, *, max_tokens, schema=None):
            Writer.asked += len(prompts)
            return [Completion(f"About {len(p.user.splitlines())} pages. And more.") for p in prompts]

    monkeypatch.setattr(lm, "open_language_model", lambda name: Writer())
    arguments = ("data=tree", f"path={task}", "data.groups=4", "data.balanced=true", "data.summaries=any")
    assert run(*arguments, f"out={tmp_path / 'tree'}") == 0
    corpus = Task.open(tmp_path / "tree").corpus
    assert {corpus.text(row) for row in corpus.children(None)} == {"About 2 pages."} and Writer.asked <= 4
    asked = Writer.asked
    (tmp_path / "tree.summaries.jsonl").rename(tmp_path / "again.summaries.jsonl")
    assert run(*arguments, f"out={tmp_path / 'again'}") == 0
    assert Writer.asked == asked
    # Only what changed is asked about after an update.
    assert run("data=update", f"path={tmp_path / 'tree'}", f"out={tmp_path / 'new'}", "data.remove=[d5]",
               "data.summaries=any") == 0  # fmt: skip
    assert Writer.asked == asked + 1
    corpus = Task.open(tmp_path / "new").corpus
    assert sorted(corpus.text(row) for row in corpus.children(None)) == ["About 1 pages."] + ["About 2 pages."] * 3
