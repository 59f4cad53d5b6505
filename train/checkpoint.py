"""Checkpoints: `checkpoints/step_00000120/` is whole, checksummed and free of pickle, or it is not there.

parameters.safetensors   the trained parameters, by name
buffers.safetensors      persistent buffers, if the model has any
optimizer.safetensors    AdamW's moments and step counts, `exp_avg:NAME` ...
state.json               step, random states of each rank, versions, fingerprint, names and shapes
manifest.json            sha256 and size of each of these
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..data_prep.files import sync
from .files import TEMPORARY, write_json
from .optim import trainable

logger = logging.getLogger(__name__)

FORMAT = 1
PARAMETERS = "parameters.safetensors"
BUFFERS = "buffers.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
REQUIRED = (PARAMETERS, OPTIMIZER, STATE)
NAME = re.compile(r"step_(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or is not what was written."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint: its folder, its step, and `state.json`."""

    path: Path
    step: int
    state: dict[str, Any]


def step_path(root: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return root / f"step_{step:08d}"


def checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of what is there, whole or not, oldest first."""
    if not root.is_dir():
        return []
    return sorted((int(m[1]), path) for path in root.iterdir() if (m := NAME.fullmatch(path.name)))


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the model's state, by name (not those that it computes anew, as rotary tables)."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write, wait for the disk, and read the header back. A full disk is an OSError, as for other files."""
    try:
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, str(path))
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    sync(path)
    with safe_open(str(path), framework="pt") as file:
        if set(file.keys()) != set(tensors):
            raise CheckpointError(f"{path}: names read back differ from names written")


def _fill(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    for name, group in tensors.items():
        _save_tensors(folder / name, group)
    write_json(folder / STATE, state)
    written = sorted(folder.iterdir())
    files = {path.name: {"sha256": _sha256(path), "bytes": path.stat().st_size} for path in written}
    write_json(folder / MANIFEST, {"format": FORMAT, "files": files})
    sync(folder)


def save_checkpoint(
    root: Path, step: int, *, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> Path:
    """The folder of a new checkpoint, written under a temporary name beside it and then renamed.

    Raises CheckpointError if the disk is full; earlier checkpoints are untouched and nothing half-written stays.
    """
    final = step_path(root, step)
    temporary = final.with_name(final.name + TEMPORARY)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _fill(temporary, tensors, state)
        if final.exists():
            # Only after falling back past it: renaming over a full folder is not possible.
            shutil.rmtree(final)
        temporary.rename(final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        kept = [path.name for _, path in checkpoints(root)]
        raise CheckpointError(
            f"{final}: the disk is full ({error.strerror}), so step {step} was not saved. "
            f"Whole checkpoints: {', '.join(kept) or 'none'}. Free space or lower loop.keep_checkpoints, "
            "then give the same command to go on"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(root)
    return final


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in `path`, after its checksums. Raises CheckpointError that names file and reason."""
    manifest = path / MANIFEST
    try:
        recorded: dict[str, dict[str, Any]] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        expected = {name: (str(entry["sha256"]), int(entry["bytes"])) for name, entry in recorded.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest}: cannot be read ({type(error).__name__}: {error})") from error
    for name in REQUIRED:
        if name not in expected:
            raise CheckpointError(f"{manifest}: does not list {name}")
    for name, (digest, size) in expected.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file}: has {file.stat().st_size} bytes instead of {size}")
        if _sha256(file) != digest:
            raise CheckpointError(f"{file}: its sha256 is not the one in {MANIFEST}")
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path / STATE}: format {state.get('format')}, this version reads {FORMAT}")
    return Checkpoint(path, int(state["step"]), state)


def newest_good(root: Path) -> Checkpoint | None:
    """The newest whole checkpoint (None if there never was one), with a warning for each damaged one.

    Raises CheckpointError if there are checkpoints and all are damaged.
    """
    damaged: list[str] = []
    for _, path in reversed(checkpoints(root)):
        try:
            return read_checkpoint(path)
        except CheckpointError as error:
            logger.warning("skipping a damaged checkpoint: %s", error)
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {root} is whole: {'; '.join(damaged)}. Delete {root} to start from the beginning, or "
            "put a copy back"
        )
    return None


def tidy(root: Path, good_step: int) -> None:
    """Remove what killed runs left half-written, and rename checkpoints after `good_step`, which are damaged."""
    if not root.is_dir():
        return
    for path in root.iterdir():
        if path.name.endswith(TEMPORARY):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for step, path in checkpoints(root):
        if step > good_step:
            aside = path.with_name(path.name + ".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def prune(root: Path, keep: int, protected: Iterable[int]) -> None:
    """Delete all but the `keep` newest checkpoints and the protected steps."""
    stay = set(protected)
    for step, path in checkpoints(root)[:-keep]:
        if step not in stay:
            # Renamed first: a deletion that is cut short leaves rubbish to tidy up, not a damaged checkpoint.
            rubbish = path.rename(path.with_name(path.name + TEMPORARY))
            shutil.rmtree(rubbish)


def load_tensors(model: nn.Module, path: Path) -> None:
    """Load trained parameters and buffers of a checkpoint folder into `model`, in place.

    Raises CheckpointError that names the first parameter whose name or shape is not as saved.
    """
    targets: list[tuple[str, Mapping[str, Tensor]]] = [(PARAMETERS, trainable(model))]
    if (path / BUFFERS).exists():
        targets.append((BUFFERS, persistent_buffers(model)))
    for name, own in targets:
        saved = load_file(str(path / name))
        for key in sorted(set(saved) ^ set(own)):
            where = "the checkpoint" if key in saved else "the model"
            raise CheckpointError(f"{path / name}: {key!r} is only in {where}; the model or adapter settings changed")
        with torch.no_grad():
            for key, value in saved.items():
                if value.shape != own[key].shape:
                    raise CheckpointError(
                        f"{path / name}: {key!r} has shape {tuple(value.shape)}, the model's is {tuple(own[key].shape)}"
                    )
                own[key].copy_(value)


def load_optimizer_tensors(path: Path) -> dict[str, Tensor]:
    """AdamW's state of a checkpoint folder, as `Optimizer.load_tensors` takes it."""
    return load_file(str(path / OPTIMIZER))
