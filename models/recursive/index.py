"""The fixed index of documents: vectors, ids, and what they were made from.

A folder holds `vectors.npy` (memory-mapped, in the type asked for), `ids.arrow`, and `manifest.json`: the encoder's
contract, the fingerprint of the corpus, type, sizes and checksums. What does not match is refused with both values.

Shapes: S queries, N documents, D dimensions, K candidates.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch

from ...data_prep.files import new_file, new_folder, sha256_file
from ..exports import differences
from ..protocols import StateEncoder
from .coarse_pass import Part
from .contract import document_part
from .duplicates import Groups, find_groups
from .exact_search import Found, search_exact

__all__ = ["DTYPES", "DocumentIndex", "Found", "IndexMismatchError"]

FORMAT, FORMAT_VERSION = "retrail-document-index", 1
MANIFEST, VECTORS, IDS = "manifest.json", "vectors.npy", "ids.arrow"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NORM_TOLERANCE = 1e-2  # half precision rounds each of D values
_CHECKED_AT_ONCE = 65_536

DocId = str | int


class IndexMismatchError(ValueError):
    """An index that was made from another corpus, by another encoder, or in another type; names both values."""


class DocumentIndex:
    """Exact search by inner product over unit vectors.

    Attributes:
        ids: the documents' ids, all `str` or all `int`.
        contract: that of the encoder that made the vectors, as far as documents go (`contract.document_part`).
        corpus: fingerprint of the corpus ("": not known).
        dtype: `float32`, `float16` or `bfloat16`, as stored; halving it rounds scores to about 3 or 2 digits.

    Raises:
        ValueError: ids repeat or mix types, counts differ, or a vector is not finite or not of unit length; names the
            document.
    """

    def __init__(
        self,
        ids: Sequence[DocId],
        vectors_ND: np.ndarray | torch.Tensor,
        *,
        contract: Mapping[str, object] | None = None,
        corpus: str = "",
        devices: Sequence[str] = ("cpu",),
        check: bool = True,
    ) -> None:
        """`devices` share the rows in equal parts; without `check` it was done when the vectors were stored."""
        self.ids = checked_ids(ids)
        stored = vectors_ND if isinstance(vectors_ND, torch.Tensor) else torch.from_numpy(vectors_ND)
        if stored.dtype not in DTYPES.values():
            raise ValueError(f"vectors of type {stored.dtype}; use one of: {', '.join(DTYPES)}")
        if stored.ndim != 2 or len(stored) != len(self.ids):
            raise ValueError(f"{len(self.ids)} ids but vectors of shape {tuple(stored.shape)}")
        if check:
            check_vectors(stored, self.ids)
        self.contract, self.corpus = dict(contract or {}), corpus
        self.dim = int(stored.shape[1])
        self.dtype = next(name for name, kind in DTYPES.items() if kind == stored.dtype)
        self._rows: dict[DocId, int] | None = None
        self._parts = _spread(stored, devices)
        self._lock, self._searched = threading.Lock(), False
        self._groups: Groups | None = None

    @classmethod
    def build(
        cls, ids: Sequence[DocId], texts: Sequence[str], encoder: StateEncoder, *, dtype: str = "float32",
        devices: Sequence[str] = ("cpu",), corpus: str = "", progress: bool = False,
    ) -> Self:  # fmt: skip
        """In memory, from texts; equal texts are encoded once."""
        if len(ids) != len(texts):
            raise ValueError(f"{len(ids)} ids but {len(texts)} texts")
        checked_ids(ids)
        distinct = list(dict.fromkeys(texts))
        place = {text: n for n, text in enumerate(distinct)}
        vectors = encoder.encode_documents(distinct, progress=progress)[[place[text] for text in texts]]
        stored = torch.from_numpy(np.ascontiguousarray(vectors)).reshape(len(texts), encoder.dim).to(dtype_of(dtype))
        return cls(ids, stored, contract=document_part(encoder.contract), corpus=corpus, devices=devices)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        devices: Sequence[str] = ("cpu",),
        contract: Mapping[str, object] | None = None,
        corpus: str | None = None,
        dtype: str | None = None,
    ) -> Self:
        """From a folder, memory-mapped; `contract`, `corpus` and `dtype` are what it has to be of (None: anything).

        contract: an encoder's, whole; what concerns states alone is not compared.

        Raises:
            FileNotFoundError: there is no index.
            IndexMismatchError: it is of something else.
            ValueError: its files are damaged.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        contract = None if contract is None else document_part(contract)
        for name, wanted in (("contract", contract), ("corpus", corpus), ("dtype", dtype)):
            if wanted is not None:
                refuse_other(name, manifest[name], wanted, folder)
        for name, facts in manifest["files"].items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != facts["bytes"]:
                raise ValueError(f"{file} is missing or cut off; build the index again")
        raw = np.load(folder / VECTORS, mmap_mode="r", allow_pickle=False)
        with pa.memory_map(str(folder / IDS)) as source, pa.ipc.open_file(source) as ids_file:
            ids = ids_file.read_all()["id"].to_pylist()
        vectors = _as_stored(raw, manifest["dtype"])
        return cls(ids, vectors, contract=manifest["contract"], corpus=manifest["corpus"], devices=devices, check=False)

    def save(self, folder: str | Path) -> Path:
        """Write it in the type it has; a folder that is there already must be empty.

        Raises:
            FileExistsError: `folder` holds something.
        """
        with new_folder(Path(folder)) as written:
            vectors = torch.cat([part.vectors_ND.cpu() for part in self._parts])
            with (written / VECTORS).open("wb") as out:
                np.save(out, as_numpy(vectors), allow_pickle=False)
            write_manifest(written, self.ids, self.dtype, self.dim, self.contract, self.corpus)
        return Path(folder)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_bytes(self) -> int:
        """What the stored vectors take, in memory or mapped."""
        return sum(part.vectors_ND.nbytes for part in self._parts)

    def row(self, doc_id: DocId) -> int:
        """The row of an id. Raises KeyError that says which type ids have where that is the difference."""
        if self._rows is None:
            self._rows = {known: n for n, known in enumerate(self.ids)}
        if doc_id not in self._rows:
            kind = f"; its ids are {type(self.ids[0]).__name__}" if self.ids else ""
            raise KeyError(f"no document {doc_id!r} in this index of {len(self.ids)}{kind}")
        return self._rows[doc_id]

    def vectors(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """The stored vectors of these rows, float32 (n, D)."""
        wanted = np.asarray(rows, dtype=np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} are not all in this index of {len(self)}")
        found = np.empty((len(wanted), self.dim), dtype=np.float32)
        for part in self._parts:
            here = (wanted >= part.start) & (wanted < part.start + len(part.vectors_ND))
            places = torch.from_numpy(wanted[here] - part.start).to(part.vectors_ND.device)
            found[here] = part.vectors_ND[places].float().cpu().numpy()
        return found

    def search(
        self,
        vectors_SD: np.ndarray,
        k: int,
        *,
        excluded: Sequence[Sequence[int]] | None = None,
        ranges: bool = False,
    ) -> Found:
        """The best `k` rows of each vector by (-score, row): the same whatever else is asked beside it.

        excluded: for each vector rows that are taken out before the cut and never come back.
        ranges: also the least and greatest score over all rows, excluded ones included.

        Raises:
            ValueError: k below 1, vectors of another size or not finite, or exclusions for another number of vectors.
        """
        queries, hidden = self.checked(vectors_SD, k, excluded)
        return search_exact(self._parts, self._equal_rows(), queries, k, hidden, ranges)

    def checked(
        self, vectors_SD: np.ndarray, k: int, excluded: Sequence[Sequence[int]] | None
    ) -> tuple[np.ndarray, list[np.ndarray] | None]:
        """(float32 vectors, sorted exclusions) of a search; raises what `search` raises."""
        queries = np.ascontiguousarray(vectors_SD, dtype=np.float32)
        if k < 1:
            raise ValueError(f"k={k} must be 1 or more")
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise ValueError(f"vectors of shape {queries.shape}, but the documents have {self.dim} dimensions")
        if not np.isfinite(queries).all():
            raise ValueError(f"query vector {int((~np.isfinite(queries).all(1)).argmax())} is not finite")
        if excluded is not None and len(excluded) != len(queries):
            raise ValueError(f"exclusions for {len(excluded)} vectors, but there are {len(queries)}")
        return queries, None if excluded is None else [self._known(rows) for rows in excluded]

    def _known(self, rows: Sequence[int]) -> np.ndarray:
        known = np.unique(np.asarray(rows, dtype=np.int64))
        if len(known) and not 0 <= known[0] <= known[-1] < len(self):
            raise ValueError(f"excluded rows {known[0]} to {known[-1]} are not all in this index of {len(self)}")
        return known

    def _equal_rows(self) -> Groups | None:
        """Found at the first search, which reads all vectors anyway."""
        with self._lock:
            if not self._searched:
                self._groups, self._searched = find_groups(self._parts), True
                repeated = self._groups.repeated if self._groups is not None else np.zeros(0, np.int64)
                for part in self._parts:
                    first, last = np.searchsorted(repeated, [part.start, part.start + len(part.vectors_ND)])
                    if first < last:
                        places = torch.from_numpy(repeated[first:last] - part.start)
                        part.repeated = places.to(part.vectors_ND.device)
        return self._groups


def checked_ids(ids: Sequence[DocId]) -> tuple[DocId, ...]:
    """The ids as a tuple. Raises ValueError where two are equal, or some are `int` and some `str`."""
    found = tuple(ids)
    kinds = {type(doc_id) for doc_id in found}
    if not kinds <= {str} and not kinds <= {int}:
        examples = ", ".join(repr(next(i for i in found if type(i) is kind)) for kind in kinds)
        raise ValueError(f"ids must all be str or all int, not {examples}")
    if len(set(found)) != len(found):
        seen: set[DocId] = set()
        twice = next(i for i in found if i in seen or seen.add(i))  # type: ignore[func-returns-value]
        raise ValueError(f"id {twice!r} appears twice; every document needs an id of its own")
    for doc_id in found:
        if isinstance(doc_id, str):
            _check_text(doc_id)
        elif not -(2**63) <= doc_id < 2**63:
            raise ValueError(f"id {doc_id} does not fit 64 bits; use a str")
    return found


def _check_text(doc_id: str) -> None:
    try:
        doc_id.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"id {doc_id!r} is no valid Unicode and fits no file: {error.reason}") from error


def check_vectors(vectors_ND: torch.Tensor, ids: Sequence[DocId]) -> None:
    """Raise ValueError naming the first document whose vector is not finite or not of unit length."""
    for start in range(0, len(vectors_ND), _CHECKED_AT_ONCE):
        norms = vectors_ND[start : start + _CHECKED_AT_ONCE].float().norm(dim=1)
        wrong = ~(torch.abs(norms - 1) <= _NORM_TOLERANCE)  # true for NaN too
        if bool(wrong.any()):
            place = int(wrong.int().argmax())
            raise ValueError(
                f"the vector of document {ids[start + place]!r} has length {float(norms[place]):.4g}, not 1: the "
                "encoder's weights or its dtype are damaged, or the vectors were not normalised"
            )


def dtype_of(name: str) -> torch.dtype:
    """The torch type of that name. Raises ValueError that lists the choices."""
    if name not in DTYPES:
        raise ValueError(f"index dtype {name!r} is not a choice; use one of: {', '.join(DTYPES)}")
    return DTYPES[name]


def as_numpy(vectors: torch.Tensor) -> np.ndarray:
    """As it is stored: bfloat16, which NumPy lacks, as the same bits in uint16."""
    return np.asarray((vectors.view(torch.uint16) if vectors.dtype == torch.bfloat16 else vectors).numpy())


def _as_stored(raw: np.ndarray, dtype: str) -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():  # torch warns of memory that must not be written to; nothing here writes
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        vectors = torch.from_numpy(raw)
    return vectors.view(torch.bfloat16) if dtype == "bfloat16" else vectors


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder says of itself.

    Raises:
        FileNotFoundError: it holds no index.
        ValueError: it is damaged or of another format.
    """
    file = folder / MANIFEST
    if not file.is_file():
        what = "it holds no finished index" if folder.is_dir() else "there is no such folder"
        raise FileNotFoundError(
            f"{folder}: {what}; a search with recurse.index=FOLDER, or build_index(folder=...), builds it"
        )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); build the index again") from error
    if not isinstance(manifest, dict) or (manifest.get("format"), manifest.get("version")) != (FORMAT, FORMAT_VERSION):
        raise ValueError(f"{file}: no {FORMAT} of version {FORMAT_VERSION}; build the index again")
    return manifest


def write_manifest(
    folder: Path, ids: Sequence[DocId], dtype: str, dim: int, contract: Mapping[str, object], corpus: str
) -> None:
    """Write ids and manifest beside the vectors that are there."""
    kind = pa.int64() if ids and isinstance(ids[0], int) else pa.large_string()
    table = pa.table({"id": pa.array(ids, type=kind)})
    with new_file(folder / IDS) as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)} for name in (VECTORS, IDS)
    }
    facts = {"dtype": dtype, "dim": dim, "count": len(ids), "contract": contract, "corpus": corpus}
    more = {"ids": fingerprint(ids), "normalised": True, "files": files}
    manifest = {"format": FORMAT, "version": FORMAT_VERSION, **facts, **more}
    with new_file(folder / MANIFEST) as out:
        out.write(json.dumps(manifest, indent=2, allow_nan=False).encode() + b"\n")


def fingerprint(ids: Sequence[DocId]) -> str:
    """Hex sha256 of the ids, in their order, with their types."""
    digest = hashlib.sha256()
    for doc_id in ids:
        digest.update(json.dumps(doc_id).encode() + b"\n")
    return digest.hexdigest()


def refuse_other(name: str, stored: Any, wanted: Any, where: Path | str) -> None:
    """Raise IndexMismatchError that names the first part that differs, and both values, unless both are equal."""
    wanted = json.loads(json.dumps(wanted))  # as it looks after a file
    for key, before, here in differences({name: stored}, {name: wanted}):
        raise IndexMismatchError(
            f"{where}: {key} was {before!r} when the index was built and is {here!r} here; build the index again, or "
            "use the encoder and corpus that it was built with"
        )


def _spread(vectors_ND: torch.Tensor, devices: Sequence[str]) -> list[Part]:
    """The rows in equal parts over the devices."""
    if not devices:
        raise ValueError("devices must name at least one device, e.g. [cpu]")
    parts, start = [], 0
    for piece, device in zip(vectors_ND.tensor_split(len(devices)), devices, strict=True):
        parts.append(Part(piece.to(device), start, 1.0 + _NORM_TOLERANCE))
        start += len(piece)
    return parts
