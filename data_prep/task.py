"""`Task`: a corpus with queries and judgements in splits, as one folder.

- `corpus/`: a `Corpus`
- `queries/SPLIT.jsonl`: {"id": ..., "text": ...} a line
- `qrels/SPLIT.tsv`: BEIR judgements: query-id, corpus-id, score, with that header
- `answers/SPLIT.jsonl`: {"id": ..., "text": ...} a line, where a split has reference answers
- `chains/SPLIT.jsonl`: which documents a query needs, in order, where the data set says so (`chains.py`)
- `manifest.json`: name, format version, counts, sources, checksums
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from .chains import Chain, check_chain, read_chains, write_chains
from .corpus import Corpus
from .files import check_new_folder, new_folder, sha256_file
from .formats.jsonio import read_json, read_jsonl, require
from .formats.trec import Qrels, read_qrels, write_qrels

__all__ = ["Chain", "Qrels", "Query", "Task", "qrels_at_level", "write_task"]

FORMAT = "retrail-task"
FORMAT_VERSION = 1
_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Query:
    """What is searched for."""

    id: str
    text: str


class Task:
    """A prepared task. Make one with `write_task` or a `prep_...` function, open it with `Task.open`.

    `manifest` holds counts and sources as written.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, object], corpus: Corpus) -> None:
        where = str(folder / "manifest.json")
        fields = dict(manifest)
        self.folder = folder
        self.manifest = manifest
        self.corpus = corpus
        self.name = require(fields, "name", str, where)
        self.fingerprint = require(fields, "fingerprint", str, where)
        """Hex sha256 over the corpus and all queries and judgements."""
        self._splits = require(fields, "splits", dict, where)
        self._files = require(fields, "files", dict, where)
        self.splits: tuple[str, ...] = tuple(self._splits)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a task folder.

        Raises:
            FileNotFoundError: no folder, or a file of it is missing.
            ValueError: not a task, another format version, or a corpus other than the one it was written with.
        """
        folder = Path(path)
        where = folder / "manifest.json"
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder; a task is a folder with a manifest.json")
        manifest = read_json(where)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ValueError(f'{where}: not the manifest of a task (no "format": "{FORMAT}")')
        if manifest.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{folder}: task format version {manifest.get('format_version')!r}, but this code reads version "
                f"{FORMAT_VERSION}; prepare it again"
            )
        corpus = Corpus.open(folder / "corpus")
        if corpus.fingerprint != require(manifest, "corpus_fingerprint", str, str(where)):
            raise ValueError(f"{folder}: its corpus is not the one that the task was written with; prepare it again")
        task = cls(folder, manifest, corpus)
        for name in task._files:
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder / name}: missing; the task is incomplete, prepare it again")
        return task

    def __repr__(self) -> str:
        return f"Task({self.name!r}, splits {', '.join(self.splits)}, {self.corpus!r})"

    def queries(self, split: str) -> list[Query]:
        """The queries of a split, in file order.

        Raises:
            KeyError: no such split; names those there are.
            ValueError: the file was changed since it was written.
        """
        file = self._file("queries", split, "jsonl")
        rows = ((f"{file}:{number}", row) for number, row in read_jsonl(file))
        return [Query(require(row, "id", str, where), require(row, "text", str, where)) for where, row in rows]

    def qrels(self, split: str) -> Qrels:
        """The judgements of every query of a split, in query order; {} where a query has none. Errors as `queries`."""
        judged = read_qrels(self._file("qrels", split, "tsv"))
        return {query.id: judged.get(query.id, {}) for query in self.queries(split)}

    def answers(self, split: str) -> dict[str, str]:
        """Reference answers by query id; queries without one are left out. Errors as `queries`."""
        if split in self._splits and f"answers/{split}.jsonl" not in self._files:
            return {}
        file = self._file("answers", split, "jsonl")
        rows = ((f"{file}:{number}", row) for number, row in read_jsonl(file))
        return {require(row, "id", str, where): require(row, "text", str, where) for where, row in rows}

    def chains(self, split: str) -> dict[str, Chain]:
        """What the queries of a split need, by query id; queries of which nothing is known are left out.

        Errors as `queries`, and ValueError with file and line for a chain that is not as `read_chains` wants it.
        """
        if split in self._splits and f"chains/{split}.jsonl" not in self._files:
            return {}
        file = self._file("chains", split, "jsonl")
        known = {query.id for query in self.queries(split)}
        counts = require(self._splits, split, dict, f"{self.folder / 'manifest.json'}['splits']")
        return read_chains(file, known, self.corpus, allow_dangling=counts["dangling_judgements"] > 0)

    def _file(self, folder: str, split: str, ending: str) -> Path:
        if split not in self._splits:
            raise KeyError(f"task {self.name!r} has no split {split!r}; it has: {', '.join(self.splits)}")
        name = f"{folder}/{split}.{ending}"
        file = self.folder / name
        if sha256_file(file) != self._files[name]:
            raise ValueError(f"{file} was changed after the task was written; prepare the task again")
        return file


def write_task(
    path: str | Path,
    *,
    name: str,
    corpus: Corpus,
    splits: Mapping[str, tuple[Sequence[Query], Qrels]],
    source: Mapping[str, object],
    allow_dangling: bool = False,
    answers: Mapping[str, Mapping[str, str]] | None = None,
    chains: Mapping[str, Mapping[str, Chain]] | None = None,
) -> Task:
    """Check and write a task folder, whole or not at all, and open it.

    source: where the data came from, as JSON (`files.describe_file` gives name, size and sha256 of a file).
    allow_dangling: keep judgements of documents that the corpus lacks, and count them in the manifest.
    answers: reference answers by split and query id (None: there are none).
    chains: which documents a query needs, by split and query id (None: nothing is known); their gold documents are
        those that the judgements call relevant.

    Raises:
        FileExistsError: `path` exists and is not an empty folder.
        ValueError: no splits, a split name that cannot be a file name, a split without queries, an empty or repeated
            query, judgements of an unknown query, or of an unknown document unless `allow_dangling`, an answer that is
            empty or to no query of its split, a chain as `check_chain` refuses it or with other gold documents than the
            judgements.
    """
    if not splits:
        raise ValueError(f"task {name!r} has no splits; give at least one")
    check_new_folder(path)
    counts = {split: _check_split(split, *content, corpus, allow_dangling) for split, content in splits.items()}
    _check_answers(answers or {}, splits)
    _check_chains(chains or {}, splits, corpus, allow_dangling)
    with new_folder(path) as folder:
        (folder / "corpus").mkdir()
        corpus.write_into(folder / "corpus")
        files = _write_files(folder, splits, answers or {}, chains or {})
        digest = hashlib.sha256(json.dumps([corpus.fingerprint, sorted(files.items())]).encode())
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "name": name,
            "fingerprint": digest.hexdigest(),
            "corpus_fingerprint": corpus.fingerprint,
            "nodes": len(corpus),
            "splits": counts,
            "files": files,
            "source": dict(source),
        }
        text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        (folder / "manifest.json").write_text(text, encoding="utf-8")
    return Task.open(path)


def qrels_at_level(qrels: Qrels, corpus: Corpus, level: int) -> Qrels:
    """Judgements of the ancestors on a level of the tree, such as documents for passages.

    An ancestor takes the highest relevance of what is judged below it (or of itself).

    Raises:
        KeyError: a judged id that the corpus lacks.
        ValueError: a judged node that lies above the level.
    """
    lifted: Qrels = {}
    for query_id, documents in qrels.items():
        above = lifted.setdefault(query_id, {})
        for doc_id, relevance in documents.items():
            path = corpus.path(corpus.row(doc_id))
            if len(path) <= level:
                raise ValueError(f"query {query_id!r}: {doc_id!r} is on level {len(path) - 1}, above level {level}")
            ancestor = corpus.id(path[level])
            above[ancestor] = max(relevance, above.get(ancestor, relevance))
    return lifted


def _write_files(
    folder: Path,
    splits: Mapping[str, tuple[Sequence[Query], Qrels]],
    answers: Mapping[str, Mapping[str, str]],
    chains: Mapping[str, Mapping[str, Chain]],
) -> dict[str, str]:
    """Write what belongs to single splits; the sha256 of each file by its name. Empty answers and chains leave none."""
    names: list[str] = []
    for split, (queries, qrels) in splits.items():
        names += [f"queries/{split}.jsonl", f"qrels/{split}.tsv"]
        for name in names[-2:]:
            (folder / name).parent.mkdir(exist_ok=True)
        _write_texts(folder / names[-2], {query.id: query.text for query in queries})
        write_qrels(folder / names[-1], {query.id: qrels.get(query.id, {}) for query in queries})
    for split, texts in answers.items():
        if texts:
            names.append(f"answers/{split}.jsonl")
            (folder / "answers").mkdir(exist_ok=True)
            _write_texts(folder / names[-1], texts)
    for split, by_query in chains.items():
        if by_query:
            names.append(f"chains/{split}.jsonl")
            (folder / "chains").mkdir(exist_ok=True)
            write_chains(folder / names[-1], by_query)
    return {name: sha256_file(folder / name) for name in names}


def _write_texts(file: Path, texts: Mapping[str, str]) -> None:
    rows = (json.dumps({"id": query_id, "text": text}, ensure_ascii=False) for query_id, text in texts.items())
    with file.open("x", encoding="utf-8", newline="\n") as handle:
        handle.writelines(row + "\n" for row in rows)


def _check_answers(
    answers: Mapping[str, Mapping[str, str]], splits: Mapping[str, tuple[Sequence[Query], Qrels]]
) -> None:
    for split, texts in answers.items():
        known = {query.id for query in splits[split][0]} if split in splits else set()
        for query_id, text in texts.items():
            if query_id not in known or not text.strip():
                raise ValueError(f"split {split!r}: the answer to {query_id!r} is empty, or to no query of that split")


def _check_chains(
    chains: Mapping[str, Mapping[str, Chain]],
    splits: Mapping[str, tuple[Sequence[Query], Qrels]],
    corpus: Corpus,
    allow_dangling: bool,
) -> None:
    for split, by_query in chains.items():
        queries, qrels = splits.get(split, ((), {}))
        known = {query.id for query in queries}
        for query_id, chain in by_query.items():
            where = f"split {split!r}: the chain of {query_id!r}"
            if query_id not in known:
                raise ValueError(f"{where} is to no query of that split")
            check_chain(chain, where, corpus, allow_dangling)
            judged = {doc_id for doc_id, relevance in qrels.get(query_id, {}).items() if relevance > 0}
            if judged != set(chain.gold):
                other = min(judged ^ set(chain.gold))
                raise ValueError(f"{where} has not the gold documents of the judgements: they differ in {other!r}")


def _check_split(
    split: str, queries: Sequence[Query], qrels: Qrels, corpus: Corpus, allow_dangling: bool
) -> dict[str, int]:
    """Counts for the manifest, or ValueError."""
    if not _SPLIT_NAME.fullmatch(split):
        raise ValueError(f"split name {split!r} cannot be a file name; use letters, digits, '_', '-' and '.'")
    if not queries:
        raise ValueError(f"split {split!r} has no queries; leave it out")
    seen: set[str] = set()
    for query in queries:
        if not query.id or not query.text.strip():
            raise ValueError(f"split {split!r}: query {query.id!r} has an empty id or text")
        if query.id in seen:
            raise ValueError(f"split {split!r}: query id {query.id!r} appears twice")
        seen.add(query.id)
    if unknown := [query_id for query_id in qrels if query_id not in seen]:
        raise ValueError(f"split {split!r}: {len(unknown)} judged queries are not its queries, first {unknown[0]!r}")
    dangling = [(q, d) for q, documents in qrels.items() for d in documents if d not in corpus]
    if dangling and not allow_dangling:
        raise ValueError(
            f"split {split!r}: {len(dangling)} judgements name documents that the corpus lacks, first "
            f"{dangling[0][1]!r} for query {dangling[0][0]!r}; add the documents, or allow dangling judgements"
        )
    return {
        "queries": len(queries),
        "judgements": sum(map(len, qrels.values())),
        "dangling_judgements": len(dangling),
        "queries_without_gold": sum(max(qrels.get(query.id, {}).values(), default=0) < 1 for query in queries),
    }
