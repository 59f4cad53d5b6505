"""HTML files as pages, with the parser of the standard library: broken HTML gives what text there is."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from ..corpus import Node
from .headings import Page, Section, folder_nodes

ENDINGS = (".html", ".htm", ".xhtml")
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_DROPPED = {"script", "style", "nav", "template", "noscript", "svg"}
_INLINE = set(
    "a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd label mark q ruby s samp small span "
    "strike strong sub sup time tt u var wbr".split()
)
_ROWS = {"td", "th", "br", "dt", "li", "tr"}  # a new line, not a new paragraph


def html_nodes(folder: str | Path) -> list[Node]:
    """The tree of a folder of HTML files. Errors as `headings.folder_nodes`."""
    return folder_nodes(Path(folder), ENDINGS, parse_html)


def parse_html(text: str) -> Page:
    """Sections of an HTML text, without scripts, styles and navigation; entities are decoded."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    parser.finish()
    return Page(parser.title, parser.sections)


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self.sections = [Section(0, "")]
        self._dropping: list[str] = []
        self._heading = ""
        self._anchor = ""
        self._in_title = False
        self._preformatted = 0
        self._words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _DROPPED or (self._dropping and tag == self._dropping[-1]):
            self._dropping.append(tag)
        if self._dropping:
            return
        anchor = next((value for name, value in attrs if name == "id" and value), "")
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

    def handle_endtag(self, tag: str) -> None:
        if self._dropping:
            if tag in self._dropping:
                del self._dropping[self._dropping.index(tag) :]
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
