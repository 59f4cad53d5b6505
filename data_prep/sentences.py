"""The first sentence of a text, without a model."""

from __future__ import annotations

import re

_END = re.compile(r"[。！？]|[.!?][\"')\]]*(?=\s|$)")
_WIDE = "。！？"
# A full stop after these, after one letter (initials, U.S.) or after nothing but a number ends no sentence.
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'])(?:[^\W\d_]|(?:\w\.)+\w|approx|c?a|capt|cf|col|dr|ft|gen|hon|inc|jr|lt|mr|mrs|ms|mt|prof|rev|sgt|sr|st|"
    r"vs?)$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\bno$", re.IGNORECASE)
_ONLY_NUMBER = re.compile(r"\W*\d*$")


def first_sentence(text: str) -> str:
    """The text up to the end of its first sentence, white space collapsed; all of it where no end is found.

    An end is followed by white space and no small letter. Where abbreviations make it unsure, more is taken.
    """
    flat = " ".join(text.split())
    for end in _END.finditer(flat):
        if end[0] in _WIDE or end.end() == len(flat):
            return flat[: end.end()]
        before, after = flat[: end.start()], flat[end.end() :].lstrip()
        if after[:1].islower() or _ONLY_NUMBER.match(before):
            continue
        if end[0] == "." and (_ABBREVIATION.search(before) or (_NUMBER.search(before) and after[0].isdigit())):
            continue
        return flat[: end.end()]
    return flat
