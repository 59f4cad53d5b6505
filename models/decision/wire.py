"""A slate as the JSON that decision servers are sent: the state once, and short questions that refer to it.

    {"query": "...", "candidates": [{"id": "1", "group": "Page", "title": "...", "text": "...", "brief": true}, ...]}

Only the text is required of a candidate. The id is its number, counted from 1, where there is none: nodes' own ids are
never shown. A `group` (heading) also holds for the candidates behind it, until another one or an empty one; `brief` is
false and `title` empty unless they say otherwise. A question about one of them says "candidate ID".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..protocols import Candidate, Slate

MAX_OPTIONS = 255
# The name of the option that no candidate is right.
NONE = "none"

_REFERENCE = re.compile(r"\bcandidate ([^\s?.,;:!\"'()\[\]{}]+)")
_FIELDS = {"id": str, "group": str, "title": str, "text": str, "brief": bool}


class Malformed(ValueError):
    """A request that breaks the format: `loc` says where, the message what is wrong and what to do."""

    def __init__(self, loc: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.loc = loc


def write_state(slate: Slate) -> dict[str, Any]:
    """The slate as JSON. `read_state` makes the same slate of it, but for the ids."""
    group, candidates = "", []
    for n, candidate in enumerate(slate.candidates):
        item: dict[str, Any] = {"id": option(n)}
        if candidate.group != group:
            item["group"] = group = candidate.group
        if candidate.title:
            item["title"] = candidate.title
        item["text"] = candidate.text
        if candidate.brief:
            item["brief"] = True
        candidates.append(item)
    return {"query": slate.query, "candidates": candidates}


def is_slate(state: object) -> bool:
    """Whether a state is meant as a slate: an object of exactly `query` and `candidates`."""
    return isinstance(state, dict) and state.keys() == {"query", "candidates"}


def read_state(state: Mapping[str, Any], loc: tuple[str | int, ...]) -> Slate:
    """The slate that a state describes.

    Raises:
        Malformed: a field of another type, an unknown one, no candidates, no text, or an id twice.
    """
    if not isinstance(state["query"], str):
        raise Malformed((*loc, "query"), "must be text")
    rows = state["candidates"]
    if not isinstance(rows, list) or not rows:
        raise Malformed((*loc, "candidates"), "must be a list of at least one candidate")
    group, candidates, seen = "", [], set()
    for n, row in enumerate(rows):
        place = (*loc, "candidates", n)
        _check_fields(row, place)
        name, group = row.get("id", option(n)), row.get("group", group)
        if name in seen:
            raise Malformed((*place, "id"), f"{name!r} is the id of two candidates; give each its own")
        seen.add(name)
        candidates.append(Candidate(name, row.get("title", ""), row["text"], group, row.get("brief", False)))
    return Slate(state["query"], tuple(candidates))


def _check_fields(row: object, loc: tuple[str | int, ...]) -> None:
    if not isinstance(row, dict):
        raise Malformed(loc, "must be an object with `text`")
    for key, value in row.items():
        if key not in _FIELDS:
            raise Malformed((*loc, key), f"unknown; a candidate has {', '.join(_FIELDS)}")
        if not isinstance(value, _FIELDS[key]):
            raise Malformed((*loc, key), f"must be {'true or false' if _FIELDS[key] is bool else 'text'}")
    if "text" not in row:
        raise Malformed((*loc, "text"), "missing")


def asked_about(instructions: str, slate: Slate, loc: tuple[str | int, ...]) -> int:
    """Place of the one candidate that a question refers to.

    Raises:
        Malformed: it refers to none, to several, or to one that is not there.
    """
    places = {candidate.id: n for n, candidate in enumerate(slate.candidates)}
    named = set(_REFERENCE.findall(instructions))
    if len(named) != 1:
        raise Malformed(loc, 'where the state is a slate, a yes/no question names one of its ids as "candidate ID"')
    [name] = named
    if name not in places:
        raise Malformed(loc, f"there is no candidate {name} in the state")
    return places[name]


def option(n: int) -> str:
    """The id of the candidate in place `n`, and its name as an option of a choice."""
    return str(n + 1)


def compact(value: object) -> str:
    """JSON on one line, without escaping what is readable."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
