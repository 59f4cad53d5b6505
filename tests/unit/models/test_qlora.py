"""QLoRA: a base in 4 bits under LoRA, trained, exported as plain weights that answer alike."""

import json

import numpy as np
import pytest
import torch
from decision_toy import shake, tiny_decision, toy_objective, toy_task

from retrail.models import backbone as module
from retrail.models.backbone import load_backbone
from retrail.models.config import AdapterConfig, ModelConfig
from retrail.models.decision.build import build_decision
from retrail.models.decision.scorer import LocalScorer
from retrail.models.protocols import Candidate, Slate
from retrail.scripts.cli import main
from retrail.scripts.run_folder import load_settings
from retrail.train.checkpoint import load_tensors

CPU = torch.device("cpu")


def test_what_it_needs_is_said(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"adapter.kind=qlora needs bitsandbytes: pip install 'retrail\[qlora\]'"):
        load_backbone(ModelConfig(path="tiny:llama"), CPU, four_bit=True)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="model.path=tiny:llama cannot be held in 4 bits"):
        load_backbone(ModelConfig(path="tiny:llama"), CPU, four_bit=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The tiny model as a folder."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("base")
    model, layout = tiny_decision("pointer")
    model.backbone.save_pretrained(folder)
    layout.tokenizer.hf.save_pretrained(folder)
    return folder


def build(base, head, **more):
    _, layout = tiny_decision(head)
    adapter = AdapterConfig(kind="qlora", rank=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_decision(ModelConfig(path=str(base), dtype="float32"), layout.config, CPU, adapter, **more)


@pytest.mark.parametrize("head", ["pointer", "yes_no"])
def test_only_the_adapter_learns(base, head):
    model, layout = build(base, head)
    kinds = {type(m).__name__ for n, m in model.named_modules() if n.endswith("q_proj.base_layer")}
    assert kinds == {"Linear4bit"}
    shake(model)
    objective = toy_objective(layout)
    sum(objective.loss(model, objective.collate([(0, 0), (9, 0)])).sums.values()).backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name or name.startswith("head.") for name in trained)
    still = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert still == []


def test_plain_weights_of_the_same_values(base):
    """What is merged and exported answers as the model in 4 bits did, which is not what the unrounded one says."""
    (model, layout), (plain, _) = build(base, "pointer"), build(base, "pointer", to_merge=True)
    shake(model)
    state = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(state.pop(name))
    assert not state
    batch = toy_objective(layout).collate([(0, 0), (9, 0), (17, 0)]).slates
    # In training mode, because in the other one bitsandbytes computes in bfloat16 on a CPU.
    one, two = (m.train().yes_logits(batch) for m in (model, plain))
    torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
    untouched = load_backbone(ModelConfig(path=str(base), dtype="float32"), CPU)[0]
    weight = plain.backbone.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
    assert 1e-4 < (weight - untouched.model.layers[0].mlp.up_proj.weight).abs().max() < 0.1


def test_trained_and_exported(base, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    toy_task(tmp_path / "task")
    arguments = ["experiment=decision_tiny", "adapter=qlora", f"model.path={base}", "model.dtype=float32", "name=q"]
    arguments += [f"data.path={tmp_path / 'task'}", f"run_dir={tmp_path / 'q'}", "runtime.threads=1", "eval.limit=3"]
    assert main(["train", *arguments, "loop.max_steps=25", "loop.save_every=0"]) == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "q" / "log.jsonl").read_text().splitlines()]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert main(["export", f"run={tmp_path / 'q'}", f"to={tmp_path / 'e'}"]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "e" / "config.json").read_text())
    model, layout = trained(tmp_path / "q")
    manifest = json.loads((tmp_path / "e" / "retrieval.json").read_text())
    probe = manifest["probes"][0]
    [answer] = LocalScorer(model.eval(), layout).yes([slate_of(probe)])
    assert answer.values_C == pytest.approx(probe["yes"], abs=0.02)


def trained(run_dir):
    """The trained model, still in 4 bits."""
    settings = load_settings(run_dir)
    model, layout = build_decision(settings.model, settings.decision, CPU, settings.adapter)
    load_tensors(model, run_dir / "checkpoints" / "step_00000025")
    return model, layout


def slate_of(probe):
    return Slate(probe["query"], tuple(Candidate(**c) for c in probe["candidates"]))
