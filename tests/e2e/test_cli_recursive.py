"""A state encoder by commands: train, go on, export, open in three ways, measure, search."""

import json
import shutil

import numpy as np
import pytest
import torch
from state_toy import tiny_encoder, toy_multihop_task

import retrail
from retrail.data_prep.corpus import Corpus, Node
from retrail.models.config import AdapterConfig, RecurseConfig
from retrail.models.exports import ExportError
from retrail.models.load import load_encoder
from retrail.models.protocols import State
from retrail.models.recursive.index import IndexMismatchError
from retrail.models.recursive.prompts import render
from retrail.scripts import eval as eval_command
from retrail.scripts import export as export_command
from retrail.scripts import search as search_command
from retrail.scripts import train as train_command
from retrail.scripts.cli import main
from retrail.train.export_folder import ExportCheckError
from retrail.train.export_state import StateFacts, check_state_export, export_state


def train(root, name, steps, *more):
    fixed = ["experiment=state_tiny", f"name={name}", f"data.path={root / 'task'}", f"run_dir={root / name}"]
    fixed += [f"loop.max_steps={steps}", "optim.schedule=constant", "optim.warmup_ratio=0", "loop.save_every=2"]
    return train_command.main([*fixed, *more])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a task, a run of four steps, and its export."""
    root = tmp_path_factory.mktemp("recursive")
    toy_multihop_task(root / "task")
    assert train(root, "run", 4) == 0
    assert export_command.main([f"run={root / 'run'}", f"to={root / 'export'}", "checkpoint=last"]) == 0
    return root


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_stopped_run_goes_on_as_if_it_had_not(made):
    assert train(made, "parts", 2) == 0
    assert train(made, "parts", 4) == 0
    assert losses(made / "parts") == losses(made / "run") and len(losses(made / "run")) == 4
    evaluations = [json.loads(line) for line in (made / "run" / "eval.jsonl").read_text().splitlines()]
    assert "Recall@5" in evaluations[-1]["metrics"]


def test_another_objective_is_refused(made, capsys):
    assert train(made, "run", 6, "contrast.temperature=0.02") != 0
    assert "contrast.temperature" in capsys.readouterr().err


def test_three_ways_to_open_it_give_the_same_vectors(made):
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel, AutoTokenizer

    folder = made / "export"
    encoder = load_encoder(folder, device="cpu", dtype="float32")
    states = [State("Which river?"), State("Which river?", ("Ada\nAda was born in Aachen.",), "continuation")]
    texts = [render(encoder.prompts, state).text for state in states] + ["Aachen\nlies on a river."]
    ours = np.concatenate([encoder.encode(states).vectors_SD, encoder.encode_documents(texts[2:])])
    plain = SentenceTransformer(str(folder), device="cpu").encode(texts)
    assert plain == pytest.approx(ours, abs=1e-5)
    assert SentenceTransformer(str(folder), device="cpu").encode_query("Which river?") == pytest.approx(
        ours[0], abs=1e-5
    )
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    for text, vector in zip(texts, ours, strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1]
        assert (hidden / hidden.norm()).numpy() == pytest.approx(vector, abs=1e-5)


def test_loaded_and_searched(made, tmp_path):
    retriever = retrail.load(made / "export", made / "task", index=tmp_path / "index")
    [hits] = retriever.search(["Which river is where Ada was born on?"], k=5)
    again = retrail.load(made / "export", made / "task", index=tmp_path / "index")
    assert again.search(["Which river is where Ada was born on?"], k=5)[0].ids == hits.ids and len(hits) == 5
    other = RecurseConfig(strategy="dense", readout="root")
    [root] = retrail.load(made / "export", made / "task", recurse=other).search(["Which river?"], k=5)
    assert len(root.trace) == 1
    with pytest.raises(ExportError, match="family recursive, which has no trunk_cache_bytes"):
        retrail.load(made / "export", made / "task", trunk_cache_bytes=1)
    with pytest.raises(IndexMismatchError, match="corpus was"):
        toy = Corpus.from_nodes([Node("a", None, "", "other")])
        retrail.load(made / "export", toy, index=tmp_path / "index")


def test_measured_and_searched_by_commands(made, capsys):
    folder = f"retriever={made / 'export'}"
    assert eval_command.main([folder, "suite=musique", f"data.path={made / 'task'}", f"out={made / 'eval'}"]) == 0
    shown = capsys.readouterr().out
    assert "recursive search, export" in shown and "BM25" in shown and "level 2" in shown
    asked = [folder, f"corpus={made / 'task'}", "query=Which river is where Ada was born on?", "k=3"]
    assert (
        search_command.main([*asked, "recurse.strategy=tree", "recurse.strategy_options={depth: 2, branching: 2}"]) == 0
    )
    shown = capsys.readouterr().out
    assert "state 2, from state 0, has read" in shown and "result: 3 hits" in shown
    for wrong, message in [
        ("navigate.keep=[3]", "is a state encoder, which has no navigate.* settings; use recurse.*"),
        ("recurse.strategy=trie", "search='trie' is not a choice"),
        ("recurse.strategy_options={width: 2}", "search=chain has no option 'width'"),
        ("recurse.readout=globl", "readout='globl' is not a choice"),
    ]:
        assert search_command.main([*asked, wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        ("calibrate", ["split=dev"], "holds a retriever of the family recursive; this takes one of decision"),
        ("pools", ["split=dev"], "holds a retriever of the family recursive; this takes one of decision"),
        ("static", [], "holds a retriever of the family recursive; this takes one of decision"),
        ("serve", [], "holds a retriever of the family recursive; this takes one of decision"),
        ("curve", ["split=dev"], "keeps no levels; a curve needs an exported decision model"),
        ("walks", [], "is a state encoder, which walks no levels; give a decision model"),
    ],
)
def test_commands_of_decision_models_refuse_it(made, tmp_path, capsys, command, more, message):
    arguments = [f"retriever={made / 'export'}", *more]
    arguments += {"static": [f"corpus={made / 'task'}", f"to={tmp_path / 'static'}"], "serve": ["port=0"]}.get(
        command, [f"data.path={made / 'task'}"]
    )
    if command == "walks":
        arguments.append(f"to={tmp_path / 'walks.jsonl'}")
    assert main([command, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_refuses_it(capsys):
    assert main(["plan", "experiment=state_tiny", "data.path=nowhere"]) == 2
    assert "a plan knows decision models alone so far" in capsys.readouterr().err


def test_damaged_exports_are_refused(made, tmp_path):
    folder = shutil.copytree(made / "export", tmp_path / "export")
    manifest = json.loads((folder / "retrieval.json").read_text())
    changed = json.loads(json.dumps(manifest))
    changed["prompts"]["head"] = "Query: {query}"
    (folder / "retrieval.json").write_text(json.dumps(changed))
    with pytest.raises(ExportError, match="prompts"):
        load_encoder(folder)
    (folder / "retrieval.json").write_text(json.dumps(manifest))
    assert check_state_export(folder, device="cpu") > 0.99999
    (folder / "retrieval.json").write_text(json.dumps(manifest | {"family": "decision"}))
    with pytest.raises(ExportError, match="of the family decision; this takes one of recursive"):
        check_state_export(folder, device="cpu")
    (folder / "retrieval.json").write_text("{")
    with pytest.raises(ExportError, match="not JSON"):
        check_state_export(folder, device="cpu")
    (folder / "retrieval.json").write_text(json.dumps(manifest))
    pooling = (folder / "1_Pooling" / "config.json").read_bytes()
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ExportCheckError, match="1_Pooling/config.json is missing"):
        check_state_export(folder, device="cpu")
    (folder / "1_Pooling" / "config.json").write_bytes(pooling)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-9] ^= 64
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ExportCheckError, match="model.safetensors is not the file that was exported"):
        check_state_export(folder, device="cpu")


FACTS = StateFacts(name="x", recurse=RecurseConfig(), training={}, data={}, metrics={"Recall@5": 0.5})


def test_a_merge_that_changes_nothing_is_refused(tmp_path):
    encoder = tiny_encoder(AdapterConfig(rank=2))  # as it was made: its product is zero
    with pytest.raises(ExportCheckError, match="gives the vectors of the untrained one"):
        export_state(encoder, tmp_path / "x", FACTS, [State("q")], ["a document"])
    assert list(tmp_path.iterdir()) == []


def test_a_full_model_is_exported_too(tmp_path):
    encoder = tiny_encoder(path="tiny:llama")
    folder = export_state(encoder, tmp_path / "x", FACTS, [State("q")], ["a document"])
    assert np.allclose(load_encoder(folder, device="cpu", dtype="float32").encode([State("q")]).vectors_SD,
                       encoder.encode([State("q")]).vectors_SD, atol=1e-6)  # fmt: skip
    with pytest.raises(ValueError, match="at least one state and one document"):
        export_state(encoder, tmp_path / "y", FACTS, [], [])
