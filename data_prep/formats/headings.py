"""A folder of files with headings as a tree: folders, pages, headings nested by level, and their bodies as leaves.

A heading with a body and no headings below it is a leaf. One with both gets its body as its first child, so that
every leaf holds text. Headings with nothing below them are left out. A page whose only level-1 heading comes first
takes that heading as its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from ..corpus import Corpus, Node, build_corpus
from ..files import check_new_folder, describe_file, scratch_folder
from ..task import Query, Task, write_task
from .beir import read_queries
from .jsonio import read_lines
from .trec import read_qrels

_NOT_SLUG = re.compile(r"[^\w.-]+")
_SPACE = re.compile(r"[\s\0]+")


@dataclass(slots=True)
class Section:
    """A heading (level 1 to 6; 0 and no title: what stands before the first) and the paragraphs of its own."""

    level: int
    title: str
    anchor: str = ""
    paragraphs: list[str] = field(default_factory=list)
    children: list[Section] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Page:
    """A parsed file: the title that it states ("" where it states none), and its sections in reading order."""

    title: str
    sections: list[Section]


class _Ids:
    """Ids without white space, each once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def new(self, wanted: str) -> str:
        base = _SPACE.sub("_", wanted)
        unique, number = base, 2
        while unique in self._seen:
            unique, number = f"{base}~{number}", number + 1
        self._seen.add(unique)
        return unique


def _nest(sections: Sequence[Section]) -> Section:
    root = Section(0, "")
    stack = [root]
    for section in sections:
        if section.level == 0:
            root.paragraphs += section.paragraphs
            continue
        while stack[-1].level >= section.level:
            stack.pop()
        stack[-1].children.append(section)
        stack.append(section)
    _prune(root)
    return root


def _prune(section: Section) -> bool:
    section.children = [child for child in section.children if _prune(child)]
    return bool(section.children or section.paragraphs)


def page_nodes(page_id: str, parent: str | None, page: Page, ids: _Ids) -> list[Node]:
    """The page and what is below it, or [] where the page has no text."""
    root = _nest(page.sections)
    tops = [section for section in page.sections if section.level == 1]
    title = page.title
    if len(root.children) == 1 and len(tops) == 1 and root.children[0] is tops[0]:
        title = title or tops[0].title
        root.paragraphs += tops[0].paragraphs
        root.children = tops[0].children
    title = title or next((s.title for s in page.sections if s.title), "") or PurePosixPath(page_id).stem
    if not root.children and not root.paragraphs:
        return []
    node_id = ids.new(page_id)
    nodes = [Node(node_id, parent, title, _about(title, root))]
    if root.paragraphs:
        nodes.append(Node(ids.new(f"{node_id}#body"), node_id, title, "\n\n".join(root.paragraphs)))
    for child in root.children:
        nodes += _section_nodes(page_id, node_id, child, ids)
    return nodes


def _section_nodes(page_id: str, parent: str, section: Section, ids: _Ids) -> Iterator[Node]:
    slug = section.anchor or _NOT_SLUG.sub("-", section.title.lower()).strip("-") or "section"
    node_id = ids.new(f"{page_id}#{slug}")
    body = "\n\n".join(section.paragraphs)
    if not section.children:
        yield Node(node_id, parent, section.title, body)
        return
    yield Node(node_id, parent, section.title, _about(section.title, section))
    if body:
        yield Node(ids.new(f"{node_id}/body"), node_id, section.title, body)
    for child in section.children:
        yield from _section_nodes(page_id, node_id, child, ids)


def _about(title: str, section: Section) -> str:
    """Text of an inner node: the beginning of its body, and the headings below it."""
    begin = " ".join(" ".join(section.paragraphs).split()[:60])
    inside = "; ".join(child.title for child in section.children if child.title)
    return "\n\n".join(filter(None, [begin, f"Contents: {inside}" if inside else ""])) or title or "(no title)"


def folder_nodes(folder: Path, endings: Sequence[str], parse: Callable[[str], Page]) -> list[Node]:
    """Nodes of all files below `folder` with these endings (also with .gz), sorted by path.

    parse: a file's text to a page.

    Raises:
        FileNotFoundError: no such file in the folder, or none with text.
        ValueError: a file that is not UTF-8; names it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    files = source_files(folder, endings)
    if not files:
        raise FileNotFoundError(f"{folder}: no file ending in {' or '.join(endings)} in it or below it")
    ids = _Ids()
    nodes: list[Node] = []
    folders: dict[PurePosixPath, str] = {}
    holds: dict[str, list[str]] = {}
    for file in files:
        text = "\n".join(line for _, line in read_lines(file))
        path = PurePosixPath(file.relative_to(folder).as_posix().removesuffix(".gz"))
        found = page_nodes(str(path), None, parse(text), ids)
        if not found:
            continue
        parent = None
        for above in reversed(path.parents[:-1]):
            if above not in folders:
                folders[above] = ids.new(f"{above}/")
                nodes.append(Node(folders[above], parent, above.name, above.name))
                if parent:
                    holds.setdefault(parent, []).append(above.name)
            parent = folders[above]
        nodes += [replace(found[0], parent=parent), *found[1:]]
        if parent:
            holds.setdefault(parent, []).append(found[0].title)
    if not nodes:
        raise FileNotFoundError(f"{folder}: its {len(files)} files ending in {' or '.join(endings)} hold no text")
    text_of = {key: "Contents: " + "; ".join(titles) for key, titles in holds.items()}
    return [replace(node, text=text_of.get(node.id, node.text)) for node in nodes]


def source_files(folder: Path, endings: Sequence[str]) -> list[Path]:
    """Files below `folder` with these endings, also gzipped, sorted by path."""
    wanted = (*endings, *(f"{ending}.gz" for ending in endings))
    return sorted(f for f in folder.rglob("*") if f.is_file() and f.name.lower().endswith(wanted))


def prep_pages(
    folder: Path, out: Path, nodes: Sequence[Node], name: str, queries: str | None, qrels: str | None
) -> Task | Corpus:
    """A corpus folder, or a task with the split `test` where queries and judgements (BEIR layout) are given.

    Raises:
        ValueError: only one of the two is given; what is wrong with them.
    """
    check_new_folder(out)
    if queries is None or qrels is None:
        if queries is not None or qrels is not None:
            raise ValueError("data.queries and data.qrels go together; give both or none")
        return build_corpus(nodes, out)
    queries_file, qrels_file = folder / queries, folder / qrels
    texts, judged = read_queries(queries_file), read_qrels(qrels_file)
    if unknown := [query_id for query_id in judged if query_id not in texts]:
        raise ValueError(f"{qrels_file}: {len(unknown)} judged queries are not in {queries_file}, first {unknown[0]!r}")
    source = {"dataset": name, "files": [describe_file(file) for file in (queries_file, qrels_file)]}
    with scratch_folder(out) as scratch:
        corpus = build_corpus(nodes, scratch / "corpus")
        split = [Query(query_id, texts[query_id]) for query_id in judged], judged
        return write_task(out, name=name, corpus=corpus, splits={"test": split}, source=source)
