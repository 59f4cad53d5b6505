"""Probabilities and their log-odds."""

from __future__ import annotations

import numpy as np

_TINY, _ULP = float(np.finfo(float).tiny), float(np.finfo(float).epsneg)


def log_odds(p_C: np.ndarray, least: float = 0.0) -> np.ndarray:
    """log(p / (1 - p)), always finite; probabilities nearer to 0 and 1 than `least` count as that.

    Without `least` different probabilities stay different.
    """
    safe_C = np.clip(p_C, max(least, _TINY), 1 - max(least, _ULP))
    return np.asarray(np.log(safe_C) - np.log1p(-safe_C))


def log_sigmoid(odds_C: np.ndarray) -> np.ndarray:
    """Log P of these log-odds."""
    return np.asarray(-np.logaddexp(0.0, -odds_C))


def sigmoid(odds_C: np.ndarray) -> np.ndarray:
    """P of these log-odds."""
    return np.asarray(np.exp(log_sigmoid(odds_C)))
