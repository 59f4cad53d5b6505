"""Rows whose stored vectors are equal to the bit: one of each group is scored, all of them are found.

Thousands of equal documents (empty ones, boilerplate) at the cut then cost as much as one.

Shapes: N rows, M members of groups, G groups, C candidates of all queries, E exclusions of all queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .coarse_pass import Part

_READ_AT_ONCE = 2**24  # bytes


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows with equal vectors. members_M: rows by (first row of their group, row); group g is starts_G1[g:g+2]."""

    members_M: np.ndarray
    starts_G1: np.ndarray
    sorted_M: np.ndarray  # the members, ascending
    group_M: np.ndarray  # of each of `sorted_M`

    @property
    def first_G(self) -> np.ndarray:
        """The first row of each group, which is scored for all of them; ascending."""
        return np.asarray(self.members_M[self.starts_G1[:-1]])

    @property
    def repeated(self) -> np.ndarray:
        """The other members, ascending."""
        return np.setdiff1d(self.sorted_M, self.first_G, assume_unique=True)

    def group_of(self, rows: np.ndarray) -> np.ndarray:
        """Group of each row, -1 where it is in none."""
        place = np.searchsorted(self.sorted_M, rows)
        inside = place < len(self.sorted_M)
        inside[inside] = self.sorted_M[place[inside]] == rows[inside]
        return np.where(inside, self.group_M[np.where(inside, place, 0)], -1)

    def hide(self, query_E: np.ndarray, row_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The (query, row) pairs that must not be scored: a first row only where all of its group are excluded."""
        group_E = self.group_of(row_E)
        alone = group_E < 0
        G = len(self.starts_G1) - 1
        key, count = np.unique(query_E[~alone] * G + group_E[~alone], return_counts=True)
        key = key[count == np.diff(self.starts_G1)[key % G]]
        return np.concatenate([query_E[alone], key // G]), np.concatenate([row_E[alone], self.first_G[key % G]])

    def expand(
        self, query_C: np.ndarray, row_C: np.ndarray, score_C: np.ndarray, most_C: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each first row becomes the first `most_C` members of its group, with its score."""
        group_C = self.group_of(row_C)
        size_C = np.where(group_C >= 0, np.diff(self.starts_G1)[group_C], 1)
        taken_C = np.minimum(size_C, most_C)
        source = np.repeat(np.arange(len(row_C)), taken_C)
        offset = np.arange(len(source)) - np.repeat(np.cumsum(taken_C) - taken_C, taken_C)
        grouped = group_C[source] >= 0
        rows = row_C[source]
        rows[grouped] = self.members_M[self.starts_G1[group_C[source[grouped]]] + offset[grouped]]
        return query_C[source], rows, score_C[source]


def find_groups(parts: Sequence[Part]) -> Groups | None:
    """Groups of two and more rows with the same bits, over all parts; None where there is none."""
    if sum(len(part.vectors_ND) for part in parts) < 2:
        return None
    head_N = np.concatenate([_heads(part.vectors_ND) for part in parts])
    order_N = np.argsort(head_N, kind="stable")
    same = head_N[order_N[1:]] == head_N[order_N[:-1]]
    suspects = np.sort(order_N[np.r_[False, same] | np.r_[same, False]])
    if len(suspects) == 0:
        return None
    hash_C = np.concatenate([_hashes(words) for words in _read(parts, suspects)])
    _, first, group_C = np.unique(hash_C, return_index=True, return_inverse=True)
    first_C = suspects[first[group_C]]
    # A hash that two vectors share would lose a document; what differs from its first row stands alone.
    pairs = zip(_read(parts, suspects), _read(parts, first_C), strict=True)
    equal_C = np.concatenate([(words == others).all(1) for words, others in pairs])
    rows, firsts = suspects[equal_C], first_C[equal_C]
    order = np.lexsort((rows, firsts))
    members, firsts = rows[order], firsts[order]
    starts = np.flatnonzero(np.r_[True, firsts[1:] != firsts[:-1]])
    sizes = np.diff(np.r_[starts, len(members)])
    keep = np.repeat(sizes > 1, sizes)
    members, sizes = members[keep], sizes[sizes > 1]
    if len(members) == 0:
        return None
    group = np.repeat(np.arange(len(sizes)), sizes)
    ascending = np.argsort(members)
    return Groups(members, np.r_[0, np.cumsum(sizes)], members[ascending], group[ascending])


def _heads(vectors_ND: torch.Tensor) -> np.ndarray:
    """The first 8 bytes of each row (all of it where it is shorter), which are almost never equal by chance."""
    return _words(vectors_ND[:, : 8 // vectors_ND.element_size()])[:, 0]


def _words(vectors: torch.Tensor) -> np.ndarray:
    """The bits of each row as uint64, filled up with zeros; at least one."""
    integer = {4: torch.int32, 2: torch.int16}[vectors.element_size()]
    bits = vectors.contiguous().view(integer).cpu().numpy()
    a_word = 8 // vectors.element_size()
    count = max(1, -(-bits.shape[1] // a_word))
    filled = np.zeros((len(bits), count * a_word), dtype=bits.dtype)
    filled[:, : bits.shape[1]] = bits
    return filled.view(np.uint64)


def _read(parts: Sequence[Part], rows: np.ndarray) -> Iterator[np.ndarray]:
    """The bits of these rows, some at a time."""
    sizes = [part.vectors_ND.element_size() * part.vectors_ND.shape[1] for part in parts]
    at_once = max(1, _READ_AT_ONCE // max(1, *sizes, 1))
    for start in range(0, len(rows), at_once):
        wanted = rows[start : start + at_once]
        words = np.zeros((len(wanted), 0), dtype=np.uint64)
        for part in parts:
            here = (wanted >= part.start) & (wanted < part.start + len(part.vectors_ND))
            places = torch.from_numpy(wanted[here] - part.start).to(part.vectors_ND.device)
            found = _words(part.vectors_ND[places])
            if words.shape[1] == 0:
                words = np.zeros((len(wanted), found.shape[1]), dtype=np.uint64)
            words[here] = found
        yield words


def _hashes(words_NW: np.ndarray) -> np.ndarray:
    """A number of 64 bits for each row, the same wherever it stands."""
    factors_W = np.random.default_rng(0).integers(0, 2**63, words_NW.shape[1], dtype=np.uint64) * 2 + 1
    with np.errstate(over="ignore"):
        # The high bits are mixed into the low ones, which a product alone never does.
        mixed = words_NW ^ (words_NW >> np.uint64(29))
        return np.asarray((mixed * factors_W).sum(axis=1, dtype=np.uint64))
