"""Build an index on disk: in shards, by one process or several, going on where an earlier build stopped.

While it is built the folder holds `building.json` (what it is made from) and `shards/`; each shard is written once, to
a temporary name first. Every process that builds holds a shared lock on the folder; whoever finds all shards there
waits until it is the only one, and joins them. A build of something else in the same folder is refused.
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
from .contract import document_part
from .index import (
    MANIFEST,
    VECTORS,
    DocId,
    as_numpy,
    check_vectors,
    checked_ids,
    dtype_of,
    fingerprint,
    read_manifest,
    refuse_other,
    write_manifest,
)

BUILDING, SHARDS, BUILDERS = "building.json", "shards", "builders.lock"

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
        "contract": document_part(encoder.contract), "corpus": corpus, "dtype": dtype, "dim": encoder.dim,
        "count": len(ids), "ids": fingerprint(ids),
    }  # fmt: skip
    kind = dtype_of(dtype)
    if (folder / MANIFEST).is_file() and not (folder / BUILDERS).exists():
        _refuse(facts, read_manifest(folder), folder)
        return True
    if not 0 <= rank < world or shard_size < 1:
        raise ValueError(
            f"rank={rank} must be 0 or more and below world={world}, and shard_size={shard_size} 1 or more"
        )
    shards = [range(start, min(start + shard_size, len(ids))) for start in range(0, len(ids), shard_size)]
    mine = [n for n in range(len(shards)) if n % world == rank]
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / BUILDERS, fcntl.LOCK_SH):
        whole = _start(folder, facts, shard_size)
        if not whole:
            with tqdm(total=sum(len(shards[n]) for n in mine), desc="index", unit="doc", disable=not progress) as bar:
                for n in mine:
                    _write_shard(folder, n, shards[n], ids, texts, encoder, kind)
                    bar.update(len(shards[n]))
            if not all((folder / SHARDS / f"{n:06d}.npy").is_file() for n in range(len(shards))):
                return False
    # Nobody encodes any more, so the others let go at once.
    with _locked(folder / BUILDERS):
        if not (folder / MANIFEST).is_file():
            _join(folder, len(shards), ids, facts)
        _tidy(folder)
    return True


def _start(folder: Path, facts: Mapping[str, Any], shard_size: int) -> bool:
    """Whether the index is whole already; else the build is begun, or found begun."""
    if (folder / MANIFEST).is_file():
        _refuse(facts, read_manifest(folder), folder)
        return True
    (folder / SHARDS).mkdir(exist_ok=True)
    facts = {**facts, "shard_size": shard_size}
    with _locked(folder / f"{BUILDING}.lock"):
        file = folder / BUILDING
        if not file.is_file():
            with new_file(file) as out:
                out.write(json.dumps(facts).encode())
        else:
            _refuse(facts, json.loads(file.read_text()), folder)
    return False


def _refuse(facts: Mapping[str, Any], stored: Mapping[str, Any], folder: Path) -> None:
    for name, wanted in facts.items():
        refuse_other(name, stored.get(name), wanted, folder)


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


def _join(folder: Path, count: int, ids: Sequence[DocId], facts: Mapping[str, Any]) -> None:
    """One file of all shards, and the manifest last, which says that the index is whole."""
    stored = as_numpy(torch.zeros((0, facts["dim"]), dtype=dtype_of(facts["dtype"]))).dtype
    with new_file(folder / VECTORS) as out:
        head = {"descr": np.lib.format.dtype_to_descr(stored), "fortran_order": False}
        np.lib.format.write_array_header_2_0(out, head | {"shape": (len(ids), facts["dim"])})
        for n in range(count):
            part = np.load(folder / SHARDS / f"{n:06d}.npy", mmap_mode="r", allow_pickle=False)
            out.write(np.ascontiguousarray(part).tobytes())
    write_manifest(folder, ids, facts["dtype"], facts["dim"], facts["contract"], facts["corpus"])


def _tidy(folder: Path) -> None:
    """Remove what only an unfinished build needs; a build that was killed here leaves some of it."""
    shutil.rmtree(folder / SHARDS, ignore_errors=True)
    for name in (BUILDING, f"{BUILDING}.lock", BUILDERS):
        (folder / name).unlink(missing_ok=True)
    for file in folder.glob(f".{VECTORS}.*.tmp"):
        file.unlink(missing_ok=True)


@contextmanager
def _locked(file: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Held by one process at a time (or by those that share it), and let go when it ends, however it ends."""
    handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, kind)
        yield
    finally:
        os.close(handle)
