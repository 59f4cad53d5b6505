"""Approximate search by faiss, for what exact search is too slow for or memory too small.

faiss chooses candidates and may miss some; their scores are then computed exactly from the stored vectors, so that
what is found has the scores and the order that exact search gives it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...data_prep.files import new_folder, sha256_file
from .exact_search import Found, exact_dots, ranked
from .index import DocId, DocumentIndex, fingerprint, refuse_other

FORMAT, FORMAT_VERSION = "retrail-faiss-index", 1
MANIFEST, GRAPH = "manifest.json", "index.faiss"
_ADDED_AT_ONCE = 65_536
_TRAINED_ON = 200_000


class FaissIndex:
    """Searched as the `DocumentIndex` whose vectors it ranks. `approximate` says that it may miss.

    factory: a faiss description that starts with HNSW, IVF or Flat, e.g. `HNSW32` or `IVF4096,SQfp16`.
    probe: lists that IVF reads or candidates that HNSW keeps, for each query; more finds more and takes longer.
    more: candidates that are scored exactly, as a multiple of k.
    """

    approximate = True

    def __init__(self, index: DocumentIndex, graph: Any, factory: str, *, probe: int = 128, more: int = 2) -> None:
        self.index, self.graph, self.factory, self.probe, self.more = index, graph, factory, probe, more
        self.ids, self.dim = index.ids, index.dim
        self.contract, self.corpus, self.dtype = index.contract, index.corpus, index.dtype

    @classmethod
    def build(
        cls, index: DocumentIndex, factory: str = "HNSW32", *, probe: int = 128, more: int = 2, seed: int = 0
    ) -> Self:
        """From the vectors of an exact index, read in blocks; IVF is trained on a random sample of them.

        Raises:
            ValueError: a factory that faiss does not know, or that cannot leave out single documents.
        """
        faiss = _faiss()

        if not factory.startswith(("HNSW", "IVF", "Flat")):
            raise ValueError(
                f"factory {factory!r} cannot leave out documents; use one that starts with HNSW, IVF, Flat"
            )
        try:
            graph = faiss.index_factory(index.dim, factory, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ValueError(
                f"factory {factory!r} is not one that faiss knows, e.g. HNSW32 or IVF1024,SQfp16"
            ) from error
        if not graph.is_trained and len(index):
            count = min(len(index), _TRAINED_ON)
            sample = np.random.default_rng(seed).choice(len(index), count, replace=False)
            if factory.startswith("IVF") and graph.nlist > count:
                raise ValueError(f"factory {factory!r} asks for {graph.nlist} lists, more than the {count} documents")
            graph.train(index.vectors(np.sort(sample)))
        for start in range(0, len(index), _ADDED_AT_ONCE):
            graph.add(index.vectors(np.arange(start, min(start + _ADDED_AT_ONCE, len(index)))))
        return cls(index, graph, factory, probe=probe, more=more)

    def save(self, folder: str | Path) -> Path:
        """Write what faiss built; the vectors stay where the exact index has them."""
        faiss = _faiss()

        with new_folder(Path(folder)) as written:
            faiss.write_index(self.graph, str(written / GRAPH))
            file = {"bytes": (written / GRAPH).stat().st_size, "sha256": sha256_file(written / GRAPH)}
            manifest = {"format": FORMAT, "version": FORMAT_VERSION, **_facts(self.index)}
            manifest |= {"factory": self.factory, "file": file}
            (written / MANIFEST).write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return Path(folder)

    @classmethod
    def open(cls, folder: str | Path, index: DocumentIndex, *, probe: int = 128, more: int = 2) -> Self:
        """What `save` wrote, memory-mapped where faiss can, together with the exact index that it was built from.

        Raises:
            FileNotFoundError: there is none.
            IndexMismatchError: it was built from another index.
            ValueError: it is damaged.
        """
        faiss = _faiss()

        folder = Path(folder)
        if not (folder / MANIFEST).is_file():
            raise FileNotFoundError(
                f"{folder}: no faiss index; build one with FaissIndex.build(...).save({str(folder)!r})"
            )
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if (manifest.get("format"), manifest.get("version")) != (FORMAT, FORMAT_VERSION):
            raise ValueError(f"{folder / MANIFEST}: no {FORMAT} of version {FORMAT_VERSION}; build the index again")
        for name, wanted in _facts(index).items():
            refuse_other(name, manifest[name], wanted, folder)
        file = folder / GRAPH
        if not file.is_file() or file.stat().st_size != manifest["file"]["bytes"]:
            raise ValueError(f"{file} is missing or cut off; build the index again")
        flags = faiss.IO_FLAG_MMAP if manifest["factory"].startswith("IVF") else 0
        return cls(index, faiss.read_index(str(file), flags), manifest["factory"], probe=probe, more=more)

    def __len__(self) -> int:
        return len(self.ids)

    def row(self, doc_id: DocId) -> int:
        """The row of an id; see `DocumentIndex.row`."""
        return self.index.row(doc_id)

    def vectors(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """The stored vectors of these rows, float32 (n, D)."""
        return self.index.vectors(rows)

    def search(
        self,
        vectors_SD: np.ndarray,
        k: int,
        *,
        excluded: Sequence[Sequence[int]] | None = None,
        ranges: bool = False,
    ) -> Found:
        """As `DocumentIndex.search`, but rows may be missing.

        Raises:
            ValueError: as there; and `ranges`, which needs the scores of all rows.
        """
        if ranges:
            raise ValueError("ranges=True needs the score of every document, which only exact search computes")
        queries, hidden = self.index.checked(vectors_SD, k, excluded)
        together: dict[bytes, list[int]] = defaultdict(list)
        for s in range(len(queries)):
            together[b"" if hidden is None else hidden[s].tobytes()].append(s)
        query_C, row_C, score_C = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
        for members in together.values():
            out = None if hidden is None else hidden[members[0]]
            for s, rows in zip(members, self._candidates(queries[members], k, out), strict=True):
                rows = rows[rows >= 0]
                query_C.append(np.full(len(rows), s))
                row_C.append(rows)
                exact = exact_dots(self.vectors(rows).astype(np.float64), queries[s].astype(np.float64))
                score_C.append(exact.astype(np.float32))
        query, row, score = np.concatenate(query_C), np.concatenate(row_C), np.concatenate(score_C)
        return Found(*ranked(query, row, score, len(queries), k))

    def _candidates(self, queries_SD: np.ndarray, k: int, hidden: np.ndarray | None) -> np.ndarray:
        faiss = _faiss()

        left = len(self) - (0 if hidden is None else len(hidden))
        count = min(self.more * k, left)
        if count < 1:
            return np.zeros((len(queries_SD), 0), np.int64)
        options: dict[str, Any] = {}
        if hidden is not None and len(hidden):
            out = faiss.IDSelectorBatch(hidden)
            options["sel"] = faiss.IDSelectorNot(out)
        if self.factory.startswith("HNSW"):
            parameters = faiss.SearchParametersHNSW(efSearch=max(self.probe, count), **options)
        elif self.factory.startswith("IVF"):
            parameters = faiss.SearchParametersIVF(nprobe=min(self.probe, self.graph.nlist), **options)
        else:
            parameters = faiss.SearchParameters(**options)
        return np.asarray(self.graph.search(queries_SD, count, params=parameters)[1])


def _faiss() -> Any:
    import faiss

    return faiss


def _facts(index: DocumentIndex) -> Mapping[str, object]:
    """What the index underneath must be the same in."""
    return {
        "contract": index.contract, "corpus": index.corpus, "dtype": index.dtype, "dim": index.dim,
        "count": len(index), "ids": fingerprint(index.ids),
    }  # fmt: skip
