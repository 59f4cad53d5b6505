"""Search all queries of an evaluation, and lose nothing when it is stopped.

Results go to `hits.jsonl` as they come: a header line, then one line a query. The next call with the same
queries and the same retriever goes on where that file ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..data_prep.files import new_file
from ..data_prep.formats.trec import write_run
from ..data_prep.hits import Cost, Hits, Step
from ..data_prep.task import Query
from ..models.protocols import Retriever

FORMAT = "retrail-hits"
FORMAT_VERSION = 1


def run_retriever(
    retriever: Retriever,
    queries: Sequence[Query],
    *,
    k: int,
    out: str | Path | None = None,
    batch_size: int = 32,
    description: str | None = None,
    save_trace: bool = False,
) -> dict[str, Hits]:
    """The ranking of each query id, at most `k` ids, in the order of the queries, with a progress bar.

    Where the retriever leaves `cost.seconds` at 0, it is the query's share of the wall time of its batch.

    Args:
        retriever: what is measured.
        queries: what is asked.
        k: how deep the rankings go; must reach as deep as the metrics do.
        out: a folder for `hits.jsonl` (written as the search goes) and `run.trec` (at the end).
        batch_size: queries a call. Larger lets the retriever batch more and loses more when stopped.
        description: which retriever this is, so that results of another are never taken for it; by default its
            attribute `description`. Needed where `out` is given.
        save_trace: keep the traces in `hits.jsonl`; a walk over wide levels takes some 100 kB a query. Rankings that
            a resumed evaluation finds there have no trace without it.

    Raises:
        ValueError: no queries, an id twice, a `hits.jsonl` of another evaluation or damaged (names file and line), or
            a retriever that returns another number of rankings than it got queries, or more than `k` ids.
    """
    if k < 1 or batch_size < 1:
        raise ValueError(f"k={k} and batch_size={batch_size} must be 1 or more")
    _check_queries(queries)
    if out is None:
        return dict(_search(retriever, queries, k, batch_size))
    if description is None:
        description = getattr(retriever, "description", None)
    if not isinstance(description, str):
        raise ValueError(
            f"{type(retriever).__name__} has no description; give run_retriever(description=...) one that changes with "
            f"the model and its settings, so that a resumed evaluation cannot mix two retrievers"
        )
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    header = _header(queries, k, description)
    done = _resume(folder / "hits.jsonl", header)
    left = [query for query in queries if query.id not in done]
    with (folder / "hits.jsonl").open("ab") as file:
        for batch in _search_batches(retriever, left, k, batch_size, len(done)):
            lines = [_dumps(hits_to_json(query_id, hits, save_trace)) for query_id, hits in batch]
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
            done.update(batch)
    run = {query.id: done[query.id] for query in queries}
    try:
        write_run(folder / "run.trec", run)
    except ValueError as error:  # ids with spaces are legal, but TREC cannot hold them: the search must not be lost
        warnings.warn(f"{folder}: no run.trec: {error}; hits.jsonl has all rankings", stacklevel=2)
    return run


def read_hits(path: str | Path) -> dict[str, Hits]:
    """All rankings of a `hits.jsonl`; a last line that was cut off is left out.

    Raises:
        ValueError: not such a file, or damaged; names file and line.
    """
    return _read(Path(path))[1]


def write_json(path: str | Path, value: object) -> None:
    """Write JSON that appears whole or not at all.

    Raises:
        ValueError: a number in it is not finite.
    """
    with new_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def hits_to_json(query_id: str, hits: Hits, trace: bool = True) -> dict[str, Any]:
    """One line of `hits.jsonl`; numbers of the cost that are 0 are left out."""
    row: dict[str, Any] = {"query": query_id, "ids": hits.ids, "scores": hits.scores, "cost": _cost(hits.cost)}
    if hits.exact is not None:
        row["exact"] = hits.exact
    if hits.answerable is not None:
        row["answerable"] = hits.answerable
    if trace and hits.trace:
        row["trace"] = [{**asdict(step), "cost": _cost(step.cost)} for step in hits.trace]
    return row


def hits_from_json(row: dict[str, Any]) -> tuple[str, Hits]:
    """(query id, ranking) of one line of `hits.jsonl`.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    steps = tuple(
        Step(
            name=step["name"],
            ids=tuple(step["ids"]),
            scores=tuple(step["scores"]),
            kept=tuple(step["kept"]),
            notes=tuple(step["notes"]),
            cost=Cost(**step["cost"]),
        )
        for step in row.get("trace", ())
    )
    hits = Hits(
        tuple(row["ids"]), tuple(row["scores"]), Cost(**row["cost"]), steps, row.get("exact"), row.get("answerable")
    )
    if not isinstance(row["query"], str):
        raise TypeError(f"query {row['query']!r} is no text")
    return row["query"], hits


def _cost(cost: Cost) -> dict[str, float]:
    return {name: value for name, value in asdict(cost).items() if value}


def _dumps(value: object) -> str:
    # ASCII, so that an unpaired surrogate in an id or note cannot stop the evaluation.
    return json.dumps(value, allow_nan=False) + "\n"


def _check_queries(queries: Sequence[Query]) -> None:
    if not queries:
        raise ValueError("no queries to search for")
    seen: set[str] = set()
    for query in queries:
        if query.id in seen:
            raise ValueError(f"query id {query.id!r} appears twice; ids must be unique")
        seen.add(query.id)


def _header(queries: Sequence[Query], k: int, description: str) -> dict[str, Any]:
    digest = hashlib.sha256()
    for query in queries:
        digest.update(_dumps([query.id, query.text]).encode())
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "retriever": description,
        "k": k,
        "queries": len(queries),
        "queries_sha256": digest.hexdigest(),
    }


def _resume(path: Path, header: dict[str, Any]) -> dict[str, Hits]:
    """The rankings that are there already; leaves a file with a header and whole lines only."""
    if path.exists():
        found, done, whole = _read(path)
        if found:
            for key, value in header.items():
                if found.get(key) != value:
                    raise ValueError(
                        f"{path} is of another evaluation: its {key} is {found.get(key)!r}, not {value!r}; "
                        f"choose another folder, or remove the file"
                    )
            with path.open("rb+") as file:
                file.truncate(whole)
            return done
    with new_file(path) as new:
        new.write(_dumps(header).encode())
    return {}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Hits], int]:
    """(header, rankings, bytes of whole lines). The header is empty where not even that line is whole."""
    header: dict[str, Any] = {}
    done: dict[str, Hits] = {}
    whole = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # stopped while this line was written
            try:
                row = json.loads(line)
                if number == 1:
                    header = _checked_header(row)
                else:
                    query_id, hits = hits_from_json(row)
                    if query_id in done:
                        raise ValueError(f"query {query_id!r} is there twice")
                    done[query_id] = hits
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: damaged ({error}); remove the file to search again") from error
            whole += len(line)
    return header, done, whole


def _checked_header(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict) or row.get("format") != FORMAT:
        raise ValueError(f'no header with "format": "{FORMAT}"')
    if row.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"format version {row.get('format_version')!r}, but this code reads {FORMAT_VERSION}")
    return row


def _search(retriever: Retriever, queries: Sequence[Query], k: int, batch_size: int) -> Iterator[tuple[str, Hits]]:
    for batch in _search_batches(retriever, queries, k, batch_size, 0):
        yield from batch


def _search_batches(
    retriever: Retriever, queries: Sequence[Query], k: int, batch_size: int, done: int
) -> Iterator[list[tuple[str, Hits]]]:
    """(query id, ranking) of each batch, checked."""
    with tqdm(total=done + len(queries), initial=done, desc="search", unit="query", mininterval=1.0) as bar:
        for start in range(0, len(queries), batch_size):
            batch = queries[start : start + batch_size]
            started = time.perf_counter()
            results = retriever.search([query.text for query in batch], k=k)
            share = (time.perf_counter() - started) / len(batch)
            name = type(retriever).__name__
            if len(results) != len(batch):
                raise ValueError(f"{name} returned {len(results)} rankings for {len(batch)} queries")
            checked = []
            for query, hits in zip(batch, results, strict=True):
                if len(hits) > k:
                    raise ValueError(f"{name} returned {len(hits)} ids for query {query.id!r}, above k={k}")
                if not hits.cost.seconds:
                    hits = replace(hits, cost=replace(hits.cost, seconds=share))
                checked.append((query.id, hits))
            yield checked
            bar.update(len(batch))
