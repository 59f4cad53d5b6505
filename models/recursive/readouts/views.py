"""Fusions of several readouts of one traversal: where different ways to look at it agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...config import check_choice
from ..traversal import Traversal
from .base import DEPTH, Ranking, Readout, Tools, largest, minmax, ranked
from .global_readout import GlobalReadout, recovery_view_readout
from .realised import PathProduct


@dataclass(frozen=True, slots=True)
class ZAgreement:
    """sum over views v of w_v z_v(d), where z_v(d) = (r_v(d) - mean) / std over the first 200 of view v.

    std is the sample's (ddof 1); where it is 0, 1 stands for it, and a view of fewer than two documents gives 0. A
    document that a view lacks gets that view's least z.

    Attributes:
        parts: the readouts, each with scores.
        weights: of the parts (None: all 1).
        group_reduce: how each part's chunks become documents where the index has groups (None: `max`): `max`, the
            best chunk, or `last`, the lowest ranked of the first 200, as the paper has it in the recovery view.
    """

    parts: tuple[Readout, ...]
    weights: tuple[float, ...] | None = None
    group_reduce: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "group_reduce"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.parts):
                raise ValueError(f"readout.{name} has {len(value)} values for {len(self.parts)} parts")
        for how in self.group_reduce or ():
            check_choice("readout.group_reduce", how, ("max", "last"))

    @property
    def views(self) -> tuple[str, ...]:
        """Those of all parts."""
        return tuple(dict.fromkeys(view for part in self.parts for view in part.views))

    @property
    def realised(self) -> bool:
        """Whether any part is."""
        return any(part.realised for part in self.parts)

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """By the weighted sum of z."""
        groups: np.ndarray | None = getattr(tools, "groups", None)
        lists = []
        for n, part in enumerate(self.parts):
            found = with_scores(part.rank(traversal, tools), part).top(DEPTH)
            if groups is not None:
                found = pool_groups(found, groups, self.group_reduce[n] if self.group_reduce else "max")
            lists.append(found)
        return z_agreement(lists, self.weights or [1.0] * len(lists))


def z_agreement(lists: Sequence[Ranking], weights: Sequence[float]) -> Ranking:
    """See `ZAgreement`; `lists` have scores."""
    rows = np.unique(np.concatenate([found.rows for found in lists]))
    total = np.zeros(len(rows))
    for found, weight in zip(lists, weights, strict=True):
        z = z_scores(np.asarray(found.scores))
        own = np.full(len(rows), z.min() if len(z) else 0.0)
        own[np.searchsorted(rows, found.rows)] = z
        total += weight * own
    return ranked(rows, total)


def z_scores(scores: np.ndarray) -> np.ndarray:
    """(score - mean) / sample standard deviation; 0 for fewer than two, and a deviation of 0 counts as 1."""
    if len(scores) < 2:
        return np.zeros(len(scores))
    deviation = scores.std(ddof=1)
    return np.asarray((scores - scores.mean()) / (deviation if deviation > 0 else 1.0))


@dataclass(frozen=True, slots=True)
class MinMaxCombMNZ:
    """(m_1(d) + w m_2(d)) * number of the two readouts that have d; m is the min-max score among its first `depth`."""

    first: Readout
    second: Readout
    weight: float = 0.5
    depth: int = 100

    @property
    def views(self) -> tuple[str, ...]:
        """Those of both."""
        return tuple(dict.fromkeys((*self.first.views, *self.second.views)))

    @property
    def realised(self) -> bool:
        """Whether one is."""
        return self.first.realised or self.second.realised

    def rank(self, traversal: Traversal, tools: Tools) -> Ranking:
        """By the product."""
        lists = [with_scores(part.rank(traversal, tools), part).top(self.depth) for part in (self.first, self.second)]
        rows, place = np.unique(np.concatenate([found.rows for found in lists]), return_inverse=True)
        values = [weight * minmax(np.asarray(f.scores)) for f, weight in zip(lists, (1.0, self.weight), strict=True)]
        counts = np.bincount(place, minlength=len(rows))
        return ranked(rows, np.bincount(place, np.concatenate(values), minlength=len(rows)) * counts)


def recovery_fusion() -> ZAgreement:
    """RDR "+ recovery": agreement of the global readout and the recovery view."""
    return ZAgreement((GlobalReadout(), recovery_view_readout()), group_reduce=("max", "last"))


def path_recovery_fusion() -> ZAgreement:
    """Agreement of the best paths and the recovery view."""
    return ZAgreement((PathProduct(), recovery_view_readout()), group_reduce=("max", "last"))


def minmax_combmnz() -> MinMaxCombMNZ:
    """The global readout and half of the recovery view, where both agree."""
    return MinMaxCombMNZ(GlobalReadout(), recovery_view_readout())


def pool_groups(ranking: Ranking, groups_N: np.ndarray, reduce: str) -> Ranking:
    """Chunks as documents: each is named by its first row, and scores as its best chunk here (`max`), or its lowest.

    groups_N: the first row of the document of each row.
    """
    rows, scores = groups_N[ranking.rows], np.asarray(ranking.scores)
    return ranked(*largest(rows, scores)) if reduce == "max" else _lowest(rows, scores)


def _lowest(rows: np.ndarray, scores: np.ndarray) -> Ranking:
    names, negated = largest(rows, -scores)
    return ranked(names, -negated)


def with_scores(ranking: Ranking, readout: Readout) -> Ranking:
    """The ranking itself. Raises ValueError where it is an order alone, which has no scores to agree on."""
    if ranking.scores is None:
        raise ValueError(f"{readout} gives an order without scores, which cannot be fused by score; fuse another")
    return ranking
