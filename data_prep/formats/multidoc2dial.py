"""MultiDoc2Dial (Feng et al. 2021) and Doc2Dial (Feng et al. 2020): dialogues grounded in spans of documents.

Reads the official files, plain or gzipped: `{"doc_data": {domain: {doc_id: document}}}` and
`{"dial_data": {domain: [dialogue]}}` (MultiDoc2Dial, references with `id_sp` and `doc_id`) or
`{"dial_data": {domain: {doc_id: [dialogue]}}}` (Doc2Dial, references with `sp_id`).

What is a passage, a query and a gold passage follows the preprocessing published with MultiDoc2Dial, with two
differences: gold passages of `structure` are matched without the title prefix between passages, so that a
grounding that runs over two sections is found; and ids have `_` for white space, so that TREC files can hold them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..corpus import Corpus, Node
from ..files import check_new_folder, describe_file
from ..task import Qrels, Query, Task, write_task
from .jsonio import expect, optional, read_json, require
from .multidoc2dial_passages import Passage, Span, clean_title, gold_passages, one_line, split_sections, split_words

DOMAIN_NAMES = {
    "dmv": "Department of Motor Vehicles",
    "ssa": "Social Security Administration",
    "studentaid": "Federal Student Aid",
    "va": "Veterans Affairs",
}
DEFAULT_BUCKETS: Mapping[str, Sequence[int]] = {"train": range(8), "dev": (8,)}


@dataclass(frozen=True, slots=True)
class _Document:
    id: str
    domain: str
    title: str
    text: str
    spans: dict[str, Span]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A user turn to answer, with the document and the text that ground the answer ("" where none is marked).

    `missing`: the document is marked, but it is not in the document file.
    """

    query: Query
    dialogue: str
    doc_id: str
    grounding: str
    missing: bool


def passage_text(node: Node) -> str:
    """What a retriever without a title field (BM25, dense) indexes of a node: `title // text`, or the text alone.

    `Node.text` does not repeat the title, so that a model that is shown both reads it once.
    """
    return f"{node.title} // {node.text}" if node.title else node.text


def read_documents(path: str | Path) -> list[_Document]:
    """The documents of an official document file, in file order.

    Raises:
        ValueError: a missing or mistyped field, named by file and JSON path.
    """
    data = require(expect(read_json(path), dict, str(path)), "doc_data", dict, str(path))
    documents = []
    for domain, by_id in data.items():
        for doc_id, document in expect(by_id, dict, f"{path}: doc_data[{domain!r}]").items():
            where = f"{path}: doc_data[{domain!r}][{doc_id!r}]"
            expect(document, dict, where)
            text = require(document, "doc_text", str, where)
            spans = {
                span_id: _read_span(span, text, f"{where}['spans'][{span_id!r}]")
                for span_id, span in require(document, "spans", dict, where).items()
            }
            documents.append(_Document(doc_id, domain, require(document, "title", str, where), text, spans))
    return documents


def _read_span(span: object, text: str, where: str) -> Span:
    fields: dict[str, Any] = expect(span, dict, where)
    start, end = require(fields, "start_sp", int, where), require(fields, "end_sp", int, where)
    if not 0 <= start <= end <= len(text):
        raise ValueError(f"{where}: start_sp {start} and end_sp {end} do not lie in doc_text of {len(text)} characters")
    parents = optional(fields, "parent_titles", list, where, [])
    names = [require(expect(p, dict, f"{where}['parent_titles']"), "text", str, where) for p in parents]
    return Span(
        start=start,
        end=end,
        text=require(fields, "text_sp", str, where),
        heading=require(fields, "tag", str, where).startswith("h"),
        section=require(fields, "id_sec", str, where),
        title=require(fields, "title", str, where).strip(),
        parents=tuple(filter(None, map(clean_title, names))),
    )


def read_turns(path: str | Path, documents: Mapping[str, _Document]) -> Iterator[_Turn]:
    """The user turns that an agent turn answers, with their groundings.

    An agent turn answers unless its `da` is `respond_no_solution` or, where `da` is missing, it has no references.

    Raises:
        ValueError: a missing or mistyped field, or a span that its document does not have.
    """
    data = require(expect(read_json(path), dict, str(path)), "dial_data", dict, str(path))
    for domain, group in data.items():
        where = f"{path}: dial_data[{domain!r}]"
        if isinstance(group, dict):
            lists = [(doc_id, group[doc_id], f"{where}[{doc_id!r}]") for doc_id in group]
        else:
            lists = [("", group, where)]
        for doc_id, dialogues, place in lists:
            for number, dialogue in enumerate(expect(dialogues, list, place)):
                yield from _dialogue_turns(dialogue, doc_id, f"{place}[{number}]", documents)


def _dialogue_turns(dialogue: object, doc_id: str, where: str, documents: Mapping[str, _Document]) -> Iterator[_Turn]:
    fields: dict[str, Any] = expect(dialogue, dict, where)
    dial_id = require(fields, "dial_id", str, where)
    turns = [
        (expect(turn, dict, place), place)
        for number, turn in enumerate(require(fields, "turns", list, where))
        for place in [f"{where}['turns'][{number}]"]
    ]
    history: list[str] = []
    for (turn, place), (following, after) in zip(turns, [*turns[1:], ({}, "")], strict=True):
        role = require(turn, "role", str, place)
        utterance = one_line(optional(turn, "utterance", str, place, ""))
        if role == "user" and utterance and following and _answers(following, after):
            text = f"{utterance}[SEP]" + "||".join(reversed(history))
            query = Query(f"{dial_id}_{require(turn, 'turn_id', int, place)}", text)
            yield _Turn(query, dial_id, *_grounding(following, doc_id, after, documents))
        if utterance:
            history.append(f"{role}: {utterance}")


def _answers(turn: dict[str, Any], where: str) -> bool:
    if require(turn, "role", str, where) != "agent":
        return False
    if "da" in turn:
        return require(turn, "da", str, where) != "respond_no_solution"
    return bool(optional(turn, "references", list, where, []))


def _grounding(
    turn: dict[str, Any], doc_id: str, where: str, documents: Mapping[str, _Document]
) -> tuple[str, str, bool]:
    """Document of the first reference, its text from the first to the last referenced span, and if it is missing."""
    spans: list[Span] = []
    for number, reference in enumerate(optional(turn, "references", list, where, [])):
        place = f"{where}['references'][{number}]"
        named = optional(expect(reference, dict, place), "doc_id", str, place, doc_id)
        doc_id = doc_id or named
        if named != doc_id:
            continue
        if doc_id not in documents:
            return doc_id, "", True
        span_id = require(reference, "id_sp" if "id_sp" in reference else "sp_id", str, place)
        if span_id not in documents[doc_id].spans:
            raise ValueError(f"{place}: document {doc_id!r} has no span {span_id!r}")
        spans.append(documents[doc_id].spans[span_id])
    if not spans:
        return doc_id, "", False
    text = documents[doc_id].text
    return doc_id, text[min(span.start for span in spans) : max(span.end for span in spans)], False


def bucket(dial_id: str) -> int:
    """The tenth of the dialogues that this one falls into: `int(sha1(dial_id), 16) % 10`."""
    return int(hashlib.sha1(dial_id.encode()).hexdigest(), 16) % 10


def prep_multidoc2dial(
    doc_file: str | Path,
    dial_files: Sequence[str | Path] | Mapping[str, str | Path],
    out: str | Path,
    *,
    segmentation: str = "structure",
    words: int = 100,
    domain_level: bool = True,
    buckets: Mapping[str, Sequence[int]] = DEFAULT_BUCKETS,
    skip_missing: bool = False,
) -> Task:
    """Write a task whose corpus is domain -> document -> passage, and whose queries are user turns with history.

    doc_file, dial_files: official files. A mapping of split names to files keeps the official splits; a sequence is
        split by `bucket` of the dialogue id as `buckets` says, and buckets that it does not name are left out.
    segmentation: `structure` (sections) or `token` (`words` space-split words each).
    domain_level: False makes the documents the root level.
    skip_missing: leave out turns whose document is not in `doc_file` instead of raising.

    A query is `user turn[SEP]role: previous turn||role: the one before||...`. Passage ids are `document id::number`.
    Turns whose grounding is found in no run of passages stay, without judgements: they count as misses.

    Raises:
        FileExistsError: `out` exists and is not an empty folder.
        ValueError: what is wrong with the files, named by file and JSON path; an unknown segmentation.
    """
    if segmentation not in ("structure", "token"):
        raise ValueError(f"segmentation={segmentation!r} is not a choice; use one of: structure, token")
    if words < 1:
        raise ValueError(f"words={words} must be 1 or more")
    check_new_folder(out)
    documents = {document.id: document for document in read_documents(doc_file)}
    passages = {
        document.id: split_sections(document.title, list(document.spans.values()))
        if segmentation == "structure"
        else split_words(document.text, words)
        for document in documents.values()
    }
    files = dict(dial_files) if isinstance(dial_files, Mapping) else {number: f for number, f in enumerate(dial_files)}
    split_of = {number: split for split, numbers in buckets.items() for number in numbers}
    turns = (
        (split if isinstance(split, str) else split_of.get(bucket(turn.dialogue)), turn)
        for split, file in files.items()
        for turn in read_turns(file, documents)
    )
    splits, counts = _collect(turns, passages, skip_missing)
    order = [*dict.fromkeys(split for split in (*files, *buckets) if isinstance(split, str))]
    source = {
        "dataset": "multidoc2dial",
        "files": [describe_file(file) for file in (doc_file, *files.values())],
        "segmentation": segmentation,
        "words": words if segmentation == "token" else None,
        "domain_level": domain_level,
        "documents": len(documents),
        "passages": sum(map(len, passages.values())),
        **counts,
    }
    return write_task(
        out,
        name=f"multidoc2dial-{segmentation}",
        corpus=Corpus.from_nodes(_nodes(documents, passages, domain_level)),
        splits={split: splits[split] for split in order if split in splits},
        source=source,
    )


def _collect(
    turns: Iterable[tuple[str | None, _Turn]], passages: Mapping[str, Sequence[Passage]], skip_missing: bool
) -> tuple[dict[str, tuple[list[Query], Qrels]], dict[str, int]]:
    """Queries and judgements by split, and how many turns were left out."""
    splits: dict[str, tuple[list[Query], Qrels]] = {}
    counts = {"turns_in_no_split": 0, "turns_without_document": 0}
    for split, turn in turns:
        if turn.missing and not skip_missing:
            raise ValueError(
                f"query {turn.query.id!r}: document {turn.doc_id!r} is not in the document file; "
                "skip_missing=True leaves such turns out"
            )
        if turn.missing or split is None:
            counts["turns_without_document" if turn.missing else "turns_in_no_split"] += 1
            continue
        queries, qrels = splits.setdefault(split, ([], {}))
        queries.append(turn.query)
        sources = [passage.source for passage in passages.get(turn.doc_id, ())]
        if gold := gold_passages(turn.grounding, sources):
            qrels[turn.query.id] = {passage_id(turn.doc_id, number): 1 for number in gold}
    return splits, counts


def document_node_id(doc_id: str) -> str:
    """The corpus id of a document: its `doc_id` with `_` for runs of white space."""
    return "_".join(doc_id.split())


def passage_id(doc_id: str, number: int) -> str:
    """The corpus id of a document's passage, counted from 0."""
    return f"{document_node_id(doc_id)}::{number}"


def _nodes(
    documents: Mapping[str, _Document], passages: Mapping[str, Sequence[Passage]], domain_level: bool
) -> Iterator[Node]:
    if domain_level:
        for domain in dict.fromkeys(document.domain for document in documents.values()):
            titles = [clean_title(document.title) for document in documents.values() if document.domain == domain]
            step = -(-len(titles) // 12)
            text = f"{len(titles)} documents, such as: " + "; ".join(titles[::step])
            yield Node(domain, None, DOMAIN_NAMES.get(domain, domain), text)
    for document in documents.values():
        parent = document.domain if domain_level else None
        yield Node(document_node_id(document.id), parent, clean_title(document.title), _overview(document))
        for number, passage in enumerate(passages[document.id]):
            yield Node(passage_id(document.id, number), document_node_id(document.id), passage.title, passage.text)


def _overview(document: _Document, words: int = 40, headings: int = 12) -> str:
    """How the document begins, and its first headings."""
    title = clean_title(document.title)
    begin = " ".join(" ".join(span.text for span in document.spans.values() if not span.heading).split()[:words])
    names = dict.fromkeys(clean_title(span.title) for span in document.spans.values() if span.heading)
    shown = [name for name in names if name and name != title][:headings]
    parts = [f"{begin} ..." if begin else "", "Sections: " + "; ".join(shown) if shown else ""]
    return " ".join(filter(None, parts)) or title or document.text
