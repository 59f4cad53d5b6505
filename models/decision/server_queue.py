"""One thread owns the model; requests wait in a queue, and what waits together is answered together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np

from ...data_prep.hits import Cost
from ..protocols import DecisionScorer, Slate, SlateScores
from .server_plan import CHOOSE, YES, Ask
from .slates import Pool, split

Answers = list[SlateScores]


class QueueFull(RuntimeError):
    """More requests wait than the queue holds, or the server is stopping."""


class TooLarge(ValueError):
    """A slate that the model cannot hold."""


@dataclass(slots=True)
class _Job:
    """The slates of one request, once it is taken from the queue: those of each ask, and their tokens."""

    asks: Sequence[Ask]
    future: Future[Answers]
    slates: list[list[Slate]] = field(default_factory=list)
    tokens: int = 0


class BatchWorker:
    """Answers requests with one scorer, from its own thread; `close` answers what was accepted, and ends it.

    max_tokens: tokens of candidates that are handed to the scorer together; more fills a GPU better, and lets a
        request wait longer for its neighbours.
    max_waiting: requests that may wait.
    """

    def __init__(self, scorer: DecisionScorer, *, max_tokens: int = 32_768, max_waiting: int = 512) -> None:
        """Start the thread."""
        self.scorer, self.max_tokens, self.max_waiting = scorer, max_tokens, max_waiting
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="decision-model", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def submit(self, asks: Sequence[Ask]) -> Future[Answers]:
        """One answer an ask, in time. A future that is cancelled before its turn costs nothing.

        The future's errors: TooLarge, or what the scorer raised.

        Raises:
            QueueFull: ask again later.
        """
        future: Future[Answers] = Future()
        with self._changed:
            if self._closing:
                raise QueueFull("the server is stopping")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(f"{len(self._waiting)} requests wait already")
            self._waiting.append(_Job(asks, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Answer what waits, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
            self._answer(self._take())

    def _take(self) -> list[_Job]:
        """The next jobs within the budget of tokens, at least one unless all that waited are gone."""
        taken: list[_Job] = []
        tokens = 0
        while True:
            with self._changed:
                if not self._waiting:
                    return taken
                job = self._waiting.popleft()
            if not job.slates and not self._prepared(job):
                continue
            tokens += job.tokens
            if taken and tokens > self.max_tokens:
                with self._changed:
                    self._waiting.appendleft(job)
                return taken
            taken.append(job)

    def _prepared(self, job: _Job) -> bool:
        """Whether the job is still wanted and fits; its slates and tokens are then known."""
        if not job.future.set_running_or_notify_cancel():
            return False
        try:
            job.slates = [self._slates(ask) for ask in job.asks]
            job.tokens = sum(self.scorer.num_tokens(c) for group in job.slates for s in group for c in s.candidates)
        except Exception as error:
            job.future.set_exception(error)
            return False
        return True

    def _slates(self, ask: Ask) -> list[Slate]:
        if ask.may_split:
            return split(Pool(ask.slate.query, ask.slate.candidates), self.scorer)
        count, most = len(ask.slate.candidates), self.scorer.max_candidates
        if ask.kind == YES and count > most:
            raise TooLarge(f"a slate of {count} candidates; this model takes {most}: split it into several requests")
        tokens, cap = sum(map(self.scorer.num_tokens, ask.slate.candidates)), self.scorer.max_candidate_tokens_per_slate
        if tokens > cap:
            raise TooLarge(
                f"a slate of {tokens} tokens; this model takes {cap}: split it into several requests, or shorten it"
            )
        return [ask.slate]

    def _answer(self, jobs: list[_Job]) -> None:
        """Answer all jobs together; if that fails each alone, so that one cannot spoil the others."""
        if not jobs:
            return
        try:
            answers = self._asked(jobs)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].future.set_exception(error)
                return
            for job in jobs:
                self._answer([job])
            return
        for job, answer in zip(jobs, answers, strict=True):
            job.future.set_result(answer)

    def _asked(self, jobs: Sequence[_Job]) -> list[Answers]:
        """All questions of one kind go to the scorer in one call."""
        kinds = dict.fromkeys(ask.kind for job in jobs for ask in job.asks)
        found: dict[str, list[SlateScores]] = {}
        for kind in kinds:
            slates = [
                slate
                for job in jobs
                for ask, group in zip(job.asks, job.slates, strict=True)
                if ask.kind == kind
                for slate in group
            ]
            found[kind] = self._scored(kind, slates)
        left = {kind: iter(scores) for kind, scores in found.items()}
        return [
            [_joined([next(left[ask.kind]) for _ in group]) for ask, group in zip(job.asks, job.slates, strict=True)]
            for job in jobs
        ]

    def _scored(self, kind: str, slates: Sequence[Slate]) -> list[SlateScores]:
        if kind == YES:
            return self.scorer.yes(slates)
        return self.scorer.choose(slates) if kind == CHOOSE else self.scorer.choose(slates, none=True)


def _joined(parts: Sequence[SlateScores]) -> SlateScores:
    """The answers of a slate that was split, as one."""
    if len(parts) == 1:
        return parts[0]
    cost = reduce(Cost.__add__, (part.cost for part in parts))
    notes = tuple(note for part in parts for note in part.notes)
    return replace(parts[0], values_C=np.concatenate([part.values_C for part in parts]), notes=notes, cost=cost)
