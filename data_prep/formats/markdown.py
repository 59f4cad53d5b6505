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
_NO_PARAGRAPH = re.compile(r" {0,3}(?:[-*+>]|\d+[.)])[ \t]|(?: {4}|\t)|\|| {0,3}(?:`{3}|~{3})")
_ANCHOR = re.compile(r"\s*\{#([^\s}]+)[^}]*\}\s*$")
_TITLE = re.compile(r"title:[ \t]*(.+?)[ \t]*$")


def markdown_nodes(folder: str | Path) -> list[Node]:
    """The tree of a folder of Markdown files. Errors as `headings.folder_nodes`."""
    return folder_nodes(Path(folder), ENDINGS, parse_markdown)


def parse_markdown(text: str) -> Page:
    """Sections of a Markdown text; marks of emphasis and links stay as they are written."""
    title, lines = _front_matter(text.split("\n"))
    parser = _Parser()
    for line in lines:
        parser.read(line)
    parser.close()
    return Page(title, parser.sections)


class _Parser:
    def __init__(self) -> None:
        self.sections = [Section(0, "")]
        self._block: list[str] = []
        self._fence = ""

    def read(self, line: str) -> None:
        """Take the next line."""
        mark = _FENCE.match(line)
        if self._fence:
            self._block.append(line)
            if mark and mark[1].startswith(self._fence) and not mark[2].strip():
                self._fence = ""
        elif mark and not (mark[1][0] == "`" and "`" in mark[2]):
            self._fence = mark[1]
            self._block.append(line)
        elif found := _ATX.match(line):
            self.close()
            self._heading(len(found[1]), found[2] or "")
        elif (under := _SETEXT.match(line)) and self._block and not any(map(_NO_PARAGRAPH.match, self._block)):
            words = " ".join(part.strip() for part in self._block)
            self._block.clear()
            self._heading(1 if under[1][0] == "=" else 2, words)
        elif line.strip():
            self._block.append(line)
        else:
            self.close()

    def close(self) -> None:
        """End the paragraph, if there is one."""
        if paragraph := "\n".join(self._block).strip("\n"):
            self.sections[-1].paragraphs.append(paragraph)
        self._block.clear()

    def _heading(self, level: int, words: str) -> None:
        anchor = _ANCHOR.search(words)
        plain = words[: anchor.start()] if anchor else words
        self.sections.append(Section(level, plain.strip(), anchor.group(1) if anchor else ""))


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
