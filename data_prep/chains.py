"""Chains: which documents a query needs, in which order, and which wrong ones were given with it.

A file of a task folder, `chains/SPLIT.jsonl`, one line a query (queries without a chain have none):

    {"id": QUERY, "gold": [ID, ...], "ordered": true, "distractors": [ID, ...], "kind": "bridge"}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from .formats.jsonio import expect, optional, read_jsonl, require


@dataclass(frozen=True, slots=True)
class Chain:
    """The documents that one query needs.

    gold: ids, none twice; where `ordered`, each is found with the help of those before it.
    ordered: whether the order means anything; otherwise any order is as good.
    distractors: ids of documents that the data set gives as wrong ones for this query.
    kind: what the data set calls this sort of question; may be empty.
    """

    gold: tuple[str, ...]
    ordered: bool
    distractors: tuple[str, ...] = ()
    kind: str = ""


def check_chain(chain: Chain, where: str, corpus: Container[str], allow_dangling: bool) -> None:
    """Raise ValueError that names `where` and what is wrong.

    Distractors must be in the corpus; gold documents too, unless `allow_dangling`.
    """
    if not chain.gold:
        raise ValueError(f"{where}: a chain needs at least one gold document; leave out the chains of other queries")
    seen: set[str] = set()
    for doc_id in (*chain.gold, *chain.distractors):
        if not doc_id:
            raise ValueError(f"{where}: a document id is empty")
        if doc_id in seen:
            raise ValueError(f"{where}: document {doc_id!r} appears twice among gold and distractors")
        seen.add(doc_id)
    needed = chain.distractors if allow_dangling else (*chain.gold, *chain.distractors)
    if unknown := [doc_id for doc_id in needed if doc_id not in corpus]:
        raise ValueError(f"{where}: {len(unknown)} documents are not in the corpus, first {unknown[0]!r}")


def write_chains(file: Path, chains: Mapping[str, Chain]) -> None:
    """Write a new file, queries in the order given."""
    with file.open("x", encoding="utf-8", newline="\n") as handle:
        for query_id, chain in chains.items():
            row = {
                "id": query_id,
                "gold": chain.gold,
                "ordered": chain.ordered,
                "distractors": chain.distractors,
                "kind": chain.kind,
            }
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_chains(
    file: Path, queries: Collection[str], corpus: Container[str], *, allow_dangling: bool = False
) -> dict[str, Chain]:
    """The chains of a file by query id, in file order.

    queries: the ids of the queries that may have one.

    Raises:
        ValueError: a missing or mistyped field, a query that is unknown or has two chains, or as `check_chain`; names
            file and line.
    """
    chains: dict[str, Chain] = {}
    for number, row in read_jsonl(file):
        where = f"{file}:{number}"
        query_id = require(row, "id", str, where)
        if query_id not in queries or query_id in chains:
            what = "has two chains" if query_id in chains else "is not of this split"
            raise ValueError(f"{where}: query {query_id!r} {what}")
        gold, distractors = (
            tuple(expect(doc_id, str, f"{where}[{key!r}]") for doc_id in require(row, key, list, where))
            for key in ("gold", "distractors")
        )
        chain = Chain(gold, require(row, "ordered", bool, where), distractors, optional(row, "kind", str, where, ""))
        check_chain(chain, where, corpus, allow_dangling)
        chains[query_id] = chain
    return chains
