import json
import logging
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from toy_objective import ToyModel, ToyObjective, toy_config

from retrail.train import checkpoint as ckpt
from retrail.train.config import FitConfig, OptimConfig, RuntimeConfig
from retrail.train.loop import fit
from retrail.train.optim import lr_multiplier
from retrail.train.resume import ResumeError
from retrail.train.sampler import step_rows
from retrail.train.step import NonFiniteError


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    # Nothing here outlives a power cut; that files are synced at all is tested in test_checkpoint.py.
    monkeypatch.setattr(os, "fsync", lambda handle: None)


DATA = {"data": "d1", "model": "toy"}
TIMES = {"seconds", "tokens_per_second", "rss_gb"}


def run(run_dir: Path, model=None, objective=None, config=None, evaluate=None, fingerprint=DATA, **loop):
    model = model or ToyModel()
    result = fit(
        model,
        objective or ToyObjective(),
        config=config or toy_config(**loop),
        run_dir=run_dir,
        evaluate=evaluate,
        fingerprint=fingerprint,
    )
    return result, model


def lines(run_dir: Path, name: str = "log.jsonl"):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def trajectory(run_dir: Path):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines(run_dir)]


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def close(one, two, tolerance=1e-6):
    return all(
        torch.allclose(a, b, atol=tolerance, rtol=0) for a, b in zip(one.parameters(), two.parameters(), strict=True)
    )


def plain_training(config: FitConfig):
    """The same training with nothing of the loop: one whole batch a step, means over it, torch's own AdamW."""
    model, objective = ToyModel(), ToyObjective()
    head = [p for n, p in model.named_parameters() if n.startswith("head")]
    rest = [p for n, p in model.named_parameters() if not n.startswith("head") and p.requires_grad]
    groups = [
        {"params": [p for p in part if (p.ndim > 1) == decays], "lr": lr, "base": lr, "weight_decay": 0.1 * decays}
        for part, lr in ((rest, config.optim.lr), (head, config.optim.head_lr))
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(groups)
    losses = []
    for step in range(config.loop.max_steps):
        rows = step_rows(step, seed=3, num_rows=objective.num_rows, batch_size=config.loop.batch_size)
        batch = objective.collate(rows)
        tokens, row_logits = model(batch.ids, batch.segment, len(rows))
        loss = 0.7 * cross_entropy(tokens, batch.targets, ignore_index=-100)
        loss = loss + 1.3 * binary_cross_entropy_with_logits(row_logits, batch.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*rest, *head], config.optim.max_grad_norm)
        for group in adamw.param_groups:
            group["lr"] = group["base"] * lr_multiplier(step, config.optim, config.loop.max_steps)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_equals_plain_pytorch_for_any_microbatches(tmp_path, max_tokens):
    # 8 microbatches of one row, some of a few, and one of all 8: the same losses and parameters after 10 steps.
    config = toy_config(max_tokens=max_tokens)
    config.optim.max_grad_norm = 2.0
    losses, expected = plain_training(config)
    _, model = run(tmp_path, config=config)
    assert [line["loss"] for line in lines(tmp_path)] == pytest.approx(losses, abs=1e-6)
    assert close(model, expected, 2e-6)


def test_log_line(tmp_path):
    run(tmp_path)
    log = lines(tmp_path)
    assert [line["step"] for line in log] == list(range(1, 11))
    for line in log:
        assert line["loss"] == pytest.approx(0.7 * line["loss/token"] + 1.3 * line["loss/row"])
        assert 0.0 <= line["log/correct"] <= 1.0
        assert line["padding_share"] == pytest.approx(0.5)
        rows = step_rows(line["step"] - 1, seed=3, num_rows=21, batch_size=8)
        assert line["tokens"] == sum(ToyObjective().length(*row) for row in rows)
        assert {"lr", "grad_norm", "tokens_per_second", "seconds", "rss_gb", "epoch"} <= set(line)


def test_log_every(tmp_path):
    run(tmp_path, log_every=4)
    assert [line["step"] for line in lines(tmp_path)] == [4, 8, 10]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_continued_run_is_bit_identical(tmp_path, dropout):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = toy_config(save_every=3, max_tokens=10_000)
    _, expected = run(whole, ToyModel(dropout), config=config)
    objective = ToyObjective()
    stop_at = 7

    def failing(rows, collate=objective.collate):
        failing.calls += 1
        if failing.calls > stop_at:
            raise OSError("the disk of the data went away")
        return collate(rows)

    failing.calls = 0
    objective.collate = failing
    with pytest.raises(OSError, match="went away"):
        run(parts, ToyModel(dropout), objective, config=config)
    assert [line["step"] for line in lines(parts)] == list(range(1, 8))
    # Whatever else was drawn between the two processes.
    torch.manual_seed(77), random.seed(77), np.random.seed(77)
    _, model = run(parts, ToyModel(dropout, seed=99), config=config)
    assert trajectory(parts) == trajectory(whole)
    assert same(model, expected)


def test_finished_run_returns_at_once(tmp_path):
    first, model = run(tmp_path, save_every=4, eval_every=5, evaluate=lambda m, s: {"x": float(s)}, best_metric="x")
    before = (tmp_path / "log.jsonl").read_bytes()
    second, again = run(
        tmp_path,
        ToyModel(seed=1),
        save_every=4,
        eval_every=5,
        evaluate=lambda m, s: pytest.fail("evaluated twice"),
        best_metric="x",
    )
    assert second == first and first.metrics == {"x": 10.0}
    assert (tmp_path / "log.jsonl").read_bytes() == before
    assert same(model, again)


def test_model_is_given_back_and_can_be_trained_again(tmp_path):
    model = ToyModel()
    config = toy_config()
    config.runtime = RuntimeConfig(device="cpu", mixed_precision="bf16")
    run(tmp_path / "a", model, config=config)
    assert "forward" not in vars(model) and model.training
    run(tmp_path / "b", model)
    # The second run is in fp32 again and equals one that starts from the same parameters.
    twin = ToyModel()
    ckpt.load_tensors(twin, tmp_path / "a" / "checkpoints" / "step_00000010")
    run(tmp_path / "c", twin)
    assert trajectory(tmp_path / "b") == trajectory(tmp_path / "c")


def test_bf16_autocast_is_used_when_asked(tmp_path):
    config = toy_config()
    config.runtime = RuntimeConfig(device="cpu", mixed_precision="bf16")
    run(tmp_path / "bf16", config=config)
    run(tmp_path / "fp32")
    losses = [[line["loss"] for line in lines(tmp_path / name)] for name in ("bf16", "fp32")]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def noisy_evaluation(model, step):
    assert not model.training and not torch.is_grad_enabled()
    random.random(), np.random.rand(3), torch.randn(5)
    model.dropout.train()
    return {"score": 1.0}


def test_evaluation_does_not_change_the_trajectory(tmp_path):
    model, other = ToyModel(0.3), ToyModel(0.3)
    run(tmp_path / "with", model, eval_every=3, evaluate=noisy_evaluation)
    run(tmp_path / "without", other)
    assert trajectory(tmp_path / "with") == trajectory(tmp_path / "without")
    assert same(model, other)
    assert [line["step"] for line in lines(tmp_path / "with", "eval.jsonl")] == [3, 6, 9, 10]


SCORES = {2: 0.1, 4: 0.9, 6: float("nan"), 8: 0.9, 10: 0.3}


@pytest.mark.parametrize(("mode", "step"), [("max", 4), ("min", 2)])
def test_best_checkpoint_stays(tmp_path, mode, step):
    result, _ = run(
        tmp_path,
        evaluate=lambda model, step: {"hit": SCORES[step]},
        eval_every=2,
        save_every=2,
        keep_checkpoints=1,
        best_metric="hit",
        best_mode=mode,
    )
    best = json.loads((tmp_path / "best.json").read_text())
    assert (best["metric"], best["value"], best["step"]) == ("hit", SCORES[step], step)
    assert result.best_checkpoint == tmp_path / best["checkpoint"]
    assert [s for s, _ in ckpt.checkpoints(tmp_path / "checkpoints")] == [step, 10]
    ckpt.load_tensors(ToyModel(), result.best_checkpoint)
    assert lines(tmp_path, "eval.jsonl")[2]["metrics"] == {"hit": None}


def test_unknown_best_metric_lists_the_names(tmp_path):
    with pytest.raises(ValueError, match="best_metric='hitt'.*hit@1, ndcg"):
        run(tmp_path, evaluate=lambda m, s: {"ndcg": 1.0, "hit@1": 0.0}, eval_every=2, best_metric="hitt")
    with pytest.raises(ValueError, match="best_metric='hit' needs an evaluation"):
        run(tmp_path / "b", best_metric="hit")


def test_killed_evaluation_is_repeated(tmp_path):
    def failing(model, step):
        if step == 6:
            raise RuntimeError("out of memory")
        return {"hit": float(step)}

    settings = {"eval_every": 3, "save_every": 6, "best_metric": "hit"}
    with pytest.raises(RuntimeError, match="out of memory"):
        run(tmp_path, evaluate=failing, **settings)
    result, _ = run(tmp_path, evaluate=lambda m, s: {"hit": float(s)}, **settings)
    assert [line["step"] for line in lines(tmp_path, "eval.jsonl")] == [3, 6, 9, 10]
    assert result.best is not None and result.best["step"] == 10


def test_best_whose_checkpoint_is_damaged_is_forgotten(tmp_path):
    settings = {"eval_every": 4, "save_every": 3, "best_metric": "hit", "keep_checkpoints": 9}
    first, model = run(tmp_path, evaluate=lambda m, s: {"hit": -abs(s - 8.0)}, **settings)
    assert first.best_checkpoint is not None
    for step in (8, 9, 10):
        (tmp_path / "checkpoints" / f"step_{step:08d}" / "state.json").write_text("{")
    result, again = run(tmp_path, evaluate=lambda m, s: {"hit": -abs(s - 8.0)}, **settings)
    assert result == first
    assert same(model, again)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": {"data": "d2", "model": "toy"}}, "data=d1, now it is d2"),
        ({"batch_size": 4}, "loop.batch_size=8, now it is 4"),
        ({"seed": 4}, "loop.seed=3, now it is 4"),
        ({"objective": ToyObjective(20)}, "objective.num_rows=21, now it is 20"),
        ({"max_steps": 20}, "loop.max_steps=10, now it is 20.*cosine.*other learning rates"),
        ({"max_steps": 5}, "loop.max_steps=5, but.*10 steps already"),
    ],
)
def test_other_run_folder_is_refused(tmp_path, change, message):
    run(tmp_path)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(ResumeError, match=message):
        run(tmp_path, **change)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_what_may_change(tmp_path, caplog):
    def constant(max_steps, **loop):
        config = toy_config(max_steps=max_steps, **loop)
        config.optim = OptimConfig(lr=1e-2, schedule="constant", warmup_ratio=0.0)
        return config

    run(tmp_path / "a", config=constant(6))
    with caplog.at_level(logging.WARNING):
        _, longer = run(tmp_path / "a", config=constant(10, max_tokens=20, save_every=2, log_every=2))
    assert "loop.max_tokens was 60, now 20" in caplog.text
    _, whole = run(tmp_path / "b", config=constant(10))
    assert close(longer, whole)


def test_second_process_is_refused(tmp_path):
    def inside(model, step):
        with pytest.raises(RuntimeError, match="another process is training into this folder"):
            run(tmp_path)
        return {}

    run(tmp_path, max_steps=1, evaluate=inside)


def test_non_finite_stops_before_the_step(tmp_path):
    objective = ToyObjective(poison=11)
    model = ToyModel()
    with pytest.raises(NonFiniteError, match=r"the loss is not finite on rank 0 \(rows .*row11") as error:
        run(tmp_path, model, objective, save_every=1, max_tokens=1)
    # One row a microbatch: only the bad row is named.
    assert "rows row11)" in str(error.value)
    step = int(str(error.value).split()[1].rstrip(":"))
    assert all("row11" not in str(r) for s in range(step - 1) for r in step_rows(s, seed=3, num_rows=21, batch_size=8))
    good = ckpt.newest_good(tmp_path / "checkpoints")
    assert (0 if good is None else good.step) == step - 1
    if good is not None:
        saved = ToyModel(seed=1)
        ckpt.load_tensors(saved, good.path)
        assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))


def test_non_finite_gradient_of_a_finite_loss(tmp_path):
    model = ToyModel()
    # d sqrt(x)/dx at 0 is infinite, times 0 is NaN: the loss stays what it was.
    model.frozen.requires_grad_(True)
    forward = model.forward
    model.forward = lambda *args: tuple(y + torch.sqrt(model.frozen - 1.0).sum() * 0.0 for y in forward(*args))
    own = model.forward
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(NonFiniteError, match="step 1: the gradient is not finite"):
        run(tmp_path, model)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    # A forward of the instance's own is put back, too.
    assert model.forward is own


def test_terms_and_counts_must_keep_their_names(tmp_path):
    objective = ToyObjective()
    objective.weights = {"token": 1.0}
    with pytest.raises(ValueError, match=r"\['row', 'token'\] are not those of its weights, \['token'\]"):
        run(tmp_path, objective=objective)


class Checkpointed(ToyModel):
    asked = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        self.asked = gradient_checkpointing_kwargs


def test_activation_checkpointing(tmp_path):
    config = toy_config(max_steps=1)
    config.runtime.activation_checkpointing = True
    _, model = run(tmp_path / "a", Checkpointed(), config=config)
    assert model.asked == {"use_reentrant": False}
    with pytest.raises(ValueError, match="runtime.activation_checkpointing"):
        run(tmp_path / "b", ToyModel(), config=config)


def test_loop_does_not_need_wandb(tmp_path, monkeypatch):
    # None makes every `import wandb` fail.
    monkeypatch.setitem(sys.modules, "wandb", None)
    result, _ = run(tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, result.steps + 1))
