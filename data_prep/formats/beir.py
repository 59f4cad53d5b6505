"""BEIR folders: `corpus.jsonl`, `queries.jsonl` and `qrels/SPLIT.tsv` (JSON Lines plain or gzipped)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..corpus import Corpus, Node, build_corpus
from ..files import check_new_folder, describe_file, scratch_folder
from ..task import Qrels, Query, Task, write_task
from .jsonio import optional, read_jsonl, require
from .trec import read_qrels


def _existing(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"{folder / name}: no such file (nor {name}.gz); a BEIR folder has one")


class _CorpusReader:
    """Nodes of a corpus file; after the iteration, `skipped` says how many lines had neither title nor text."""

    def __init__(self, file: Path, skip_empty: bool) -> None:
        self._file = file
        self._skip_empty = skip_empty
        self.skipped = 0

    def __iter__(self) -> Iterator[Node]:
        for number, row in read_jsonl(self._file):
            where = f"{self._file}:{number}"
            doc_id = require(row, "_id", str, where)
            title = optional(row, "title", str, where, "")
            text = optional(row, "text", str, where, "")
            if not text.strip():
                text = title
            if text.strip():
                yield Node(doc_id, None, title, text)
            elif self._skip_empty:
                self.skipped += 1
            else:
                raise ValueError(
                    f"{where}: document {doc_id!r} has no title and no text; skip_empty=True leaves it out"
                )


def read_queries(file: str | Path) -> dict[str, str]:
    """Texts of the queries of a `queries.jsonl`, by id.

    Raises:
        ValueError: a missing or mistyped field, or an id twice; names file and line.
    """
    queries: dict[str, str] = {}
    for number, row in read_jsonl(file):
        where = f"{file}:{number}"
        query_id = require(row, "_id", str, where)
        if query_id in queries:
            raise ValueError(f"{where}: query id {query_id!r} appears twice")
        queries[query_id] = require(row, "text", str, where)
    return queries


def prep_beir(
    folder: str | Path,
    out: str | Path,
    *,
    name: str | None = None,
    splits: Sequence[str] | None = None,
    skip_empty: bool = False,
    allow_dangling: bool = False,
) -> Task:
    """Write the task of a BEIR folder, with a corpus of one level: title and text, or the title where text is empty.

    splits: which files of `qrels/` to take (None: all). A split's queries are those that its file judges.
    skip_empty: leave out (and count in the manifest) documents without title and text instead of raising.
    allow_dangling: keep judgements of documents that the corpus lacks.

    Raises:
        FileExistsError: `out` exists and is not an empty folder.
        FileNotFoundError: a file that BEIR wants is missing.
        ValueError: what is wrong with the data, named by file and line.
    """
    source_folder = Path(folder)
    check_new_folder(out)
    corpus_file, queries_file = (_existing(source_folder, f"{part}.jsonl") for part in ("corpus", "queries"))
    found = sorted(file.stem for file in (source_folder / "qrels").glob("*.tsv"))
    wanted = found if splits is None else list(splits)
    if not wanted or set(wanted) - set(found):
        missing = sorted(set(wanted) - set(found)) or "any"
        raise FileNotFoundError(f"{source_folder / 'qrels'}: no judgements for {missing}; there are: {found or 'none'}")
    texts = read_queries(queries_file)
    qrels_files = [source_folder / "qrels" / f"{split}.tsv" for split in wanted]
    contents: dict[str, tuple[list[Query], Qrels]] = {}
    for split, file in zip(wanted, qrels_files, strict=True):
        qrels = read_qrels(file)
        if unknown := [query_id for query_id in qrels if query_id not in texts]:
            raise ValueError(f"{file}: {len(unknown)} judged queries are not in {queries_file}, first {unknown[0]!r}")
        contents[split] = [Query(query_id, texts[query_id]) for query_id in qrels], qrels
    nodes = _CorpusReader(corpus_file, skip_empty)
    with scratch_folder(out) as scratch:
        corpus: Corpus = build_corpus(nodes, scratch / "corpus")
        source = {
            "dataset": name or source_folder.name,
            "files": [describe_file(file) for file in (corpus_file, queries_file, *qrels_files)],
            "skipped_empty_documents": nodes.skipped,
        }
        return write_task(
            out,
            name=name or source_folder.name,
            corpus=corpus,
            splits=contents,
            source=source,
            allow_dangling=allow_dangling,
        )
