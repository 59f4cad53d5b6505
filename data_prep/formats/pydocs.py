"""The documentation of Python's own standard library as a tree of real text, with questions that it answers.

Chapters hold modules, modules hold submodules, classes and functions, classes hold methods and properties, and one
more root holds the topics of the language reference (`pydoc_data.topics`) in pieces of up to 150 words. A question is
the summary, the first sentence, of the docstring of a leaf; it is taken out of the text that is searched, so that only
the signature and the rest of the docstring can answer it. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..corpus import Corpus, Node
from ..files import check_new_folder
from ..task import Qrels, Query, Task, write_task
from .jsonio import read_jsonl, require
from .pydocs_chapters import shelve

SPLIT_OF = ("train",) * 7 + ("dev",) + ("test",) * 2
MIN_SUMMARY_WORDS = 4
MAX_SUMMARY_WORDS = 40
MIN_REST_WORDS = 8
PIECE_WORDS = 150

_WORD = re.compile(r"\w+")
_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_SENTENCE_END = re.compile(r"[.!?](?=[\"')\]`]*(?:\s+[A-Z\"'(`<]|$))")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|cf|approx)\.$")
_UNDERLINE = re.compile(r"^([*=\-~^\"#])\1{2,}$")


@dataclass(frozen=True, slots=True)
class Record:
    """One documented object, as the collecting process found it."""

    id: str
    parent: str | None
    title: str
    kind: str
    signature: str
    doc: str


@dataclass(frozen=True, slots=True)
class _Entry:
    """A node, and the summary that was taken out of its text ("" for inner nodes and where there is none)."""

    node: Node
    summary: str
    rest_words: int


def collect(timeout_s: float = 60.0) -> tuple[list[Record], dict[str, str]]:
    """What is documented in the standard library of this Python, parents first, and the modules that did not import.

    The modules are imported in another process, without a display and with a fixed hash seed.

    Raises:
        RuntimeError: that process failed or took longer than `timeout_s`.
    """
    script = Path(__file__).with_name("pydocs_collect.py")
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "records.jsonl"
        environment = kept | {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "HOME": folder}
        command = [sys.executable, "-P", "-s", "-S", str(script), str(out)]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"collecting the standard library took longer than {timeout_s} s") from error
        if done.returncode:
            message = done.stderr.decode(errors="replace").strip()[-2000:]
            raise RuntimeError(f"collecting the standard library failed (exit {done.returncode}): {message}")
        return _read_records(out)


def _read_records(file: Path) -> tuple[list[Record], dict[str, str]]:
    records: list[Record] = []
    failures: dict[str, str] | None = None
    for number, row in read_jsonl(file):
        where = f"{file}:{number}"
        if row.get("kind") == "failures":
            failures = require(row, "imports", dict, where)
            continue
        parent = None if row.get("parent") is None else require(row, "parent", str, where)
        texts = [require(row, key, str, where) for key in ("title", "kind", "signature", "doc")]
        records.append(Record(require(row, "id", str, where), parent, *texts))
    if failures is None:
        raise RuntimeError("collecting the standard library ended early: its last line is missing")
    return records, failures


def split_summary(doc: str, name: str) -> tuple[str, str]:
    """The first sentence of a docstring, on one line, and what follows it.

    Lines at the start that only repeat a call of `name` are dropped, as built-in functions have them. Where the first
    paragraph has no end of sentence, it is the summary as a whole. A summary of more than 40 words is none:
    then ("", the docstring) comes back.
    """
    lines = doc.split("\n")
    call = re.compile(rf"^(?:[\w.]*\.)?{re.escape(name)}\(.*")
    while lines and call.match(lines[0]):
        lines.pop(0)
    body = "\n".join(lines).strip()
    paragraph, *others = _BLANK_LINE.split(body, maxsplit=1)
    flat = " ".join(paragraph.split())
    ends = (match.end() for match in _SENTENCE_END.finditer(flat))
    end = next((end for end in ends if not _ABBREVIATION.search(flat[:end])), len(flat))
    while end < len(flat) and flat[end] in "\"')]`":
        end += 1
    summary, rest = flat[:end], flat[end:].strip()
    if len(summary.split()) > MAX_SUMMARY_WORDS:
        return "", body
    return summary, "\n\n".join(filter(None, [rest, *others]))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def make_entries(records: Sequence[Record]) -> list[_Entry]:
    """Nodes in reading order. Classes and modules that hold nothing and say nothing are left out."""
    holds = {record.parent for record in records}
    # From the last to the first, so that a module whose only class is left out is left out as well.
    kept: set[str | None] = set()
    for record in reversed(records):
        if record.doc or (record.id in holds and record.id in kept):
            kept |= {record.id, record.parent}
    contents: dict[str | None, list[str]] = {}
    for record in records:
        if record.id in kept:
            contents.setdefault(record.parent, []).append(record.title.rpartition(".")[2])
    seen: set[str] = set()
    topics = sorted((record for record in records if record.kind == "topic"), key=lambda topic: len(topic.doc))
    pieces = {topic.id: _topic_entries(topic, seen) for topic in topics}
    entries: list[_Entry] = []
    for record in records:
        if record.kind == "topic":
            entries += pieces[record.id]
        elif record.id in kept:
            entries.append(_entry(record, contents.get(record.id, [])))
    return entries


def _entry(record: Record, contents: Sequence[str]) -> _Entry:
    if not contents and record.kind in ("class", "routine", "attribute"):
        summary, rest = split_summary(record.doc, record.title.rpartition(".")[2])
        text = "\n\n".join(filter(None, [record.signature, rest]))
        return _Entry(Node(record.id, record.parent, record.title, text), summary, len(_words(rest)))
    # What a module or class holds says more of it than its introduction's second paragraph, and a model that judges it
    # reads the beginning only.
    first, _, rest = record.doc.partition("\n\n")
    inside = [name for name in contents if not name.startswith("_")] or list(contents)
    holds = "Contents: " + ", ".join(inside) if inside else ""
    text = "\n\n".join(filter(None, [record.signature, first.strip(), holds, rest.strip()]))
    return _Entry(Node(record.id, record.parent, record.title, text), "", 0)


def split_sections(text: str) -> list[tuple[str, list[str]]]:
    """(heading, paragraphs) of each part of a topic; a heading is a line that is underlined."""
    lines = text.split("\n")
    parts: list[tuple[str, list[str]]] = [("", [])]
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if _UNDERLINE.match(following) and line.strip() and len(following) >= len(line.strip()):
            parts.append((line.strip(), []))
        elif not (_UNDERLINE.match(line) and number and parts[-1][0] == lines[number - 1].strip()):
            parts[-1][1].append(line)
    sections = [(heading, _BLANK_LINE.split("\n".join(body).strip("\n"))) for heading, body in parts]
    return [(heading, list(filter(str.strip, paragraphs))) for heading, paragraphs in sections]


def pack(paragraphs: Sequence[str], words: int = PIECE_WORDS) -> list[str]:
    """Neighbouring paragraphs joined to pieces of at most `words` words; a longer one is cut at line or word ends."""
    pieces: list[tuple[int, list[str]]] = []
    for paragraph in paragraphs:
        for block in _cut(paragraph, words):
            size = len(block.split())
            if pieces and pieces[-1][0] + size <= words:
                pieces[-1] = pieces[-1][0] + size, [*pieces[-1][1], block]
            else:
                pieces.append((size, [block]))
    return ["\n\n".join(blocks) for _, blocks in pieces]


def _cut(paragraph: str, words: int) -> list[str]:
    if len(paragraph.split()) <= words:
        return [paragraph]
    blocks: list[list[str]] = [[]]
    size = 0
    for line in paragraph.split("\n"):
        tokens = line.split()
        chunks = [" ".join(tokens[i : i + words]) for i in range(0, len(tokens), words)]
        for chunk in [line] if len(tokens) <= words else chunks:
            if size and size + len(chunk.split()) > words:
                blocks.append([])
                size = 0
            blocks[-1].append(chunk)
            size += len(chunk.split())
    return ["\n".join(block) for block in blocks if block]


def _topic_entries(record: Record, seen: set[str]) -> list[_Entry]:
    """The topic and its pieces, without those already `seen`: some topics hold shorter ones word for word."""
    sections = split_sections(record.doc)
    title = next((heading for heading, _ in sections if heading), record.title)
    leaves: list[_Entry] = []
    for heading, paragraphs in sections:
        for piece in pack(paragraphs):
            key = " ".join(piece.split())
            if key in seen:
                continue
            seen.add(key)
            full = title if heading in ("", title) else f"{title} / {heading}"
            leaves.append(_Entry(Node(f"{record.id}/{len(leaves)}", record.id, full, piece), "", 0))
    if not leaves:
        return []
    begin = " ".join(" ".join(p for _, paragraphs in sections for p in paragraphs).split()[:60])
    return [_Entry(Node(record.id, record.parent, title, f"{title}. {begin} ..."), "", 0), *leaves]


def choose_queries(entries: Sequence[_Entry]) -> tuple[dict[str, str], Counter[str]]:
    """Summaries by the id of the leaf that answers them, and how many were refused for which reason.

    A summary is refused if it or the text left is too short, if another leaf has the same, or if its words still
    stand one after the other in the title or text of any node.
    """
    refused: Counter[str] = Counter()
    words = {entry.node.id: _words(entry.summary) for entry in entries}
    times = Counter(" ".join(found) for found in words.values())
    candidates: dict[str, str] = {}
    for entry in entries:
        found = words[entry.node.id]
        if not found:
            continue
        if len(found) < MIN_SUMMARY_WORDS:
            refused["summary_too_short"] += 1
        elif entry.rest_words < MIN_REST_WORDS:
            refused["text_too_short"] += 1
        elif times[" ".join(found)] > 1:
            refused["summary_repeats"] += 1
        else:
            candidates[entry.node.id] = entry.summary
    for leaf in _standing(entries, {leaf: words[leaf] for leaf in candidates}):
        del candidates[leaf]
        refused["summary_in_searched_text"] += 1
    return candidates, refused


def _standing(entries: Sequence[_Entry], summaries: Mapping[str, list[str]]) -> set[str]:
    """The leaves whose summary's words stand in some node. Found by the first four words, then compared in full."""
    by_start: dict[tuple[str, ...], list[str]] = {}
    for leaf, words in summaries.items():
        by_start.setdefault(tuple(words[:MIN_SUMMARY_WORDS]), []).append(leaf)
    standing: set[str] = set()
    for entry in entries:
        text = _words(f"{entry.node.title}\n{entry.node.text}")
        for position, start in enumerate(zip(*(text[shift:] for shift in range(MIN_SUMMARY_WORDS)), strict=False)):
            for leaf in by_start.get(start, ()):
                if text[position : position + len(summaries[leaf])] == summaries[leaf]:
                    standing.add(leaf)
    return standing


def _on_shelves(nodes: Sequence[Node]) -> list[Node]:
    """`nodes` with chapters above their top-level modules."""
    chapters, chapter_of = shelve([node for node in nodes if node.parent is None and node.id != "topics"])
    return chapters + [replace(node, parent=node.parent or chapter_of.get(node.id)) for node in nodes]


def split_of_module(name: str) -> str:
    """`train` (7 of 10 modules), `dev` (1) or `test` (2), by the sha1 of the top-level module's name."""
    return SPLIT_OF[int(hashlib.sha1(name.encode()).hexdigest(), 16) % 10]


def prep_pydocs(out: str | Path, *, timeout_s: float = 60.0) -> Task:
    """Write the task of the standard library of the Python that runs this; the same for the same build of Python.

    The manifest's `source` counts modules, leaves, modules that did not import, and summaries that are no queries.

    Raises:
        FileExistsError: `out` exists and is not an empty folder.
        RuntimeError: the standard library could not be collected within `timeout_s`.
    """
    check_new_folder(out)
    records, failures = collect(timeout_s)
    entries = make_entries(records)
    corpus = Corpus.from_nodes(_on_shelves([entry.node for entry in entries]))
    queries, refused = choose_queries(entries)
    splits: dict[str, tuple[list[Query], Qrels]] = {split: ([], {}) for split in dict.fromkeys(SPLIT_OF)}
    for leaf, summary in queries.items():
        found, qrels = splits[split_of_module(leaf.partition(".")[0])]
        found.append(Query(f"q:{leaf}", summary))
        qrels[f"q:{leaf}"] = {leaf: 1}
    source = {
        "dataset": "python standard library documentation",
        "python": platform.python_version(),
        "top_level_modules": sum(entry.node.parent is None for entry in entries) - ("topics" in corpus),
        "modules": sum(record.kind == "module" and record.id in corpus for record in records) - ("topics" in corpus),
        "leaves": len(corpus.leaves()),
        "failed_imports": failures,
        "refused_queries": dict(refused),
    }
    return write_task(out, name="pydocs", corpus=corpus, splits=splits, source=source)
