"""What exports of all families have in common: how a folder comes to be, what it says of itself, its checksums."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data_prep.files import new_folder, scratch_folder, sha256_file, swap_folder
from ..models.exports import FORMAT_VERSION, RETRIEVAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a folder says of itself besides its weights.

    training: the settings of the run; data: name and fingerprint of what it was trained on; metrics: numbers by name.
    """

    name: str
    training: Mapping[str, Any]
    data: Mapping[str, str]
    metrics: Mapping[str, float]


class ExportCheckError(RuntimeError):
    """The written folder does not give the answers of the model it was written from."""


def check_target(to: str | Path) -> None:
    """Raise FileExistsError unless `to` is absent, an empty folder, or an export (which is then replaced)."""
    target = Path(to)
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise FileExistsError(f"{target} is no folder; choose another name")
    if any(target.iterdir()) and not (target / RETRIEVAL).is_file():
        raise FileExistsError(f"{target} exists and is no export of this toolkit; choose another folder")


def publish(target: Path, write: Callable[[Path], None], check: Callable[[Path], object]) -> Path:
    """`write` a folder beside `target`, `check` it, and only then give it that name; an export there stays till then.

    Raises:
        FileExistsError: `target` holds something that is no export.
    """
    check_target(target)
    with scratch_folder(target) as scratch:
        folder = scratch / "export"
        with new_folder(folder) as written:
            write(written)
        check(folder)
        if target.exists():
            swap_folder(folder, target, scratch / "old")
        else:
            folder.rename(target)
    return target


def write_facts(folder: Path, family: str, dtype: str, facts: Facts, more: Mapping[str, Any], card: str) -> None:
    """Write `retrieval.json`, with checksums of all files that are there by now, and the model card."""
    files = {
        str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": sha256_file(p)}
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
    manifest = {
        "family": family,
        "format_version": FORMAT_VERSION,
        "name": facts.name,
        "dtype": dtype,
        "training": facts.training,
        "data": facts.data,
        "metrics": facts.metrics,
        **more,
        "files": files,
    }
    (folder / RETRIEVAL).write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ExportCheckError that names the first file that is missing or is not the one that was written."""
    for name, written in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise ExportCheckError(f"{file} is missing; export again")
        if file.stat().st_size != written["bytes"] or sha256_file(file) != written["sha256"]:
            raise ExportCheckError(f"{file} is not the file that was exported; export again")


def base_model(facts: Facts) -> tuple[str, str]:
    """(what was trained, a line of front matter that links the Hub to it, or "")."""
    base = str(facts.training.get("model", {}).get("path", "unknown"))
    # The Hub links to a base model of its own; a folder or packaged model has no page there.
    on_hub = base.count("/") == 1 and base[0].isalnum() and not Path(base).exists()
    return base, f"base_model: {base}\n" if on_hub else ""


def usage(facts: Facts) -> str:
    """The part of a model card that shows how to open and search it."""
    return f"""```python
import retrail

retriever = retrail.load("{facts.name}", corpus="path/to/prepared/folder")
hits = retriever.search(["your question"], k=5)
```"""


def numbers(facts: Facts) -> str:
    """The part of a model card that says what it was trained on and what was measured."""
    rows = [f"| {name} | {value:.4f} |" for name, value in facts.metrics.items()]
    table = "\n".join(["| measure | value |", "|---|---|", *rows]) if rows else "No evaluation was run."
    return f"""## Numbers

Data: {facts.data.get("name", "unknown")}, fingerprint `{facts.data.get("fingerprint", "unknown")[:16]}`.

{table}"""
