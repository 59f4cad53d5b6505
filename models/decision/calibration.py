"""The file that `retrail calibrate` writes: conformal thresholds of each level, and what they were fitted for."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...data_prep.files import new_file
from ...data_prep.formats.jsonio import expect, read_json, require
from ..config import NavigateConfig
from .conformal import SCORES

FORMAT = "retrail-calibration"
FORMAT_VERSION = 1
GOLD = ("any", "all")
# Settings of a walk that change the log-odds which a budget sees.
WALK_KEYS = ("path_weight", "scoring", "slate_size", "slate_tokens", "anchors", "slate_temperature", "start_level")


@dataclass(frozen=True, slots=True)
class LevelThreshold:
    """Kept on this level is every candidate whose nonconformity `score` is at most `threshold`, and the best one.

    alpha: the share of gold paths that may be lost here.
    queries: labelled queries behind the threshold.
    """

    score: str
    threshold: float
    alpha: float
    queries: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Thresholds from the root level down, and what they hold for.

    alpha: the share of queries that may lose their gold path on all levels together.
    confidence: how surely; None is on average over sets of labelled queries.
    gold: with several gold nodes, `any` promises that at least one path survives, `all` that each does.
    retriever, corpus: fingerprints. The thresholds mean nothing for another model; on another corpus they can be used,
        without the promise.
    walk: the settings of `WALK_KEYS`, which must be the same in a search.
    """

    alpha: float
    gold: str
    levels: tuple[LevelThreshold, ...]
    retriever: str
    corpus: str
    walk: Mapping[str, object]
    confidence: float | None = None


def walk_settings(config: NavigateConfig) -> dict[str, object]:
    """What of a walk's settings its thresholds rest on."""
    return {key: getattr(config, key) for key in WALK_KEYS}


def write_calibration(path: str | Path, calibration: Calibration) -> None:
    """Write the file, replacing one that is there, whole or not at all."""
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(calibration)}
    with new_file(path) as file:
        file.write((json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def read_calibration(path: str | Path) -> Calibration:
    """The content of a file that `write_calibration` wrote.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not JSON, no calibration, another format version, or a value that cannot be; names file and key.
    """
    content = read_json(path)
    where = str(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'{where}: no calibration (no "format": "{FORMAT}"); make one with `retrail calibrate`')
    if content.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{where}: format_version is {content.get('format_version')!r}, this version reads {FORMAT_VERSION}; "
            "calibrate again"
        )
    levels = require(content, "levels", list, where)
    if not levels:
        raise ValueError(f"{where}['levels'] is empty; calibrate again")
    return Calibration(
        alpha=_number(content, "alpha", where, below=1.0),
        gold=_choice(content, "gold", GOLD, where),
        levels=tuple(_level(level, f"{where}['levels'][{n}]") for n, level in enumerate(levels)),
        retriever=require(content, "retriever", str, where),
        corpus=require(content, "corpus", str, where),
        walk=require(content, "walk", dict, where),
        confidence=None if content.get("confidence") is None else _number(content, "confidence", where, below=1.0),
    )


def check_calibration(path: str | Path, *, retriever: str, corpus: str) -> tuple[str, ...]:
    """What a user must know before a search with this file, given the fingerprints of model and corpus.

    Raises:
        FileNotFoundError, ValueError: as `read_calibration`, or the file was made with another model.
    """
    calibration = read_calibration(path)
    if calibration.retriever != retriever:
        raise ValueError(
            f"{path}['retriever'] is {calibration.retriever}, but this retriever is {retriever}: thresholds of one "
            "model mean nothing for another; calibrate again"
        )
    if calibration.corpus != corpus:
        return (f"{path} was fitted on another corpus; here it promises nothing, measure survival first",)
    return ()


def calibration_hash(path: str | Path) -> str:
    """The beginning of the sha256 of the file, to tell one calibration from another."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _level(value: object, where: str) -> LevelThreshold:
    level: dict[str, Any] = expect(value, dict, where)
    score = _choice(level, "score", SCORES, where)
    threshold = require(level, "threshold", float, where)
    if not math.isfinite(threshold) or (score != "odds" and threshold < 0):
        raise ValueError(f"{where}['threshold'] is {threshold}, which {score!r} never is; calibrate again")
    queries = require(level, "queries", int, where)
    if queries < 1:
        raise ValueError(f"{where}['queries'] is {queries}, but must be 1 or more; calibrate again")
    return LevelThreshold(score, threshold, _number(level, "alpha", where, below=1.0), queries)


def _number(obj: dict[str, Any], key: str, where: str, *, below: float) -> float:
    value = require(obj, key, float, where)
    if not 0 < value < below:
        raise ValueError(f"{where}[{key!r}] is {value}, but must be above 0 and below {below:g}; calibrate again")
    return value


def _choice(obj: dict[str, Any], key: str, choices: tuple[str, ...], where: str) -> str:
    value = require(obj, key, str, where)
    if value not in choices:
        raise ValueError(f"{where}[{key!r}] is {value!r}, this version knows: {', '.join(choices)}; calibrate again")
    return value
