"""Rounds of training through the command line: walks of one model become slates of the next, over several data sets."""

import json
import re

import numpy as np
import pytest
import torch
from decision_toy import toy_corpus, toy_task
from safetensors.numpy import load_file

from retrail.data_prep.examples import gold_paths
from retrail.data_prep.task import Task
from retrail.data_prep.walks import read_walks
from retrail.eval.dense import DenseRetriever
from retrail.models.bm25 import BM25
from retrail.models.config import NavigateConfig
from retrail.models.decision.navigate import Navigator
from retrail.models.load import load, load_scorer
from retrail.scripts.cli import main
from retrail.train.objectives.decision_rivals import gold_path_rows

SMALL = ["experiment=decision_tiny", "adapter=lora", "runtime.threads=1", "loop.save_every=0", "loop.best_metric="]
SMALL += ["optim.schedule=constant", "optim.warmup_ratio=0"]


@pytest.fixture(scope="module", autouse=True)
def float32():
    """Exports open in float32 on any machine; in bfloat16, which some processors have, batches round differently."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrail.models.backbone._cpu_has_bf16", lambda: False)
        yield


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RETRAIL_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


def train(task, run_dir, *more):
    return main(["train", *SMALL, f"data.path={task}", f"name={run_dir.name}", f"run_dir={run_dir}", *more])


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Two prepared folders, an export of a model trained on the first, and its walks over that."""
    root = tmp_path_factory.mktemp("first")
    toy_task(root / "a")
    toy_task(root / "b", toy_corpus(3, 5))
    assert train(root / "a", root / "r0", "loop.max_steps=3") == 0
    assert main(["export", f"run={root / 'r0'}", f"to={root / 'e0'}"]) == 0
    assert walks(root, root / "w.jsonl") == 0
    return root


def walks(root, to, *more, retriever=None, data="a"):
    arguments = [f"retriever={retriever or root / 'e0'}", f"data.path={root / data}", f"to={to}", "navigate.keep=[2]"]
    return main(["walks", *arguments, *more])


def log(run_dir):
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["tokens"]) for line in lines]


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


def test_walks_are_what_the_navigator_judged(first):
    task = Task.open(first / "a")
    header, found = read_walks(first / "w.jsonl", task.corpus)
    assert header["split"] == "train" and '"keep": [2]' in header["retriever"]
    assert not (first / "w.jsonl.part").exists()
    queries = task.queries("train")
    assert {walk.query_id for walk in found} == {query.id for query in queries}
    navigator = load(first / "e0", task.corpus, device="cpu", navigate=NavigateConfig(keep=[2]))
    for walk, hits in zip(found[:6], navigator.search([walk.query for walk in found[:6]], k=5), strict=True):
        for part, step in zip(walk.levels, hits.trace, strict=False):
            assert set(part.ids) == set(step.ids)
            assert part.ids[0] == step.kept[0]
            assert part.scores == pytest.approx(sorted(step.scores, reverse=True), rel=1e-4)
        assert len(walk.levels) == 2 and len(walk.levels[1].ids) == 8  # the children of the two pages it kept


def test_what_is_said_of_the_gold_path(first, tmp_path, capsys):
    capsys.readouterr()
    assert walks(first, tmp_path / "w.jsonl", "limit=7", "depth=3") == 0
    printed = capsys.readouterr().out
    task = Task.open(first / "a")
    _, found = read_walks(tmp_path / "w.jsonl", task.corpus)
    assert len(found) == 7 and max(len(part.ids) for walk in found for part in walk.levels) == 3
    judgements = task.qrels("train")
    for level in (0, 1):
        shown = sum(
            any(
                task.corpus.id(path[level]) in walk.levels[level].ids
                for path in gold_paths(task.corpus, judgements[walk.query_id])
            )
            for walk in found
        )
        assert f"level {level + 1}: a right node was judged for {shown} of 7 queries" in printed
    assert "objective.walks=[" in printed


def test_an_interrupted_search_goes_on(first, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("retrail.scripts.walks._AT_ONCE", 4)
    search, asked = Navigator.search, []

    def stopped(self, queries, **more):
        asked.extend(queries)
        if len(asked) == 12:
            raise KeyboardInterrupt
        return search(self, queries, **more)

    monkeypatch.setattr(Navigator, "search", stopped)
    assert walks(first, tmp_path / "w.jsonl") == 130
    part = tmp_path / "w.jsonl.part"
    assert not (tmp_path / "w.jsonl").exists() and part.read_bytes().count(b"\n") == 9
    part.write_bytes(part.read_bytes()[:-20])  # cut off in a line
    assert "was begun with depth=100, not 9" in refused(
        capsys, "walks", f"retriever={first / 'e0'}", f"data.path={first / 'a'}", f"to={tmp_path / 'w.jsonl'}",
        "navigate.keep=[2]", "depth=9",
    )  # fmt: skip
    again = len(asked)
    assert walks(first, tmp_path / "w.jsonl") == 0
    assert len(asked) - again == 12 - 7
    corpus = Task.open(first / "a").corpus
    one, two = (read_walks(folder / "w.jsonl", corpus)[1] for folder in (first, tmp_path))
    assert [walk.query_id for walk in one] == [walk.query_id for walk in two]
    for a, b in zip(one, two, strict=True):  # sums of other batches round otherwise
        assert [part.scores for part in b.levels] == [pytest.approx(part.scores, rel=1e-4) for part in a.levels]
    assert "is there already" in refused(
        capsys, "walks", f"retriever={first / 'e0'}", f"data.path={first / 'a'}", f"to={tmp_path / 'w.jsonl'}"
    )


def test_a_retriever_without_a_walk(first, tmp_path, capsys):
    arguments = ["walks", "retriever=bm25", f"data.path={first / 'a'}", f"to={tmp_path / 'w.jsonl'}"]
    assert "takes no walk" in refused(capsys, *arguments)
    assert not (tmp_path / "w.jsonl").exists()


EVERYTHING = [
    "objective.easy_rows=20",
    "objective.own_share=0.7",
    "objective.level_weights=[2.0,1.0]",
    "objective.positive_weights=[3.0,1.0]",
]


def second_round(first):
    mix = f"data.mix={{{first / 'a'}: 1, {first / 'b'}: 0.5}}"
    return [f"model.path={first / 'e0'}", f"objective.walks=[{first / 'w.jsonl'}]", mix, *EVERYTHING]


def test_the_next_round_starts_from_the_export(first, tmp_path):
    """Its backbone and its head: with a learning rate of almost nothing the model stays what it was."""
    assert train(first / "a", tmp_path / "r1", "loop.max_steps=1", "optim.lr=1e-12", *second_round(first)) == 0
    assert main(["export", f"run={tmp_path / 'r1'}", f"to={tmp_path / 'e1'}"]) == 0
    before, after = (load_file(folder / "pointer_head.safetensors") for folder in (first / "e0", tmp_path / "e1"))
    assert all(np.allclose(before[key], after[key], atol=1e-6) for key in before)
    assert any(abs(value - np.eye(*value.shape)).max() > 1e-4 for key, value in before.items() if "query" in key)
    one, two = (load_scorer(folder, device="cpu").model.backbone for folder in (first / "e0", tmp_path / "e1"))
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.allclose(a.float(), b.float(), atol=1e-6), name


def test_a_stopped_round_goes_on_bit_for_bit(first, tmp_path):
    more = second_round(first)
    assert train(first / "a", tmp_path / "whole", "loop.max_steps=8", *more) == 0
    assert train(first / "a", tmp_path / "parts", "loop.max_steps=3", *more) == 0
    assert train(first / "a", tmp_path / "parts", "loop.max_steps=8", *more) == 0
    assert log(tmp_path / "parts") == log(tmp_path / "whole") and len(log(tmp_path / "whole")) == 8
    for name in ("parameters", "optimizer"):
        a, b = (load_file(tmp_path / r / f"checkpoints/step_00000008/{name}.safetensors") for r in ("whole", "parts"))
        assert a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a), name


def test_other_walks_or_another_export_are_refused(first, tmp_path, capsys):
    mixed = [
        "loop.max_steps=2",
        *EVERYTHING,
        f"model.path={tmp_path / 'e'}",
        f"objective.walks=[{tmp_path / 'w.jsonl'}]",
    ]
    (tmp_path / "e").symlink_to(first / "e0")
    content = (first / "w.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "w.jsonl").write_text("".join(content))
    assert train(first / "a", tmp_path / "r", *mixed) == 0
    (tmp_path / "w.jsonl").write_text("".join(content[:-3]))
    capsys.readouterr()
    assert train(first / "a", tmp_path / "r", *mixed) != 0
    assert re.search("started with rows=[0-9a-f]{64}, now it is [0-9a-f]{64}", capsys.readouterr().err)
    (tmp_path / "w.jsonl").write_text("".join(content))
    assert main(["export", f"run={first / 'r0'}", f"to={tmp_path / 'e2'}"]) == 0
    manifest = tmp_path / "e2" / "retrieval.json"
    manifest.write_text(manifest.read_text() + " ")
    (tmp_path / "e").unlink()
    (tmp_path / "e").symlink_to(tmp_path / "e2")
    assert train(first / "a", tmp_path / "r", *mixed) != 0
    assert "started with model.export=" in capsys.readouterr().err


def test_walks_are_used_where_their_corpus_is(first, tmp_path, capsys):
    """Trained on `b` alone, the walks over `a` are refused; in a mixture they serve `a`."""
    arguments = ["train", *SMALL, f"data.path={first / 'b'}", "name=x", f"run_dir={tmp_path / 'x'}", "loop.max_steps=1"]
    said = refused(capsys, *arguments, f"objective.walks=[{first / 'w.jsonl'}]")
    assert "these are walks over another corpus" in said and "w.jsonl" in said
    assert "nowhere.jsonl: no such file" in refused(capsys, *arguments, "objective.walks=[nowhere.jsonl]")


def test_rivals_from_runs(first, tmp_path, capsys):
    searched = ["eval", "retriever=bm25", f"data.path={first / 'a'}", "suite=pydocs", "split=train", "baselines=[]"]
    assert main([*searched, f"out={tmp_path / 'bm25'}"]) == 0
    run = tmp_path / "bm25" / "bm25"
    one = ["loop.max_steps=3"]
    for name, rivals in (
        ("trec", f"[{run / 'run.trec'}]"),
        ("hits", f"[{run / 'hits.jsonl'}]"),
        ("both", f"[bm25,{run / 'run.trec'}]"),
        ("bm25", "[bm25]"),
        ("none", "[]"),
    ):
        assert train(first / "a", tmp_path / name, *one, f"objective.rivals={rivals}") == 0
    logs = {name: log(tmp_path / name) for name in ("trec", "hits", "both", "bm25", "none")}
    assert logs["trec"] == logs["hits"]
    assert logs["trec"] != logs["none"] and logs["bm25"] != logs["none"]
    arguments = ["train", *SMALL, "name=x", f"run_dir={tmp_path / 'x'}", "loop.max_steps=1"]
    said = refused(capsys, *arguments, f"data.path={first / 'a'}", "objective.rivals=[splade]")
    assert "objective.rivals: splade is none of bm25, dense, and no file of that name" in said
    said = refused(capsys, *arguments, f"data.path={first / 'b'}", f"objective.rivals=[{run / 'run.trec'}]")
    assert "nodes that the corpus lacks, first 'p3s0'" in said and "run.trec" in said
    dev = f"objective.rivals=[{run / 'run.trec'}]"
    assert "no ranking of any training query" in refused(
        capsys, *arguments, f"data.path={first / 'a'}", dev, "data.split=dev"
    )


def test_dense_rivals_are_searched_like_any(first, tmp_path, monkeypatch):
    """BM25 in the place of MiniLM: the same rivals, hence the same losses."""
    asked = []

    def from_corpus(corpus, rows, device):
        asked.append((len(rows), device))
        return BM25.from_corpus(corpus, rows)

    monkeypatch.setattr(DenseRetriever, "from_corpus", from_corpus)
    for name in ("dense", "bm25"):
        assert train(first / "a", tmp_path / name, "loop.max_steps=2", f"objective.rivals=[{name}]") == 0
    assert log(tmp_path / "dense") == log(tmp_path / "bm25")
    assert asked == [(4, "cpu"), (16, "cpu")]


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ("{A: 1, nowhere: 2}", "nowhere: no such folder"),
        ("{A: 0}", "must be above 0"),
        ("{A: x}", "data.mix"),
        ("{A: 1, B: 0.001}", "gives it none of the"),
    ],
)
def test_mixtures_that_are_refused(first, tmp_path, capsys, mix, message):
    mix = mix.replace("A", str(first / "a")).replace("B", str(first / "b"))
    arguments = ["train", *SMALL, f"data.path={first / 'a'}", "name=x", f"run_dir={tmp_path / 'x'}", f"data.mix={mix}"]
    assert message in refused(capsys, *arguments)


def test_what_is_trained_on_need_not_be_what_is_measured(first, tmp_path):
    """Trained on `b` alone, measured on `a`."""
    more = [f"data.mix={{{first / 'b'}: 1}}", "loop.max_steps=2", "loop.best_metric=Hit@1"]
    assert train(first / "a", tmp_path / "r", *more) == 0
    state = json.loads(next((tmp_path / "r").rglob("state.json")).read_text())
    facts = state["fingerprint"]
    task = Task.open(first / "b")
    assert facts[f"data.mix.{first / 'b'}"] == f"1.0 of {task.fingerprint}"
    assert json.loads((tmp_path / "r" / "result.json").read_text())["metrics"].keys() >= {"Hit@1"}
    rows = gold_path_rows(task.corpus, task.queries("train"), task.qrels("train"))
    assert facts["objective.num_rows"] == str(len(rows))


def test_a_damaged_or_other_head_is_no_start(first, tmp_path, capsys):
    arguments = ["train", *SMALL, f"data.path={first / 'a'}", "name=x", f"run_dir={tmp_path / 'x'}", "loop.max_steps=1"]
    start = f"model.path={first / 'e0'}"
    said = refused(capsys, *arguments, start, "decision.readout=end")
    assert "pointer_head.safetensors: not the pointer head" in said and "decision.readout=end" in said
    # A pointer head is not asked for.
    assert main([*arguments, start, "decision.head=yes_no", "decision.min_label_mass=0"]) == 0
