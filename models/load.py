"""Open an exported folder: read `retrieval.json`, refuse what does not match, build the loop of its family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..data_prep.corpus import Corpus
from .config import DecisionConfig, ModelConfig, NavigateConfig

if TYPE_CHECKING:
    from .decision.navigate import Navigator
    from .decision.scorer import LocalScorer
    from .decision.static import StaticSlates
    from .protocols import Retriever

RETRIEVAL = "retrieval.json"
FORMAT_VERSION = 1
# What the settings of a slate were before there was a choice.
_CAME_LATER = {"query_cut": "end"}

_Settings = TypeVar("_Settings", DecisionConfig, NavigateConfig)


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
        return _settings(NavigateConfig, self.manifest, "navigate", self.path / RETRIEVAL)


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
    if manifest.get("family") != "decision":
        raise ExportError(f"{file}: family is {manifest.get('family')!r}, this version knows: decision")
    return Export(folder, manifest["family"], manifest)


def load(
    path: str | Path,
    corpus: Corpus | str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    navigate: NavigateConfig | None = None,
    join: Retriever | None = None,
    static: str | Path | None = None,
    trunk_cache_bytes: int = 0,
) -> Navigator:
    """A retriever over `corpus` from an exported folder.

    corpus: a `Corpus`, or a folder of one, or a prepared folder that holds one.
    navigate: budgets instead of the exported ones.
    join: another retriever, whose best join the last level.
    static: a folder of `retrail static`, whose slates are then read no more.
    trunk_cache_bytes: memory for candidates that come back in later searches (see `LocalScorer`).

    Raises:
        FileNotFoundError: a path that is not there.
        ExportError: the folder does not match this version's prompt, or its own tokenizer.
        StaticError: the static slates are damaged, or of another model or corpus.
    """
    from .decision.navigate import Navigator

    export = read_export(path)
    opened = corpus if isinstance(corpus, Corpus) else open_corpus(corpus)
    store = None
    if static is not None:  # before the weights, which take long to load
        from .decision.static import StaticSlates

        store = StaticSlates.open(static)
        store.check_corpus(opened)
    scorer = load_scorer(path, device=device, dtype=dtype, static=store, trunk_cache_bytes=trunk_cache_bytes)
    return Navigator(scorer, opened, navigate or export.navigate, join=join)


def open_corpus(path: str | Path) -> Corpus:
    """The corpus of a corpus folder or of a prepared folder."""
    inside = Path(path) / "corpus"
    return Corpus.open(inside if inside.is_dir() else path)


def load_scorer(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    static: StaticSlates | None = None,
    trunk_cache_bytes: int = 0,
) -> LocalScorer:
    """The decision scorer of an exported folder, to put into any loop.

    Raises:
        FileNotFoundError, ExportError, StaticError: as `load`.
    """
    from .backbone import load_backbone, pick_device
    from .decision.build import HEAD, contract, load_head, open_layout, wrap_decision
    from .decision.scorer import LocalScorer

    export = read_export(path)
    file = export.path / RETRIEVAL
    stored = _section(export.manifest, "contract", file)
    config = _settings(DecisionConfig, stored, "decision", file)
    _check_weights(export.path)
    place = pick_device(device)
    try:
        backbone, tokenizer = load_backbone(ModelConfig(path=str(export.path.resolve()), dtype=dtype), place)
        layout = open_layout(tokenizer, config, backbone)
    except (OSError, ValueError) as error:
        raise ExportError(f"{export.path}: what it holds cannot be opened: {error}") from error
    refuse_mismatch({**stored, "decision": _CAME_LATER | stored["decision"]}, contract(layout), file)
    network = wrap_decision(backbone.requires_grad_(False), layout)
    if network.head is not None:
        file = export.path / HEAD
        if not file.is_file():
            raise ExportError(f"{file}: missing, but decision.head is pointer; export the run again")
        try:
            load_head(network.head, file)
        except ValueError as error:
            raise ExportError(str(error)) from error
    return LocalScorer(network, layout, static=static, trunk_cache_bytes=trunk_cache_bytes)


def refuse_mismatch(stored: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Raise ExportError that names the first key that differs, and both values, unless the two contracts are equal."""
    from .decision.build import flat

    before, here = flat(stored), flat(now)
    for key in sorted(before.keys() | here.keys()):
        if before.get(key) != here.get(key):
            raise ExportError(
                f"{where}: {key} was {before.get(key)} when the model was trained and is {here.get(key)} here. "
                "Inference would show the model other tokens than training did: use the version that exported it, or "
                "export again"
            )


def _section(manifest: Mapping[str, Any], key: str, file: Path) -> Mapping[str, Any]:
    section = manifest.get(key)
    if not isinstance(section, Mapping):
        raise ExportError(f"{file}: {key} is missing or no table; export the run again")
    return section


def _settings(kind: type[_Settings], manifest: Mapping[str, Any], key: str, file: Path) -> _Settings:
    try:
        return kind(**_section(manifest, key, file))
    except (TypeError, ValueError) as error:
        if isinstance(error, ExportError):
            raise
        raise ExportError(f"{file}: {key} holds settings that this version does not know: {error}") from error


def _check_weights(folder: Path) -> None:
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
