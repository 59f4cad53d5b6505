"""`retrail walks`: search training queries and keep what was judged on the way, for the next round of training."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cli import run_command
from .config import WalksRun

if TYPE_CHECKING:
    from ..data_prep.corpus import Corpus
    from ..data_prep.task import Qrels
    from ..data_prep.walks import Walk

_AT_ONCE = 32


def run(run: WalksRun) -> int:
    """Search, and write the file; what an interrupted call has searched is not searched again."""
    from tqdm import tqdm

    from ..data_prep.examples import gold_paths
    from ..data_prep.task import Task
    from ..data_prep.walks import walk_of, walk_to_json, walks_header
    from ..eval.suites import sample_queries
    from ..models.recursive.retriever import RecursiveRetriever
    from .systems import open_retriever

    target, unfinished = Path(run.to), Path(f"{run.to}.part")
    if target.exists():
        raise FileExistsError(f"{target} is there already; remove it or give to=ANOTHER_NAME")
    task = Task.open(run.data.path)
    corpus, qrels = task.corpus, task.qrels(run.split)
    judged = [query for query in task.queries(run.split) if gold_paths(corpus, qrels[query.id])]
    queries = sample_queries(judged, run.limit)
    if not queries:
        raise ValueError(
            f"split={run.split}: no query of {run.data.path} has a relevant node, so none can be trained on"
        )
    retriever, description = open_retriever(run.retriever, corpus, run.navigate, run.device)
    if isinstance(retriever, RecursiveRetriever):
        raise ValueError(f"retriever={run.retriever} is a state encoder, which walks no levels; give a decision model")
    header = walks_header(corpus, description, split=run.split, depth=run.depth)
    done = {walk.query_id for walk in _resume(unfinished, header, corpus)}
    left = [query for query in queries if query.id not in done]
    with unfinished.open("ab") as file, tqdm(total=len(queries), initial=len(done), desc="walks", unit="query") as bar:
        for start in range(0, len(left), _AT_ONCE):
            part = left[start : start + _AT_ONCE]
            found = retriever.search([query.text for query in part], k=1)
            if not all(hits.trace for hits in found):
                raise ValueError(f"retriever={run.retriever} takes no walk that could be trained on; give an export")
            walks = [walk_of(q, hits.trace, corpus, run.depth) for q, hits in zip(part, found, strict=True)]
            file.write("".join(json.dumps(walk_to_json(walk)) + "\n" for walk in walks).encode())
            file.flush()
            os.fsync(file.fileno())
            bar.update(len(part))
    _report(unfinished, corpus, qrels)
    os.replace(unfinished, target)
    print(f"{target}: {len(queries)} walks of {run.retriever}")
    print(f"next: retrail train ... model.path={run.retriever} objective.walks=[{target}]")
    return 0


def _resume(file: Path, header: dict[str, Any], corpus: Corpus) -> list[Walk]:
    """The walks that are there already; leaves a file with a header and whole lines only.

    Raises:
        ValueError: the file is of another call; names what differs.
    """
    from ..data_prep.walks import read_walks

    whole = file.read_bytes() if file.exists() else b""
    whole = whole[: whole.rfind(b"\n") + 1]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(whole or (json.dumps(header) + "\n").encode())
    found, walks = read_walks(file, corpus)
    for key, value in header.items():
        if found.get(key) != value:
            raise ValueError(f"{file} was begun with {key}={found.get(key)!r}, not {value!r}; remove it to start anew")
    return walks


def _report(file: Path, corpus: Corpus, qrels: Qrels) -> None:
    """Print, for each level, how often a right node was among what was judged there."""
    from ..data_prep.examples import gold_paths
    from ..data_prep.walks import read_walks

    shown: dict[int, list[bool]] = {}
    for walk in read_walks(file, corpus)[1]:
        judged = {part.level: set(part.ids) for part in walk.levels}
        right: dict[int, set[str]] = {}
        for path in gold_paths(corpus, qrels[walk.query_id]):
            for level, row in enumerate(path):
                right.setdefault(level, set()).add(corpus.id(row))
        for level, ids in right.items():
            shown.setdefault(level, []).append(not ids.isdisjoint(judged.get(level, ())))
    for level, hits in sorted(shown.items()):
        print(f"level {level + 1}: a right node was judged for {sum(hits)} of {len(hits)} queries")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(WalksRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
