"""Best-first search: what a walk dropped stays at hand, and the likeliest path is taken up again until a limit.

A node's priority is the probability chain of its path, the product of P(yes) of all that was judged on it, itself
included; no descendant's is above it. Each round opens the `expand` best dropped nodes of a query at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...data_prep.corpus import Corpus
from ...data_prep.hits import Cost, Step
from ..config import NavigateConfig
from .slates import PoolScores, ranked
from .walk import Nodes, Walk, opened

if TYPE_CHECKING:
    from .navigate import Navigator

_SHOWN_LEFT = 20


def has_reached_a_limit(config: NavigateConfig, walk: Walk, more: Cost | None = None) -> str:
    """Which limit the walk has reached (with the cost `more` of the present step), in words; empty for none."""
    cost = walk.cost + (more or Cost())
    spent = (
        ("max_tokens", config.max_tokens, cost.prompt_tokens + cost.generated_tokens),
        ("max_requests", config.max_requests, cost.requests),
        ("max_seconds", config.max_seconds, time.perf_counter() - walk.started),
    )
    for key, limit, value in spent:
        if limit is not None and value >= limit:
            return f"{key}={limit} reached"
    return ""


def come_back(navigator: Navigator, walks: Sequence[Walk], watch: Callable[[str, Step], None]) -> None:
    """Open dropped nodes of each walk, the likeliest first, until nothing is left or a limit is reached."""
    number = 0
    while active := [w for w in walks if len(w.dropped) and not has_reached_a_limit(navigator.config, w)]:
        number += 1
        # Nodes of one level are judged side by side, as in the descent.
        asked = [(walk, nodes) for walk in active for nodes in _by_level(navigator, walk)]
        answers = navigator.judge([(walk.query, nodes.rows_C) for walk, nodes in asked])
        for (walk, nodes), scores in zip(asked, answers, strict=True):
            _sort_in(navigator, walk, nodes, scores, f"round {number}", watch)


def _by_level(navigator: Navigator, walk: Walk) -> Iterator[Nodes]:
    """The children of the next dropped nodes, a group for each level; a leaf that joined the walk was judged before."""
    corpus = navigator.corpus
    taken = walk.take_dropped(navigator.config.expand)
    level_C = np.array([corpus.level(int(row)) for row in taken.rows_C])
    for level in np.unique(level_C):
        group = taken.at(np.flatnonzero(level_C == level))
        nothing = np.zeros(len(group))  # the sums of a dropped node hold its own answer already
        nodes = opened(corpus, group, nothing, nothing)
        nodes = nodes.at(np.flatnonzero(~np.isin(nodes.rows_C, walk.leaves)))
        if len(nodes):
            yield nodes


def _sort_in(
    navigator: Navigator,
    walk: Walk,
    nodes: Nodes,
    scores: PoolScores,
    name: str,
    watch: Callable[[str, Step], None],
) -> None:
    """Leaves are found; inner nodes wait with all others that were dropped."""
    value_C = navigator.value(nodes, scores.values_C)
    level = navigator.corpus.level(int(nodes.rows_C[0])) + 1
    navigator.note(walk, nodes.rows_C, scores, ranked(value_C), f"{name}, level {level}", watch)
    leaf = navigator.corpus.are_leaves(nodes.rows_C)
    walk.found(navigator.corpus, nodes.rows_C[leaf], value_C[leaf])
    odds_C, log_p_C = navigator.own(scores.values_C)
    inner = np.flatnonzero(~leaf)
    walk.drop(nodes.at(inner), odds_C[inner], log_p_C[inner])


def what_is_left(config: NavigateConfig, corpus: Corpus, walk: Walk) -> Step:
    """The likeliest dropped nodes that were not opened, with the probability of their paths."""
    order = np.argsort(-walk.dropped.chain_C, kind="stable")[:_SHOWN_LEFT]
    limit = has_reached_a_limit(config, walk) or "nothing more to open"
    return Step(
        name="left",
        ids=tuple(corpus.id(int(walk.dropped.rows_C[i])) for i in order),
        scores=tuple(np.exp(walk.dropped.chain_C[order]).tolist()),
        kept=(),
        notes=(f"{limit}; {len(walk.dropped)} nodes were not opened",),
    )
