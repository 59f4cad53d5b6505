"""Markdown files as pages: ATX and setext headings, fenced code that holds none, a title in front matter."""

from __future__ import annotations

import re
from pathlib import Path

from ..corpus import Node
from .headings import Page, Section, folder_nodes

ENDINGS = (".md", ".markdown")
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_FENCE = re.compile(r" {0,3}(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?(`{3,}|~{3,})(.*)$")  # also as the start of a list item
_FENCE_END = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*$")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_RULE = re.compile(r" {0,3}(?:-{3,}|\*{3,}|_{3,})[ \t]*$")
_NO_PARAGRAPH = re.compile(r" {0,3}(?:[-*+>]|\d+[.)])[ \t]|(?: {4}|\t)|\|| {0,3}(?:`{3}|~{3})")
_ANCHOR = re.compile(r"\s*\{#([^\s}]+)[^}]*\}\s*$")
_KEY = re.compile(r"[\w.-]+[ \t]*:(?:\s|$)|#")
_TITLE = re.compile(r"title:[ \t]*(.+?)[ \t]*$")


def markdown_nodes(folder: str | Path) -> list[Node]:
    """The tree of a folder of Markdown files. Errors as `headings.folder_nodes`."""
    return folder_nodes(Path(folder), ENDINGS, parse_markdown)


def parse_markdown(text: str) -> Page:
    """Sections of a Markdown text; marks of emphasis and links stay as they are written, comments do not."""
    title, lines = _front_matter(text.split("\n"))
    parser = _Parser()
    for line in lines:
        parser.read(line)
    parser.finish()
    return Page(title, parser.sections)


class _Parser:
    def __init__(self) -> None:
        self.sections = [Section(0, "")]
        self._block: list[str] = []
        self._fence = ""
        self._comment: list[str] = []

    def read(self, line: str) -> None:
        """Take the next line."""
        if self._fence:
            self._block.append(line)
            if (end := _FENCE_END.match(line)) and end[1].startswith(self._fence):
                self._fence = ""
        elif self._comment or line.lstrip().startswith("<!--"):
            self._read_comment(line)
        elif (mark := _FENCE.match(line)) and not (mark[1][0] == "`" and "`" in mark[2]):
            self._fence = mark[1]
            self._block.append(line)
        elif found := _ATX.match(line):
            self.close()
            self._heading(len(found[1]), found[2] or "")
        elif (under := _SETEXT.match(line)) and self._block and not any(map(_NO_PARAGRAPH.match, self._block)):
            words = " ".join(part.strip() for part in self._block)
            self._block.clear()
            self._heading(1 if under[1][0] == "=" else 2, words)
        elif not line.strip() or (_RULE.match(line) and not self._block):
            self.close()
        else:
            self._block.append(line)

    def _read_comment(self, line: str) -> None:
        self._comment.append(line)
        _, end, after = line.partition("-->")
        if end:
            self._comment.clear()
            if after.strip():
                self.read(after)

    def finish(self) -> None:
        """Take what is still open: a comment without an end is text."""
        self._block += self._comment
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
    first = next((line for line in lines[1:end] if line.strip()), None)
    if end is None or (first is not None and not _KEY.match(first)):  # a text between two rules
        return "", lines
    found = next((match[1] for line in lines[1:end] if (match := _TITLE.match(line))), "")
    if len(found) > 1 and found[0] == found[-1] and found[0] in "\"'":
        found = found[1:-1]
    return found, lines[end + 1 :]
