"""The final choice: the best few candidates meet alone in one multiple-choice request (DecisionRAG)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from ...data_prep.hits import Cost, Step
from ..protocols import MAX_OPTIONS, DecisionScorer, Slate, SlateScores
from .slates import Pool, ranked


@dataclass(frozen=True, slots=True)
class FinalOrder:
    """All positions of a pool in final order with their scores, and the step of the choice (None: there was none).

    `answerable` is the probability that any finalist is right (None: nobody asked).
    """

    order: tuple[tuple[int, float], ...]
    step: Step | None = None
    answerable: float | None = None


def check_options(candidates: int, none: bool) -> None:
    """Raise ValueError where a choice between so many candidates has too many options."""
    if candidates + none > MAX_OPTIONS:
        most = f"{MAX_OPTIONS - 1} and none-of-these" if none else str(MAX_OPTIONS)
        raise ValueError(
            f"a choice between {candidates} candidates, and one request offers at most {most}: choose between the best "
            "of them by P(yes), or ask about several slates (navigate.choose is how many finalists there are)"
        )


def choose_best(
    scorer: DecisionScorer,
    pools: Sequence[Pool],
    values: Sequence[np.ndarray],
    choose: int,
    *,
    orders: int = 1,
    none: bool = False,
) -> list[FinalOrder]:
    """The final order of each pool, given each candidate's P(yes).

    The best `choose` candidates (fewer where one slate cannot hold them) share one request whose context holds only
    them, in reading order; they lead with 1 + their probability there, the rest follows with P(yes).

    orders: in how many orders the finalists are shown, each the reading order begun at another place; their
        probabilities are averages over them. More orders favour places less, and cost a request each.
    none: also ask whether none of them is right, which a single finalist is asked about too.

    Raises:
        ValueError: `choose` finalists are more options than one request offers, or `orders` is below 1.
    """
    check_options(choose, none)
    if orders < 1:
        raise ValueError(f"orders={orders} must be 1 or more")
    finalists = [_finalists(scorer, pool, v, choose, none) for pool, v in zip(pools, values, strict=True)]
    shifts = [_shifts(len(best), orders) for best in finalists]
    slates = [
        Slate(pool.query, tuple(pool.candidates[i] for i in best[shift:] + best[:shift]))
        for pool, best, starts in zip(pools, finalists, shifts, strict=True)
        for shift in starts
    ]
    answers = iter(scorer.choose(slates, none=none) if slates else [])
    out = []
    for pool, v, best, starts in zip(pools, values, finalists, shifts, strict=True):
        if best:
            out.append(_lead(pool, v, best, _averaged([next(answers) for _ in starts], starts), choose))
        else:
            out.append(FinalOrder(_by_value(v, ())))
    return out


def _finalists(scorer: DecisionScorer, pool: Pool, values_C: np.ndarray, choose: int, none: bool) -> list[int]:
    """The best candidates that fit one slate, in reading order; none where there is nothing to choose from."""
    best: list[int] = []
    tokens = 0
    for i in ranked(values_C)[: min(choose, scorer.max_candidates)]:
        tokens += scorer.num_tokens(pool.candidates[i])
        if tokens > scorer.max_candidate_tokens_per_slate:
            break
        best.append(int(i))
    return sorted(best) if len(best) > 1 or none else []


def _shifts(count: int, orders: int) -> list[int]:
    """Where each of at most `orders` orders of so many finalists begins, evenly spaced."""
    orders = min(orders, count)
    return [n * count // orders for n in range(orders)]


def _averaged(answers: Sequence[SlateScores], shifts: Sequence[int]) -> SlateScores:
    """One answer from those to the same finalists, each shown in the order that begins at its shift."""
    if len(answers) == 1:
        return answers[0]
    values_C = np.mean([np.roll(a.values_C, shift) for a, shift in zip(answers, shifts, strict=True)], axis=0)
    none = [a.none for a in answers if a.none is not None]
    notes = dict.fromkeys(note for a in answers for note in a.notes)
    return SlateScores(
        values_C,
        (*notes, f"mean over {len(answers)} orders of the options"),
        reduce(Cost.__add__, (a.cost for a in answers), Cost(max_concurrency=len(answers))),
        float(np.mean(none)) if none else None,
    )


def _lead(pool: Pool, values_C: np.ndarray, best: Sequence[int], answer: SlateScores, choose: int) -> FinalOrder:
    winners = ranked(answer.values_C)
    top = tuple((best[j], 1.0 + float(answer.values_C[j])) for j in winners)
    ids = tuple(pool.candidates[i].id for i in best)
    notes = answer.notes
    if len(best) < min(choose, len(values_C)):
        notes = (*notes, f"one slate holds only {len(best)} of the best {choose}")
    if answer.none is not None:
        notes = (*notes, f"none of these: {answer.none:.3f}")
    step = Step(
        name="final choice",
        ids=ids,
        scores=tuple(map(float, answer.values_C)),
        kept=(ids[winners[0]],),
        notes=notes,
        cost=answer.cost,
    )
    return FinalOrder(top + _by_value(values_C, best), step, None if answer.none is None else 1.0 - answer.none)


def _by_value(values_C: np.ndarray, without: Sequence[int]) -> tuple[tuple[int, float], ...]:
    left_out = set(without)
    return tuple((int(i), float(values_C[i])) for i in ranked(values_C) if int(i) not in left_out)
