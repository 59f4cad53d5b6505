"""One blocked pass over the vectors that keeps, for each query, every row which may belong to its best k.

Its scores only choose; they may come from fast and imprecise products, because each carries a bound of its error. With
o the computed and t the true score (q, v as stored; q', v' as rounded for the product):

    |o - t| <= e + u|o|,  e = (D+2) 2^-24 |q'||v'| + |q-q'||v| + |q'||v-v'|  and u the rounding of the output

The k-th best o is L, so k rows have t >= L - u|L| - e, and a row that is better than those has o >= that - e, rounded
as the outputs are. Whatever passes this is kept; nothing else can be among the best k.

Shapes: S queries, N rows, D dimensions, B rows of a block, C candidates of all queries.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# A product in bfloat16 pays where there are many products a row, and only a large one surely sums in float32.
_COARSE_QUERIES, _COARSE_ROWS = 16, 4096
_BLOCK_VALUES = {"cpu": 2**22, "cuda": 2**28}  # a block and its scores fit the last cache of a CPU
_BLOCK_ROWS = {"cpu": (1024, 65_536), "cuda": (16_384, 2**20)}
_SURVEYED_AT_ONCE = 2**22  # values
_INPUT_ROUNDING = {"ieee": 0.0, "none": 0.0, "tf32": 2.0**-11, "bf16": 2.0**-8}
# Splitting a product between cores of a GPU may round partial sums to the type of the output.
_SPLIT_SUMS = 8
_NATIVE_BF16 = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(slots=True)
class Part:
    """Neighbouring rows of an index on one device.

    vectors_ND: as stored; `start` is the first row's number; `repeated`: places of rows that repeat an earlier one.
    """

    vectors_ND: Tensor
    start: int
    largest_norm: float
    repeated: Tensor | None = None
    _rounding: dict[torch.dtype, float] = field(default_factory=dict)

    def largest_rounding(self, dtype: torch.dtype) -> float:
        """The largest |v - v'| over all rows when they are rounded to `dtype`; measured once."""
        if self.vectors_ND.dtype == dtype:
            return 0.0
        if dtype not in self._rounding:
            rows = max(1, _SURVEYED_AT_ONCE // max(1, self.vectors_ND.shape[1]))
            largest = 0.0
            for block in self.vectors_ND.split(rows):
                exact = block.float()
                largest = max(largest, float((exact - exact.to(dtype).float()).norm(dim=1).max()))
            self._rounding[dtype] = largest * (1 + 1e-4) + 1e-12
        return self._rounding[dtype]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Pairs that are to be scored exactly, by query and place: query_C ascends; place_C: row within the part."""

    query_C: Tensor
    place_C: Tensor


def coarse_pass(
    part: Part, queries_SD: Tensor, k: int, hidden: tuple[Tensor, Tensor] | None, ranges: bool
) -> tuple[Candidates, ...]:
    """Candidates for the best `k`; with `ranges` also those for the least and for the greatest score of all rows.

    hidden: (query, place) pairs that must not be among the best `k`, by place.
    """
    device = part.vectors_ND.device
    queries = queries_SD.to(device)
    S = len(queries)
    if S == 0 or len(part.vectors_ND) == 0:
        return (_none(device),) * (3 if ranges else 1)
    dtype = _product_dtype(part, S)
    error_S, share = _error_bound(part, queries, dtype)
    best = [_Best(count, error_S, share, dtype) for count in ((k, 1, 1) if ranges else (k,))]
    scores_of = _Products(part, queries.to(dtype), _block_rows(part, S))
    for start, stop in scores_of.blocks():
        scores_SB = scores_of(start, stop)
        if part.repeated is not None:
            scores_SB.index_fill_(1, _between(part.repeated, start, stop) - start, -torch.inf)
        if ranges:
            low_SB = torch.where(scores_SB == -torch.inf, scores_SB, -scores_SB)
            best[1].add(low_SB, start)
            best[2].add(scores_SB, start)
        if hidden is not None:
            query, place = hidden
            first, last = torch.searchsorted(place, torch.tensor([start, stop], device=device)).tolist()
            scores_SB[query[first:last], place[first:last] - start] = -torch.inf
        best[0].add(scores_SB, start)
    return tuple(one.candidates() for one in best)


def _none(device: torch.device) -> Candidates:
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    return Candidates(nothing, nothing)


def _between(places: Tensor, start: int, stop: int) -> Tensor:
    first, last = torch.searchsorted(places, torch.tensor([start, stop], device=places.device)).tolist()
    return places[first:last]


def _product_dtype(part: Part, S: int) -> torch.dtype:
    stored, device = part.vectors_ND.dtype, part.vectors_ND.device.type
    if S < _COARSE_QUERIES or len(part.vectors_ND) < _COARSE_ROWS:
        return torch.float32
    if device == "cuda":
        return stored
    return torch.bfloat16 if device == "cpu" and native_bf16() else torch.float32


def native_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 itself."""
    known = torch.cpu.get_capabilities()
    return any(bool(known.get(name)) for name in _NATIVE_BF16)


def _error_bound(part: Part, queries: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """(e of each query, u): see the head of this file."""
    D, device = queries.shape[1], part.vectors_ND.device.type
    norms_S = queries.norm(dim=1)
    error_S = (D + 2) * 2.0**-24 * norms_S * part.largest_norm
    if dtype == torch.float32:
        rounded = _float32_rounding(device)
        error_S = error_S + (2 * rounded + rounded**2) * norms_S * part.largest_norm
        return error_S * (1 + 1e-3) + 2.0**-24, 0.0
    unit = torch.finfo(dtype).eps / 2
    lost_S = (queries - queries.to(dtype).float()).norm(dim=1)
    error_S = error_S + lost_S * part.largest_norm + (norms_S + lost_S) * part.largest_rounding(dtype)
    if device == "cuda":
        error_S = error_S + _SPLIT_SUMS * unit * norms_S * part.largest_norm
    return error_S * (1 + 1e-3) + 2.0**-24, unit * (1 + 2 * unit)


def _float32_rounding(device: str) -> float:
    """How the process has allowed float32 products to round their inputs (TF32 and the like)."""
    backend = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    allowed = (backend.matmul.fp32_precision, getattr(torch.backends, "fp32_precision", "none"))
    return max(_INPUT_ROUNDING.get(name, _INPUT_ROUNDING["bf16"]) for name in allowed)


def _block_rows(part: Part, S: int) -> int:
    kind = "cpu" if part.vectors_ND.device.type == "cpu" else "cuda"
    least, most = _BLOCK_ROWS[kind]
    return min(most, max(least, _BLOCK_VALUES[kind] // max(1, S, part.vectors_ND.shape[1])))


class _Products:
    """Scores of one block after the other, in memory that is used again."""

    def __init__(self, part: Part, queries_SD: Tensor, rows: int) -> None:
        N, D = part.vectors_ND.shape
        self._vectors, self._queries = part.vectors_ND, queries_SD
        self._count = max(1, -(-N // rows))
        self._starts = [N * n // self._count for n in range(self._count + 1)]
        rows = max(b - a for a, b in self.blocks())
        new = queries_SD.new_empty
        self._scores = new(len(queries_SD) * rows)
        self._float = self._scores if queries_SD.dtype == torch.float32 else new(len(self._scores), dtype=torch.float32)
        self._rounded = None if self._vectors.dtype == queries_SD.dtype else new((rows, D))
        # No CPU rounds float16 to bfloat16 quickly; by way of float32 it does.
        by_way = {self._vectors.dtype, queries_SD.dtype} == {torch.float16, torch.bfloat16}
        self._between = new((rows, D), dtype=torch.float32) if by_way else None

    def blocks(self) -> list[tuple[int, int]]:
        """(start, stop) of equal blocks, so that none is too small for a fast product."""
        return list(zip(self._starts[:-1], self._starts[1:], strict=True))

    def __call__(self, start: int, stop: int) -> Tensor:
        block = self._vectors[start:stop]
        if self._between is not None:
            block = self._between[: stop - start].copy_(block)
        if self._rounded is not None:
            block = self._rounded[: stop - start].copy_(block)
        S = len(self._queries)
        scores_SB = self._scores[: S * (stop - start)].view(S, stop - start)
        torch.mm(self._queries, block.T, out=scores_SB)
        if scores_SB.dtype == torch.float32:
            return scores_SB
        return self._float[: S * (stop - start)].view_as(scores_SB).copy_(scores_SB)  # compared many times faster


class _Best:
    """For each query all places whose computed score may belong to the best k."""

    def __init__(self, k: int, error_S: Tensor, share: float, dtype: torch.dtype) -> None:
        self._k, self._error_S, self._share, self._dtype = k, error_S, share, dtype
        self._S = len(error_S)
        # Above -inf, which marks what must not be found.
        self._least_S = torch.full_like(error_S, torch.finfo(dtype).min)
        self._counts_S = torch.zeros(self._S, dtype=torch.long, device=error_S.device)
        self._kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # query, number within it, place, score
        self._waiting = 0

    def add(self, scores_SB: Tensor, start: int) -> None:
        """Take in a block of scores, whose first column is the place `start`; -inf is never taken."""
        if not self._kept and scores_SB.shape[1] >= self._k:
            self._raise_to(scores_SB.topk(self._k, dim=1, sorted=False).values.amin(1))
        above_S = (scores_SB.amax(1) >= self._least_S).nonzero()[:, 0]
        if len(above_S) == 0:
            return
        few = 2 * len(above_S) < self._S
        chosen_SB = scores_SB[above_S] if few else scores_SB
        least_S = self._least_S[above_S] if few else self._least_S
        query_C, column_C = _positions(chosen_SB >= least_S[:, None])
        score_C = chosen_SB[query_C, column_C]
        self._keep(above_S[query_C] if few else query_C, column_C + start, score_C)
        if self._waiting > self._S * self._k:
            self._compact()

    def candidates(self) -> Candidates:
        """What is left of them, by query and place."""
        if not self._kept:
            return _none(self._error_S.device)
        self._compact()
        [(query_C, _, place_C, _)] = self._kept
        return Candidates(query_C, place_C)

    def _keep(self, query_C: Tensor, place_C: Tensor, score_C: Tensor) -> None:
        """query_C: ascending."""
        counts_S = torch.bincount(query_C, minlength=self._S)
        before_S = counts_S.cumsum(0) - counts_S - self._counts_S
        number_C = torch.arange(len(query_C), device=query_C.device) - before_S[query_C]
        self._kept.append((query_C, number_C, place_C, score_C))
        self._counts_S = self._counts_S + counts_S
        self._waiting += len(query_C)

    def _raise_to(self, kth_S: Tensor) -> None:
        """`kth_S`: the k-th best computed score so far, -inf where there are fewer."""
        least_S = kth_S - self._share * kth_S.abs() - 2 * self._error_S
        # Rounded as scores are: whatever is at least this is at least this when rounded.
        least_S = torch.where(kth_S == -torch.inf, kth_S, least_S).to(self._dtype).float()
        self._least_S = torch.maximum(self._least_S, least_S)

    def _compact(self) -> None:
        query_C, number_C, place_C, score_C = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
        scores_SW = score_C.new_full((self._S, int(self._counts_S.max())), -torch.inf)
        places_SW = torch.empty_like(scores_SW, dtype=torch.long)
        scores_SW[query_C, number_C] = score_C
        places_SW[query_C, number_C] = place_C
        if scores_SW.shape[1] >= self._k:
            self._raise_to(scores_SW.topk(self._k, dim=1, sorted=False).values.amin(1))
        query_C, column_C = _positions(scores_SW >= self._least_S[:, None])
        self._kept, self._counts_S = [], torch.zeros_like(self._counts_S)
        self._keep(query_C, places_SW[query_C, column_C], scores_SW[query_C, column_C])
        self._waiting = 0


def _positions(mask_SB: Tensor) -> tuple[Tensor, Tensor]:
    """(row, column) of each true element, by row."""
    if mask_SB.device.type != "cpu":
        row, column = mask_SB.nonzero(as_tuple=True)
        return row, column
    # NumPy skips what is false many times faster.
    flat = torch.from_numpy(mask_SB.numpy().reshape(-1).nonzero()[0])
    row = torch.div(flat, mask_SB.shape[1], rounding_mode="floor")
    return row, flat - row * mask_SB.shape[1]
