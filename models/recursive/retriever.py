"""RDR: search recursively with one state encoder, and rank with a readout over all states that were formed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...data_prep.corpus import Corpus
from ...data_prep.hits import Cost, Hits, Step, Trace
from ..config import RecurseConfig, check_positive
from ..protocols import State, StateEncoder
from .contract import document_part
from .engine import Engine, Request
from .index import DocId, DocumentIndex, Found, refuse_other
from .index_build import build_index
from .index_faiss import FaissIndex
from .readouts.base import Ranking, Readout, rank_all
from .readouts.registry import make_readout
from .search import Search, make_search
from .traversal import StateRecord, Traversal

_SHOWN = 10  # candidates of a state in a trace
_VIEWS = ("recovery",)

Documents = Mapping[Any, str] | Sequence[str] | Corpus


@dataclass(frozen=True, slots=True)
class SearchIndex:
    """Documents that can be searched: their vectors, and their texts, which states observe.

    groups: for chunks of documents, the row of the first chunk of each row's document (None: rows are documents).
    """

    vectors: DocumentIndex | FaissIndex
    text: Callable[[int], str]
    groups: np.ndarray | None = None

    @property
    def identity(self) -> dict[str, object]:
        """What rows of it are rows of, as plain JSON."""
        index = self.vectors
        return {"corpus": index.corpus, "dtype": index.dtype, "count": len(index), "contract": index.contract}

    def __len__(self) -> int:
        return len(self.vectors)


class RecursiveRetriever:
    """A `Retriever` that reads what it found, and searches again.

        retriever = RecursiveRetriever(encoder)
        index = retriever.build_index({"d1": "The novel Harbor Lights ...", "d2": "Mara Voss was born in Linz ..."})
        hits = retriever.search(["Which river flows through the birthplace of ...?"], index, k=3)

    Attributes:
        encoder: makes vectors of states and documents.
        strategy: which states are formed, by name or as an object (`search.SEARCHES`).
        readout: what ranks documents, by name or as an object (`readouts.registry.READOUTS`).
        role: of states with observations (None: the primary role of the encoder's prompts).
        candidate_k: how many candidates a state keeps.
        temperature: tau of the softmax over them.
        batch_size, inflight: see `Engine`; neither changes what is found.
    """

    def __init__(
        self,
        encoder: StateEncoder,
        *,
        strategy: str | Search = "tree",
        readout: str | Readout = "global",
        role: str | None = None,
        candidate_k: int = 200,
        temperature: float = 0.05,
        batch_size: int = 32,
        inflight: int = 2,
    ) -> None:
        self.encoder = encoder
        self.strategy, self.readout = make_search(strategy), make_readout(readout)
        prompts = getattr(encoder, "prompts", None)
        self.role: str = role or getattr(prompts, "primary_role", None) or "continuation"
        self.candidate_k, self.temperature = candidate_k, temperature
        self.batch_size, self.inflight = batch_size, inflight
        self.index: SearchIndex | None = None

    @classmethod
    def of(cls, encoder: StateEncoder, config: RecurseConfig) -> Self:
        """With settings that were written down."""
        return cls(
            encoder,
            strategy=make_search(config.strategy, config.strategy_options),
            readout=make_readout(config.readout, config.readout_options),
            candidate_k=config.candidate_k,
            temperature=config.temperature,
            batch_size=config.batch_size,
            inflight=config.inflight,
        )

    def build_index(
        self,
        documents: Documents,
        *,
        folder: str | Path | None = None,
        dtype: str = "float32",
        devices: Sequence[str] = ("cpu",),
        progress: bool = False,
    ) -> SearchIndex:
        """Encode documents, raw and without instruction; searches without an index of their own use it from then on.

        documents: texts by id, texts (whose ids are then 0, 1, ...), or a `Corpus`, whose leaves they are.
        folder: keep the vectors there, or open those that are there already if they are of the same corpus and encoder.
        dtype: `float32`, or `float16` and `bfloat16`, which halve it and round scores.

        Raises:
            IndexMismatchError: the folder holds an index of something else.
            ValueError: ids repeat or mix types, or the encoder gives a vector that is not finite.
        """
        ids, text, fingerprint = _opened(documents)
        if folder is None:
            texts = [text(row) for row in range(len(ids))]
            vectors = DocumentIndex.build(
                ids, texts, self.encoder, dtype=dtype, devices=devices, corpus=fingerprint, progress=progress
            )
        else:
            read = lambda rows: [text(row) for row in rows]  # noqa: E731
            build_index(folder, ids, read, self.encoder, corpus=fingerprint, dtype=dtype, progress=progress)
            vectors = DocumentIndex.open(
                folder, devices=devices, contract=self.encoder.contract, corpus=fingerprint, dtype=dtype
            )
        self.index = SearchIndex(vectors, text)
        return self.index

    def search(
        self,
        queries: Sequence[str],
        index: SearchIndex | None = None,
        *,
        k: int = 10,
        strategy: str | Search | None = None,
        readout: str | Readout | None = None,
        instruction: str | Sequence[str | None] | None = None,
        excluded: Sequence[Sequence[DocId]] | None = None,
        progress: bool = False,
    ) -> list[Hits]:
        """One ranking a query, at most `k` ids; ids of `int` are written as text.

        Where the readout gives an order alone, scores are 1 / rank. The trace holds one step a state.

        instruction: the root instruction, of all queries or of each (None: the preset's).
        excluded: for each query ids that must never be seen, read or returned.

        Raises:
            ValueError: no index, k below 1, or a readout that is not defined for the search.
            IndexMismatchError: another encoder made the index.
            KeyError: an excluded id that the index lacks.
        """
        check_positive("k", k)
        chosen = self._index(index)
        readout = self.readout if readout is None else make_readout(readout)
        traversals = self.traverse(
            queries, chosen, strategy=strategy, instruction=instruction, excluded=excluded, progress=progress
        )
        return self.read(traversals, readout, chosen, k=k)

    def semantic_search(self, queries: str | Sequence[str], index: SearchIndex, top_k: int = 10, **options: Any) -> Any:
        """Hits as sentence-transformers' `semantic_search` has them: `corpus_id` (of its own type), `score`, `index`.

        One query gives one list, several a list of lists. `options` as in `search`.
        """
        several = [queries] if isinstance(queries, str) else list(queries)
        names = {str(doc_id): doc_id for doc_id in index.vectors.ids}
        found = [
            [
                {"corpus_id": names[name], "score": score, "index": index.vectors.row(names[name])}
                for name, score in zip(hits.ids, hits.scores, strict=True)
            ]
            for hits in self.search(several, index, k=top_k, **options)
        ]
        return found[0] if isinstance(queries, str) else found

    def traverse(
        self,
        queries: Sequence[str],
        index: SearchIndex | None = None,
        *,
        strategy: str | Search | None = None,
        instruction: str | Sequence[str | None] | None = None,
        excluded: Sequence[Sequence[DocId]] | None = None,
        ranges: bool = False,
        progress: bool = False,
    ) -> list[Traversal]:
        """Search, and keep all that any readout needs (`read`); `save_traversals` writes it down.

        ranges: record each state's least and greatest score over the whole corpus, for readouts by min-max scores.

        Raises:
            IndexMismatchError: another encoder made the index.
        """
        if isinstance(queries, str):
            raise TypeError("queries must be a sequence; put a single query in a list")
        chosen = self._index(index)
        if chosen.vectors.contract:
            made_by = document_part(self.encoder.contract)
            refuse_other("contract", chosen.vectors.contract, made_by, "the index that is searched")
        words = [instruction] * len(queries) if instruction is None or isinstance(instruction, str) else instruction
        hidden: Sequence[Sequence[DocId]] = [()] * len(queries) if excluded is None else excluded
        for name, values in (("instruction", words), ("excluded", hidden)):
            if len(values) != len(queries):
                raise ValueError(f"{name} is given for {len(values)} queries, but there are {len(queries)}")
        requests = [
            Request(query, own, tuple(sorted({chosen.vectors.row(doc_id) for doc_id in out})))
            for query, own, out in zip(queries, words, hidden, strict=True)
        ]
        search = self.strategy if strategy is None else make_search(strategy)
        return self._engine(chosen).run(requests, search, ranges=ranges, progress=progress)

    def read(
        self,
        traversals: Sequence[Traversal],
        readout: str | Readout | None = None,
        index: SearchIndex | None = None,
        *,
        k: int = 10,
    ) -> list[Hits]:
        """Rank the documents of traversals by a readout, which may ask the encoder or the index again."""
        chosen = self._index(index)
        readout = self.readout if readout is None else make_readout(readout)
        traversals = self.with_views(traversals, readout.views, chosen)
        hits: list[Hits] = []
        for start in range(0, len(traversals), self.batch_size):
            part = traversals[start : start + self.batch_size]
            tools = _Tools(self.encoder, chosen)  # its session remembers states for as long as it lives
            rankings = rank_all(readout, part, tools)
            hits += [
                _hits(ranking, traversal, chosen, k, tools.costs.get(n, Cost()))
                for n, (ranking, traversal) in enumerate(zip(rankings, part, strict=True))
            ]
        return hits

    def with_views(
        self, traversals: Sequence[Traversal], names: Sequence[str], index: SearchIndex | None = None
    ) -> list[Traversal]:
        """The traversals with those views formed that they lack."""
        found = list(traversals)
        for name in names:
            if name not in _VIEWS:
                raise ValueError(f"there is no view {name!r}; use one of: {', '.join(_VIEWS)}")
            lacking = [n for n, traversal in enumerate(found) if name not in traversal.views]
            formed = self._engine(self._index(index)).form_view([found[n] for n in lacking])
            for n, states in zip(lacking, formed, strict=True):
                found[n] = replace(found[n], views={**found[n].views, name: states})
        return found

    @property
    def description(self) -> str:
        """What tells this retriever from another, for logs and for resuming an evaluation."""
        own = f"{self.strategy}, {self.readout}, role={self.role}, K={self.candidate_k}, tau={self.temperature}"
        encoder = {key: value for key, value in self.encoder.contract.items() if key != "source"}
        return f"RecursiveRetriever({own}, {self._index(None).identity}, {encoder})"

    def _engine(self, index: SearchIndex) -> Engine:
        return Engine(
            self.encoder,
            index.vectors,
            index.text,
            role=self.role,
            candidate_k=self.candidate_k,
            temperature=self.temperature,
            batch_size=self.batch_size,
            inflight=self.inflight,
        )

    def _index(self, index: SearchIndex | None) -> SearchIndex:
        chosen = self.index if index is None else index  # an empty index is one, and false
        if chosen is None:
            raise ValueError("there is no index to search: call build_index(documents) first, or hand one in")
        return chosen


class _Tools:
    """What readouts may ask for, with the cost of it by traversal."""

    def __init__(self, encoder: StateEncoder, index: SearchIndex) -> None:
        self._session, self._index = encoder.session(), index
        self.groups, self.text = index.groups, index.text
        self.costs: dict[int, Cost] = {}

    def encode(self, states: Sequence[State], owners: Sequence[int]) -> np.ndarray:
        encoded = self._session.encode(states, owners)
        for owner, cost in zip(owners, encoded.costs, strict=True):
            self.costs[owner] = self.costs.get(owner, Cost()) + cost
        return encoded.vectors_SD

    def search(self, vectors_SD: np.ndarray, k: int, excluded: Sequence[Sequence[int]]) -> Found:
        return self._index.vectors.search(vectors_SD, k, excluded=excluded)

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        return self._index.vectors.vectors(rows)


def _opened(documents: Documents) -> tuple[list[DocId], Callable[[int], str], str]:
    """Ids, the text of a row, and what changes with any of them."""
    if isinstance(documents, Corpus):
        leaves = documents.leaves()
        ids: list[DocId] = [documents.id(row) for row in leaves.tolist()]
        return ids, lambda row: document_text(documents, int(leaves[row])), documents.fingerprint
    if isinstance(documents, str):
        raise TypeError("documents must be a mapping from ids to texts, a sequence of texts, or a Corpus")
    pairs = list(documents.items() if isinstance(documents, Mapping) else enumerate(documents))
    texts = [text for _, text in pairs]
    return [doc_id for doc_id, _ in pairs], texts.__getitem__, _fingerprint(pairs)


def document_text(corpus: Corpus, row: int) -> str:
    """What is encoded, and observed, of a document: its title, if it has one, on a line above its text."""
    title, text = corpus.title(row), corpus.text(row)
    return f"{title}\n{text}" if title else text


def _fingerprint(pairs: Sequence[tuple[DocId, str]]) -> str:
    import hashlib
    import json

    digest = hashlib.sha256()
    for doc_id, text in pairs:
        digest.update(json.dumps([doc_id, text]).encode())
    return digest.hexdigest()


def _hits(ranking: Ranking, traversal: Traversal, index: SearchIndex, k: int, extra: Cost) -> Hits:
    best = ranking.top(k)
    names = tuple(str(index.vectors.ids[row]) for row in best.rows.tolist())
    scores = [1.0 / (n + 1) for n in range(len(names))] if best.scores is None else best.scores.tolist()
    return Hits(names, tuple(scores), traversal.cost + extra, _trace(traversal, index))


def _trace(traversal: Traversal, index: SearchIndex) -> Trace:
    """One step a state: what it observed, what it found first, and what it selected."""
    selected: dict[int, list[int]] = {}
    for proposal in traversal.proposals:
        selected.setdefault(proposal.parent, []).append(proposal.document)
    steps = [_step(n, state, selected.get(n, []), index) for n, state in enumerate(traversal.states)]
    for name, states in traversal.views.items():
        steps += [_step(n, state, [], index, f"{name} view ") for n, state in enumerate(states)]
    if traversal.notes and steps:
        steps[-1] = replace(steps[-1], notes=(*steps[-1].notes, *traversal.notes))
    return tuple(steps)


def _step(number: int, state: StateRecord, selected: Sequence[int], index: SearchIndex, prefix: str = "") -> Step:
    name = [str(doc_id) for doc_id in (index.vectors.ids[row] for row in state.candidates_K[:_SHOWN].tolist())]
    seen = ", ".join(str(index.vectors.ids[row]) for row in state.observed)
    which = f"state {number}"
    if state.parent is not None:
        which += f", from state {state.parent}, has read {seen}"
    kept = [str(index.vectors.ids[row]) for row in selected[:_SHOWN]]
    return Step(
        name=f"{prefix}level {state.level}",
        ids=tuple(name),
        scores=tuple(state.scores_K[:_SHOWN].tolist()),
        kept=tuple(kept),
        notes=(which, *state.notes),
        cost=state.cost,
    )
