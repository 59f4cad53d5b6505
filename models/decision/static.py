"""Static slates: a corpus's upper levels are read once, stored on disk, and mapped by every search.

With the candidates first, what a model has read of a slate's candidates does not depend on the query. A store is a
folder: one safetensors file a slate (keys and values of every layer, and what the pointer head needs), named by the
sha256 of the trunk's tokens, and `manifest.json`, which says what they were made with. `static_build.py` makes one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...data_prep.corpus import Corpus
from ...data_prep.formats.jsonio import read_json, require
from ..exports import flat
from .build import contract
from .layout import SlateLayout
from .model import DecisionModel
from .trunks import CandidateKeys, TrunkMemory

FORMAT = "retrail-static-slates"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
UNFINISHED = "building.json"
_HASHERS = 8


class StaticError(ValueError):
    """A store that is damaged, unfinished, or of another model, prompt or corpus."""


class StaticSlates:
    """The trunks of a store, each mapped when it is first asked for. Several processes share one copy in memory."""

    def __init__(self, path: Path, made_with: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """`made_with`: see `fingerprints`; `sizes`: bytes of each trunk's file, by its key. Use `open`."""
        self.path, self.made_with, self.sizes = path, made_with, sizes
        self._open: dict[str, TrunkMemory] = {}

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read the manifest and check the sizes of the files; nothing else is read.

        Raises:
            FileNotFoundError: no such folder, or it holds no store.
            StaticError: another format version, a build that did not end, or a file that is missing or was cut off.
        """
        folder = Path(path)
        file = folder / MANIFEST
        if (folder / UNFINISHED).is_file() and not file.is_file():
            raise StaticError(f"{folder}: its build did not end; the same `retrail static` goes on with it")
        if not file.is_file():
            what = "there is no such folder" if not folder.is_dir() else f"it holds no {MANIFEST}"
            raise FileNotFoundError(f"{folder} has no static slates: {what}; make them with `retrail static`")
        manifest = _read_manifest(file)
        sizes = require(manifest, "files", dict, str(file))
        for key, size in sizes.items():
            _check_size(trunk_file(folder, key), size)
        return cls(folder, require(manifest, "made_with", dict, str(file)), sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(self.sizes.values())

    def check_model(self, model: DecisionModel, layout: SlateLayout) -> None:
        """Refuse a store of another model, dtype, prompt, tokenizer or decision setting.

        Raises:
            StaticError: names the first key that differs, and both values.
        """
        self._check(fingerprints(model, layout))

    def check_corpus(self, corpus: Corpus) -> None:
        """Refuse a store of another corpus. Raises StaticError with both fingerprints."""
        self._check({"corpus": corpus.fingerprint})

    def _check(self, here: Mapping[str, Any]) -> None:
        refuse_difference(self.made_with, here, self.path)

    def get(self, key: str) -> TrunkMemory | None:
        """The mapped memory of the trunk with that `trunk_key`; None where it is not stored.

        Raises:
            StaticError: the file is damaged.
        """
        if key not in self.sizes:
            return None
        if key not in self._open:
            self._open[key] = _map(trunk_file(self.path, key))
        return self._open[key]


def refuse_difference(stored: Mapping[str, Any], here: Mapping[str, Any], where: Path) -> None:
    """Raise StaticError that names the first key of `here` that `stored` has otherwise, and both values."""
    for name, value in here.items():
        if stored.get(name) != value:
            raise StaticError(
                f"{where}: {name} was {stored.get(name)} when the slates were stored and is {value} here, so that "
                "their answers would be others; store them again with `retrail static`, or search without them"
            )


def fingerprints(model: DecisionModel, layout: SlateLayout) -> dict[str, Any]:
    """All that the memory of a trunk depends on, besides its tokens; flat, as JSON gives it back."""
    names = flat(json.loads(json.dumps(contract(layout))))
    return {**names, "dtype": str(model.backbone.dtype).removeprefix("torch."), "model": model_fingerprint(model)}


def model_fingerprint(model: DecisionModel) -> str:
    """Hex sha256 over the configuration of the backbone and every parameter, the head's included.

    Reads all weights once, several tensors at a time: about a second for 3 GB on 2 cores.
    """
    config: Any = model.backbone.config.get_text_config()
    # What says where the model came from, or how fast it is computed, changes no answer.
    skip = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
    kept = {k: v for k, v in config.to_dict().items() if not k.startswith("_") and k not in skip}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
    parameters = dict(model.named_parameters())
    with ThreadPoolExecutor(min(_HASHERS, os.cpu_count() or 1)) as pool:
        for name, part in zip(parameters, pool.map(_tensor_digest, parameters.values()), strict=True):
            digest.update(f"\n{name} {part}".encode())
    return digest.hexdigest()


def _tensor_digest(tensor: Tensor) -> str:
    # hashlib lets other threads run meanwhile.
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def trunk_file(folder: Path, key: str) -> Path:
    """Where a store keeps the trunk with that key."""
    return folder / f"{key}.safetensors"


def memory_tensors(memory: TrunkMemory) -> dict[str, Tensor]:
    """The tensors of a trunk's file."""
    tensors = {"last": memory.last_H}
    for n, (keys, values) in enumerate(memory.layers):
        tensors |= {f"{n}.keys": keys, f"{n}.values": values}
    if memory.head is not None:
        tensors |= {
            "head.keys": memory.head.keys_SKH,
            "head.mean": memory.head.mean_SH,
            "head.level": memory.head.level_SC,
        }
    return tensors


def _map(file: Path) -> TrunkMemory:
    """The trunk of a file, whose pages are read when they are used."""
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
        count = sum(name.endswith(".values") for name in tensors)
        layers = tuple((tensors[f"{n}.keys"], tensors[f"{n}.values"]) for n in range(count))
    except (SafetensorError, OSError, KeyError) as error:
        raise StaticError(f"{file}: damaged ({error}); remove the folder and store the slates again") from error
    head = None
    if "head.keys" in tensors:
        head = CandidateKeys(tensors["head.keys"], tensors["head.mean"], tensors["head.level"])
    return TrunkMemory(layers, tensors["last"], head)


def _read_manifest(file: Path) -> dict[str, Any]:
    manifest = read_json(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StaticError(f"{file} is not the manifest of static slates")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise StaticError(
            f"{file}: format_version is {manifest.get('format_version')}, this version reads {FORMAT_VERSION}; "
            "store the slates again"
        )
    return manifest


def _check_size(file: Path, size: int) -> None:
    if not file.is_file():
        raise StaticError(f"{file} is missing; remove the folder and store the slates again")
    if file.stat().st_size != size:
        raise StaticError(
            f"{file} has {file.stat().st_size:,} bytes instead of {size:,}: it was cut off or changed; remove the "
            "folder and store the slates again"
        )
