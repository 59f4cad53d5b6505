"""Placeholder."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..config import NavigateConfig
from .slates import ranked


class Budget(Protocol):
    """Which candidates of a level stay."""

    def keep(self, level: int, log_odds_C: np.ndarray) -> np.ndarray:
        """Positions that stay, best first."""
        ...


class KeepCount:
    """The best k."""

    def __init__(self, keep: list[int]) -> None:
        self.counts = keep

    def keep(self, level: int, log_odds_C: np.ndarray) -> np.ndarray:
        """Positions that stay, best first."""
        return ranked(log_odds_C)[: self.counts[min(level, len(self.counts) - 1)]]


def make_budget(config: NavigateConfig) -> Budget:
    """The budget of a configuration."""
    return KeepCount(config.keep)
