"""Run recursive searches level by level: all new states of a batch of queries in one encoding and one index search.

A batch is a generator that encodes a level, asks for an index search, and goes on with what it found. So while the
index (in a thread, on its own device) works for one batch, the encoder works for the next; every batch is on its own,
and results do not depend on how many are under way, nor on which queries share a batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from ...data_prep.hits import Cost
from ..protocols import EncoderSession, State, StateEncoder, StateVectors
from .index import DocumentIndex, Found
from .index_faiss import FaissIndex
from .search import AdaptiveSearch, JointFeedback, Search, TreeSearch
from .selection import Growth, select
from .traversal import Proposal, StateRecord, Traversal


@dataclass(frozen=True, slots=True)
class Request:
    """One query to search for. `excluded` are rows of the index that must never be seen."""

    query: str
    instruction: str | None = None
    excluded: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Ask:
    """Vectors to search for, and what each may not find."""

    vectors_SD: np.ndarray
    excluded: list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _New:
    """A state that is to be formed: for which query of the batch, from which proposal (None: the root)."""

    owner: int
    state: State
    observed: tuple[int, ...]
    level: int
    parent: int | None
    path_score: float
    path_sum: float
    logp: float


_Q = TypeVar("_Q")
_R = TypeVar("_R")
# It is sent (Found, seconds) of what it asked for, and returns one result a query.
_Batch = Generator[_Ask, Any, list[_R]]
_Begin = Callable[[Sequence[_Q], int], _Batch[_R]]


class Engine:
    """Forms the states of searches.

    Attributes:
        text: the text of a row of the index, as states observe it.
        role: of states with observations (a preset's primary role).
        candidate_k: K, how many candidates a state keeps; more lets readouts see deeper and costs memory.
        temperature: tau of p_s.
        batch_size: queries that go level by level together; more fills a GPU better and holds more in memory.
        inflight: batches under way at once; 2 keeps encoder and index busy where they are on two devices.
    """

    def __init__(
        self,
        encoder: StateEncoder,
        index: DocumentIndex | FaissIndex,
        text: Callable[[int], str],
        *,
        role: str = "continuation",
        candidate_k: int = 200,
        temperature: float = 0.05,
        batch_size: int = 32,
        inflight: int = 2,
    ) -> None:
        for name, value in (("candidate_k", candidate_k), ("batch_size", batch_size), ("inflight", inflight)):
            if value < 1:
                raise ValueError(f"{name}={value} must be 1 or more")
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} must be above 0")
        if encoder.dim != index.dim:
            raise ValueError(f"the encoder has {encoder.dim} dimensions and the index {index.dim}")
        self.encoder, self.index, self.text, self.role = encoder, index, text, role
        self.candidate_k, self.temperature = candidate_k, temperature
        self.batch_size, self.inflight = batch_size, inflight

    def run(
        self, requests: Sequence[Request], search: Search, *, ranges: bool = False, progress: bool = False
    ) -> list[Traversal]:
        """One traversal a request, in their order. ranges: record each state's least and greatest score."""
        session = self.encoder.session()
        ranges = ranges or (isinstance(search, TreeSearch) and search.path_score == "minmax")
        begin = lambda part, first: self._batch(part, first, search, session)  # noqa: E731
        return self._drive(requests, begin, ranges, progress)

    def form_view(self, traversals: Sequence[Traversal], role: str = "recovery_view") -> list[tuple[StateRecord, ...]]:
        """The states of every proposal's path, also of the deepest and the pruned ones, under another role.

        RDR's recovery view: each is encoded as the path with its last document marked as wrong, at the level after its
        parent's; it has candidates and ranges of its own, and never changes the search.
        """
        session = self.encoder.session()
        return self._drive(traversals, lambda part, first: self._view(part, first, role, session), ranges=True)

    def _drive(self, queries: Sequence[_Q], begin: _Begin[_Q, _R], ranges: bool, progress: bool = False) -> list[_R]:
        """Run the batches that `begin` makes of queries and of the number of the first, `inflight` at a time.

        Their index searches run in a thread. One result a query.
        """
        starts = range(0, len(queries), self.batch_size)
        batches = [begin(queries[start : start + self.batch_size], start) for start in starts]
        results: list[list[_R]] = [[] for _ in batches]
        upcoming = deque(range(len(batches)))
        waiting: deque[tuple[int, Future[tuple[Found, float]]]] = deque()
        with (
            ThreadPoolExecutor(1, thread_name_prefix="index") as thread,
            tqdm(total=len(queries), desc="search", unit="query", disable=not progress) as bar,
        ):
            while upcoming or waiting:
                if upcoming and len(waiting) < self.inflight:
                    n, answer = upcoming.popleft(), None
                else:
                    n, future = waiting.popleft()
                    answer = future.result()
                try:
                    ask = batches[n].send(answer)
                except StopIteration as end:
                    results[n] = end.value
                    bar.update(len(results[n]))
                else:
                    waiting.append((n, thread.submit(self._look_up, ask, ranges)))
        return [result for batch in results for result in batch]

    def _look_up(self, ask: _Ask, ranges: bool) -> tuple[Found, float]:
        start = time.perf_counter()
        hidden = ask.excluded if any(ask.excluded) else None
        found = self.index.search(ask.vectors_SD, self.candidate_k, excluded=hidden, ranges=ranges)
        return found, time.perf_counter() - start

    def _batch(
        self, requests: Sequence[Request], first: int, search: Search, session: EncoderSession
    ) -> _Batch[Traversal]:
        started = time.perf_counter()
        growths = [Growth(self.temperature, used=set(request.excluded)) for request in requests]
        notes: list[list[str]] = [[] for _ in requests]
        new = [
            _New(n, State(request.query, instruction=request.instruction), (), 1, None, 1.0, 0.0, 0.0)
            for n, request in enumerate(requests)
        ]
        while new:
            vectors = self._vectors(new, session, first)
            excluded = [requests[state.owner].excluded for state in new]
            found, seconds = yield _Ask(vectors.vectors_SD, excluded)
            numbers = _record(growths, new, vectors, found, seconds)
            level, new = new[0].level, []
            for n, growth in enumerate(growths):
                if isinstance(search, JointFeedback):
                    new += self._feedback(n, requests[n], growth, search) if level == 1 else []
                    continue
                if numbers[n]:
                    select(growth, numbers[n], search)
                    if isinstance(search, AdaptiveSearch):
                        _cap(growth, level, search, started, notes[n])
                    role = "document" if search.observe == "document" else self.role
                    kept = [p for p in growth.proposals if p.kept and p.level == level]
                    new += [self._child(n, requests[n], proposal, role) for proposal in kept]
        for n in range(len(requests)):
            session.forget(first + n)
        return [
            Traversal(
                query=request.query,
                instruction=request.instruction,
                search=str(search),
                candidate_k=self.candidate_k,
                temperature=self.temperature,
                states=tuple(growth.states),
                proposals=tuple(growth.proposals),
                excluded=request.excluded,
                realised=not isinstance(search, JointFeedback),
                notes=tuple(said),
            )
            for request, growth, said in zip(requests, growths, notes, strict=True)
        ]

    def _vectors(self, new: Sequence[_New], session: EncoderSession, first: int) -> StateVectors:
        """The states' encodings; where documents are queries, the vectors that the index has of them."""
        if new[0].state.role == "document":
            start = time.perf_counter()
            vectors = self.index.vectors([state.observed[-1] for state in new])
            seconds = (time.perf_counter() - start) / len(new)
            return StateVectors(vectors, tuple([Cost(seconds=seconds)] * len(new)), tuple([()] * len(new)))
        return session.encode([state.state for state in new], [first + state.owner for state in new])

    def _child(self, owner: int, request: Request, proposal: Proposal, role: str) -> _New:
        texts = tuple(self.text(row) for row in proposal.path)
        state = State(request.query, texts, role, request.instruction)
        sums = proposal.cum, proposal.path_sum, proposal.logp
        return _New(owner, state, proposal.path, proposal.level + 1, proposal.parent, *sums)

    def _feedback(self, owner: int, request: Request, growth: Growth, search: JointFeedback) -> list[_New]:
        rows = tuple(growth.states[0].candidates_K[: search.documents].tolist())
        if not rows:
            return []
        state = State(request.query, tuple(self.text(row) for row in rows), "feedback", request.instruction)
        return [_New(owner, state, rows, 2, 0, 1.0, 0.0, 0.0)]

    def _view(
        self, traversals: Sequence[Traversal], first: int, role: str, session: EncoderSession
    ) -> _Batch[tuple[StateRecord, ...]]:
        growths = [Growth(self.temperature) for _ in traversals]
        new = []
        for n, traversal in enumerate(traversals):
            request = Request(traversal.query, traversal.instruction)
            new += [self._child(n, request, proposal, role) for proposal in traversal.proposals]
        if new:
            vectors = session.encode([state.state for state in new], [first + state.owner for state in new])
            found, seconds = yield _Ask(vectors.vectors_SD, [traversals[state.owner].excluded for state in new])
            _record(growths, new, vectors, found, seconds)
        for n in range(len(traversals)):
            session.forget(first + n)
        return [tuple(growth.states) for growth in growths]


def _record(
    growths: Sequence[Growth], new: Sequence[_New], vectors: StateVectors, found: Found, seconds: float
) -> list[list[int]]:
    """Add the states to their queries' growths; their numbers, by query."""
    numbers: list[list[int]] = [[] for _ in growths]
    share = seconds / len(new)
    for n, state in enumerate(new):
        growth, count = growths[state.owner], int(found.counts_S[n])
        numbers[state.owner].append(len(growth.states))
        cost = replace(vectors.costs[n], seconds=vectors.costs[n].seconds + share)
        growth.states.append(
            StateRecord(
                role=state.state.role,
                level=state.level,
                parent=state.parent,
                observed=state.observed,
                path_score=state.path_score,
                candidates_K=found.rows_SK[n, :count],
                scores_K=found.scores_SK[n, :count],
                vector_D=vectors.vectors_SD[n],
                low=None if found.low_S is None else float(found.low_S[n]),
                high=None if found.high_S is None else float(found.high_S[n]),
                cost=cost,
                search_seconds=share,
                notes=vectors.notes[n],
            )
        )
        growth.sums.append(state.path_sum)
        growth.logps.append(state.logp)
    return numbers


def _cap(growth: Growth, level: int, search: AdaptiveSearch, started: float, notes: list[str]) -> None:
    """Keep only what of the next level may be formed under the caps; a note where one was reached."""
    kept = [n for n, proposal in enumerate(growth.proposals) if proposal.kept and proposal.level == level]
    if not kept:
        return
    tokens = sum(state.cost.prompt_tokens for state in growth.states)
    spent = (time.perf_counter() - started) * 1000
    room = len(kept)
    if search.max_states is not None and search.max_states - len(growth.states) < room:
        room = max(0, search.max_states - len(growth.states))
        notes.append(f"level {level + 1} forms {room} of {len(kept)} states (max_states={search.max_states})")
    for name, value, cap in (("max_tokens", tokens, search.max_tokens), ("max_ms", spent, search.max_ms)):
        if cap is not None and value >= cap:
            room = 0
            notes.append(f"stopped after level {level}: {value:.0f} of {name}={cap:g} are spent")
    for n in sorted(kept, key=lambda n: -growth.proposals[n].cum)[room:]:
        growth.proposals[n] = replace(growth.proposals[n], kept=False)
