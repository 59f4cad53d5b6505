"""Exports: the same answers merged, reloaded, and by transformers alone; damage is found; nothing is half-written."""

import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from decision_toy import shake, tiny_decision, toy_objective, toy_task
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from retrail.data_prep.files import sha256_file
from retrail.models.config import AdapterConfig, NavigateConfig
from retrail.models.decision.scorer import LocalScorer
from retrail.models.exports import ExportError, read_export
from retrail.models.load import load, load_scorer
from retrail.scripts import export as command
from retrail.scripts import train as train_command
from retrail.scripts.run_folder import load_settings
from retrail.train import export as module
from retrail.train.checkpoint import CheckpointError
from retrail.train.export import ExportFacts, check_export, export_decision
from retrail.train.export_folder import ExportCheckError, check_target

FACTS = ExportFacts(
    name="d0",
    navigate=NavigateConfig(keep=[3, 2], choose=2),
    training={"model": {"path": "Org/Base-1B"}, "optim": {"lr": 1e-3}},
    data={"name": "toy", "fingerprint": "0123456789abcdef0123"},
    metrics={"Hit@1": 0.25, "MRR@10": 1 / 3},
)


def trained(head, kind="lora"):
    model, layout = tiny_decision(head, AdapterConfig(kind=kind, rank=4))
    return shake(model, 0.05), layout


def probes(layout):
    objective = toy_objective(layout)
    return [objective.slate(row, 0)[0] for row in (0, 9, 17)]


def answers(scorer, slates):
    return [[y.values_C, c.values_C] for y, c in zip(scorer.yes(slates), scorer.choose(slates), strict=True)]


def largest_difference(one, two):
    return max(np.abs(a - b).max() for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Head -> (folder, probes, answers before the merge)."""
    out = {}
    for head in ("pointer", "yes_no"):
        model, layout = trained(head)
        slates = probes(layout)
        before = answers(LocalScorer(model, layout), slates)
        out[head] = (
            export_decision(model, layout, tmp_path_factory.mktemp(head) / "d0", FACTS, slates),
            slates,
            before,
        )
    return out


@pytest.fixture
def copy(exported, tmp_path):
    """An export to damage."""
    return shutil.copytree(exported["yes_no"][0], tmp_path / "d0")


@pytest.mark.parametrize("head", ["pointer", "yes_no"])
def test_merged_and_reloaded_answers_are_those_of_the_adapter(exported, head):
    folder, slates, before = exported[head]
    scorer = load_scorer(folder, device="cpu", dtype="float32")
    assert not any("lora" in name for name, _ in scorer.model.named_parameters())
    assert largest_difference(answers(scorer, slates), before) < 1e-4
    plain, layout = tiny_decision(head)
    assert largest_difference(answers(LocalScorer(plain, layout), slates), before) > 1e-2, "the adapter does nothing"
    assert check_export(folder, device="cpu") < 1e-5


def test_full_fine_tuning(tmp_path):
    model, layout = trained("pointer", "full")
    slates = probes(layout)
    before = answers(LocalScorer(model, layout), slates)
    folder = export_decision(model, layout, tmp_path / "d0", FACTS, slates)
    assert largest_difference(answers(load_scorer(folder, device="cpu", dtype="float32"), slates), before) < 1e-5


def test_transformers_alone_gives_the_same_yes_and_no(exported):
    folder, slates, before = exported["yes_no"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scorer = load_scorer(folder, device="cpu", dtype="float32")
    yes, no = scorer.layout.label_ids
    for slate, (values, _) in zip(slates, before, strict=True):
        for n, value in enumerate(values):
            packed = scorer.layout.render(slate, [n])
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([packed.trunk + packed.branches[0]])).logits[0, -1]
            assert torch.sigmoid(logits[yes] - logits[no]).item() == pytest.approx(value, abs=1e-4)


def test_what_the_folder_says_of_itself(exported):
    folder, slates, _ = exported["pointer"]
    manifest = json.loads((folder / "retrieval.json").read_text())
    assert manifest["family"] == "decision" and manifest["format_version"] == 1
    assert manifest["dtype"] == "torch.float32"
    assert manifest["navigate"] == asdict(NavigateConfig(keep=[3, 2], choose=2))
    assert manifest["metrics"] == FACTS.metrics and manifest["data"] == FACTS.data
    assert manifest["training"] == FACTS.training
    assert manifest["contract"]["decision"]["head"] == "pointer"
    assert len(manifest["contract"]["prompt"]["sha256"]) == 64
    assert 0 <= manifest["merge_drift"] < 1e-4
    assert [p["query"] for p in manifest["probes"]] == [slate.query for slate in slates]
    assert set(manifest["files"]) == {p.name for p in folder.iterdir()} - {"retrieval.json", "README.md"}
    assert {"model.safetensors", "pointer_head.safetensors", "tokenizer.json"} <= set(manifest["files"])
    assert not list(folder.rglob("*.bin"))
    assert read_export(folder).navigate == NavigateConfig(keep=[3, 2], choose=2)


def test_model_card(exported):
    card = (exported["pointer"][0] / "README.md").read_text()
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert "base_model: Org/Base-1B" in front.splitlines() and "library_name: transformers" in front
    assert "| Hit@1 | 0.2500 |" in body and "| MRR@10 | 0.3333 |" in body
    assert "0123456789abcdef" in body and "head `pointer`" in body


def test_a_local_base_model_is_not_linked(tmp_path):
    model, layout = trained("pointer")
    facts = ExportFacts(name="x", navigate=NavigateConfig(), training={}, data={}, metrics={})
    card = (export_decision(model, layout, tmp_path / "x", facts, probes(layout)[:1]) / "README.md").read_text()
    assert "base_model" not in card and "No evaluation was run." in card


def noise(folder):
    """Other weights in a file that is a whole safetensors file."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    changed = {name: w + 0.3 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def flip(folder):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def cut(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def reseal(folder):
    """Checksums of the files as they are now."""
    manifest = json.loads((folder / "retrieval.json").read_text())
    for name, entry in manifest["files"].items():
        entry.update(bytes=(folder / name).stat().st_size, sha256=sha256_file(folder / name))
    (folder / "retrieval.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("damage", [noise, flip, cut, lambda folder: (folder / "model.safetensors").unlink()])
def test_a_damaged_file_is_named(copy, damage):
    damage(copy)
    with pytest.raises(ExportCheckError, match="model.safetensors"):
        check_export(copy, device="cpu")


def test_other_weights_are_found_by_their_answers(copy):
    noise(copy)
    reseal(copy)
    with pytest.raises(ExportCheckError, match="reloading .* changed a probability by 0"):
        check_export(copy, device="cpu")


def test_weights_that_do_not_load(copy):
    cut(copy)
    reseal(copy)
    with pytest.raises((ExportCheckError, ExportError), match="model.safetensors: damaged or cut off"):
        check_export(copy, device="cpu")


def test_another_tokenizer_is_refused(copy):
    text = (copy / "tokenizer.json").read_text()
    assert '"<think>"' in text
    (copy / "tokenizer.json").write_text(text.replace('"<think>"', '"<thunk>"'))
    with pytest.raises(ExportError, match="tokenizer_sha256"):
        load_scorer(copy, device="cpu")


def broken_save(self, folder, *args, **kwargs):
    (folder / "half.safetensors").write_bytes(b"half")
    raise OSError(28, "No space left on device")


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    model, layout = trained("pointer")
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", broken_save)
    with pytest.raises(OSError, match="No space"):
        export_decision(model, layout, tmp_path / "out" / "d0", FACTS, probes(layout))
    assert list((tmp_path / "out").iterdir()) == []


def content(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def fails_to_check(monkeypatch):
    def refuse(*args, **kwargs):
        raise ExportCheckError("other answers")

    monkeypatch.setattr(module, "check_export", refuse)


def fails_to_save(monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", broken_save)


def fails_to_rename(monkeypatch):
    rename = module.Path.rename

    def refuse(self, target):
        if self.name == "export":
            raise OSError(5, "the disk is gone")
        return rename(self, target)

    monkeypatch.setattr(module.Path, "rename", refuse)


@pytest.mark.parametrize("failure", [fails_to_check, fails_to_save, fails_to_rename])
def test_a_failing_export_leaves_the_old_one(copy, monkeypatch, failure):
    before = content(copy)
    model, layout = trained("pointer")
    failure(monkeypatch)
    with pytest.raises((OSError, ExportCheckError)):
        export_decision(model, layout, copy, FACTS, probes(layout))
    assert content(copy) == before
    assert [p.name for p in copy.parent.iterdir()] == ["d0"]


def test_an_old_export_is_replaced_whole(copy):
    (copy / "old file").touch()
    leftover = copy.parent / ".d0.0123456789ab.tmp"  # of a process that was killed
    (leftover / "export").mkdir(parents=True)
    (leftover / "export" / "model.safetensors").write_bytes(b"half")
    model, layout = trained("pointer")
    export_decision(model, layout, copy, FACTS, probes(layout))
    assert read_export(copy).manifest["contract"]["decision"]["head"] == "pointer"
    assert not (copy / "old file").exists()
    assert sorted(p.name for p in copy.parent.iterdir()) == [leftover.name, "d0"]
    check_export(copy, device="cpu")


def test_other_targets_are_refused(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("thesis", "file", "link"):
        with pytest.raises(FileExistsError, match=name):
            check_target(tmp_path / name)
    model, layout = trained("pointer")
    with pytest.raises(FileExistsError, match="no export of this toolkit"):
        export_decision(model, layout, tmp_path / "thesis", FACTS, probes(layout))
    assert (tmp_path / "thesis" / "chapter1").exists()
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty")
    check_target(tmp_path / "new" / "deep")


def test_without_probes_nothing_could_be_compared(tmp_path):
    model, layout = trained("pointer")
    with pytest.raises(ValueError, match="at least one probe"):
        export_decision(model, layout, tmp_path / "d0", FACTS, [])


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A short run whose first evaluation was the best, unless said otherwise below."""
    folder = tmp_path_factory.mktemp("run")
    toy_task(folder / "task")
    arguments = ["experiment=decision_tiny", f"data.path={folder / 'task'}", f"run_dir={folder / 'r'}", "name=r"]
    arguments += ["loop.max_steps=4", "loop.save_every=2", "loop.eval_every=2", "runtime.threads=1"]
    assert train_command.main(arguments) == 0
    return folder / "r"


@pytest.fixture
def run(run_folder, tmp_path):
    """A copy in which step 2 is the best."""
    folder = shutil.copytree(run_folder, tmp_path / "r")
    best = {"metric": "Hit@1", "mode": "max", "value": 0.9, "step": 2, "checkpoint": "checkpoints/step_00000002"}
    (folder / "best.json").write_text(json.dumps(best))
    lines = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    lines[0]["metrics"]["Hit@1"] = 0.9
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def exported_from(run, to, **more):
    return command.main([f"run={run}", f"to={to}", *(f"{key}={value}" for key, value in more.items())])


@pytest.mark.parametrize(("which", "step", "hit"), [("best", 2, 0.9), ("last", 4, None)])
def test_best_and_last_checkpoint(run, tmp_path, capsys, which, step, hit):
    assert exported_from(run, tmp_path / "out", checkpoint=which) == 0
    assert f"exported step_{step:08d}" in capsys.readouterr().out
    manifest = read_export(tmp_path / "out").manifest
    assert manifest["training"]["checkpoint"] == f"step_{step:08d}"
    saved = load_file(run / "checkpoints" / f"step_{step:08d}" / "parameters.safetensors")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(weights[name], saved["backbone." + name])
    # The numbers of the card are those of this checkpoint.
    lines = {line["step"]: line for line in map(json.loads, (run / "eval.jsonl").read_text().splitlines())}
    assert manifest["metrics"] == lines[step]["metrics"]
    assert hit is None or manifest["metrics"]["Hit@1"] == hit
    settings = load_settings(run)
    assert manifest["training"]["loop"]["max_steps"] == settings.loop.max_steps == 4
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def halve(run, step):
    file = run / "checkpoints" / f"step_{step:08d}" / "parameters.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_a_checkpoint_cut_in_half(run, tmp_path, capsys, caplog):
    halve(run, 4)
    assert exported_from(run, tmp_path / "out", checkpoint="last") == 0
    assert "exported step_00000002" in capsys.readouterr().out
    assert "skipping a damaged checkpoint" in caplog.text and "parameters.safetensors" in caplog.text


def test_the_best_checkpoint_cut_in_half(run, tmp_path, capsys):
    halve(run, 2)
    assert exported_from(run, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "parameters.safetensors" in error and "checkpoint=last" in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_no_whole_checkpoint(run, tmp_path, capsys):
    halve(run, 2)
    halve(run, 4)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        command.find_checkpoint(run, "last")
    shutil.rmtree(run / "checkpoints")
    (run / "best.json").unlink()
    assert exported_from(run, tmp_path / "out") == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_mistakes_are_told_before_any_work(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "load_settings", lambda folder: pytest.fail("worked"))
    (tmp_path / "thesis").write_text("mine")
    assert exported_from(run, tmp_path / "thesis") == 2
    assert exported_from(run, tmp_path / "out", hub="no org") == 2
    assert "must be ORG/NAME" in capsys.readouterr().err


def test_other_folders_are_no_runs(tmp_path, capsys):
    assert exported_from(tmp_path, tmp_path / "out") == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_one_call_opens_it(run, tmp_path):
    assert exported_from(run, tmp_path / "out") == 0
    retriever = load(tmp_path / "out", load_settings(run).data.path, device="cpu")
    [hits] = retriever.search(["where is jam?"], k=3)
    assert len(hits) == 3
