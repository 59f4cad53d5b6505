"""Exact inner-product search: one blocked pass that misses nothing, then exact scores for the few that may be best.

A matrix product rounds, and how it rounds depends on the number of queries and rows in it. So its scores only choose
candidates: every row within twice the error bound of the k-th best stays. What stays is scored again, each (query,
row) by itself in float64, so that scores depend on nothing but the two vectors, identical documents get identical
scores, and the order (-score, row) is the same in any batch.

Shapes: S queries, N rows, D dimensions, B rows of a block, M candidates of a query so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_BLOCK_BYTES = 32 * 2**20  # of scores held at once
_BLOCK_ROWS = (1024, 65536)
# Values that are scored again at once: few enough to stay in a core's cache, and in memory that is at hand.
_RESCORED_VALUES = {"cpu": 65_536, "cuda": 8_000_000}


@dataclass(frozen=True, slots=True)
class Found:
    """The best rows of each query by (-score, row).

    rows_SK: int64, -1 where a query has fewer; scores_SK: float32, -inf there; counts_S: how many are real.
    low_S, high_S: least and greatest score over all rows, excluded ones too, float32 (None: not asked for).
    """

    rows_SK: np.ndarray
    scores_SK: np.ndarray
    counts_S: np.ndarray
    low_S: np.ndarray | None = None
    high_S: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring rows of an index on one device. vectors_ND: as stored; `start` is the first row's number."""

    vectors_ND: Tensor
    start: int
    largest_norm: float


def search_exact(
    parts: Sequence[Part], queries_SD: Tensor, k: int, excluded: Sequence[np.ndarray] | None, ranges: bool
) -> Found:
    """The best `k` of all parts for each query; see `Found`.

    queries_SD: float32 on the CPU. excluded: for each query the rows that must not come back, sorted.
    """
    S = len(queries_SD)
    best = [_search_part(part, queries_SD, k, excluded, ranges) for part in parts]
    rows_SM, scores_SM = (np.concatenate([getattr(b[0], name) for b in best], axis=1) for name in ("rows", "scores"))
    order_SM = np.lexsort((rows_SM, -scores_SM), axis=1)[:, :k]
    rows_SK, scores_SK = (np.take_along_axis(x, order_SM, axis=1) for x in (rows_SM, scores_SM))
    counts_S = np.isfinite(scores_SK).sum(axis=1)
    width = int(counts_S.max(initial=0))
    rows_SK = np.where(np.isfinite(scores_SK), rows_SK, -1)[:, :width]
    low = high = None
    if ranges:
        ends = [(lo.scores.max(axis=1, initial=-np.inf), hi.scores.max(axis=1, initial=-np.inf)) for _, lo, hi in best]
        low = -np.max([lo for lo, _ in ends], axis=0).astype(np.float32).reshape(S)
        high = np.max([hi for _, hi in ends], axis=0).astype(np.float32).reshape(S)
    return Found(rows_SK, scores_SK[:, :width].astype(np.float32), counts_S.astype(np.int64), low, high)


@dataclass(slots=True)
class _Scored:
    """Candidates with exact scores as float32 values (S, M); -inf where there is none."""

    rows: np.ndarray
    scores: np.ndarray


def _search_part(
    part: Part, queries_SD: Tensor, k: int, excluded: Sequence[np.ndarray] | None, ranges: bool
) -> tuple[_Scored, _Scored, _Scored]:
    vectors, device = part.vectors_ND, part.vectors_ND.device
    queries = queries_SD.to(device)
    S, N = len(queries), len(vectors)
    # |computed - true| of one product of D terms in float32, whatever the order of its sums.
    unit = torch.finfo(torch.float32).eps / 2
    norms_S = queries.norm(dim=1)
    slack_S = 2 * (queries.shape[1] + 2) * unit * norms_S * part.largest_norm
    top = _Best(k, slack_S)
    ends = [_Best(1, slack_S), _Best(1, slack_S)] if ranges else []
    hidden = _hidden(excluded, part.start, N)
    size = int(np.clip(_BLOCK_BYTES // (4 * max(S, 1)), *_BLOCK_ROWS))
    for start in range(0, N, size):
        block = vectors[start : start + size]
        scores_SB = queries @ block.float().T
        if ends:
            ends[0].add(-scores_SB, start)
            ends[1].add(scores_SB, start)
        if hidden is not None:
            here = (hidden[1] >= start) & (hidden[1] < start + len(block))
            scores_SB[hidden[0][here].to(device), (hidden[1][here] - start).to(device)] = -torch.inf
        top.add(scores_SB, start)
    found = _exact(part, queries_SD, top, 1.0)
    if not ends:
        return found, found, found
    return found, _exact(part, queries_SD, ends[0], -1.0), _exact(part, queries_SD, ends[1], 1.0)


def _hidden(excluded: Sequence[np.ndarray] | None, start: int, count: int) -> tuple[Tensor, Tensor] | None:
    """(query, place in the part) of every exclusion."""
    if excluded is None or not any(map(len, excluded)):
        return None
    query = np.repeat(np.arange(len(excluded)), [len(rows) for rows in excluded])
    row = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in excluded]) - start
    inside = (row >= 0) & (row < count)
    return torch.from_numpy(query[inside]), torch.from_numpy(row[inside])


class _Best:
    """For each query all places whose computed score may belong to the best k, in any order."""

    def __init__(self, k: int, slack_S: Tensor) -> None:
        self.k, self.slack_S = k, slack_S
        S = len(slack_S)
        self.scores_SM = slack_S.new_full((S, 0), -torch.inf)
        self.places_SM = torch.zeros((S, 0), dtype=torch.long, device=slack_S.device)
        self.least_S = slack_S.new_full((S,), -torch.inf)

    def add(self, scores_SB: Tensor, start: int) -> None:
        """Take in a block of scores, whose first column is the place `start`; -inf is never taken."""
        if self.scores_SM.shape[1] < self.k:
            # Nothing to compare with yet: the best k of the block bound what can follow.
            kept = scores_SB.topk(min(self.k, scores_SB.shape[1]), dim=1).values
            if kept.shape[1] == self.k:
                self.least_S = torch.maximum(self.least_S, kept[:, -1] - self.slack_S)
        # A number above -inf that no score is below, so that exclusions are never candidates.
        least_S1 = self.least_S.clamp(min=torch.finfo(torch.float32).min)[:, None]
        query_C, place_C = (scores_SB >= least_S1).nonzero(as_tuple=True)
        if len(query_C) == 0:
            return
        counts_S = torch.bincount(query_C, minlength=len(scores_SB))
        width = int(counts_S.max())
        new_SW = scores_SB.new_full((len(scores_SB), width), -torch.inf)
        where_SW = torch.zeros_like(new_SW, dtype=torch.long)
        column_C = torch.arange(len(query_C), device=query_C.device) - (counts_S.cumsum(0) - counts_S)[query_C]
        new_SW[query_C, column_C] = scores_SB[query_C, place_C]
        where_SW[query_C, column_C] = place_C + start
        self._keep(torch.cat([self.scores_SM, new_SW], dim=1), torch.cat([self.places_SM, where_SW], dim=1))

    def _keep(self, scores_SM: Tensor, places_SM: Tensor) -> None:
        scores_SM, order_SM = scores_SM.sort(dim=1, descending=True)
        if scores_SM.shape[1] >= self.k:
            self.least_S = torch.maximum(self.least_S, scores_SM[:, self.k - 1] - self.slack_S)
        keep = int((scores_SM >= self.least_S.clamp(min=torch.finfo(torch.float32).min)[:, None]).sum(1).max())
        self.scores_SM = scores_SM[:, :keep].contiguous()
        self.places_SM = places_SM.gather(1, order_SM[:, :keep])


def _exact(part: Part, queries_SD: Tensor, best: _Best, sign: float) -> _Scored:
    """Scores of the candidates in float64, each by itself, rounded to float32."""
    real = (best.scores_SM > -torch.inf).cpu().numpy()
    places = best.places_SM.cpu().numpy()
    scores = np.full(places.shape, -np.inf, dtype=np.float32)
    query_C, column_C = real.nonzero()
    at_once = max(1, _RESCORED_VALUES.get(part.vectors_ND.device.type, 65_536) // max(1, queries_SD.shape[1]))
    for start in range(0, len(query_C), at_once):
        query, column = query_C[start : start + at_once], column_C[start : start + at_once]
        scores[query, column] = sign * pair_scores(queries_SD[query], part.vectors_ND, places[query, column])
    return _Scored(places + part.start, scores)


def pair_scores(queries_CD: Tensor, vectors_ND: Tensor, places_C: np.ndarray) -> np.ndarray:
    """<query, vector> of each pair (C,), summed in float64 in an order that depends on D alone (on a CPU)."""
    device = vectors_ND.device
    if device.type != "cpu":
        chosen = vectors_ND[torch.from_numpy(places_C).to(device)].double()
        return np.asarray((chosen * queries_CD.to(device).double()).sum(1).float().cpu().numpy())
    # bfloat16 is no type of NumPy.
    rows_CD = vectors_ND[torch.from_numpy(places_C)].float().numpy()
    return np.einsum("cd,cd->c", rows_CD.astype(np.float64), queries_CD.numpy().astype(np.float64)).astype(np.float32)
