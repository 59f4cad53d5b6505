"""What a model's own search judged on its way down, as a file: the slates of the next round of training (DAgger).

The file is JSON Lines. Its first line says of which corpus and by which retriever; each further line is one query:

    {"query": ID, "text": TEXT, "levels": [{"level": 0, "ids": [...], "scores": [...]}, ...]}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from .corpus import Corpus
from .formats.jsonio import expect, read_jsonl, require
from .hits import Step
from .task import Query

FORMAT = "retrail-walks"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class JudgedLevel:
    """The nodes of one level that a search judged, best first, with its P(yes) of each."""

    level: int
    ids: tuple[str, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """What the search for one query judged, a `JudgedLevel` for each level that it reached, root level first."""

    query_id: str
    query: str
    levels: tuple[JudgedLevel, ...]


def walk_of(query: Query, trace: Iterable[Step], corpus: Corpus, depth: int) -> Walk:
    """The walk of a search's trace, at most the best `depth` nodes of each level.

    A node that was judged more than once (a leaf beside deeper ones, the final choice) has its first score.
    """
    first: dict[str, float] = {}
    for step in trace:
        for node, score in zip(step.ids, step.scores, strict=True):
            first.setdefault(node, score)
    judged: dict[int, list[tuple[str, float]]] = {}
    for node, score in first.items():
        judged.setdefault(corpus.level(corpus.row(node)), []).append((node, score))
    levels = []
    for level in sorted(judged):
        best = sorted(judged[level], key=lambda pair: -pair[1])[:depth]
        levels.append(JudgedLevel(level, tuple(node for node, _ in best), tuple(score for _, score in best)))
    return Walk(query.id, query.text, tuple(levels))


def walks_header(corpus: Corpus, retriever: str, **settings: object) -> dict[str, Any]:
    """The first line of a file of walks over `corpus`; `retriever` says whose, `settings` how they were made."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "corpus_fingerprint": corpus.fingerprint,
        "retriever": retriever,
        **settings,
    }


def walk_to_json(walk: Walk) -> dict[str, Any]:
    """One line of the file."""
    levels = [{"level": part.level, "ids": part.ids, "scores": part.scores} for part in walk.levels]
    return {"query": walk.query_id, "text": walk.query, "levels": levels}


def read_header(path: str | Path) -> dict[str, Any]:
    """The first line of a file of walks. Errors as `read_walks`."""
    for number, row in read_jsonl(path):
        return _header(row, f"{path}:{number}")
    raise ValueError(f"{path} is empty; write it with `retrail walks`")


def read_walks(path: str | Path, corpus: Corpus) -> tuple[dict[str, Any], list[Walk]]:
    """The header of a file of walks, and its walks, which must be of `corpus`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not such a file, another corpus, an unknown node or one of another level, a query twice, scores that
            rise or are not finite. Names file and line.
    """
    header = read_header(path)
    if (found := header["corpus_fingerprint"]) != corpus.fingerprint:
        raise ValueError(
            f"{path}: these are walks over another corpus ({found[:16]}, not {corpus.fingerprint[:16]}); write them "
            "again with `retrail walks`"
        )
    walks: dict[str, Walk] = {}
    for number, row in islice(read_jsonl(path), 1, None):
        where = f"{path}:{number}"
        walk = _walk(row, corpus, where)
        if walk.query_id in walks:
            raise ValueError(f"{where}: query {walk.query_id!r} is there twice")
        walks[walk.query_id] = walk
    return header, list(walks.values())


def judged_nodes(walks: Sequence[Walk], queries: Sequence[Query], where: str) -> dict[int, dict[str, tuple[str, ...]]]:
    """Ids by level and query, best first, of the walks of these queries; walks of others are left out.

    Raises:
        ValueError: no walk is of any of these queries, or one is of another text under the same id. Names `where`.
    """
    texts = {query.id: query.text for query in queries}
    judged: dict[int, dict[str, tuple[str, ...]]] = {}
    for walk in walks:
        if walk.query_id not in texts:
            continue
        if walk.query != texts[walk.query_id]:
            raise ValueError(
                f"{where}: query {walk.query_id!r} was {walk.query[:60]!r} when it was searched and is now "
                f"{texts[walk.query_id][:60]!r}; write the walks again"
            )
        for part in walk.levels:
            judged.setdefault(part.level, {})[walk.query_id] = part.ids
    if not judged:
        raise ValueError(f"{where} holds no walk of any of the {len(texts)} training queries; write one of their split")
    return judged


def _header(row: dict[str, Any], where: str) -> dict[str, Any]:
    if row.get("format") != FORMAT:
        raise ValueError(f'{where}: no header with "format": "{FORMAT}"; write the file with `retrail walks`')
    if row.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{where}: format version {row.get('format_version')!r}, but this code reads {FORMAT_VERSION}")
    require(row, "retriever", str, where)
    require(row, "corpus_fingerprint", str, where)
    return row


def _walk(row: dict[str, Any], corpus: Corpus, where: str) -> Walk:
    query_id, text = require(row, "query", str, where), require(row, "text", str, where)
    levels: list[JudgedLevel] = []
    for n, part in enumerate(require(row, "levels", list, where)):
        inside = f"{where}['levels'][{n}]"
        judged = _judged(expect(part, dict, inside), inside)
        if levels and judged.level <= levels[-1].level:
            raise ValueError(f"{inside}: level {judged.level} comes after level {levels[-1].level}")
        _check_nodes(judged, corpus, inside)
        levels.append(judged)
    return Walk(query_id, text, tuple(levels))


def _judged(part: Mapping[str, Any], where: str) -> JudgedLevel:
    fields = dict(part)
    level = require(fields, "level", int, where)
    ids = tuple(expect(node, str, f"{where}['ids']") for node in require(fields, "ids", list, where))
    scores = tuple(expect(score, float, f"{where}['scores']") for score in require(fields, "scores", list, where))
    if len(ids) != len(scores):
        raise ValueError(f"{where}: {len(ids)} ids but {len(scores)} scores")
    if len(set(ids)) != len(ids):
        raise ValueError(f"{where}: an id is there twice")
    if not all(map(math.isfinite, scores)) or any(b > a for a, b in zip(scores, scores[1:], strict=False)):
        raise ValueError(f"{where}: scores must be finite and best first")
    return JudgedLevel(level, ids, scores)


def _check_nodes(judged: JudgedLevel, corpus: Corpus, where: str) -> None:
    for node in judged.ids:
        if node not in corpus:
            raise ValueError(f"{where}: the corpus has no node {node!r}")
        if corpus.level(corpus.row(node)) != judged.level:
            raise ValueError(f"{where}: {node!r} is not on level {judged.level}")
