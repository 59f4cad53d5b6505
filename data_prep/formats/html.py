"""HTML files as pages, with the parser of the standard library: broken HTML gives what text there is."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from ..corpus import Node
from .headings import Page, Section, folder_nodes

ENDINGS = (".html", ".htm", ".xhtml")
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_CODE = {"script", "style"}
_DROPPED = _CODE | {"nav", "template", "noscript", "svg"}
# Navigation without a tag of its own, as documentation builders mark it; on elements that need an end tag only.
_NAVIGATION = {"navigation", "doc-toc", "toc", "navheader", "navfooter", "navbar", "breadcrumb", "breadcrumbs"}
_CONTAINERS = {"div", "table", "ul", "ol", "dl", "section", "aside", "header", "footer"}
# What cannot stand in a heading, so that it ends one whose end tag is missing.
_ENDS_HEADING = {"p", "ul", "ol", "dl", "table", "pre", "blockquote", "section", "article", "main", "form", "figure"}
_INLINE = set(
    "a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd label mark q ruby s samp small span "
    "strike strong sub sup time tt u var wbr".split()
)
_ROWS = {"td", "th", "br", "dt", "li", "tr"}  # a new line, not a new paragraph


def html_nodes(folder: str | Path) -> list[Node]:
    """The tree of a folder of HTML files. Errors as `headings.folder_nodes`."""
    return folder_nodes(Path(folder), ENDINGS, parse_html)


def parse_html(text: str) -> Page:
    """Sections of an HTML text, without scripts, styles and navigation; entities are decoded.

    Where navigation is never closed it is kept: the page would be lost with it.
    """
    parser = _read(text, _Parser())
    if parser.is_dropping:
        parser = _read(text, _Parser(keep_navigation=True))
    return Page(parser.title, parser.sections)


def _read(text: str, parser: _Parser) -> _Parser:
    parser.feed(text)
    parser.close()
    parser.finish()
    return parser


class _Parser(HTMLParser):
    def __init__(self, *, keep_navigation: bool = False) -> None:
        super().__init__(convert_charrefs=True)
        self._keep_navigation = keep_navigation
        self.title = ""
        self.sections = [Section(0, "")]
        self._dropping: list[str] = []
        self._heading = ""
        self._anchor = ""
        self._in_title = False
        self._preformatted = 0
        self._words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._dropping or self._is_dropped(tag, attrs):
            self._dropping.append(tag)
        if self._dropping:
            return
        anchor = next((value for name, value in attrs if name == "id" and value), "")
        if self._heading and tag in _ENDS_HEADING and "".join(self._words).strip():
            self._flush()
        if tag in _HEADINGS:
            self._flush()
            self._heading, self._anchor = tag, anchor
        elif tag == "title":
            self._flush()
            self._in_title = True
        elif tag == "pre":
            self._flush()
            self._preformatted += 1
        elif self._heading:
            self._anchor = self._anchor or anchor
        elif tag in _ROWS:
            self._words.append("\n")
        elif tag not in _INLINE:
            self._flush()

    def _is_dropped(self, tag: str, attrs: list[tuple[str, str | None]]) -> bool:
        if self._keep_navigation:
            return tag in _CODE
        marks = {word for name, value in attrs if name in ("class", "role") and value for word in value.split()}
        return tag in _DROPPED or (tag in _CONTAINERS and bool(marks & _NAVIGATION))

    def handle_endtag(self, tag: str) -> None:
        if self._dropping:
            while tag in self._dropping and self._dropping.pop() != tag:
                pass
            return
        if tag == "title" and self._in_title:
            self.title = self.title or " ".join("".join(self._words).split())
            self._words.clear()
            self._in_title = False
        elif tag in _HEADINGS and self._heading:
            self._flush()
        elif tag not in _INLINE and tag not in _ROWS and not self._heading:
            self._flush()
            self._preformatted = max(0, self._preformatted - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if not self._dropping:
            self._words.append(data if self._preformatted else data.replace("\n", " "))

    @property
    def is_dropping(self) -> bool:
        """Whether something is left out that has not ended."""
        return bool(self._dropping)

    def finish(self) -> None:
        """Take what an unclosed element held."""
        self._flush()

    def _flush(self) -> None:
        text = "".join(self._words)
        self._words.clear()
        if self._heading:
            title = " ".join(text.split()).rstrip("¶").strip()
            self.sections.append(Section(_HEADINGS[self._heading], title, self._anchor))
            self._heading = self._anchor = ""
            return
        lines = text.split("\n")
        if not self._preformatted:
            lines = [" ".join(line.split()) for line in lines]
        if paragraph := "\n".join(line for line in lines if line.strip()):
            self.sections[-1].paragraphs.append(paragraph)
