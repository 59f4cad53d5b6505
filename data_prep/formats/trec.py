"""TREC runs (`qid Q0 docid rank score tag`), TREC qrels (`qid 0 docid rel`), BEIR qrels (tab-separated, with header).

trec_eval ignores the rank column, sorts by score as float32 and breaks ties by descending document id. So a run is
written with whole, strictly decreasing scores that any reader ranks alike, the true scores go to a sidecar file, and
a run whose rank and score columns tell different stories is refused on reading.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

from ..files import new_file
from ..hits import Hits
from .jsonio import expect, read_jsonl, read_lines, require

Run = dict[str, Hits]
Qrels = dict[str, dict[str, int]]

BEIR_HEADER = ("query-id", "corpus-id", "score")
_SEPARATORS = re.compile(r"[ \t]+")
_BREAKS_TREC = re.compile(r"[ \t\n\r\f\v\0]")
_BREAKS_TSV = re.compile(r"[\t\n\r\0]")


def scores_path(path: str | Path) -> Path:
    """Where `write_run` puts the true scores of the run at `path`."""
    return Path(f"{path}.scores.jsonl")


def read_run(path: str | Path, *, order: str = "strict", true_scores: bool = False) -> Run:
    """The rankings of a TREC run file (plain or gzipped), queries in order of appearance.

    order: `strict` wants ranks and scores to agree (equal scores keep the rank order); `score` sorts by score alone,
        ties by rank; `rank` sorts by rank alone and, where that makes scores increase, replaces the scores of the
        query by N, N-1, ... 1.
    true_scores: take scores from the sidecar that `write_run` wrote, where queries without hits are kept too.

    Raises:
        ValueError: not six fields, a score that is not finite, a rank that is not whole, a document twice for one
            query, ranks against scores, or a sidecar that does not belong to the run. Names file and line.
    """
    if order not in ("strict", "score", "rank"):
        raise ValueError(f"order={order!r} is not a choice; use one of: strict, score, rank")
    rows: dict[str, dict[str, tuple[int, float, int]]] = {}
    for number, line in read_lines(path):
        if not line.strip(" \t"):
            continue
        fields = _SEPARATORS.split(line.strip(" \t"))
        if len(fields) != 6:
            raise ValueError(f"{path}:{number}: {len(fields)} fields, but a run has 6: qid Q0 docid rank score tag")
        query_id, _, doc_id, rank, score, _ = fields
        documents = rows.setdefault(query_id, {})
        if doc_id in documents:
            where, first = f"{path}:{number}", documents[doc_id][2]
            raise ValueError(f"{where}: document {doc_id!r} is there twice for query {query_id!r} (line {first})")
        documents[doc_id] = (_integer(rank, path, number, "rank"), _score(score, path, number), number)
    run = {query_id: _rank(query_id, documents, order, path) for query_id, documents in rows.items()}
    return _with_true_scores(run, path) if true_scores else run


def _integer(text: str, path: str | Path, number: int, what: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{path}:{number}: the {what} {text!r} is not a whole number") from error


def _score(text: str, path: str | Path, number: int) -> float:
    try:
        score = float(text)
    except ValueError as error:
        raise ValueError(f"{path}:{number}: the score {text!r} is not a number") from error
    if not math.isfinite(score):
        raise ValueError(f"{path}:{number}: the score {text!r} is not finite")
    return score


def _rank(query_id: str, documents: dict[str, tuple[int, float, int]], order: str, path: str | Path) -> Hits:
    if order == "score":
        ids = sorted(documents, key=lambda d: (-documents[d][1], documents[d][0]))
    else:
        ids = sorted(documents, key=lambda d: (documents[d][0], -documents[d][1]))
    scores = [documents[d][1] for d in ids]
    rising = next((i for i in range(1, len(ids)) if scores[i] > scores[i - 1]), None)
    if rising is not None and order == "strict":
        (rank_a, score_a, line_a), (rank_b, score_b, line_b) = documents[ids[rising - 1]], documents[ids[rising]]
        raise ValueError(
            f"{path}:{line_b}: query {query_id!r}: rank {rank_b} has the score {score_b}, above rank {rank_a} with "
            f"{score_a} (line {line_a}); say which to trust with order='score' or order='rank'"
        )
    if rising is not None:
        scores = [float(len(ids) - i) for i in range(len(ids))]
    return Hits(tuple(ids), tuple(scores))


def _with_true_scores(run: Run, path: str | Path) -> Run:
    sidecar = scores_path(path)
    result: Run = {}
    for number, row in read_jsonl(sidecar):
        where = f"{sidecar}:{number}"
        query_id = require(row, "id", str, where)
        ids = tuple(expect(d, str, f"{where}['docs']") for d in require(row, "docs", list, where))
        if query_id in result or ids != (run[query_id].ids if query_id in run else ()):
            raise ValueError(f"{where}: query {query_id!r} is not as in {path}; the two files are of different runs")
        scores = (expect(s, float, f"{where}['scores']") for s in require(row, "scores", list, where))
        result[query_id] = Hits(ids, tuple(scores))
    if missing := run.keys() - result.keys():
        raise ValueError(f"{sidecar}: query {min(missing)!r} of {path} is missing; the two files are of different runs")
    return result


def write_run(path: str | Path, run: Mapping[str, Hits], *, tag: str = "retrail") -> None:
    """Write a TREC run, and the true scores beside it (`scores_path`), both replaced atomically.

    The score written for rank r (from 1) of N hits is N + 1 - r. A query without hits has no line in the run, but
    one in the sidecar: {"id": ..., "docs": [...], "scores": [...]}.

    Raises:
        ValueError: a tag, query or document id that is empty or has white space in it, which the format cannot hold.
    """
    _check_id(tag, "the tag", _BREAKS_TREC, "TREC")
    for query_id, hits in run.items():
        _check_id(query_id, "query id", _BREAKS_TREC, "TREC")
        for doc_id in hits.ids:
            _check_id(doc_id, f"query {query_id!r}: document id", _BREAKS_TREC, "TREC")
    with new_file(scores_path(path)) as sidecar, new_file(path) as file:
        for query_id, hits in run.items():
            for rank, doc_id in enumerate(hits.ids, start=1):
                file.write(f"{query_id} Q0 {doc_id} {rank} {len(hits) + 1 - rank} {tag}\n".encode())
            row = {"id": query_id, "docs": hits.ids, "scores": hits.scores}
            sidecar.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def _check_id(value: str, what: str, breaks: re.Pattern[str], layout: str) -> None:
    if not value:
        raise ValueError(f"{what} is empty, which a {layout} file cannot hold")
    if found := breaks.search(value):
        raise ValueError(f"{what} {value!r} has {found[0]!r} in it, which a {layout} file cannot hold; rename it")


def read_qrels(path: str | Path) -> Qrels:
    """Judgements by query and document, from a TREC file or a BEIR one (told by its header line).

    Raises:
        ValueError: the wrong number of fields, a relevance that is not whole, or a pair twice. Names file and line.
    """
    qrels: Qrels = {}
    beir = False
    for number, line in read_lines(path):
        if number == 1 and tuple(line.split("\t")) == BEIR_HEADER:
            beir = True
            continue
        if not line.strip(" \t"):
            continue
        fields = line.split("\t") if beir else _SEPARATORS.split(line.strip(" \t"))
        if len(fields) != (3 if beir else 4):
            layout = "3 (tab-separated): query-id corpus-id score" if beir else "4: qid 0 docid rel"
            hint = "" if beir else "; a BEIR file starts with the line query-id<tab>corpus-id<tab>score"
            raise ValueError(f"{path}:{number}: {len(fields)} fields, not {layout}{hint}")
        query_id, doc_id, relevance = fields[0], fields[-2], fields[-1]
        documents = qrels.setdefault(query_id, {})
        if doc_id in documents:
            raise ValueError(f"{path}:{number}: document {doc_id!r} is judged twice for query {query_id!r}")
        documents[doc_id] = _integer(relevance, path, number, "relevance")
    return qrels


def write_qrels(path: str | Path, qrels: Mapping[str, Mapping[str, int]], *, layout: str = "beir") -> None:
    """Write judgements as `beir` (ids may have spaces) or `trec`. Queries without judgements leave no line.

    Raises:
        ValueError: an id that the layout cannot hold, or a relevance that is not an int.
    """
    if layout not in ("beir", "trec"):
        raise ValueError(f"layout={layout!r} is not a choice; use one of: beir, trec")
    breaks = _BREAKS_TSV if layout == "beir" else _BREAKS_TREC
    with new_file(path) as file:
        if layout == "beir":
            file.write(("\t".join(BEIR_HEADER) + "\n").encode())
        for query_id, documents in qrels.items():
            _check_id(query_id, "query id", breaks, layout.upper())
            for doc_id, relevance in documents.items():
                _check_id(doc_id, f"query {query_id!r}: document id", breaks, layout.upper())
                if not isinstance(relevance, int) or isinstance(relevance, bool):
                    raise ValueError(f"query {query_id!r}, document {doc_id!r}: relevance {relevance!r} is not an int")
                fields = (query_id, doc_id, relevance) if layout == "beir" else (query_id, 0, doc_id, relevance)
                file.write((("\t" if layout == "beir" else " ").join(map(str, fields)) + "\n").encode())
