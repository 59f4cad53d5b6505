"""What a search returns: ranked ids with scores, the cost of getting them, and the trace of how.

Every retriever of the toolkit (navigation, recursive search, generation, rewriting, BM25) returns
`Hits`, so every metric, control and report reads all of them alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one query (or one step of it) consumed.

    Tokens are counted once a forward pass reads them; `reused_tokens` are those whose keys and
    values came from a cache instead. `max_concurrency` is the largest number of requests in flight
    together; `seconds` is wall time; `usd` is 0 unless a price table says otherwise.
    """

    requests: int = 0
    forwards: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    max_concurrency: int = 0
    seconds: float = 0.0
    usd: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        """The cost of both, one after the other: sums, but the larger of the concurrencies."""
        merged = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        merged["max_concurrency"] = max(self.max_concurrency, other.max_concurrency)
        return Cost(**merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One level, hop or round of a search, for the trace.

    `ids` are the candidates in the order in which the model read them, `scores` theirs, `kept` the ids that
    went on. `notes` say in words what a reader must know (a text was cut, nothing passed the threshold).
    """

    name: str
    ids: tuple[str, ...]
    scores: tuple[float, ...]
    kept: tuple[str, ...]
    notes: tuple[str, ...] = ()
    cost: Cost = Cost()


Trace = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Hits:
    """The ranking for one query: unique ids, non-increasing finite scores.

    `exact` says whether the ranking is proven to be the true top k of its own scoring function
    (None where the question makes no sense). `answerable` is the probability that any of what was judged last
    answers the query (None where nobody asked).

    Raises:
        ValueError: lengths differ, an id repeats, a score is not finite, scores increase, or `answerable` is no
            probability.
    """

    ids: tuple[str, ...]
    scores: tuple[float, ...]
    cost: Cost = Cost()
    trace: Trace = ()
    exact: bool | None = None
    answerable: float | None = None

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.scores):
            raise ValueError(f"{len(self.ids)} ids but {len(self.scores)} scores")
        if len(set(self.ids)) != len(self.ids):
            seen: set[str] = set()
            twice = next(i for i in self.ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
            raise ValueError(f"id {twice!r} appears twice in one ranking")
        for doc_id, score in zip(self.ids, self.scores, strict=True):
            if not math.isfinite(score):
                raise ValueError(f"score of {doc_id!r} is {score}, not a finite number")
        if self.answerable is not None and not 0.0 <= self.answerable <= 1.0:
            raise ValueError(f"answerable={self.answerable} is not between 0 and 1")
        for rank, (above, below) in enumerate(zip(self.scores, self.scores[1:], strict=False)):
            if below > above:
                raise ValueError(f"scores increase from rank {rank + 1} ({above}) to {rank + 2} ({below})")

    @classmethod
    def from_scores(cls, ids: Sequence[str], scores: Sequence[float], k: int | None = None, **extra: object) -> Self:
        """The best `k` (None: all) of unordered (id, score) pairs; ties keep the order given.

        Raises:
            ValueError: lengths differ, `k` is negative, an id repeats, or a score is not finite.
        """
        if len(ids) != len(scores):
            raise ValueError(f"{len(ids)} ids but {len(scores)} scores")
        if k is not None and k < 0:
            raise ValueError(f"k={k} must be 0 or more")
        for doc_id, score in zip(ids, scores, strict=True):  # before sorting, which has no meaning with NaN
            if not math.isfinite(score):
                raise ValueError(f"score of {doc_id!r} is {score}, not a finite number")
        order = sorted(range(len(ids)), key=lambda i: -scores[i])[:k]
        return cls(tuple(ids[i] for i in order), tuple(float(scores[i]) for i in order), **extra)  # type: ignore[arg-type]

    def top(self, k: int) -> Hits:
        """The first `k` of this ranking, with the same cost and trace.

        Raises:
            ValueError: `k` is negative.
        """
        if k < 0:
            raise ValueError(f"k={k} must be 0 or more")
        return Hits(self.ids[:k], self.scores[:k], self.cost, self.trace, self.exact, self.answerable)

    def __len__(self) -> int:
        return len(self.ids)
