"""Conformal thresholds: what must be kept so that the right candidate is kept with a promised probability.

A nonconformity score is low for a candidate that looks right; kept is everything up to a threshold. The threshold is a
quantile of the scores that the right candidates of labelled queries got, so it holds for the next query, whatever the
model is worth, as long as the queries could have come in any order (split conformal prediction, Vovk et al. 2005).
Shapes: C candidates of a level, N queries.
"""

from __future__ import annotations

import math

import numpy as np

SCORES = ("odds", "gap", "mass", "rank")

# Room for rounding where a share of queries is a whole number of them.
_EPSILON = 1e-9


def nonconformity(score: str, log_odds_C: np.ndarray) -> np.ndarray:
    """How little each candidate of a level looks like the right one, (C,); lower is better, whatever the score.

    odds: minus its log-odds of yes. One bar for all levels and queries: an easy query keeps few, a vague one none.
    gap: how far its log-odds are below the best of the level.
    mass: minus the log of the softmax mass at it and below it, which is 0 for the best and grows with the mass above
        it (adaptive prediction sets, Romano et al. 2020; the logarithm keeps the far tail apart).
    rank: how many candidates are better, which calibrates a fixed k.

    Candidates that are equal in log-odds follow in reading order, as everywhere.
    """
    if score == "odds":
        return -log_odds_C
    if score == "gap":
        return np.asarray(log_odds_C.max() - log_odds_C)
    order = np.argsort(-log_odds_C, kind="stable")
    out_C = np.empty(len(log_odds_C))
    if score == "rank":
        out_C[order] = np.arange(len(order))
    elif score == "mass":
        below_C = np.logaddexp.accumulate(log_odds_C[order][::-1])[::-1]
        out_C[order] = below_C[0] - below_C
    else:
        raise ValueError(f"score={score!r} is not a choice; use one of: {', '.join(SCORES)}")
    return out_C


def queries_needed(alpha: float, confidence: float | None = None) -> int:
    """The fewest labelled queries that support a threshold: with fewer, only keeping everything is safe enough."""
    if confidence is None:
        return math.ceil(1 / alpha - _EPSILON) - 1
    return math.ceil(math.log(1 - confidence) / math.log1p(-alpha) - _EPSILON)


def may_be_lost(count: int, alpha: float, confidence: float | None = None) -> int:
    """One more than the number of `count` calibration scores that may lie above the threshold (0: too few scores).

    confidence: None promises 1 - alpha on average over calibration sets: floor((N + 1) alpha), split conformal
        prediction. Else it is promised for this very set, with that probability: the largest j with
        P(Binomial(N, alpha) < j) <= 1 - confidence (Vovk 2012, training-conditional validity), which is more cautious.
    """
    if confidence is None:
        return math.floor((count + 1) * alpha + _EPSILON)
    below, allowed = 0.0, 0
    for j in range(count):
        log_ways = math.lgamma(count + 1) - math.lgamma(j + 1) - math.lgamma(count - j + 1)
        below += math.exp(log_ways + j * math.log(alpha) + (count - j) * math.log1p(-alpha))
        if below > 1 - confidence + _EPSILON:
            break
        allowed = j + 1
    return allowed


def conformal_threshold(scores_N: np.ndarray, alpha: float, confidence: float | None = None) -> float:
    """The score that the next one is above with probability <= alpha: the `may_be_lost`-th largest.

    Without `confidence` that is the ceil((N + 1) (1 - alpha))-th smallest.

    Raises:
        ValueError: N is below `queries_needed(alpha, confidence)`.
    """
    count = len(scores_N)
    left_out = may_be_lost(count, alpha, confidence)
    if left_out < 1:
        need = queries_needed(alpha, confidence)
        raise ValueError(f"alpha={alpha:g} needs at least {need} labelled queries, there are {count}")
    return float(np.sort(scores_N)[count - left_out])


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a share (95 % by default); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    share, spread = successes / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
