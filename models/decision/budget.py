"""How many candidates stay at each level of a walk: a fixed number, a share, a bar, or what a promise needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from ..config import NavigateConfig
from .calibration import LevelThreshold, read_calibration, walk_settings
from .conformal import nonconformity
from .odds import sigmoid
from .slates import ranked

T = TypeVar("T")

# A probability that went through log-odds and back is still at the bar that it was at.
_EPSILON = 1e-12


class Budget(Protocol):
    """Chooses what a walk opens."""

    def keep(self, level: int, log_odds_C: np.ndarray) -> np.ndarray:
        """Positions that stay, best first, at least one; equal ones in reading order. `level` is 0 at the roots."""
        ...


@dataclass(frozen=True, slots=True)
class KeepCount:
    """The best k; `counts[level]`, the last of which repeats for deeper levels."""

    counts: tuple[int, ...]

    def keep(self, level: int, log_odds_C: np.ndarray) -> np.ndarray:
        """As `Budget.keep`."""
        return ranked(log_odds_C)[: _at(self.counts, level)]


@dataclass(frozen=True, slots=True)
class KeepShare:
    """The best share of what was judged, rounded up; a list as in `KeepCount`."""

    shares: tuple[float, ...]

    def keep(self, level: int, log_odds_C: np.ndarray) -> np.ndarray:
        """As `Budget.keep`."""
        # Without the slack, 0.07 of 100 candidates would be 8: the product is a hair above 7.
        count = math.ceil(_at(self.shares, level) * len(log_odds_C) - 1e-9)
        return ranked(log_odds_C)[: max(1, count)]


@dataclass(frozen=True, slots=True)
class KeepThreshold:
    """All whose P(yes) reaches the bar, or the best one alone; a list as in `KeepCount`."""

    thresholds: tuple[float, ...]

    def keep(self, level: int, log_odds_C: np.ndarray) -> np.ndarray:
        """As `Budget.keep`."""
        bar = _at(self.thresholds, level) - _EPSILON
        return ranked(log_odds_C)[: max(1, int((sigmoid(log_odds_C) >= bar).sum()))]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """All that look no less right than a calibrated threshold says (`calibrate.fit`), and the best one in any case."""

    levels: tuple[LevelThreshold, ...]
    source: str = "the calibration"

    def keep(self, level: int, log_odds_C: np.ndarray) -> np.ndarray:
        """As `Budget.keep`.

        Raises:
            ValueError: the walk is deeper than the calibration.
        """
        if level >= len(self.levels):
            raise ValueError(
                f"{self.source} has thresholds for {len(self.levels)} levels, but this walk must choose on level "
                f"{level + 1}; calibrate on a tree as deep as this one"
            )
        rule = self.levels[level]
        # Every score grows from the best candidate to the worst, so what passes is the head of the ranking.
        passing = int((nonconformity(rule.score, log_odds_C) <= rule.threshold).sum())
        return ranked(log_odds_C)[: max(1, passing)]


def make_budget(config: NavigateConfig) -> Budget:
    """The budget that the settings ask for.

    Raises:
        FileNotFoundError, ValueError: as `read_calibration`, or the file was fitted for a walk with other settings.
    """
    if config.budget == "count":
        return KeepCount(tuple(config.keep))
    if config.budget == "share":
        return KeepShare(tuple(config.share))
    if config.budget == "threshold":
        return KeepThreshold(tuple(config.threshold))
    path = str(config.calibration)
    calibration = read_calibration(path)
    now = walk_settings(config)
    for key in sorted(now.keys() | calibration.walk.keys()):
        if now.get(key) != calibration.walk.get(key):
            raise ValueError(
                f"{path}['walk'][{key!r}] is {calibration.walk.get(key)}, but navigate.{key} is {now.get(key)}, which "
                "changes the scores that its thresholds are for; search with the same setting or calibrate again"
            )
    return Calibrated(calibration.levels, path)


def _at(values: Sequence[T], level: int) -> T:
    return values[min(level, len(values) - 1)]
