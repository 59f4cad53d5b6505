"""How MultiDoc2Dial cuts documents into passages, and which passages hold a grounding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_TITLE_SUFFIX = re.compile(r"#[\d_]*$")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document: `title` and `text` are shown and searched, `source` is matched with groundings."""

    title: str
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Span:
    """A marked stretch of a document's text; `section` and `title` are those of its section, `parents` those above."""

    start: int
    end: int
    text: str
    heading: bool
    section: str
    title: str
    parents: tuple[str, ...]


def clean_title(title: str) -> str:
    """Without the `#3` or `#3_0` at its end, and with `-` for `/`, which joins titles."""
    return _TITLE_SUFFIX.sub("", one_line(title)).replace("/", "-").strip()


def one_line(text: str) -> str:
    """The text with every run of white space as one space, and none at its ends."""
    return " ".join(text.split())


def _squeeze(text: str) -> str:
    return "".join(text.lower().split())


def split_words(text: str, words: int) -> list[Passage]:
    """`token` passages: `words` pieces of the text split at single spaces, without overlap and without titles."""
    pieces = text.split(" ")
    chunks = (" ".join(pieces[start : start + words]) for start in range(0, len(pieces), words))
    return [Passage("", one_line(chunk), chunk) for chunk in chunks if chunk.strip()]


def split_sections(title: str, spans: Sequence[Span]) -> list[Passage]:
    """`structure` passages: neighbouring spans of the same section or with the same title.

    A passage's title is `parent / section`, where the parent is the document's title unless the spans name
    more than one; its text is the body, or the heading where there is no body.
    """
    groups: list[list[Span]] = []
    for span in spans:
        last = groups[-1][-1] if groups else None
        if last and (last.section == span.section or last.title == span.title):
            groups[-1].append(span)
        else:
            groups.append([span])
    passages = []
    for group in groups:
        parents = max((span.parents for span in group), key=len)
        path = list(parents) if len(parents) > 1 else [clean_title(title)]
        own = clean_title(group[0].title)
        if own and own != path[-1]:
            path.append(own)
        whole = " ".join(span.text for span in group)
        body = " ".join(span.text for span in group if not span.heading)
        if text := one_line(body) or one_line(whole):
            passages.append(Passage(" / ".join(path), text, whole))
    return passages


def gold_passages(grounding: str, sources: Sequence[str]) -> list[int]:
    """Numbers of the passages in the smallest run of neighbours whose joined text holds the grounding.

    White space and case do not count, and three characters at either end of the grounding need not match (of
    groundings below 12 characters all must: what is left would stand nearly anywhere). Where several runs hold
    it, the first single passage wins, or else the run that starts last. Empty where none does.
    """
    wanted = _squeeze(grounding)
    if len(wanted) >= 12:
        wanted = wanted[3:-3]
    if not wanted:
        return []
    squeezed = [_squeeze(source) for source in sources]
    owner = [number for number, text in enumerate(squeezed) for _ in text]
    joined = "".join(squeezed)
    best: tuple[int, int] | None = None
    found = joined.find(wanted)
    while found >= 0:
        run = owner[found], owner[found + len(wanted) - 1]
        if run[0] == run[1]:
            return [run[0]]
        if best is None or run[0] > best[0]:
            best = run
        found = joined.find(wanted, found + 1)
    return [] if best is None else list(range(best[0], best[1] + 1))
