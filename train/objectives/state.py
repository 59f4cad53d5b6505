"""The state objective: every state of a chain must find its next document among all documents of a step.

A row is a chain: its root, continuation and recovery states share one forward pass (`StateBatch`), and their positives
and negatives stand beside them. The loss compares all rows of the step, over microbatches and ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ...data_prep.corpus import Corpus
from ...data_prep.state_rows import DrawConfig, StateRow, StateRows, Target
from ...models.protocols import State
from ...models.recursive.encoder import LocalEncoder
from ...models.recursive.prompts import PromptConfig, wordings
from ...models.recursive.retriever import document_text
from ...models.recursive.state_model import StateBatch
from ..config import StateObjectiveConfig
from ..contrastive import Columns, Pairs, allowed_negatives, info_nce, matryoshka
from .base import Batch, LossParts

_REMEMBERED = 4096
# The role in which a state with a wrong last document is rendered, by the instructions that its data come with.
_RECOVERY = {"multi-hop": "recovery_view"}


@dataclass(frozen=True, slots=True)
class Example:
    """One row as it is trained on in one epoch.

    states: token lists. documents: numbers (unique over all data sets); texts: their hashes; doc_tokens: their ids.
    positive: of each state, a place among `documents`. right: numbers that are right for the query. weights: of the
    states. query, group: equal numbers are equal queries, and groups.
    """

    name: str
    states: tuple[list[int], ...]
    documents: tuple[int, ...]
    texts: tuple[int, ...]
    doc_tokens: tuple[list[int], ...]
    positive: tuple[int, ...]
    right: tuple[int, ...]
    weights: tuple[float, ...]
    query: int
    group: int


@dataclass(frozen=True, slots=True)
class ContrastBatch:
    """A microbatch; an empty one carries a row of which nothing counts."""

    tokens: StateBatch
    examples: tuple[Example, ...]
    rows: tuple[int, ...]

    @property
    def counts(self) -> Mapping[str, float]:
        """The weight of its states."""
        total = sum(weight for example in self.examples for weight in example.weights)
        return {"infonce": total, "hit": float(sum(len(example.states) for example in self.examples))}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rows."""
        return tuple(example.name for example in self.examples)

    @property
    def num_tokens(self) -> int:
        """Tokens that carry meaning."""
        return self.tokens.num_tokens if self.examples else 0

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return self.tokens.num_padded_tokens

    def to(self, device: torch.device | str) -> ContrastBatch:
        """The same batch on another device."""
        return replace(self, tokens=self.tokens.to(device))


class StateObjective:
    """InfoNCE over all documents of a step; a `ContrastiveObjective`.

    Negatives of a state are its own wrong documents and everything that other rows brought, less what is right for its
    query by number or text, what rows of its group brought, and what looks more right than its positive by a margin.
    """

    weights = {"infonce": 1.0}

    def __init__(
        self, parts: Sequence[StateRows], encoder: LocalEncoder, config: StateObjectiveConfig, *, seed: int = 0
    ) -> None:
        """`parts`: rows of each data set, which are trained on as one; `encoder` renders and tokenises.

        Raises:
            ValueError: there are no rows, or more dimensions are to be trained by themselves than vectors have.
        """
        if max(config.dimensions, default=0) > encoder.dim:
            raise ValueError(f"contrast.dimensions={config.dimensions}, but vectors have {encoder.dim}")
        self.parts, self.encoder, self.config = list(parts), encoder, config
        self.num_rows = sum(map(len, self.parts))
        if not self.num_rows:
            raise ValueError("there is nothing to train on: no query of this split has a relevant document")
        self._wordings = _all_wordings(encoder.prompts) if config.paraphrases else [encoder.prompts]
        self._draw = DrawConfig(
            negatives=config.negatives,
            recovery_share=config.recovery_share,
            random_share=config.random_share,
            paraphrases=len(self._wordings),
            seed=seed,
        )
        self._fitters = [encoder.fitter_of(prompts) for prompts in self._wordings]
        self._first_row = [sum(map(len, self.parts[:n])) for n in range(len(self.parts))]
        self._first_doc = [sum(len(part.corpus) for part in self.parts[:n]) for n in range(len(self.parts))]
        self._example = lru_cache(maxsize=_REMEMBERED)(self._make)
        self._document = lru_cache(maxsize=8 * _REMEMBERED)(self._read)

    def length(self, row: int, epoch: int) -> int:
        """Tokens of the row's states, common beginnings once, and of its documents."""
        example = self._example(row, epoch)
        return StateBatch.of([example.states], example.doc_tokens).num_tokens

    def collate(self, rows: Sequence[tuple[int, int]]) -> ContrastBatch:
        """The microbatch of these (row, epoch) pairs."""
        examples = tuple(self._example(row, epoch) for row, epoch in rows)
        shown = examples or (self._example(0, 0),)
        tokens = StateBatch.of([e.states for e in shown], [ids for e in shown for ids in e.doc_tokens])
        return ContrastBatch(tokens, examples, tuple(row for row, _ in rows))

    def facts(self, batch: Batch) -> dict[str, list[Any]]:
        """What a step's other microbatches must know of this one."""
        assert isinstance(batch, ContrastBatch)
        examples = list(zip(batch.examples, batch.rows, strict=True))
        return {
            "query": [e.query for e, _ in examples for _ in e.states],
            "document": [number for e, _ in examples for number in e.documents],
            "text": [text for e, _ in examples for text in e.texts],
            "row": [row for e, row in examples for _ in e.documents],
            "group": [e.group for e, _ in examples for _ in e.documents],
        }

    def represent(self, model: nn.Module, batch: Batch) -> Tensor:
        """Vectors of the states, then of the documents."""
        assert isinstance(batch, ContrastBatch)
        vectors = torch.cat(model(batch.tokens))
        return vectors if batch.examples else vectors[:0]

    def contrast(
        self, vectors: Tensor, facts: Sequence[Sequence[Any]], rank: int, batches: Sequence[Batch]
    ) -> LossParts:
        """InfoNCE of this rank's states, and how many of them have their positive first (`hit`)."""
        own = [batch for batch in batches if isinstance(batch, ContrastBatch)]
        examples = [pair for batch in own for pair in zip(batch.examples, batch.rows, strict=True)]
        if not examples:
            return LossParts({"infonce": (vectors * 0.0).sum()}, {"hit": vectors.new_zeros(())})
        layout = _Layout.of(facts, rank)
        pairs = self._pairs(layout, examples).to(vectors.device)
        states, documents = vectors[layout.states.to(vectors.device)], vectors[layout.documents.to(vectors.device)]
        losses = [self._infonce(states, documents, pairs)]
        losses += [
            self._infonce(matryoshka(states, size), matryoshka(documents, size), pairs)
            for size in self.config.dimensions
        ]
        return LossParts({"infonce": torch.stack(losses).mean()}, {"hit": _hits(states, documents, pairs)})

    def _infonce(self, states: Tensor, documents: Tensor, pairs: Pairs) -> Tensor:
        return info_nce(
            states,
            documents,
            pairs,
            self.config.temperature,
            margin=self.config.margin,
            states_too=self.config.states_too,
            documents_too=self.config.documents_too,
        )

    def loss(self, model: nn.Module, batch: Batch) -> LossParts:
        """The loss of a microbatch by itself, as if it were the whole step."""
        vectors = self.represent(model, batch)
        return self.contrast(vectors, [[self.facts(batch)]], 0, [batch])

    def _pairs(self, layout: _Layout, examples: Sequence[tuple[Example, int]]) -> Pairs:
        own = torch.arange(layout.first_state, layout.first_state + sum(len(e.states) for e, _ in examples))
        right, positive, row, group, weight = [], [], [], [], []
        start = layout.first_document
        for example, number in examples:
            for place, counts in zip(example.positive, example.weights, strict=True):
                right.append(example.right)
                positive.append(start + place)
                row.append(number)
                group.append(example.group)
                weight.append(counts)
            start += len(example.documents)
        allowed = allowed_negatives(
            right, torch.tensor(positive), torch.tensor(row), torch.tensor(group), layout.columns
        )
        other = layout.query[own][:, None] != layout.query
        return Pairs(own, torch.tensor(positive), allowed, other, torch.tensor(weight))

    def _make(self, row: int, epoch: int) -> Example:
        which = max(n for n, first in enumerate(self._first_row) if row >= first)
        part = self.parts[which]
        drawn = part.draw(row - self._first_row[which], epoch, self._draw)
        targets = list(drawn.targets())
        documents = list(dict.fromkeys(doc for t in targets for doc in (t.positive, *t.negatives)))
        read = [self._document(which, doc) for doc in documents]
        first = self._first_doc[which]
        return Example(
            name=f"{drawn.name} (epoch {epoch})",
            states=tuple(self._tokens(part.corpus, drawn, target) for target in targets),
            documents=tuple(first + doc for doc in documents),
            texts=tuple(text for text, _ in read),
            doc_tokens=tuple(ids for _, ids in read),
            positive=tuple(documents.index(target.positive) for target in targets),
            right=tuple(first + doc for doc in drawn.gold),
            weights=tuple(self._weight(target) for target in targets),
            query=_number(f"{drawn.source} {drawn.query_id}"),
            group=_number(f"{drawn.source} {drawn.group}"),
        )

    def _tokens(self, corpus: Corpus, drawn: StateRow, target: Target) -> list[int]:
        role = target.role
        if role == "recovery":
            role = _RECOVERY.get(drawn.instruction_key, role)
        observed = tuple(document_text(corpus, row) for row in target.observed)
        fitted = self._fitters[drawn.paraphrase].fit(State(drawn.query, observed, role))
        return self.encoder.framed(fitted.ids)

    def _read(self, which: int, row: int) -> tuple[int, list[int]]:
        text = document_text(self.parts[which].corpus, row)
        return _number(text), self.encoder.document_tokens(text)

    def _weight(self, target: Target) -> float:
        if target.role == "recovery":
            return self.config.recovery_weight
        return self.config.hop_weights[min(target.hop, len(self.config.hop_weights) - 1)]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where everything stands among the vectors of all ranks, which lie rank by rank, microbatch by microbatch.

    states, documents: places. query: of each state. columns: of each document. first_state, first_document: where this
    rank's begin among them.
    """

    states: Tensor
    documents: Tensor
    query: Tensor
    columns: Columns
    first_state: int
    first_document: int

    @classmethod
    def of(cls, facts: Sequence[Sequence[Mapping[str, list[int]]]], rank: int) -> _Layout:
        states: list[int] = []
        documents: list[int] = []
        first, place = (0, 0), 0
        for n, batches in enumerate(facts):
            if n == rank:
                first = len(states), len(documents)
            for one in batches:
                states += range(place, place + len(one["query"]))
                place += len(one["query"])
                documents += range(place, place + len(one["document"]))
                place += len(one["document"])
        flat = {
            key: torch.tensor([value for batches in facts for one in batches for value in one[key]], dtype=torch.long)
            for key in ("query", "document", "text", "row", "group")
        }
        columns = Columns(flat["document"], flat["text"], flat["row"], flat["group"])
        return cls(torch.tensor(states), torch.tensor(documents), flat["query"], columns, *first)


def _hits(states: Tensor, documents: Tensor, pairs: Pairs) -> Tensor:
    """How many states have no negative above their positive."""
    with torch.no_grad():
        query = states[pairs.own_S]
        score = (query * documents[pairs.positive_S]).sum(1)
        rival = (query @ documents.T).masked_fill(~pairs.allowed_SM, -torch.inf).amax(1)
        return (score > rival).sum().float()


def _all_wordings(prompts: PromptConfig) -> list[PromptConfig]:
    """The prompts in each wording of their preset's instructions; themselves alone where they are of no preset."""
    try:
        roots = wordings(prompts.name, "root")
        by_role = {role: wordings(prompts.name, role) for role in prompts.instructions}
    except ValueError:
        return [prompts]
    count = max(len(roots), *(len(words) for words in by_role.values()))
    return [
        replace(
            prompts,
            root=roots[n % len(roots)],
            instructions={role: words[n % len(words)] for role, words in by_role.items()},
        )
        for n in range(count)
    ]


def _number(text: str) -> int:
    """63 bits that are equal for equal texts."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
