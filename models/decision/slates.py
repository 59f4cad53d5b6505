"""From nodes of a corpus to slates, and from the answers of split slates to one pooled ranking."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from ...data_prep.corpus import Corpus
from ...data_prep.hits import Cost
from ..protocols import Candidate, DecisionScorer, Slate

_SHOWN_NOTES = 3


@dataclass(frozen=True, slots=True)
class Pool:
    """Everything that one query must judge at one step, in reading order."""

    query: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class PoolScores:
    """P(yes) of each candidate of a pool (C,), whatever slates it was split into."""

    values_C: np.ndarray
    num_slates: int
    notes: tuple[str, ...]
    cost: Cost


def node_candidate(corpus: Corpus, row: int) -> Candidate:
    """What a model is shown of a node; its group is the path of titles above it."""
    above = corpus.path(row)[:-1]
    group = " > ".join(corpus.title(r) for r in above if corpus.title(r))
    return Candidate(corpus.id(row), corpus.title(row), corpus.text(row), group, not corpus.is_leaf(row))


def split(pool: Pool, scorer: DecisionScorer) -> list[Slate]:
    """Slates of neighbouring candidates within the scorer's limits, as few as possible and of similar size.

    Similar sizes, because a probability depends on its rivals: 52 candidates become 26 + 26, not 50 + 2.

    Raises:
        ValueError: the pool is empty.
    """
    if not pool.candidates:
        raise ValueError(f"nothing to judge for the query {pool.query[:60]!r}")
    farthest = _farthest_ends([scorer.num_tokens(c) for c in pool.candidates], scorer)
    count = len(farthest)
    needed = [0] * (count + 1)  # slates that candidates[i:] need at least
    for i in reversed(range(count)):
        needed[i] = 1 + needed[farthest[i]]
    slates: list[Slate] = []
    start = 0
    for left in range(needed[0], 0, -1):
        # An even share, or less where tokens forbid it, or more where the slates that are left could not hold the rest.
        end = min(start + -(-(count - start) // left), farthest[start])
        while needed[end] > left - 1:
            end += 1
        slates.append(Slate(pool.query, pool.candidates[start:end]))
        start = end
    return slates


def _farthest_ends(sizes: Sequence[int], scorer: DecisionScorer) -> list[int]:
    """For each candidate, where a slate that starts with it must end; at least one candidate behind it."""
    upto = np.concatenate(([0], np.cumsum(sizes)))
    start = np.arange(len(sizes))
    by_tokens = np.searchsorted(upto, upto[:-1] + scorer.max_candidate_tokens_per_slate, side="right") - 1
    by_count = np.minimum(start + scorer.max_candidates, len(sizes))
    ends: list[int] = np.minimum(np.maximum(by_tokens, start + 1), by_count).tolist()
    return ends


def score_pools(scorer: DecisionScorer, pools: Iterable[Pool]) -> list[PoolScores]:
    """Judge every candidate of every pool; all slates of all pools go to the scorer together."""
    slates = [split(pool, scorer) for pool in pools]
    answers = iter(scorer.yes([slate for group in slates for slate in group]))
    out = []
    for group in slates:
        parts = [next(answers) for _ in group]
        cost = reduce(Cost.__add__, (part.cost for part in parts), Cost(max_concurrency=len(parts)))
        notes = [note for part in parts for note in part.notes]
        if len(parts) > 1:
            notes.insert(0, f"split into {len(parts)} slates")
        out.append(PoolScores(np.concatenate([p.values_C for p in parts]), len(parts), short_notes(notes), cost))
    return out


def ranked(values_C: np.ndarray) -> np.ndarray:
    """Positions by descending value; equal values stay in reading order."""
    return np.argsort(-values_C, kind="stable")


def short_notes(notes: Sequence[str]) -> tuple[str, ...]:
    """The first few different notes, and how many there are beside them."""
    unique = list(dict.fromkeys(notes))
    if len(unique) <= _SHOWN_NOTES + 1:
        return tuple(unique)
    return (*unique[:_SHOWN_NOTES], f"and {len(unique) - _SHOWN_NOTES} more notes like these")


def check_queries(queries: Sequence[str], k: int) -> None:
    """Raise ValueError for an empty query or k below 1; for one string instead of a list, TypeError."""
    if isinstance(queries, str):
        raise TypeError("search takes a list of queries; put the one query into brackets")
    if k < 1:
        raise ValueError(f"k={k} must be 1 or more")
    for n, query in enumerate(queries):
        if not query.strip():
            raise ValueError(f"query number {n} is empty")
