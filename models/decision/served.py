"""A `DecisionScorer` on a server: vLLM, SGLang, llama.cpp, a commercial service, or `retrail serve`.

The candidates of a slate are the state of one request, and short questions refer to them by number, so that they are
judged beside their rivals (DecisionRAG).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ...data_prep.hits import Cost
from ..answer_cache import AnswerCache
from ..config import ServedOptions, check_choice
from ..protocols import Candidate, Slate, SlateScores
from .served_http import MAX_IN_FLIGHT, Abandoned, BadAnswer, Endpoint, Reply
from .served_protocols import PROTOCOLS, WrongAnswer, normalised, usage_cost
from .wire import MAX_OPTIONS, NONE, compact, option

Read = Callable[[Mapping[str, Any]], np.ndarray]

# What a candidate takes beside its text: its frame in the state, and its question.
_TOKENS_AROUND = 40
_SHOWN_NOTES = 20


@dataclass(frozen=True, slots=True)
class _Ask:
    """One request about one slate."""

    body: str
    read: Read
    notes: tuple[str, ...]


class ServedScorer:
    """Scores slates through one endpoint of a server; close it, or use it in a `with` block.

    protocol: `systemone`, `decisions`, `rerank` (scores are probabilities) or `rerank_logits` (any numbers; see
        `served_protocols.Rerank`).
    num_tokens: tokens that a candidate takes of a slate; None estimates them from its bytes, rather too many.

    Raises:
        ValueError: an unknown protocol, an address that is none, or a cache file that is something else.
    """

    def __init__(
        self,
        url: str,
        model: str,
        protocol: str = "systemone",
        options: ServedOptions | None = None,
        *,
        num_tokens: Callable[[Candidate], int] | None = None,
    ) -> None:
        """Nothing is sent yet."""
        check_choice("protocol", protocol, tuple(PROTOCOLS))
        self.options = options or ServedOptions()
        self.model, self.protocol = model, protocol
        self._wire = PROTOCOLS[protocol]
        self._num_tokens = num_tokens or estimate_tokens
        self._endpoint = Endpoint(url, self.options)
        self._cache = AnswerCache(self.options.cache) if self.options.cache else None

    def __repr__(self) -> str:
        return f"ServedScorer({self.url!r}, {self.model!r}, {self.protocol!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and the cache."""
        self._endpoint.close()
        if self._cache is not None:
            self._cache.close()

    @property
    def url(self) -> str:
        """Where the questions go."""
        return f"{self._endpoint.url}{self._wire.path}"

    @property
    def max_candidates(self) -> int:
        """How many candidates one slate may hold."""
        return self.options.max_candidates

    @property
    def max_candidate_tokens_per_slate(self) -> int:
        """How many tokens of candidates one slate may hold."""
        return self.options.max_slate_tokens

    def num_tokens(self, candidate: Candidate) -> int:
        """How many tokens of a slate's budget this candidate takes, its text cut as it will be sent."""
        return self._num_tokens(self._cut(candidate)[0])

    def yes(self, slates: Sequence[Slate]) -> list[SlateScores]:
        """P(yes) of each candidate of each slate, as the server says; see `Endpoint` for what runs together.

        Raises:
            ServedError: the server refused, failed, was too slow, or answered what cannot be.
            ValueError: a slate without candidates, or one that holds an id twice.
        """
        return self._all([self._ask_yes(slate) for slate in slates])

    def choose(self, slates: Sequence[Slate], *, none: bool = False) -> list[SlateScores]:
        """One multiple-choice question a slate; a slate whose only option is its one candidate needs no request.

        Raises:
            ServedError: as `yes`.
            ValueError: as `yes`; more than 255 options; `none` where the protocol cannot say it.
        """
        if none and not self._wire.has_none:
            raise ValueError(f"{self.protocol} cannot answer that no candidate is right; use systemone or decisions")
        asked = [slate for slate in slates if none or len(slate.candidates) != 1]
        answers = iter(self._all([self._ask_choice(slate, none) for slate in asked]))
        out = []
        for slate in slates:
            if not none and len(slate.candidates) == 1:
                out.append(SlateScores(np.ones(1)))
                continue
            answer = next(answers)
            if none:
                answer = replace(answer, values_C=answer.values_C[:-1], none=float(answer.values_C[-1]))
            out.append(answer)
        return out

    def _ask_yes(self, slate: Slate) -> _Ask:
        slate, notes = self._shown(slate)
        count = len(slate.candidates)
        return _Ask(compact(self._wire.ask_yes(self.model, slate)), lambda answer: self._wire.yes(answer, count), notes)

    def _ask_choice(self, slate: Slate, none: bool) -> _Ask:
        slate, notes = self._shown(slate)
        names = [option(n) for n in range(len(slate.candidates))] + [NONE] * none
        if len(names) > MAX_OPTIONS:
            raise ValueError(
                f"a choice among {len(names)} options for the query {slate.query[:60]!r}: servers take at most "
                f"{MAX_OPTIONS}; ask yes/no about them first and let the best choose (navigate.choose)"
            )
        body = compact(self._wire.ask_choice(self.model, slate, names))
        return _Ask(body, lambda answer: normalised(self._wire.choice(answer, names)), notes)

    def _shown(self, slate: Slate) -> tuple[Slate, tuple[str, ...]]:
        """The slate with its long texts cut, and what was cut."""
        if not slate.candidates:
            raise ValueError(f"a slate for the query {slate.query[:60]!r} has no candidates")
        cut = [self._cut(candidate) for candidate in slate.candidates]
        return Slate(slate.query, tuple(c for c, _ in cut)), tuple(note for _, note in cut if note)

    def _cut(self, candidate: Candidate) -> tuple[Candidate, str]:
        cap = self.options.max_brief_chars if candidate.brief else self.options.max_candidate_chars
        if len(candidate.text) <= cap:
            return candidate, ""
        note = f"text of {candidate.id} cut from {len(candidate.text)} to {cap} characters"
        return replace(candidate, text=candidate.text[:cap]), note

    def _all(self, asks: Sequence[_Ask]) -> list[SlateScores]:
        """All answers; the first error stops what has not begun."""
        start, stop = time.perf_counter(), threading.Event()
        if len(asks) <= 1:
            replies = [self._one(ask, stop) for ask in asks]
        else:
            with ThreadPoolExecutor(min(MAX_IN_FLIGHT, len(asks)), thread_name_prefix="served") as pool:
                futures = [pool.submit(self._one, ask, stop) for ask in asks]
                try:
                    errors = [error for future in futures if (error := future.exception()) is not None]
                finally:
                    stop.set()
            for error in sorted(errors, key=lambda error: isinstance(error, Abandoned)):
                raise error
            replies = [future.result() for future in futures]
        return _costed(asks, replies, time.perf_counter() - start)

    def _one(self, ask: _Ask, stop: threading.Event) -> tuple[np.ndarray, Reply]:
        """The values, and the reply they were read from (0 tries: the cache)."""
        try:
            return self._asked(ask, stop)
        except BaseException:
            stop.set()
            raise

    def _asked(self, ask: _Ask, stop: threading.Event) -> tuple[np.ndarray, Reply]:
        key = AnswerCache.key(self._endpoint.url, self.protocol, self.model, ask.body)
        stored = self._cache.get(key) if self._cache is not None else None
        if stored is not None:
            parsed = json.loads(stored)
            return ask.read(parsed), Reply(stored, parsed, 0, 0.0, 0)
        reply = self._endpoint.post(self._wire.path, ask.body, stop)
        try:
            values = ask.read(reply.parsed)
        except WrongAnswer as error:
            begins = self._endpoint.quote(reply.text)
            raise BadAnswer(f"{self.url}: {error}; the answer begins {begins}") from error
        if self._cache is not None:
            self._cache.put(key, reply.text)
        return values, reply


def estimate_tokens(candidate: Candidate) -> int:
    """Tokens of a candidate in a slate without its tokenizer: a token has three bytes or more in most texts."""
    return len(f"{candidate.group}{candidate.title}{candidate.text}".encode()) // 3 + _TOKENS_AROUND


def _costed(asks: Sequence[_Ask], replies: Sequence[tuple[np.ndarray, Reply]], seconds: float) -> list[SlateScores]:
    """Answers with their costs. Each has its share of the wall time, by how long it took itself."""
    total = sum(reply.seconds for _, reply in replies) or 1.0
    peak = max((reply.in_flight for _, reply in replies), default=0)
    out = []
    for ask, (values, reply) in zip(asks, replies, strict=True):
        cost, notes = Cost(), (*ask.notes, *_server_notes(reply.parsed))
        if reply.tries:
            share = seconds * reply.seconds / total
            own = Cost(requests=reply.tries, max_concurrency=peak, seconds=share)
            cost = own + usage_cost(reply.parsed)
        else:
            notes = (*notes, "answered from the cache")
        out.append(SlateScores(values, notes, cost))
    return out


def _server_notes(answer: Mapping[str, Any]) -> tuple[str, ...]:
    """What `retrail serve` notes about texts that it cut."""
    notes = answer.get("x_notes")
    if not isinstance(notes, list):
        return ()
    return tuple(note for note in notes if isinstance(note, str))[:_SHOWN_NOTES]
