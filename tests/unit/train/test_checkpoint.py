import errno
import json
import logging
import os
import shutil
import subprocess

import pytest
import torch
from toy_objective import ToyModel

from retrail.train import checkpoint as ckpt
from retrail.train.config import OptimConfig
from retrail.train.optim import Optimizer


def save(root, step, model=None):
    model = model or ToyModel()
    optimizer = Optimizer(model, OptimConfig(), 10)
    for p in optimizer.parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step(0)
    tensors = {
        ckpt.PARAMETERS: dict(optimizer.parameters),
        ckpt.OPTIMIZER: optimizer.tensors(),
        ckpt.BUFFERS: ckpt.persistent_buffers(model),
    }
    state = {"format": ckpt.FORMAT, "step": step, "rng": []}
    return ckpt.save_checkpoint(root, step, tensors=tensors, state=state)


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_round_trip(tmp_path):
    model = ToyModel()
    model.calls += 7
    path = save(tmp_path, 120, model)
    assert path.name == "step_00000120"
    found = ckpt.newest_good(tmp_path)
    assert found is not None and found.step == 120 and found.path == path
    other = ToyModel(seed=99)
    assert not torch.equal(other.body.weight, model.body.weight)
    ckpt.load_tensors(other, path)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_only_trained_parameters_are_saved(tmp_path):
    path = save(tmp_path, 1)
    from safetensors import safe_open

    with safe_open(str(path / ckpt.PARAMETERS), framework="pt") as file:
        assert "frozen" not in file.keys() and "body.weight" in file.keys()


def test_no_pickle(tmp_path):
    path = save(tmp_path, 1)
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json"}
    for file in path.iterdir():
        # Pickle protocol 2 and later starts with 0x80; torch.save is a zip (PK).
        assert not file.read_bytes().startswith((b"\x80", b"PK"))


FILES = [ckpt.PARAMETERS, ckpt.OPTIMIZER, ckpt.BUFFERS, ckpt.STATE, ckpt.MANIFEST]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "missing"])
def test_damage_falls_back_and_is_named(tmp_path, caplog, name, damage):
    save(tmp_path, 10)
    file = save(tmp_path, 20) / name
    data = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        # In the manifest, a digit of a checksum.
        at = data.index(b'"sha256": "') + 11 if name == ckpt.MANIFEST else len(data) // 2
        data[at] ^= 1
        file.write_bytes(data)
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
    with caplog.at_level(logging.WARNING):
        found = ckpt.newest_good(tmp_path)
    assert found is not None and found.step == 10
    if name != ckpt.MANIFEST or damage != "flip":
        assert str(file) in caplog.text
    assert "step_00000020" in caplog.text


def test_none_good_is_an_error_that_names_all(tmp_path):
    for step in (10, 20):
        (save(tmp_path, step) / ckpt.STATE).unlink()
    with pytest.raises(ckpt.CheckpointError, match=r"step_00000020.*step_00000010.*Delete"):
        ckpt.newest_good(tmp_path)


def test_none_at_all(tmp_path):
    assert ckpt.newest_good(tmp_path / "absent") is None
    assert ckpt.newest_good(tmp_path) is None


def test_tidy_removes_leftovers_and_moves_damaged_ones_aside(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "step_00000030.tmp").mkdir()
    (tmp_path / "step_00000030.tmp" / "parameters.safetensors").write_bytes(b"half")
    ckpt.tidy(tmp_path, 10)
    assert names(tmp_path) == ["step_00000010", "step_00000020.damaged"]


def test_prune_keeps_newest_and_protected(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    ckpt.prune(tmp_path, 2, {10})
    assert names(tmp_path) == ["step_00000010", "step_00000030", "step_00000040"]


@pytest.mark.parametrize("where", ["parameters", "optimizer", "manifest"])
def test_full_disk(tmp_path, monkeypatch, where):
    save(tmp_path, 10)
    before = {p: p.read_bytes() for p in (tmp_path / "step_00000010").iterdir()}
    original = ckpt._save_tensors

    def full(path, tensors):
        if path.name.startswith(where):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, tensors)

    def full_json(path, value):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(ckpt, "_save_tensors", full)
    if where == "manifest":
        monkeypatch.setattr(ckpt, "write_json", full_json)
    with pytest.raises(ckpt.CheckpointError, match="disk is full.*step 20 was not saved.*step_00000010"):
        save(tmp_path, 20)
    assert names(tmp_path) == ["step_00000010"]
    assert {p: p.read_bytes() for p in before} == before


def test_everything_is_on_the_disk_before_the_name_appears(tmp_path, monkeypatch):
    events = []
    rename, fsync = os.rename, os.fsync

    def synced(handle):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(source, target, **options):
        events.append(f"-> {os.path.basename(target)}")
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    path = save(tmp_path, 20)
    at = events.index("-> step_00000020")
    # JSON is synced under its own temporary name.
    before = {event.removesuffix(".tmp") for event in events[:at]}
    assert before >= {file.name for file in path.iterdir()} | {"step_00000020"}
    assert events[at + 1 :] == [tmp_path.name]


def test_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True
        ).returncode
    ):
        pytest.skip("a small file system cannot be mounted here")
    try:
        root = disk / "checkpoints"
        save(root, 10)
        (disk / "filler").write_bytes(b"x" * (shutil.disk_usage(disk).free - 8192))
        with pytest.raises(ckpt.CheckpointError, match="disk is full"):
            save(root, 20)
        assert names(root) == ["step_00000010"]
        assert ckpt.newest_good(root).step == 10
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_other_errors_leave_nothing_either(tmp_path, monkeypatch):
    def interrupt(path, tensors):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(ckpt, "_save_tensors", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 20)
    assert names(tmp_path) == []


def test_another_model_is_refused(tmp_path):
    path = save(tmp_path, 1)
    wide = ToyModel()
    wide.head = torch.nn.Linear(8, 2)
    with pytest.raises(ckpt.CheckpointError, match=r"'head.bias' has shape \(1,\), the model's is \(2,\)"):
        ckpt.load_tensors(wide, path)
    frozen = ToyModel()
    frozen.body.requires_grad_(False)
    with pytest.raises(ckpt.CheckpointError, match=r"'body.bias' is only in the checkpoint"):
        ckpt.load_tensors(frozen, path)


def test_unknown_format_is_refused(tmp_path):
    path = save(tmp_path, 1)
    state = json.loads((path / ckpt.STATE).read_text())
    (path / ckpt.STATE).write_text(json.dumps(state | {"format": 99}))
    manifest = json.loads((path / ckpt.MANIFEST).read_text())
    manifest["files"][ckpt.STATE] = {
        "sha256": ckpt._sha256(path / ckpt.STATE),
        "bytes": (path / ckpt.STATE).stat().st_size,
    }
    (path / ckpt.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ckpt.CheckpointError, match="format 99"):
        ckpt.read_checkpoint(path)
