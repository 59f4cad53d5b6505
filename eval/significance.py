"""Is the difference of two systems on the same queries more than luck?

Shapes: Q queries, R random repetitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Mean difference a - b over `queries`, its 95 % bootstrap interval, and the two-sided p of the sign-flip test."""

    queries: int
    difference: float
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        return f"{self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}], p = {self.p:.2g}, {self.queries} queries"


def paired(a: Mapping[str, float], b: Mapping[str, float], *, repetitions: int = 10_000, seed: int = 0) -> Paired:
    """Compare two systems by the values of their queries.

    The sign-flip (paired randomisation) test asks how often differences of random sign have a mean at least as far
    from 0, the observed one counted among them (Smucker et al., CIKM 2007); the interval is the percentile bootstrap
    over queries.

    Raises:
        ValueError: the systems answered different queries, or none.
    """
    if a.keys() != b.keys():
        odd = sorted(a.keys() ^ b.keys())
        raise ValueError(f"the systems do not share {len(odd)} queries, first {odd[0]!r}; they cannot be paired")
    if not a:
        raise ValueError("no queries to compare")
    difference_Q = np.array([a[query] - b[query] for query in a])
    Q, mean = len(difference_Q), float(difference_Q.mean())
    rng = np.random.default_rng(seed)
    extreme, means = 0, []
    for start in range(0, repetitions, _AT_ONCE):
        R = min(_AT_ONCE, repetitions - start)
        flipped_R = (rng.integers(0, 2, (R, Q)) * 2 - 1) @ difference_Q / Q
        extreme += int((np.abs(flipped_R) >= abs(mean) - 1e-12).sum())
        means.append(difference_Q[rng.integers(0, Q, (R, Q))].mean(1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Paired(queries=Q, difference=mean, low=float(low), high=float(high), p=(extreme + 1) / (repetitions + 1))
