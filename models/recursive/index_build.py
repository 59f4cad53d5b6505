"""Build an index on disk: in shards, by one process or several, going on where an earlier build stopped.

While it is built the folder holds `building.json` (what it is made from) and `shards/`; each shard is written once, to
a temporary name first. The process that finds all shards there joins them. A build of something else in the same
folder is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ...data_prep.files import new_file
from ..protocols import StateEncoder
from .index import (
    MANIFEST,
    VECTORS,
    DocId,
    as_numpy,
    check_vectors,
    checked_ids,
    dtype_of,
    read_manifest,
    refuse_other,
    write_manifest,
)

BUILDING, SHARDS = "building.json", "shards"

Texts = Callable[[range], Sequence[str]]


def build_index(
    folder: str | Path,
    ids: Sequence[DocId],
    texts: Texts,
    encoder: StateEncoder,
    *,
    corpus: str,
    dtype: str = "float16",
    shard_size: int = 16_384,
    rank: int = 0,
    world: int = 1,
    progress: bool = False,
) -> bool:
    """Encode what is missing of this process's shards; True when the index is whole and joined.

    texts: the documents of a range of rows, asked for one shard at a time.
    shard_size: documents of a shard; a smaller one loses less work to a crash and makes more files.
    rank, world: this process takes the shards rank, rank + world, ...; whoever finds all of them there joins them.

    Raises:
        IndexMismatchError: the folder holds an index, or a build, of another corpus, encoder or type.
        ValueError: ids repeat or mix types, or a document's vector is not finite.
    """
    folder = Path(folder)
    ids = checked_ids(ids)
    facts = {
        "contract": json.loads(json.dumps(encoder.contract)), "corpus": corpus, "dtype": dtype, "dim": encoder.dim,
        "count": len(ids),
    }  # fmt: skip
    kind = dtype_of(dtype)
    if (folder / MANIFEST).is_file():
        _refuse(facts, read_manifest(folder), folder)
        _tidy(folder)
        return True
    _start(folder, facts | {"shard_size": shard_size})
    shards = [range(start, min(start + shard_size, len(ids))) for start in range(0, len(ids), shard_size)]
    mine = [n for n in range(len(shards)) if n % world == rank]
    with tqdm(total=sum(len(shards[n]) for n in mine), desc="index", unit="doc", disable=not progress) as bar:
        for n in mine:
            _write_shard(folder, n, shards[n], ids, texts, encoder, kind)
            bar.update(len(shards[n]))
    return _join(folder, len(shards), ids, facts)


def _start(folder: Path, facts: Mapping[str, Any]) -> None:
    (folder / SHARDS).mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{BUILDING}.lock"):
        file = folder / BUILDING
        if not file.is_file():
            with new_file(file) as out:
                out.write(json.dumps(facts).encode())
        else:
            _refuse(facts, json.loads(file.read_text()), folder)


def _refuse(facts: Mapping[str, Any], stored: Mapping[str, Any], folder: Path) -> None:
    for name, wanted in facts.items():
        refuse_other(name, stored[name], wanted, folder)


def _write_shard(
    folder: Path, n: int, rows: range, ids: Sequence[DocId], texts: Texts, encoder: StateEncoder, kind: torch.dtype
) -> None:
    file = folder / SHARDS / f"{n:06d}.npy"
    with _locked(file.with_suffix(".lock")):  # another process may have been started for the same shard
        if file.is_file():
            return
        documents = list(texts(rows))
        if len(documents) != len(rows):
            raise ValueError(f"{len(documents)} texts for the {len(rows)} documents from row {rows.start} on")
        distinct = list(dict.fromkeys(documents))
        place = {text: i for i, text in enumerate(distinct)}
        vectors = encoder.encode_documents(distinct)[[place[text] for text in documents]]
        stored = torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32)).to(kind)
        check_vectors(stored, ids[rows.start : rows.stop])
        with new_file(file) as out:
            np.save(out, as_numpy(stored), allow_pickle=False)


def _join(folder: Path, count: int, ids: Sequence[DocId], facts: Mapping[str, Any]) -> bool:
    """One file of all shards, and the manifest last, which says that the index is whole."""
    with _locked(folder / f"{BUILDING}.lock"):
        if (folder / MANIFEST).is_file():
            return True
        files = [folder / SHARDS / f"{n:06d}.npy" for n in range(count)]
        if not all(file.is_file() for file in files):
            return False
        parts = [np.load(file, mmap_mode="r", allow_pickle=False) for file in files]
        stored = as_numpy(torch.zeros((0, facts["dim"]), dtype=dtype_of(facts["dtype"]))).dtype
        with new_file(folder / VECTORS) as out:
            head = {"descr": np.lib.format.dtype_to_descr(stored), "fortran_order": False}
            np.lib.format.write_array_header_2_0(out, head | {"shape": (len(ids), facts["dim"])})
            for part in parts:
                out.write(np.ascontiguousarray(part).tobytes())
        write_manifest(folder, ids, facts["dtype"], facts["dim"], facts["contract"], facts["corpus"])
    _tidy(folder)
    return True


def _tidy(folder: Path) -> None:
    """Remove what only an unfinished build needs; a build that was killed here leaves some of it."""
    shutil.rmtree(folder / SHARDS, ignore_errors=True)
    for name in (BUILDING, f"{BUILDING}.lock"):
        (folder / name).unlink(missing_ok=True)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Held by one process at a time, and let go when it ends, however it ends."""
    handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
