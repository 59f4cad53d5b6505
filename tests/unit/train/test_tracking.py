import json
import os
import sys

import pytest
import torch
from torch import nn
from toy_objective import ToyModel, ToyObjective, toy_config

from retrail.train.config import TrackerConfig
from retrail.train.files import dumps, read_jsonl, write_text
from retrail.train.loop import fit
from retrail.train.tracking import JsonlFile, WandbTracker, flops_per_token, memory_gb, peak_flops


def test_lines_after_the_step_and_a_cut_line_are_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 0.1}\n{"step": 2, "loss": 0.2}\n{"step": 3, "loss": 0.3}\n{"step": 4, "lo')
    file = JsonlFile(path, 2)
    file.log(3, {"loss": 0.25, "bad": float("nan")})
    file.close()
    assert read_jsonl(path) == [
        {"step": 1, "loss": 0.1},
        {"step": 2, "loss": 0.2},
        {"step": 3, "loss": 0.25, "bad": None},
    ]


def test_broken_line_in_the_middle_names_file_and_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\noops\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"log.jsonl, line 2: not JSON"):
        JsonlFile(path, 9)


def test_numbers_survive_exactly(tmp_path):
    values = [0.1 + 0.2, 1e-300, torch.tensor(1 / 3).item()]
    assert json.loads(dumps({"x": values}))["x"] == values
    assert dumps({"x": [float("inf"), {"y": float("nan")}]}) == '{"x": [null, {"y": null}]}'


def test_failed_write_leaves_the_old_text(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\udc80")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_flops_by_hand():
    # Embedding (5 x 4) is not counted; frozen 4 x 6 weights and 6 biases: 4 each; trained 6 x 2 weights: 6 each.
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6).requires_grad_(False), nn.Linear(6, 2, bias=False))
    assert flops_per_token(model) == 4 * (24 + 6) + 6 * 12


def test_machine_numbers_on_a_cpu():
    assert peak_flops(torch.device("cpu")) is None
    found = memory_gb(torch.device("cpu"))
    assert set(found) == {"rss_gb"} and 0.01 < found["rss_gb"] < 1000


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA L4", 121e12), ("Tesla K80", None)],
)
def test_peak_of_known_devices(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak


def test_missing_wandb_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb, or tracker.wandb=false"):
        WandbTracker(TrackerConfig(wandb=True), tmp_path, {})


class FakeRun:
    def __init__(self):
        self.logged = []
        self.finished = False

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


def test_wandb_is_told_what_the_log_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    run, asked = FakeRun(), []

    class Wandb:
        @staticmethod
        def init(**settings):
            asked.append(settings)
            return run

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    config = toy_config(max_steps=3, eval_every=2)
    config.tracker = TrackerConfig(wandb=True, project="p")
    for _ in range(2):
        fit(
            ToyModel(),
            ToyObjective(),
            config=config,
            run_dir=tmp_path,
            evaluate=lambda m, s: {"hit": float(s)},
            fingerprint={"data": "d"},
        )
    log = read_jsonl(tmp_path / "log.jsonl")
    expected = [(line["step"], {k: v for k, v in line.items() if k != "step"}) for line in log]
    assert [entry for entry in run.logged if "loss" in entry[1]] == expected
    assert [entry for entry in run.logged if "eval/hit" in entry[1]] == [(2, {"eval/hit": 2.0}), (3, {"eval/hit": 3.0})]
    assert run.finished
    assert asked[0]["project"] == "p" and asked[0]["mode"] == "offline" and asked[0]["config"]["optim.lr"] == "0.01"
    # The second call continues the same run.
    assert asked[0]["id"] == asked[1]["id"] == (tmp_path / "wandb_id").read_text()


@pytest.mark.slow
def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    config = toy_config(max_steps=2)
    config.tracker = TrackerConfig(wandb=True)
    fit(ToyModel(), ToyObjective(), config=config, run_dir=tmp_path, fingerprint={"data": "d"})
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
