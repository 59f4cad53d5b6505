"""What an exported folder says of itself: `retrieval.json`, read and checked before anything heavy is opened."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .config import NavigateConfig, RecurseConfig

RETRIEVAL = "retrieval.json"
FORMAT_VERSION = 1
FAMILIES = ("decision", "recursive")

_Settings = TypeVar("_Settings")


class ExportError(ValueError):
    """A folder that is no export of this toolkit, or one that this version cannot run as it was trained."""


@dataclass(frozen=True, slots=True)
class Export:
    """The parsed `retrieval.json` of a folder."""

    path: Path
    family: str
    manifest: Mapping[str, Any]

    @property
    def navigate(self) -> NavigateConfig:
        """Budgets that the retriever was exported with. Raises ExportError where this version knows no such budget."""
        self.need("decision")
        return settings(NavigateConfig, self.manifest, "navigate", self.path / RETRIEVAL)

    @property
    def recurse(self) -> RecurseConfig:
        """How a state encoder was exported to search. Raises ExportError where this version knows no such settings."""
        self.need("recursive")
        return settings(RecurseConfig, self.manifest, "recurse", self.path / RETRIEVAL)

    def need(self, family: str) -> None:
        """Raise ExportError unless the folder holds a retriever of that family."""
        if self.family != family:
            raise ExportError(f"{self.path} holds a retriever of the family {self.family}; this takes one of {family}")


def read_export(path: str | Path) -> Export:
    """Parse and check `retrieval.json`.

    Raises:
        FileNotFoundError: no such folder, or no `retrieval.json` in it.
        ExportError: broken JSON, another format version, or an unknown family.
    """
    folder = Path(path)
    file = folder / RETRIEVAL
    if not file.is_file():
        what = "there is no such folder" if not folder.is_dir() else f"it holds no {RETRIEVAL}"
        raise FileNotFoundError(f"{folder} is not an exported retriever: {what}; make one with `retrail export`")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{file}: not JSON ({error}); export the run again") from error
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        found = manifest.get("format_version") if isinstance(manifest, dict) else None
        raise ExportError(
            f"{file}: format_version is {found}, this version reads {FORMAT_VERSION}; export the run again"
        )
    if manifest.get("family") not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ExportError(f"{file}: family is {manifest.get('family')!r}, this version knows: {known}")
    return Export(folder, manifest["family"], manifest)


def refuse_mismatch(stored: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Raise ExportError that names the first key that differs, and both values, unless the two contracts are equal."""
    for key, before, here in differences(stored, now):
        raise ExportError(
            f"{where}: {key} was {before} when the model was trained and is {here} here. Inference would show the "
            "model other tokens than training did: use the version that exported it, or export again"
        )


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys of nested tables, joined by dots and in order, whose values differ, and both values (None: not there)."""
    before, here = flat(stored), flat(now)
    for key in sorted(before.keys() | here.keys()):
        if before.get(key) != here.get(key):
            yield key, before.get(key), here.get(key)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables inside tables as one, their keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def section(manifest: Mapping[str, Any], key: str, file: Path) -> Mapping[str, Any]:
    """The table of that name. Raises ExportError where there is none."""
    found = manifest.get(key)
    if not isinstance(found, Mapping):
        raise ExportError(f"{file}: {key} is missing or no table; export the run again")
    return found


def settings(kind: type[_Settings], manifest: Mapping[str, Any], key: str, file: Path) -> _Settings:
    """The table of that name as settings. Raises ExportError where this version knows no such settings."""
    try:
        return kind(**section(manifest, key, file))
    except (TypeError, ValueError) as error:
        if isinstance(error, ExportError):
            raise
        raise ExportError(f"{file}: {key} holds settings that this version does not know: {error}") from error


def check_weights(folder: Path) -> None:
    """Refuse a folder without weights or with a file that was cut off, before a library fails on it with less words."""
    from safetensors import SafetensorError, safe_open

    if not any(folder.glob("model*.safetensors")):
        raise ExportError(f"{folder} holds no model.safetensors; export the run again")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ExportError(f"{file}: damaged or cut off ({error}); copy or export it again") from error
