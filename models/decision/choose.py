"""The final choice: the best few candidates meet alone in one multiple-choice request (DecisionRAG)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...data_prep.hits import Step
from ..protocols import DecisionScorer, Slate, SlateScores
from .slates import Pool, ranked


@dataclass(frozen=True, slots=True)
class FinalOrder:
    """All positions of a pool in final order with their scores, and the step of the choice (None: there was none)."""

    order: tuple[tuple[int, float], ...]
    step: Step | None = None


def choose_best(
    scorer: DecisionScorer, pools: Sequence[Pool], values: Sequence[np.ndarray], choose: int
) -> list[FinalOrder]:
    """The final order of each pool, given each candidate's P(yes).

    The best `choose` candidates (fewer where one slate cannot hold them) share one request whose context holds only
    them, in reading order; they lead with 1 + their probability there, the rest follows with P(yes).
    """
    finalists = [_finalists(scorer, pool, v, choose) for pool, v in zip(pools, values, strict=True)]
    slates = [
        Slate(pool.query, tuple(pool.candidates[i] for i in best))
        for pool, best in zip(pools, finalists, strict=True)
        if best
    ]
    answers = iter(scorer.choose(slates) if slates else [])
    return [
        _lead(pool, v, best, next(answers), choose) if best else FinalOrder(_by_value(v, ()))
        for pool, v, best in zip(pools, values, finalists, strict=True)
    ]


def _finalists(scorer: DecisionScorer, pool: Pool, values_C: np.ndarray, choose: int) -> list[int]:
    """The best candidates that fit one slate, in reading order; none where there is nothing to choose from."""
    best: list[int] = []
    tokens = 0
    for i in ranked(values_C)[: min(choose, scorer.max_candidates)]:
        tokens += scorer.num_tokens(pool.candidates[i])
        if tokens > scorer.max_candidate_tokens_per_slate:
            break
        best.append(int(i))
    return sorted(best) if len(best) > 1 else []


def _lead(pool: Pool, values_C: np.ndarray, best: Sequence[int], answer: SlateScores, choose: int) -> FinalOrder:
    winners = ranked(answer.values_C)
    top = tuple((best[j], 1.0 + float(answer.values_C[j])) for j in winners)
    ids = tuple(pool.candidates[i].id for i in best)
    notes = answer.notes
    if len(best) < min(choose, len(values_C)):
        notes = (*notes, f"one slate holds only {len(best)} of the best {choose}")
    step = Step(
        name="final choice",
        ids=ids,
        scores=tuple(map(float, answer.values_C)),
        kept=(ids[winners[0]],),
        notes=notes,
        cost=answer.cost,
    )
    return FinalOrder(top + _by_value(values_C, best), step)


def _by_value(values_C: np.ndarray, without: Sequence[int]) -> tuple[tuple[int, float], ...]:
    left_out = set(without)
    return tuple((int(i), float(values_C[i])) for i in ranked(values_C) if int(i) not in left_out)
