"""Make a store of static slates: which slates a search asks about with everything open, and reading them once."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from ...data_prep.corpus import Corpus
from ...data_prep.files import new_file, sync
from ...data_prep.formats.jsonio import read_json
from ..protocols import Candidate, DecisionScorer
from .batch import SlateBatch
from .candidates import Candidates
from .layout import PackedSlate
from .model import DecisionModel, check_keepable
from .scorer import LocalScorer
from .slates import split
from .static import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    UNFINISHED,
    StaticSlates,
    fingerprints,
    memory_tensors,
    refuse_difference,
    trunk_file,
)
from .trunks import padded_length, trunk_key
from .walk import Nodes, opened


@dataclass(frozen=True, slots=True)
class StaticSlate:
    """A slate to store: its level, its packed trunk, that trunk's key, and the bytes that it will take."""

    level: int
    packed: PackedSlate
    key: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StaticPlan:
    """What a store would hold, upper levels first, and the slates that its cap leaves out."""

    kept: tuple[StaticSlate, ...]
    left_out: tuple[StaticSlate, ...]

    @property
    def num_bytes(self) -> int:
        """Of the slates that are kept; headers of files, a few kB each, come on top."""
        return sum(slate.num_bytes for slate in self.kept)

    def lines(self) -> list[str]:
        """One line a level, for the user."""
        out = []
        for level in sorted({slate.level for slate in (*self.kept, *self.left_out)}):
            kept, left = ([s for s in part if s.level == level] for part in (self.kept, self.left_out))
            candidates, size = sum(len(s.packed.ends) for s in kept), sum(s.num_bytes for s in kept) / 1e6
            text = f"level {level + 1}: {len(kept)} slates, {candidates:,} candidates, {size:,.1f} MB"
            if left:
                more = sum(s.num_bytes for s in left) / 1e6
                text += f"; {len(left)} more ({more:,.1f} MB) do not fit max_gb and are read in every search"
            out.append(text)
        return out


def level_slates(corpus: Corpus, scorer: DecisionScorer, level: int) -> list[tuple[Candidate, ...]]:
    """The slates that a walk judges at `level` (0: the root) where everything above stays open, whatever the query.

    A leaf above `level` is judged again there, as in a walk.

    Raises:
        ValueError: the walk ends above that level.
    """
    nodes = Nodes.all(corpus.level_rows(0))
    for above in range(level):
        if corpus.are_leaves(nodes.rows_C).all():
            raise ValueError(f"there is no level {level + 1}: with everything open a walk ends at level {above + 1}")
        nothing = np.zeros(len(nodes))
        nodes = opened(corpus, nodes, nothing, nothing)
    return [slate.candidates for slate in split(Candidates(corpus).pool("", nodes.rows_C), scorer)]


def plan_static(scorer: LocalScorer, corpus: Corpus, levels: int, max_bytes: float | None = None) -> StaticPlan:
    """What a store of the upper `levels` holds, within `max_bytes` (None: without limit), upper levels first.

    Raises:
        ValueError: the tree has fewer levels, or this scorer cannot have static slates.
    """
    check_keepable(scorer.model, scorer.layout)
    size = _token_bytes(scorer.model)
    slates: dict[str, StaticSlate] = {}
    for level in range(levels):
        for candidates in level_slates(corpus, scorer, level):
            # The trunk is the same for every query and, with a yes/no head, for a choice.
            packed = scorer.layout.pack(["?"], candidates)
            key = trunk_key(packed)
            slates.setdefault(key, StaticSlate(level, packed, key, size(packed)))
    kept, total = [], 0.0
    for slate in slates.values():
        total += slate.num_bytes
        if max_bytes is not None and total > max_bytes:
            break
        kept.append(slate)
    return StaticPlan(tuple(kept), tuple(slates.values())[len(kept) :])


def _token_bytes(model: DecisionModel) -> Callable[[PackedSlate], int]:
    """How many bytes the memory of a slate's trunk takes."""
    config: Any = model.backbone.config.get_text_config()
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    number: int = model.backbone.dtype.itemsize
    token: int = 2 * config.num_hidden_layers * groups * head_dim * number

    def size(packed: PackedSlate) -> int:
        trunk = padded_length(len(packed.trunk))
        total = token * trunk + hidden * number
        if model.head is not None:
            keys = trunk if model.head.readout == "late" else len(packed.ends)
            total += 4 * (hidden * (keys + 1) + len(packed.ends))
        return total

    return size


def build_static(scorer: LocalScorer, corpus: Corpus, plan: StaticPlan, path: str | Path) -> StaticSlates:
    """Read the slates of a plan and store them in the folder `path`; a build that was stopped goes on where it was.

    Raises:
        FileExistsError: `path` holds something else than a build that was stopped.
        StaticError: it holds one of another model, prompt or corpus; names what differs.
        OSError: the disk lacks room for them, or is full.
        ValueError: the plan keeps no slate.
    """
    if not plan.kept:
        least = plan.left_out[0].num_bytes / 1e9
        raise ValueError(f"max_gb is too small for the first slate, which takes {least:.3g} GB")
    folder = Path(path)
    made_with = {"corpus": corpus.fingerprint, **fingerprints(scorer.model, scorer.layout)}
    _start(folder, made_with)
    left = [slate for slate in plan.kept if not trunk_file(folder, slate.key).is_file()]
    _check_room(folder, left)
    total = sum(len(slate.packed.trunk) for slate in plan.kept)
    done = total - sum(len(slate.packed.trunk) for slate in left)
    with tqdm(total=total, initial=done, desc="static slates", unit="token", mininterval=1.0) as bar:
        for slate in left:
            _store(scorer.model, slate.packed, trunk_file(folder, slate.key))
            bar.update(len(slate.packed.trunk))
    wanted = {trunk_file(folder, slate.key) for slate in plan.kept}
    for file in folder.glob("*.safetensors"):
        if file not in wanted:  # of a build with other levels that was stopped
            file.unlink()
    sizes = {slate.key: trunk_file(folder, slate.key).stat().st_size for slate in plan.kept}
    _write_json(folder / MANIFEST, {"made_with": made_with, "levels": _counts(plan.kept), "files": sizes})
    (folder / UNFINISHED).unlink()
    return StaticSlates.open(folder)


def check_target(folder: Path) -> None:
    """Raise FileExistsError unless there is nothing, an empty folder, or a build that was stopped."""
    if (folder / MANIFEST).is_file():
        raise FileExistsError(f"{folder} holds static slates already; remove it or choose another name")
    if not (folder / UNFINISHED).is_file() and not _is_empty(folder):
        raise FileExistsError(f"{folder} exists and holds no static slates; choose another name")


def _is_empty(folder: Path) -> bool:
    if not folder.is_dir():
        return not folder.exists()
    # A build may have been killed in its very first step.
    return all(file.name.startswith(f".{UNFINISHED}.") for file in folder.iterdir())


def _start(folder: Path, made_with: dict[str, Any]) -> None:
    """A folder to build in: new, or one in which the same build was stopped."""
    check_target(folder)
    unfinished = folder / UNFINISHED
    if unfinished.is_file():
        refuse_difference(read_json(unfinished).get("made_with", {}), made_with, folder)
    for file in folder.glob(".*.tmp"):  # what a killed build was writing
        file.unlink()
    _write_json(unfinished, {"made_with": made_with})


def _check_room(folder: Path, left: Sequence[StaticSlate]) -> None:
    needed, free = sum(slate.num_bytes for slate in left), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the slates need {needed / 1e9:.3g} GB and the disk has {free / 1e9:.3g} GB left; set max_gb or levels",
            str(folder),
        )


def _store(model: DecisionModel, packed: PackedSlate, file: Path) -> None:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            [memory] = model.read_trunks(SlateBatch.of([packed]).to(model.device))
    finally:
        model.train(was_training)
    tensors = {name: tensor.contiguous() for name, tensor in memory_tensors(memory.to("cpu")).items()}
    with new_file(file) as handle:
        try:
            save_file(tensors, handle.name)
        except SafetensorError as error:
            if f"os error {errno.ENOSPC}" in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file)) from error
            raise
        sync(handle.name)  # safetensors may have put a file of its own under this name


def _counts(slates: Sequence[StaticSlate]) -> list[int]:
    """Slates of each level."""
    return [sum(s.level == level for s in slates) for level in range(slates[-1].level + 1)]


def _write_json(file: Path, value: dict[str, Any]) -> None:
    with new_file(file) as out:
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **value}
        out.write((json.dumps(content, indent=2) + "\n").encode())
