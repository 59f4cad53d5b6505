"""Positive-aware mining of hard negatives, block by block: memory follows the block, not the number of queries.

A candidate d of query q with positive p is kept as a negative where

    s(q, d) <= s(q, p) - absolute_margin    and    s(q, d) <= s(q, p) - relative_margin * |s(q, p)|

(NV-Retriever, arXiv 2407.15831, "TopK-MarginPos" and "TopK-PercPos"; the absolute value keeps the second rule a margin
where the positive scores below zero). What scores higher is probably an unjudged right answer. A query of which
nothing is left keeps its row with no negatives.

Shapes: Q queries of a block, C candidates of a query, G gold rows of a query, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
Vectors = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Ranked:
    """What a retriever found for some queries, best first.

    Attributes:
        positive_Q: the score of each query's positive, by the same retriever.
        gold_QG: rows that are right for each query, the positive among them; short lists are filled with -1.
        rows_QC: rows of the candidates; short lists are filled with -1 at their end.
        scores_QC: their scores.
    """

    positive_Q: np.ndarray
    gold_QG: np.ndarray
    rows_QC: np.ndarray
    scores_QC: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class MiningRule:
    """Which candidates become negatives.

    count: how many a query at most; there may be fewer, also none.
    absolute_margin, relative_margin: see the module (None: no such margin); wider ones drop more unjudged right answers
        and more hard negatives.
    ranks: first and last rank to look at, counted from 1 in the ranking as it is given, gold rows included. A window
        beyond a ranking's end finds what is there.

    Raises:
        ValueError: a count below 1, a margin that is negative or not finite, or ranks that are no window.
    """

    count: int = 7
    absolute_margin: float | None = None
    relative_margin: float | None = None
    ranks: tuple[int, int] = (1, 100)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count={self.count} must be 1 or more")
        for name in ("absolute_margin", "relative_margin"):
            margin = getattr(self, name)
            if margin is not None and not 0 <= margin < np.inf:
                raise ValueError(f"{name}={margin} must be 0 or more and finite, or None")
        first, last = self.ranks
        if not 1 <= first <= last:
            raise ValueError(f"ranks={self.ranks} are no window; use 1 <= first <= last")


@dataclass(frozen=True, slots=True)
class Mined:
    """The negatives of Q queries, best first: those of query i are `rows[offsets[i] : offsets[i + 1]]`."""

    offsets: np.ndarray
    rows: np.ndarray
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of(self, query: int) -> np.ndarray:
        """The rows of one query's negatives."""
        return self.rows[self.offsets[query] : self.offsets[query + 1]]


def mine_negatives(
    blocks: Iterable[Ranked], rule: MiningRule, *, text_keys: np.ndarray | None = None
) -> Iterator[Mined]:
    """The negatives of each block as it comes; how queries are cut into blocks changes nothing.

    text_keys: a number for the text of each row of the corpus, equal for equal texts (`TextKeys.all`): copies of a gold
        document are no negatives either.

    Raises:
        ValueError: shapes that do not fit, or a score that is NaN; names the query, counted over all blocks.
    """
    start = 0
    for block in blocks:
        _check(block, start)
        yield _mine(block, rule, text_keys)
        start += len(block.positive_Q)


def _mine(block: Ranked, rule: MiningRule, text_keys: np.ndarray | None) -> Mined:
    window = slice(rule.ranks[0] - 1, rule.ranks[1])
    rows_QC, scores_QC = block.rows_QC[:, window], block.scores_QC[:, window]
    positive_Q1 = block.positive_Q.astype(np.float64)[:, None]
    keep_QC = rows_QC >= 0
    if rule.absolute_margin is not None:
        keep_QC &= scores_QC <= positive_Q1 - rule.absolute_margin
    if rule.relative_margin is not None:
        keep_QC &= scores_QC <= positive_Q1 - rule.relative_margin * np.abs(positive_Q1)
    for gold_Q in block.gold_QG.T:
        same_QC = rows_QC == gold_Q[:, None]
        if text_keys is not None:
            same_QC |= text_keys[rows_QC] == text_keys[gold_Q][:, None]
        keep_QC &= ~same_QC | (gold_Q < 0)[:, None]
    keep_QC &= np.cumsum(keep_QC, axis=1) <= rule.count
    offsets = np.zeros(len(rows_QC) + 1, dtype=np.int64)
    np.cumsum(keep_QC.sum(axis=1), out=offsets[1:])
    return Mined(offsets, rows_QC[keep_QC].astype(np.int64), scores_QC[keep_QC].astype(np.float32))


def _check(block: Ranked, start: int) -> None:
    queries = len(block.positive_Q)
    shapes = block.gold_QG.shape[:1], block.rows_QC.shape, block.scores_QC.shape
    if shapes[0] != (queries,) or shapes[1] != shapes[2] or shapes[1][:1] != (queries,):
        raise ValueError(
            f"block of queries from {start}: {queries} positives, gold {block.gold_QG.shape}, rows {shapes[1]} and "
            f"scores {shapes[2]} do not fit together"
        )
    bad_Q = np.isnan(block.positive_Q) | np.isnan(block.scores_QC).any(axis=1)
    if bad_Q.any():
        raise ValueError(f"query {start + int(np.argmax(bad_Q))}: a score is NaN; the retriever or its index is broken")


def join(parts: Iterable[Mined]) -> Mined:
    """All parts as one; 12 bytes a negative and 8 a query."""
    offsets, rows, scores = [np.zeros(1, dtype=np.int64)], [], []
    for part in parts:
        offsets.append(part.offsets[1:] + offsets[-1][-1])
        rows.append(part.rows)
        scores.append(part.scores)
    if not rows:
        return Mined(offsets[0], np.zeros(0, np.int64), np.zeros(0, np.float32))
    return Mined(np.concatenate(offsets), np.concatenate(rows), np.concatenate(scores))


def ranked_blocks(
    queries_QD: np.ndarray,
    gold_QG: np.ndarray,
    search: Search,
    vectors: Vectors,
    *,
    depth: int,
    block: int = 1024,
) -> Iterator[Ranked]:
    """Search queries block by block.

    Args:
        queries_QD: query vectors, possibly a memory map.
        gold_QG: rows that are right for each, its positive first, filled with -1.
        search: (vectors, depth) to rows and scores of the best, as the exact index does it.
        vectors: rows to document vectors, for the scores of positives below that depth.
        depth: candidates of a query; the last rank of the rule.
        block: queries a search; more is faster and takes block * depth * 12 bytes.

    Raises:
        ValueError: a depth or block below 1, or other numbers of queries.
    """
    if depth < 1 or block < 1:
        raise ValueError(f"depth={depth} and block={block} must be 1 or more")
    if len(queries_QD) != len(gold_QG):
        raise ValueError(f"{len(queries_QD)} query vectors, but gold rows of {len(gold_QG)} queries")
    for start in range(0, len(queries_QD), block):
        part_QD = np.asarray(queries_QD[start : start + block])
        gold = gold_QG[start : start + block]
        rows_QC, scores_QC = search(part_QD, depth)
        positive_Q = np.einsum("qd,qd->q", part_QD, vectors(gold[:, 0]), dtype=np.float64)
        # Where the search saw the positive, its own score is the one to compare with: sums are rounded differently.
        seen_QC = rows_QC == gold[:, :1]
        seen_Q = seen_QC.any(axis=1)
        positive_Q[seen_Q] = scores_QC[seen_QC]
        yield Ranked(positive_Q, gold, rows_QC, scores_QC)
