"""ConditionalQA (Sun, Cohen and Salakhutdinov, 2022): questions about gov.uk pages, with HTML elements as evidence.

Reads the official files, plain or gzipped: documents `[{title, url, contents: [HTML element]}]` and questions
`[{id, url, scenario, question, evidences: [HTML element]}]`. A query is scenario and question; its gold leaves are the
elements of its page that equal its evidences, white space aside.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

from ..corpus import Corpus, Node
from ..files import check_new_folder, describe_file
from ..task import Qrels, Query, Task, write_task
from .jsonio import expect, optional, read_json, require

_HEADING = re.compile(r"\s*<h([1-6])[^>]*>")
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_Elements = dict[tuple[str, str], list[str]]


def _plain(element: str) -> str:
    return " ".join(unescape(_TAG.sub(" ", element)).split())


def _key(element: str) -> str:
    return " ".join(element.split())


def _read(path: Path) -> list[tuple[str, dict[str, Any]]]:
    rows = expect(read_json(path), list, str(path))
    return [(f"{path}[{i}]", expect(row, dict, f"{path}[{i}]")) for i, row in enumerate(rows)]


def read_pages(path: str | Path) -> tuple[list[Node], _Elements]:
    """Nodes page > heading > element, and the ids of each page's elements by url and HTML.

    A heading without elements below it is no node of its own text but a leaf, since evidences quote headings too.

    Raises:
        ValueError: a missing or mistyped field, a page twice, a page without text; names the place.
    """
    nodes: list[Node] = []
    elements: _Elements = {}
    seen: set[str] = set()
    for where, row in _read(Path(path)):
        url, title = require(row, "url", str, where), require(row, "title", str, where)
        page_id = re.sub(r"\s+", "_", url.rstrip("/").rpartition("/")[2])
        if not page_id or page_id in seen:
            raise ValueError(f"{where}['url']: page {url!r} appears twice or has no name")
        seen.add(page_id)
        found = _page(page_id, title, require(row, "contents", list, where), where)
        if not found:
            raise ValueError(f"{where}['contents']: page {url!r} has no text")
        begin = " ".join(" ".join(node.text for _, node in found if node.id != page_id).split()[:60])
        nodes.append(Node(page_id, None, title, begin))
        for element, node in found:
            nodes.append(node)
            elements.setdefault((url, _key(element)), []).append(node.id)
    return nodes, elements


def _page(page_id: str, title: str, contents: list[object], where: str) -> list[tuple[str, Node]]:
    """(HTML, node) of each element with text, under the heading above it."""
    texts = [expect(content, str, f"{where}['contents'][{i}]") for i, content in enumerate(contents)]
    stack: list[tuple[int, str, str]] = [(0, page_id, title)]
    found: list[tuple[str, Node]] = []
    for number, element in enumerate(texts):
        text = _plain(element)
        if not text:
            continue
        node_id = f"{page_id}#{number}"
        if heading := _HEADING.match(element):
            level = int(heading[1])
            while stack[-1][0] >= level:
                stack.pop()
            found.append((element, Node(node_id, stack[-1][1], text, text)))
            stack.append((level, node_id, text))
        else:
            found.append((element, Node(node_id, stack[-1][1], stack[-1][2], text)))
    return found


def prep_conditionalqa(documents: Path, questions: Mapping[str, Path], out: str | Path) -> Task:
    """Write the task of official files; a split takes each file's questions.

    Evidences without an equal element, or that are headings with elements below, give no gold leaf: the manifest's
    `source` counts them, and questions whose page is not in the document file, which are left out.

    Raises:
        FileExistsError: `out` exists and is not an empty folder.
        ValueError: what is wrong with the files, or a file none of whose questions has its page.
    """
    check_new_folder(out)
    nodes, elements = read_pages(documents)
    corpus = Corpus.from_nodes(nodes)
    urls = {url for url, _ in elements}
    counts: Counter[str] = Counter()
    splits: dict[str, tuple[list[Query], Qrels]] = {}
    for split, file in questions.items():
        queries: list[Query] = []
        qrels: Qrels = {}
        for where, row in _read(file):
            if (url := require(row, "url", str, where)) not in urls:
                counts[f"{split}_questions_without_page"] += 1
                continue
            text = f"{require(row, 'scenario', str, where)} {require(row, 'question', str, where)}"
            query = Query(require(row, "id", str, where), " ".join(text.split()))
            queries.append(query)
            gold = qrels.setdefault(query.id, {})
            for evidence in optional(row, "evidences", list, where, []):
                ids = elements.get((url, _key(expect(evidence, str, f"{where}['evidences']"))), [])
                leaves = [node_id for node_id in ids if corpus.is_leaf(corpus.row(node_id))]
                gold.update(dict.fromkeys(leaves, 1))
                counts[f"{split}_evidences"] += 1
                counts[f"{split}_evidences_unmatched"] += not ids
                counts[f"{split}_evidences_that_are_headings"] += bool(ids) and not leaves
        if not queries:
            raise ValueError(f"{file}: none of its questions is about a page of {documents}; give its documents")
        splits[split] = queries, qrels
    source = {
        "dataset": "ConditionalQA",
        "files": [describe_file(file) for file in (documents, *questions.values())],
        "counts": dict(counts),
    }
    return write_task(out, name="conditionalqa", corpus=corpus, splits=splits, source=source)
