"""Exact inner-product search: one blocked pass that misses nothing, then exact scores for the few that may be best.

A matrix product rounds, and how it rounds depends on the number of queries and rows in it. So its scores only choose
candidates (`coarse_pass`). Each candidate is scored again by itself: products of float32 values are exact in float64,
and are summed there in an order that depends on D alone. Scores therefore depend on nothing but the two vectors:
identical documents get identical scores, and the order (-score, row) is the same in any batch.

Shapes: S queries, N rows, D dimensions, K found, C candidates of all queries, E exclusions of all queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from .coarse_pass import Candidates, Part, coarse_pass
from .duplicates import Groups

_QUERIES_AT_ONCE = 1024
# Values that are scored again at once: few enough to stay in a core's cache.
_RESCORED_VALUES = {"cpu": 2**16, "cuda": 2**24}
_THREADED_VALUES = 2**20
_SUMMED_VALUES = 4096

Item = TypeVar("Item")
Result = TypeVar("Result")
Flat = tuple[np.ndarray, np.ndarray, np.ndarray]  # query, row, score of each candidate


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


def search_exact(
    parts: Sequence[Part],
    groups: Groups | None,
    queries_SD: np.ndarray,
    k: int,
    excluded: Sequence[np.ndarray] | None,
    ranges: bool,
) -> Found:
    """The best `k` of all parts for each query; see `Found`.

    groups: rows that are equal; `Part.repeated` are all of them but the first.
    queries_SD: float32. excluded: for each query the rows that must not come back, each once.
    """
    found = []
    for start in range(0, max(1, len(queries_SD)), _QUERIES_AT_ONCE):
        some = slice(start, start + _QUERIES_AT_ONCE)
        hidden = None if excluded is None else excluded[some]
        found.append(_search_some(parts, groups, queries_SD[some], k, hidden, ranges))
    return found[0] if len(found) == 1 else _stack(found)


def _search_some(
    parts: Sequence[Part],
    groups: Groups | None,
    queries_SD: np.ndarray,
    k: int,
    excluded: Sequence[np.ndarray] | None,
    ranges: bool,
) -> Found:
    S = len(queries_SD)
    out = _excluded_pairs(excluded)
    hidden = groups.hide(*out) if groups is not None and out is not None else out
    queries = torch.from_numpy(queries_SD)
    exact = queries_SD.astype(np.float64)

    def of_part(part: Part) -> list[Flat]:
        with torch.inference_mode():
            chosen = coarse_pass(part, queries, k, _hidden_places(part, hidden), ranges)
            return [_exact_scores(part, exact, pairs) for pairs in chosen]

    # Parts on one device would only take turns.
    several = len({part.vectors_ND.device for part in parts}) > 1
    by_part = _map(of_part, parts, len(parts) if several else 1)
    best, *ends = ([np.concatenate(x) for x in zip(*flats, strict=True)] for flats in zip(*by_part, strict=True))
    query, row, score = best
    if groups is not None:
        excluded_S = np.zeros(S, np.int64) if out is None else np.bincount(out[0], minlength=S)
        query, row, score = groups.expand(query, row, score, k + excluded_S[query])
        if out is not None:
            N = 1 + max(int(row.max(initial=0)), int(out[1].max(initial=0)))
            seen = ~np.isin(query * N + row, out[0] * N + out[1])
            query, row, score = query[seen], row[seen], score[seen]
    low, high = (_ends(ends, S)) if ranges else (None, None)
    return Found(*ranked(query, row, score, S, k), low, high)


def _excluded_pairs(excluded: Sequence[np.ndarray] | None) -> tuple[np.ndarray, np.ndarray] | None:
    """(query, row) of every exclusion."""
    if excluded is None or not any(map(len, excluded)):
        return None
    query_E = np.repeat(np.arange(len(excluded)), [len(rows) for rows in excluded])
    return query_E, np.concatenate([np.asarray(rows, dtype=np.int64) for rows in excluded])


def _hidden_places(part: Part, hidden: tuple[np.ndarray, np.ndarray] | None) -> tuple[Tensor, Tensor] | None:
    """(query, place in the part) of what must not be scored, by place."""
    if hidden is None:
        return None
    query, place = hidden[0], hidden[1] - part.start
    inside = np.flatnonzero((place >= 0) & (place < len(part.vectors_ND)))
    inside = inside[np.argsort(place[inside], kind="stable")]
    device = part.vectors_ND.device
    return torch.from_numpy(query[inside]).to(device), torch.from_numpy(place[inside]).to(device)


def ranked(query: np.ndarray, row: np.ndarray, score: np.ndarray, S: int, k: int) -> Flat:
    """(rows_SK, scores_SK, counts_S) of the first k of each query by (-score, row)."""
    order = np.lexsort((row, -score, query))
    query, row, score = query[order], row[order], score[order]
    counts = np.bincount(query, minlength=S)
    column = np.arange(len(query)) - (np.cumsum(counts) - counts)[query]
    counts = np.minimum(counts, k)
    kept = column < k
    rows_SK = np.full((S, int(counts.max(initial=0))), -1, dtype=np.int64)
    scores_SK = np.full(rows_SK.shape, -np.inf, dtype=np.float32)
    rows_SK[query[kept], column[kept]] = row[kept]
    scores_SK[query[kept], column[kept]] = score[kept]
    return rows_SK, scores_SK, counts.astype(np.int64)


def _ends(ends: Sequence[Sequence[np.ndarray]], S: int) -> tuple[np.ndarray, np.ndarray]:
    low_S, high_S = np.full(S, np.inf, np.float32), np.full(S, -np.inf, np.float32)
    np.minimum.at(low_S, ends[0][0], ends[0][2])
    np.maximum.at(high_S, ends[1][0], ends[1][2])
    return low_S, high_S


def _stack(found: Sequence[Found]) -> Found:
    width = max(one.rows_SK.shape[1] for one in found)

    def wide(arrays: Sequence[np.ndarray], filler: float) -> np.ndarray:
        pad = [((0, 0), (0, width - array.shape[1])) for array in arrays]
        return np.concatenate([np.pad(a, p, constant_values=filler) for a, p in zip(arrays, pad, strict=True)])

    rows, scores = wide([f.rows_SK for f in found], -1), wide([f.scores_SK for f in found], -np.inf)
    ends = [[end for end in (getattr(f, name) for f in found) if end is not None] for name in ("low_S", "high_S")]
    low, high = (np.concatenate(end) if end else None for end in ends)
    return Found(rows, scores, np.concatenate([f.counts_S for f in found]), low, high)


def _exact_scores(part: Part, queries_SD: np.ndarray, pairs: Candidates) -> Flat:
    """Exact scores of the candidates, as float32. queries_SD: float64."""
    query_C, place_C = pairs.query_C.cpu().numpy(), pairs.place_C.cpu().numpy()
    kind = part.vectors_ND.device.type
    score_C = np.empty(len(query_C), dtype=np.float32)
    if kind == "cuda":
        for start in range(0, len(query_C), step := max(1, _RESCORED_VALUES["cuda"] // max(1, queries_SD.shape[1]))):
            some = slice(start, start + step)
            score_C[some] = _dots_on_gpu(part.vectors_ND, place_C[some], queries_SD, query_C[some])
        return query_C, place_C + part.start, score_C
    at_once = max(1, _RESCORED_VALUES["cpu"] // max(1, queries_SD.shape[1]))
    ends = np.searchsorted(query_C, np.arange(len(queries_SD) + 1))
    chunks = [
        (s, slice(start, min(start + at_once, ends[s + 1])))
        for s in range(len(queries_SD))
        for start in range(ends[s], ends[s + 1], at_once)
    ]

    def score(chunk: tuple[int, slice]) -> None:
        query, some = chunk
        score_C[some] = exact_dots(_rows(part.vectors_ND, place_C[some]), queries_SD[query])

    # Several threads only where there is work for them.
    _map(score, chunks, torch.get_num_threads() if len(query_C) * queries_SD.shape[1] > _THREADED_VALUES else 1)
    return query_C, place_C + part.start, score_C


def exact_dots(rows_CD: np.ndarray, query_D: np.ndarray) -> np.ndarray:
    """<row, query> of each row (C,), both float64, summed in an order that depends on D alone."""
    # NumPy sums through a buffer of 8,192 values; where a row does not fit, its place would choose where it is cut.
    sums_C = np.zeros(len(rows_CD))
    for start in range(0, len(query_D), _SUMMED_VALUES):
        some = slice(start, start + _SUMMED_VALUES)
        sums_C += np.einsum("cd,d->c", rows_CD[:, some], query_D[some])
    return sums_C


def _rows(vectors_ND: Tensor, place_C: np.ndarray) -> np.ndarray:
    """These rows as float64, which holds every stored value."""
    if vectors_ND.device.type != "cpu":  # no float64 there
        rows_CD = vectors_ND[torch.from_numpy(place_C).to(vectors_ND.device)].cpu().float().numpy()
    elif vectors_ND.dtype == torch.bfloat16:  # no type of NumPy: the upper half of a float32
        rows_CD = (vectors_ND.view(torch.uint16).numpy()[place_C].astype(np.uint32) << 16).view(np.float32)
    else:
        rows_CD = vectors_ND.numpy()[place_C]
    return rows_CD.astype(np.float64)


def _dots_on_gpu(vectors_ND: Tensor, place_C: np.ndarray, queries_SD: np.ndarray, query_C: np.ndarray) -> np.ndarray:
    """As `exact_dots`. The upper half is added to the lower one until one column is left: no library picks an order."""
    device = vectors_ND.device
    terms_CD = vectors_ND[torch.from_numpy(place_C).to(device)].double()
    terms_CD *= torch.from_numpy(queries_SD).to(device)[torch.from_numpy(query_C).to(device)]
    width = terms_CD.shape[1]
    while width > 1:
        half = (width + 1) // 2
        terms_CD[:, : width - half] += terms_CD[:, half:width]
        width = half
    return np.asarray(terms_CD[:, 0].float().cpu().numpy())


def _map(call: Callable[[Item], Result], items: Sequence[Item], workers: int) -> list[Result]:
    if workers < 2 or len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(workers, len(items))) as pool:
        return list(pool.map(call, items))
