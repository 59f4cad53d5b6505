"""Markdown files as pages: ATX and setext headings, fenced code that holds none, a title in front matter."""

from __future__ import annotations

import re
from pathlib import Path

from ..corpus import Node
from .headings import Page, Section, folder_nodes

ENDINGS = (".md", ".markdown")
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)$")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_NO_PARAGRAPH = re.compile(r" {0,3}(?:[-*+>]|\d+[.)])[ \t]|(?: {4}|\t)|\|")
_ANCHOR = re.compile(r"\s*\{#([^\s}]+)[^}]*\}\s*$")
_TITLE = re.compile(r"title:[ \t]*(.+?)[ \t]*$")


def markdown_nodes(folder: str | Path) -> list[Node]:
    """The tree of a folder of Markdown files. Errors as `headings.folder_nodes`."""
    return folder_nodes(Path(folder), ENDINGS, lambda text, _: parse_markdown(text))


def parse_markdown(text: str) -> Page:
    """Sections of a Markdown text; marks of emphasis and links stay as they are written."""
    title, lines = _front_matter(text.split("\n"))
    sections = [Section(0, "")]
    block: list[str] = []
    fence = ""

    def close() -> None:
        if paragraph := "\n".join(block).strip("\n"):
            sections[-1].paragraphs.append(paragraph)
        block.clear()

    def heading(level: int, words: str) -> None:
        close()
        anchor = _ANCHOR.search(words)
        plain = words[: anchor.start()] if anchor else words
        sections.append(Section(level, plain.strip(), anchor.group(1) if anchor else ""))

    for line in lines:
        mark = _FENCE.match(line)
        if fence:
            block.append(line)
            if mark and mark[1].startswith(fence) and not mark[2].strip():
                fence = ""
        elif mark and not (mark[1][0] == "`" and "`" in mark[2]):
            fence = mark[1]
            block.append(line)
        elif found := _heading(line, block):
            heading(*found)
        elif line.strip():
            block.append(line)
        else:
            close()
    close()
    return Page(title, sections)


def _heading(line: str, block: list[str]) -> tuple[int, str] | None:
    """Level and words of a heading that ends with this line; one that is underlined takes its words from `block`."""
    if found := _ATX.match(line):
        return len(found[1]), found[2] or ""
    if block and (under := _SETEXT.match(line)) and not any(map(_NO_PARAGRAPH.match, block)):
        words = " ".join(map(str.strip, block))
        block.clear()
        return (1 if under[1][0] == "=" else 2), words
    return None


def _front_matter(lines: list[str]) -> tuple[str, list[str]]:
    """The title between `---` lines at the start, and the lines after them."""
    if not lines or lines[0].rstrip() != "---":
        return "", lines
    end = next((i for i, line in enumerate(lines[1:], start=1) if line.rstrip() in ("---", "...")), None)
    if end is None:
        return "", lines
    found = next((match[1] for line in lines[1:end] if (match := _TITLE.match(line))), "")
    if len(found) > 1 and found[0] == found[-1] and found[0] in "\"'":
        found = found[1:-1]
    return found, lines[end + 1 :]
