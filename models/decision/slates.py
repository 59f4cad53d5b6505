"""From nodes of a corpus to slates, and from the answers of split slates to one pooled ranking."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby

import numpy as np

from ...data_prep.corpus import Corpus
from ...data_prep.hits import Cost
from ..config import NavigateConfig
from ..protocols import Candidate, DecisionScorer, Slate, check_ids

_SHOWN_NOTES = 3


@dataclass(frozen=True, slots=True)
class Pool:
    """Everything that one query must judge at one step, in reading order.

    `pages` says which candidates stand on one page, by any number of it (C,); only page by page scoring needs it.

    Raises:
        ValueError: two candidates have the same id, even if they would go to different slates.
    """

    query: str
    candidates: tuple[Candidate, ...]
    pages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_ids(self.candidates)


@dataclass(frozen=True, slots=True)
class Cut:
    """How pools are cut into slates: within the scorer's limits or smaller ones, and what stands side by side."""

    scoring: str
    max_candidates: int
    max_tokens: int

    @classmethod
    def of(cls, scorer: DecisionScorer, config: NavigateConfig | None = None) -> Cut:
        """The scorer's own limits, or those that `config` sets below them.

        Raises:
            ValueError: `config` asks for larger slates than the scorer takes.
        """
        limits = scorer.max_candidates, scorer.max_candidate_tokens_per_slate
        if config is None:
            return cls("shared", *limits)
        asked = config.slate_size, config.slate_tokens
        for key, wanted, limit in zip(("slate_size", "slate_tokens"), asked, limits, strict=True):
            if wanted is not None and wanted > limit:
                raise ValueError(f"navigate.{key}={wanted} is more than the scorer takes in one slate ({limit})")
        size, tokens = (limit if wanted is None else wanted for wanted, limit in zip(asked, limits, strict=True))
        return cls(config.scoring, 1 if config.scoring == "pointwise" else size, tokens)


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


def split(pool: Pool, scorer: DecisionScorer, cut: Cut | None = None) -> list[Slate]:
    """Slates of neighbouring candidates within the limits, as few as possible and of similar size.

    Similar sizes, because a probability depends on its rivals: 52 candidates become 26 + 26, not 50 + 2.

    Raises:
        ValueError: the pool is empty.
    """
    if not pool.candidates:
        raise ValueError(f"nothing to judge for the query {pool.query[:60]!r}")
    cut = cut or Cut.of(scorer)
    if cut.max_candidates == 1:
        return [Slate(pool.query, (candidate,)) for candidate in pool.candidates]
    if cut.scoring != "page_by_page":
        parts = [pool.candidates]
    else:
        places = range(len(pool.candidates))
        runs = (list(run) for _, run in groupby(places, key=pool.pages.__getitem__))
        parts = [pool.candidates[run[0] : run[-1] + 1] for run in runs]
    return [Slate(pool.query, part) for whole in parts for part in _evenly(whole, scorer, cut)]


def _evenly(candidates: tuple[Candidate, ...], scorer: DecisionScorer, cut: Cut) -> list[tuple[Candidate, ...]]:
    farthest = _farthest_ends([scorer.num_tokens(c) for c in candidates], cut)
    count = len(farthest)
    if farthest[0] == count:
        return [candidates]
    needed = [0] * (count + 1)  # slates that candidates[i:] need at least
    for i in reversed(range(count)):
        needed[i] = 1 + needed[farthest[i]]
    parts: list[tuple[Candidate, ...]] = []
    start = 0
    for left in range(needed[0], 0, -1):
        # An even share, or less where tokens forbid it, or more where the slates that are left could not hold the rest.
        end = min(start + -(-(count - start) // left), farthest[start])
        while needed[end] > left - 1:
            end += 1
        parts.append(candidates[start:end])
        start = end
    return parts


def _farthest_ends(sizes: Sequence[int], cut: Cut) -> list[int]:
    """For each candidate, where a slate that starts with it must end; at least one candidate behind it."""
    upto = np.concatenate(([0], np.cumsum(sizes)))
    start = np.arange(len(sizes))
    by_tokens = np.searchsorted(upto, upto[:-1] + cut.max_tokens, side="right") - 1
    by_count = np.minimum(start + cut.max_candidates, len(sizes))
    ends: list[int] = np.minimum(np.maximum(by_tokens, start + 1), by_count).tolist()
    return ends


def score_pools(scorer: DecisionScorer, pools: Iterable[Pool], cut: Cut | None = None) -> list[PoolScores]:
    """Judge every candidate of every pool; all slates of all pools go to the scorer together."""
    cut = cut or Cut.of(scorer)
    return score_slates(scorer, [split(pool, scorer, cut) for pool in pools])


def score_slates(scorer: DecisionScorer, slates: Sequence[Sequence[Slate]]) -> list[PoolScores]:
    """Judge every candidate of every group of slates, each group as one pool; all go to the scorer together."""
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
