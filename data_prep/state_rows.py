"""Typed training rows of the state encoder: a query and rows of its corpus, never rendered prompts.

A row holds one chain of gold documents g_1 .. g_n and stands for all its states (RDR Eq. 1, s = [i; q; ctx(O_s)]):

    hop h, root or continuation:  (q; g_1 .. g_{h-1})      -> g_h
    hop h, recovery:              (q; g_1 .. g_{h-1}, w)   -> g_h     where the last document w is a wrong one

Everything random about a row in an epoch follows from (seed, epoch, row) alone.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from .chains import Chain
from .corpus import Corpus
from .negatives import TextKeys, interleave, rank_window
from .state_types import DrawConfig, StateRow, Target, WrongDocuments, ids_of, state_id
from .task import Qrels, Query

__all__ = [
    "DrawConfig",
    "StateRow",
    "StateRows",
    "Target",
    "WrongDocuments",
    "chain_rows",
    "dialogue_rows",
    "ids_of",
    "pair_rows",
    "state_id",
]


@dataclass(frozen=True, slots=True)
class _Record:
    """A row before wrong documents are looked for. `given`: ids of the data set's own distractors."""

    query: Query
    chain: tuple[int, ...]
    ordered: bool
    gold: tuple[int, ...]
    group: str
    given: Sequence[str] = ()


class _Ragged:
    """Lists of rows, 8 bytes a row."""

    def __init__(self) -> None:
        self._values = array("q")
        self._ends = array("q", [0])

    def append(self, rows: Iterable[int]) -> None:
        self._values.extend(rows)
        self._ends.append(len(self._values))

    def __getitem__(self, number: int) -> list[int]:
        return self._values[self._ends[number] : self._ends[number + 1]].tolist()

    def update(self, digest: hashlib._Hash) -> None:
        for part in (self._ends, self._values):
            digest.update(part.tobytes())


class StateRows:
    """The rows of one data set, to be drawn anew in each epoch; made by `chain_rows`, `pair_rows`, `dialogue_rows`.

    Memory is 8 bytes a known wrong document and some hundred a row, whatever the texts of documents.

    Attributes:
        skipped: how many queries or documents were left out, by reason.
    """

    def __init__(self, corpus: Corpus, instruction_key: str, source: str) -> None:
        self.corpus, self.instruction_key, self.source = corpus, instruction_key, source
        self.skipped: Counter[str] = Counter()
        self._queries: list[Query] = []
        self._groups: list[str] = []
        self._ordered: list[bool] = []
        self._first_hop = array("q", [0])
        self._chains, self._gold = _Ragged(), _Ragged()
        self._given, self._pool, self._picks = _Ragged(), _Ragged(), _Ragged()  # of all hops of a row
        self._hop_pool, self._hop_picks = _Ragged(), _Ragged()  # of one hop
        self._leaves = corpus.leaves()
        self._keys = TextKeys(corpus)

    def __len__(self) -> int:
        return len(self._queries)

    def hops(self, row: int) -> int:
        """How many documents the row's chain has, whatever is drawn."""
        return self._first_hop[row + 1] - self._first_hop[row]

    @property
    def digest(self) -> str:
        """Hex sha256 of all that is drawn from, to tell whether a run goes on with the rows it began with."""
        digest = hashlib.sha256(f"{self.corpus.fingerprint} {self.instruction_key} {self.source}".encode())
        for query, group, ordered in zip(self._queries, self._groups, self._ordered, strict=True):
            digest.update(repr((query.id, query.text, group, ordered)).encode(errors="surrogatepass"))
        for part in (self._chains, self._gold, self._given, self._pool, self._picks, self._hop_pool, self._hop_picks):
            part.update(digest)
        return digest.hexdigest()

    def draw(self, row: int, epoch: int, config: DrawConfig) -> StateRow:
        """The row as it is in that epoch; the same for the same (seed, epoch, row), whatever was drawn before.

        A chain without order has another one each time. A recovery state's wrong document is, in this order of
        preference, one of the model's own wrong picks, a distractor of the data set, one of the rankings, any of the
        corpus; a hop of which every document is right has none. It is no negative of that hop, unless there is
        no other.
        """
        rng = np.random.default_rng([config.seed, epoch, row])
        query, gold = self._queries[row], self._gold[row]
        chain = self._chains[row]
        paraphrase = int(rng.integers(config.paraphrases))
        if not self._ordered[row]:
            chain = [chain[i] for i in rng.permutation(len(chain))]
        wrong: list[int | None] = []
        negatives: list[tuple[int, ...]] = []
        for hop in range(len(chain)):
            recovers = rng.random() < config.recovery_share
            observed = self._wrong(row, hop, config.random_share, rng) if recovers else None
            pool = self._hop(row, hop, self._hop_pool) + self._pool[row]
            others = [doc for doc in dict.fromkeys(pool) if doc != observed]
            if observed is not None and not others and observed in pool:
                others = [observed]
            size = min(config.negatives, len(others))
            chosen = sorted(rng.choice(len(others), size, replace=False).tolist()) if size else []
            wrong.append(observed)
            negatives.append(tuple(others[i] for i in chosen))
        return StateRow(
            query_id=query.id,
            query=query.text,
            instruction_key=self.instruction_key,
            paraphrase=paraphrase,
            chain=tuple(chain),
            negatives=tuple(negatives),
            wrong=tuple(wrong),
            gold=tuple(gold),
            group=self._groups[row],
            source=self.source,
        )

    def _hop(self, row: int, hop: int, of_hops: _Ragged) -> list[int]:
        """What is known of one hop alone: only the first one of a chain without order is always the same state."""
        return of_hops[self._first_hop[row] + hop] if hop == 0 or self._ordered[row] else []

    def _wrong(self, row: int, hop: int, random_share: float, rng: np.random.Generator) -> int | None:
        if rng.random() >= random_share:
            picks = self._hop(row, hop, self._hop_picks) or self._picks[row]
            for known in (picks, self._given[row], self._hop(row, hop, self._hop_pool) or self._pool[row]):
                if known:
                    return known[int(rng.integers(len(known)))]
        return self._random(row, rng)

    def _random(self, row: int, rng: np.random.Generator) -> int | None:
        """A leaf that is neither right, nor a copy of what is right, nor known to look right; None: there is none."""
        gold, given = self._gold[row], self._given[row]
        right = {self._keys.of(doc) for doc in gold}
        for _ in range(32):
            doc = int(self._leaves[int(rng.integers(len(self._leaves)))])
            if doc not in given and self._is_wrong(doc, gold, right):
                return doc
        left = [doc for doc in self._leaves.tolist() if doc not in given and self._is_wrong(doc, gold, right)]
        return left[int(rng.integers(len(left)))] if left else None

    def _add(self, record: _Record, wrong: WrongDocuments) -> None:
        query_id = record.query.id
        right = {self._keys.of(doc) for doc in record.gold}

        def clean(rankings: Iterable[Sequence[str]], most: int) -> list[int]:
            rows = map(self.corpus.row, interleave(rankings))
            return list(islice((row for row in rows if self._is_wrong(row, record.gold, right)), most))

        def found(name: str) -> list[int]:
            windows = (rank_window(of[name], *wrong.ranks) for of in wrong.rankings if name in of)
            return clean(windows, wrong.depth)

        def picked(name: str) -> list[int]:
            return clean([wrong.picks.get(name, ())], wrong.pick_depth)

        self._queries.append(record.query)
        self._groups.append(record.group)
        self._ordered.append(record.ordered)
        self._first_hop.append(self._first_hop[-1] + len(record.chain))
        self._chains.append(record.chain)
        self._gold.append(record.gold)
        given = [row for row in map(self.corpus.row, record.given) if self._keys.of(row) not in right]
        self._given.append(given)
        self._pool.append(interleave([given, found(query_id)]))
        self._picks.append(picked(query_id))
        for hop in range(len(record.chain)):
            self._hop_pool.append(found(state_id(query_id, hop)))
            self._hop_picks.append(picked(state_id(query_id, hop)))

    def _is_wrong(self, row: int, gold: Sequence[int], right: Collection[int]) -> bool:
        """Whether a row is neither gold, nor has a text of `right`, nor stands above or below gold, and so answers."""
        if row in gold or self._keys.of(row) in right:
            return False
        if self.corpus.num_levels == 1:
            return True
        path = self.corpus.path(row)
        return not any(doc in path or row in self.corpus.path(doc) for doc in gold)


def chain_rows(
    corpus: Corpus,
    queries: Sequence[Query],
    chains: Mapping[str, Chain],
    *,
    instruction_key: str = "multi-hop",
    source: str,
    wrong: WrongDocuments | None = None,
) -> StateRows:
    """One row a query with a chain, with all its hops.

    Where the corpus lacks a gold document, an ordered chain ends before it (later hops would need its text), one
    without order goes on without it; `skipped` counts `missing_gold` documents, `cut_chains`, and queries
    `without_chain` or left with `no_gold`.

    Raises:
        KeyError: a distractor or ranked document that the corpus lacks.
    """
    rows = StateRows(corpus, instruction_key, source)
    wrong, skipped = wrong or WrongDocuments(), rows.skipped
    for query in queries:
        chain = chains.get(query.id)
        if chain is None:
            skipped["without_chain"] += 1
            continue
        there = [doc_id in corpus for doc_id in chain.gold]
        gold = tuple(corpus.row(doc_id) for doc_id, known in zip(chain.gold, there, strict=True) if known)
        usable = gold
        if not all(there):
            skipped["missing_gold"] += there.count(False)
            usable = gold[: there.index(False)] if chain.ordered else gold
            skipped["cut_chains"] += bool(usable)
        if usable:
            rows._add(_Record(query, usable, chain.ordered, gold, query.id, chain.distractors), wrong)
        else:
            skipped["no_gold"] += 1
    rows.skipped = +skipped
    return rows


def pair_rows(
    corpus: Corpus,
    queries: Sequence[Query],
    qrels: Qrels,
    *,
    instruction_key: str,
    source: str,
    wrong: WrongDocuments | None = None,
    groups: Mapping[str, str] | None = None,
) -> StateRows:
    """One row of one hop for each query and relevant document, as of any BEIR-like task.

    groups: the group of each query id (None: the query itself). `skipped` counts queries `without_gold`, and relevant
    documents that the corpus lacks (`missing_gold`).

    Raises:
        KeyError: a ranked document that the corpus lacks, or a query without a group.
    """
    rows = StateRows(corpus, instruction_key, source)
    wrong, skipped = wrong or WrongDocuments(), rows.skipped
    for query in queries:
        relevant = [doc_id for doc_id, relevance in qrels.get(query.id, {}).items() if relevance > 0]
        gold = tuple(corpus.row(doc_id) for doc_id in relevant if doc_id in corpus)
        skipped["missing_gold"] += len(relevant) - len(gold)
        skipped["without_gold"] += not relevant
        group = query.id if groups is None else groups[query.id]
        for doc in gold:
            rows._add(_Record(query, (doc,), True, gold, group), wrong)
    rows.skipped = +skipped
    return rows


def dialogue_rows(
    corpus: Corpus,
    queries: Sequence[Query],
    qrels: Qrels,
    *,
    instruction_key: str = "dialogue",
    source: str,
    wrong: WrongDocuments | None = None,
) -> StateRows:
    """`pair_rows` of a task whose queries are dialogues so far, DIALOGUE_TURN by id (MultiDoc2Dial).

    The turns of one dialogue are one group: what one of them asks for often answers the next one as well.
    """
    groups = {query.id: query.id.rpartition("_")[0] or query.id for query in queries}
    return pair_rows(corpus, queries, qrels, instruction_key=instruction_key, source=source, wrong=wrong, groups=groups)
