"""Packed slates as tensors.

Shapes: S slates of a batch, T longest trunk, C candidates of a slate, W tokens of a candidate, N queries of a slate,
M tokens of a query, Q questions (a query about a candidate) of all slates, B branches of all slates, L longest row of
branch tokens, K tokens of an option's label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from .layout import PackedSlate
from .trunks import TrunkMemory, padded_length


@dataclass(frozen=True, slots=True)
class SlateBatch:
    """Several packed slates as tensors, trunks and branch rows padded on the right.

    Positions count in the trunk, and behind it (from T on) in the slate's row of branches.

    trunk_ST, trunk_len_S.
    end_pos_SC, span_pos_SCW: the last position and all positions (its page's heading first) of every candidate asked
        about, padded by its last one; candidates that a slate lacks are padded with 0.
    query_pos_SNM: positions of the tokens of each query, padded with -1.
    slate_Q, query_Q, candidate_Q: what each question is about, slate after slate, query after query.
    branch_SL, branch_pos_SL: the branches of a slate as a prefix tree in depth-first order (tokens that several
        branches begin with are computed once); before_SL: place in the row of the token before (-1: the trunk's last);
        until_SL: the last place of the row that may look back at it (-1: padding).
    read_slate_B, read_pos_B: place in the row of each branch's last token; label_pos_BK: places of its option's label,
        padded with -1.
    kept: the trunks' memories where they were read before; then only the branches are.
    """

    slates: tuple[PackedSlate, ...]
    trunk_ST: Tensor
    trunk_len_S: Tensor
    end_pos_SC: Tensor
    span_pos_SCW: Tensor
    query_pos_SNM: Tensor
    slate_Q: Tensor
    query_Q: Tensor
    candidate_Q: Tensor
    branch_SL: Tensor
    branch_pos_SL: Tensor
    before_SL: Tensor
    until_SL: Tensor
    read_slate_B: Tensor
    read_pos_B: Tensor
    label_pos_BK: Tensor
    kept: tuple[TrunkMemory, ...] = ()

    @classmethod
    def of(cls, slates: Sequence[PackedSlate], kept: Sequence[TrunkMemory] = ()) -> SlateBatch:
        """Tensors of these slates, on the CPU; `kept` stays where it is."""
        T = padded_length(max(len(s.trunk) for s in slates))
        trees = [s.tree for s in slates]
        paths = [(s, path) for s, tree in enumerate(trees) for path in tree.paths]
        labels = [n for slate in slates for n in slate.label_tokens]
        questions = [(s, n, c) for s, slate in enumerate(slates) for n, c in slate.questions()]
        question = torch.tensor(questions, dtype=torch.long).reshape(-1, 3)
        return cls(
            tuple(slates),
            trunk_ST=_rows([s.trunk for s in slates], 0, T),
            trunk_len_S=torch.tensor([len(s.trunk) for s in slates]),
            end_pos_SC=_rows([s.ends for s in slates], 0),
            span_pos_SCW=_spans(slates),
            query_pos_SNM=_queries(slates, T),
            slate_Q=question[:, 0],
            query_Q=question[:, 1],
            candidate_Q=question[:, 2],
            branch_SL=_rows([tree.ids for tree in trees], 0),
            branch_pos_SL=_rows(
                [[len(s.trunk) + depth for depth in tree.depths] for s, tree in zip(slates, trees, strict=True)], 0
            ),
            before_SL=_rows([tree.before for tree in trees], -1),
            until_SL=_rows([tree.until for tree in trees], -1),
            read_slate_B=torch.tensor([s for s, _ in paths], dtype=torch.long),
            read_pos_B=torch.tensor([path[-1] for _, path in paths], dtype=torch.long),
            label_pos_BK=_rows([path[len(path) - n :] for (_, path), n in zip(paths, labels, strict=True)], -1),
            kept=tuple(kept),
        )

    def to(self, device: torch.device | str) -> SlateBatch:
        """The same batch on another device."""
        kept = tuple(memory.to(device) for memory in self.kept)
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name not in ("slates", "kept")}
        return SlateBatch(self.slates, **moved, kept=kept)

    @property
    def num_tokens(self) -> int:
        """Tokens that carry meaning."""
        return sum(slate.num_tokens for slate in self.slates)

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return self.trunk_ST.numel() + self.branch_SL.numel()


def _rows(rows: Sequence[Sequence[int]], fill: int, width: int = 0) -> Tensor:
    """Lists of different lengths as one tensor (rows, longest), filled up on the right."""
    table = np.full((len(rows), max([width, *map(len, rows)])), fill, dtype=np.int64)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(table)


def _spans(slates: Sequence[PackedSlate]) -> Tensor:
    """Positions of each candidate (S, C, W), those of its heading first, filled up with its last one."""
    C = max(len(s.ends) for s in slates)
    starts, ends, first, size = (np.zeros((len(slates), C, 1), dtype=np.int64) for _ in range(4))
    for i, slate in enumerate(slates):
        count = len(slate.ends)
        starts[i, :count, 0], ends[i, :count, 0] = slate.starts, slate.ends
        first[i, :count, 0] = [heading.start for heading in slate.headings]
        size[i, :count, 0] = [len(heading) for heading in slate.headings]
    place = np.arange(int((size + ends - starts).max(initial=0)) + 1)
    return torch.from_numpy(np.where(place < size, first + place, np.minimum(starts + place - size, ends)))


def _queries(slates: Sequence[PackedSlate], width: int) -> Tensor:
    """Positions of each query's tokens (S, N, M), filled up with -1; those in branches follow the trunk's width."""
    places = [_query_places(slate, width) for slate in slates]
    N = max(map(len, places))
    flat = _rows([query for slate in places for query in (*slate, *[[]] * (N - len(slate)))], -1)
    return flat.reshape(len(slates), N, flat.shape[1])


def _query_places(slate: PackedSlate, width: int) -> list[list[int]]:
    if not slate.candidates_first:
        return [list(span) for span in slate.queries]
    # A yes/no head has a branch for every question of a query, all of which begin with its words.
    each = len(slate.branches) // len(slate.queries)
    if each == 0:
        return [[] for _ in slate.queries]
    return [[width + slate.tree.paths[n * each][i] for i in span] for n, span in enumerate(slate.queries)]
