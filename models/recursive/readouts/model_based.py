"""Readouts that ask the model once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...config import check_positive
from ...protocols import State
from ..traversal import Traversal
from .base import DEPTH, OfStates, Ranking, Readout, Tools
from .global_readout import GlobalReadout


@dataclass(frozen=True, slots=True)
class RootInterpolation(OfStates):
    """As in DC-PRF: one more search, with normalize(lam z_root + (1 - lam) z_last), 200 deep.

    z_last is the state with the largest (level, path score). `lam` keeps the vector near the query: 1 is the root
    alone, 0 the last state alone.
    """

    lam: float = 0.8

    def __post_init__(self) -> None:
        if not 0.0 <= self.lam <= 1.0:
            raise ValueError(f"readout.lam={self.lam} must be between 0 and 1")

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """By the cosine with the interpolated vector."""
        return self.rank_together([traversal], tools)[0]

    def rank_together(self, traversals: Sequence[Traversal], tools: Tools) -> list[Ranking]:
        """As `rank`, in one search for all."""
        if not traversals:
            return []
        vectors = np.stack([self._vector(traversal) for traversal in traversals])
        found = tools.search(vectors, DEPTH, [traversal.excluded for traversal in traversals])
        return [
            Ranking(found.rows_SK[n, :count], np.asarray(found.scores_SK[n, :count], np.float64))
            for n, count in enumerate(found.counts_S)
        ]

    def _vector(self, traversal: Traversal) -> np.ndarray:
        last = max(traversal.states, key=lambda state: (state.level, state.path_score))
        mixed = self.lam * traversal.states[0].vector_D.astype(np.float64) + (1 - self.lam) * last.vector_D
        return np.asarray(mixed / np.linalg.norm(mixed), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Assembly:
    """A set that is put together document by document (RDR Eq. 10).

    With S_0 = {}, n times: z = enc(render(q, S_j, role assembly)), then the d of the pool outside S_j with the largest
    <z, v_d> joins S_j. The pool is the first `pool` of `base`. S stands first in its order, then the order of `base`.
    It takes n encodings a query and no index search; of equal documents the one that the pool has first is taken.
    """

    base: Readout = field(default_factory=GlobalReadout)
    pool: int = 50
    n: int = 10

    def __post_init__(self) -> None:
        check_positive("readout.pool", self.pool)
        check_positive("readout.n", self.n)

    @property
    def views(self) -> tuple[str, ...]:
        """Those of the base."""
        return self.base.views

    @property
    def realised(self) -> bool:
        """As the base."""
        return self.base.realised

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """The set, then the rest. An order alone."""
        return self.rank_together([traversal], tools)[0]

    def rank_together(self, traversals: Sequence[Traversal], tools: Tools) -> list[Ranking]:
        """As `rank`, with one encoding of all queries a step."""
        bases = [self.base.rank(traversal, tools) for traversal in traversals]
        pools = [base.rows[: self.pool] for base in bases]
        vectors = [tools.vectors(pool).astype(np.float64) for pool in pools]
        chosen: list[list[int]] = [[] for _ in traversals]
        for _ in range(self.n):
            going = [i for i, pool in enumerate(pools) if len(chosen[i]) < len(pool)]
            if not going:
                break
            states = [self._state(traversals[i], pools[i][chosen[i]], tools) for i in going]
            for i, z in zip(going, tools.encode(states, going), strict=True):
                scores = np.einsum("pd,d->p", vectors[i], z.astype(np.float64)).astype(np.float32)
                scores[chosen[i]] = -np.inf
                chosen[i].append(int(scores.argmax()))
        return [_put_first(base.rows, pool[first]) for base, pool, first in zip(bases, pools, chosen, strict=True)]

    @staticmethod
    def _state(traversal: Traversal, rows: np.ndarray, tools: Tools) -> State:
        texts = tuple(tools.text(int(row)) for row in rows)
        return State(traversal.query, texts, "assembly", traversal.instruction)


def _put_first(rows: np.ndarray, first: np.ndarray) -> Ranking:
    return Ranking(np.concatenate([first, rows[~np.isin(rows, first)]]), None)
