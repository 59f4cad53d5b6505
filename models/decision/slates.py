"""From nodes of a corpus to slates, and from the answers of split slates to one pooled ranking."""

from __future__ import annotations

from collections.abc import Sequence
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
    """
    sizes = np.array([scorer.num_tokens(c) for c in pool.candidates])
    fewest = max(
        -(-len(sizes) // scorer.max_candidates), -(-int(sizes.sum()) // scorer.max_candidate_tokens_per_slate), 1
    )
    per_slate, tokens_per_slate = -(-len(sizes) // fewest), sizes.sum() / fewest
    slates: list[Slate] = []
    start, tokens = 0, 0
    for i, size in enumerate(sizes):
        full = i - start >= min(per_slate, scorer.max_candidates)
        full |= tokens + size > min(scorer.max_candidate_tokens_per_slate, 1.25 * tokens_per_slate + size)
        full |= tokens + size > scorer.max_candidate_tokens_per_slate
        if i > start and full:
            slates.append(Slate(pool.query, pool.candidates[start:i]))
            start, tokens = i, 0
        tokens += int(size)
    slates.append(Slate(pool.query, pool.candidates[start:]))
    return slates


def score_pools(scorer: DecisionScorer, pools: Sequence[Pool]) -> list[PoolScores]:
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
        out.append(PoolScores(np.concatenate([p.values_C for p in parts]), len(parts), _short(notes), cost))
    return out


def ranked(values_C: np.ndarray) -> np.ndarray:
    """Positions by descending value; equal values stay in reading order."""
    return np.argsort(-values_C, kind="stable")


def _short(notes: Sequence[str]) -> tuple[str, ...]:
    unique = list(dict.fromkeys(notes))
    if len(unique) <= _SHOWN_NOTES + 1:
        return tuple(unique)
    return (*unique[:_SHOWN_NOTES], f"and {len(unique) - _SHOWN_NOTES} more notes like these")
