"""MTRAG (arXiv 2501.03468): questions in conversations, over one flat corpus of passages a domain.

A domain's folder holds `corpus.jsonl` or `corpus_pool.jsonl` (also gzipped), `qrels/dev.tsv` and each query in three
forms: `DOMAIN_lastturn.jsonl`, `DOMAIN_questions.jsonl`, `DOMAIN_rewrite.jsonl`. Reference answers, where there are
any, are in `reference.jsonl` beside the domains, and those of MTRAG-UN in `mtrag_un/`, with its own `qrels/DOMAIN.tsv`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..corpus import Corpus, Node, build_corpus
from ..files import check_new_folder, describe_file, scratch_folder
from ..task import Qrels, Query, Task, write_task
from .beir import read_queries
from .jsonio import expect, optional, read_jsonl, require
from .trec import read_qrels

DOMAINS = ("clapnq", "cloud", "fiqa", "govt")
FORMS = ("lastturn", "questions", "rewrite")
_SPEAKER = re.compile(r"^\|user\|:[ ]?", re.MULTILINE)


def prep_mtrag(folder: str | Path, out: str | Path, *, domain: str, skip_missing: bool = False) -> Task:
    """Write the task of one domain: a split a form of the queries, and two of MTRAG-UN where it is there.

    `lastturn` is the user's last words, `questions` all of them up to there, a line each, `rewrite` one question that
    stands alone; `un_lastturn` and `un_questions` are those of MTRAG-UN. The speaker's mark `|user|:` is left out.
    Queries are those with judgements; passages without title and text are left out, and counted in the manifest.

    skip_missing: leave out queries that have a gold passage which the corpus lacks, instead of stopping.

    Raises:
        FileExistsError: `out` exists and is not an empty folder.
        FileNotFoundError: no such domain, or one of its files is missing.
        ValueError: what is wrong with the data, named by file and line.
    """
    home = Path(folder)
    source = home / domain
    if not source.is_dir():
        there = sorted(path.name for path in home.iterdir() if path.is_dir() and path.name in DOMAINS)
        raise FileNotFoundError(f"{source}: no such folder; the domains here are: {', '.join(there) or 'none'}")
    check_new_folder(out)
    corpus_file = _first_of(source, "corpus.jsonl", "corpus_pool.jsonl")
    qrels_file = source / "qrels" / "dev.tsv"
    files = [corpus_file, qrels_file, *(source / f"{domain}_{form}.jsonl" for form in FORMS)]
    splits: dict[str, tuple[dict[str, str], Qrels]] = {}
    for form, file in zip(FORMS, files[2:], strict=True):
        texts = {query_id: _SPEAKER.sub("", text).strip() for query_id, text in read_queries(file).items()}
        splits[form] = texts, read_qrels(qrels_file)
    answers, reference_files = _references(home)
    files += reference_files
    extra = home / "mtrag_un" / "qrels" / f"{domain}.tsv"
    if extra.is_file():
        files.append(extra)
        for form, texts in _conversations(reference_files).items():
            splits[f"un_{form}"] = texts, read_qrels(extra)
    nodes = _Passages(corpus_file)
    with scratch_folder(out) as scratch:
        corpus = build_corpus(nodes, scratch / "corpus")
        contents, skipped = {}, {}
        for split, (texts, qrels) in splits.items():
            contents[split], skipped[split] = _judged(texts, qrels, corpus if skip_missing else None, split)
        return write_task(
            out,
            name=f"mtrag_{domain}",
            corpus=corpus,
            splits=contents,
            answers={
                s: {q.id: answers[q.id] for q in queries if q.id in answers} for s, (queries, _) in contents.items()
            },
            source={
                "dataset": f"mtrag {domain}",
                "files": [describe_file(file) for file in files],
                "skipped_empty_passages": nodes.skipped,
                "skipped_queries": skipped,
            },
        )


class _Passages:
    """Passages of a corpus file, in its order; after the iteration, `skipped` says how many were empty."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.skipped = 0

    def __iter__(self) -> Iterator[Node]:
        for number, row in read_jsonl(self._file):
            where = f"{self._file}:{number}"
            title, text = optional(row, "title", str, where, ""), optional(row, "text", str, where, "")
            if text.strip() or title.strip():
                yield Node(require(row, "_id", str, where), None, title.strip(), text.strip() or title.strip())
            else:
                self.skipped += 1


def _first_of(folder: Path, *names: str) -> Path:
    for name in names:
        for file in (folder / name, folder / f"{name}.gz"):
            if file.is_file():
                return file
    raise FileNotFoundError(f"{folder}: holds none of {', '.join(names)}, plain or gzipped")


def _judged(
    texts: Mapping[str, str], qrels: Qrels, corpus: Corpus | None, split: str
) -> tuple[tuple[list[Query], Qrels], int]:
    """The judged queries of a split, less those with a gold passage that `corpus` lacks (None: keep all)."""
    if unknown := [query_id for query_id in qrels if query_id not in texts]:
        raise ValueError(f"split {split!r}: {len(unknown)} judged queries have no text, first {unknown[0]!r}")
    kept = {
        query_id: judged
        for query_id, judged in qrels.items()
        if corpus is None or all(node in corpus for node, value in judged.items() if value > 0)
    }
    if not kept:
        raise ValueError(f"split {split!r}: no query has all its gold passages in the corpus; get the whole corpus")
    return ([Query(query_id, texts[query_id]) for query_id in kept], kept), len(qrels) - len(kept)


def _references(home: Path) -> tuple[dict[str, str], list[Path]]:
    """Reference answers by the id of the task, and the files that hold them."""
    answers: dict[str, str] = {}
    files = [
        file
        for folder in (home, home / "mtrag_un")
        for file in (folder / "reference.jsonl", folder / "reference.jsonl.gz")
        if file.is_file()
    ]
    for file in files:
        for number, row in read_jsonl(file):
            where = f"{file}:{number}"
            targets = require(row, "targets", list, where)
            text = _text(targets[0], f"{where}['targets'][0]") if targets else ""
            if text.strip():
                answers[require(row, "task_id", str, where)] = text.strip()
    return answers, files


def _conversations(files: list[Path]) -> dict[str, dict[str, str]]:
    """The last words of the user, and all of them, by the id of the task, of the file of MTRAG-UN."""
    forms: dict[str, dict[str, str]] = {"lastturn": {}, "questions": {}}
    for file in files:
        if file.parent.name != "mtrag_un":
            continue
        for number, row in read_jsonl(file):
            where = f"{file}:{number}"
            said = [
                _text(turn, f"{where}['input'][{n}]").strip()
                for n, turn in enumerate(require(row, "input", list, where))
                if isinstance(turn, dict) and turn.get("speaker") == "user"
            ]
            if not said:
                raise ValueError(f"{where}['input'] has no turn of the user")
            task_id = require(row, "task_id", str, where)
            forms["lastturn"][task_id], forms["questions"][task_id] = said[-1], "\n".join(said)
    return forms


def _text(turn: object, where: str) -> str:
    return require(expect(turn, dict, where), "text", str, where)
