"""Generative navigation, the control of DecisionRAG: a language model *writes* the numbers of the candidates to keep.

The same navigator, tree and budgets run with it, so that what differs is only how a candidate is judged.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...data_prep.hits import Cost
from ..prompts import GENERATIVE_PROMPT
from ..protocols import Candidate, Completion, LanguageModel, Prompt, Slate, SlateScores
from .choose import check_options

UNLISTED = 0.25
"""The value of every candidate that the reply does not list."""

_BYTES_A_TOKEN = 4  # of English and of most scripts, roughly; the model's own tokenizer may be out of reach
_FRAME_TOKENS = 16  # number, line break, and a heading's mark
_MISSING_SHARE = 0.05  # of a choice's probability, spread over all options: a written number is no certainty

_NUMBER = r"[0-9]+"
_RANGE = rf"{_NUMBER}\s?[-–]\s?{_NUMBER}"
_BETWEEN = r"[\s,;|>&\[\](){}\"'.]"
_LIST = re.compile(rf"{_BETWEEN}*(?:{_RANGE}|{_NUMBER})(?:{_BETWEEN}+(?:and\s+)?(?:{_RANGE}|{_NUMBER}))*{_BETWEEN}*")
_ITEM = re.compile(rf"({_NUMBER})(?:\s?[-–]\s?({_NUMBER}))?")
_RUN = rf"#?{_NUMBER}(?:(?:\s*,\s*(?:and\s+)?|\s+and\s+|\s*&\s*)#?{_NUMBER})*"
_NAMED = re.compile(
    rf"\[({_NUMBER})\]|(?:\b(?:candidates?|numbers?|no\.)\s*|(?=#))({_RUN})(?!\w|\.[0-9]|\s?[-–]\s?[0-9])",
    re.IGNORECASE,
)
_LEADING = re.compile(rf"({_NUMBER})[.):](?=\s)")
_BULLET = re.compile(r"[-*•]\s+")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a reply says: numbers from 0 ("none of them") to the last candidate's, each once, in its order."""

    numbers: tuple[int, ...]
    notes: tuple[str, ...] = ()


def parse_numbers(text: str, count: int, *, truncated: bool = False) -> Reply:
    """The numbers of a reply about candidates 1 to `count`.

    - What stands before `</think>` is thought, not answer. A reply that is JSON gives its list of whole numbers.
    - Otherwise line by line: a line of nothing but numbers, or its part after the last colon if that is one; else
      numbers in brackets or after "candidate", "number", "no." or "#"; else a number that begins the line, "3. ...".
      "1.", "2." ... that each stand before one other number count lines. All other numbers in prose are none.
    - "3-5" is 3, 4, 5 where both ends are candidates and the first is smaller; otherwise it counts as out of range.
    - Numbers out of range are left out, and so is each repeated one; a last number that the limit may have cut, too.
    """
    answer = text.rpartition("</think>")[2].strip()
    cut = truncated and re.search(r"[0-9]\Z", answer) is not None
    if cut:
        answer = re.sub(rf"(?:{_NUMBER}\s?[-–]\s?)?{_NUMBER}\Z", "", answer)
    found = _from_json(answer)
    if found is None:
        found = _from_lines(answer)
    numbers: dict[int, None] = {}
    outside = repeated = 0
    for first, last in found:
        span = _span(first, last, count)
        outside += not span
        for number in span:
            repeated += number in numbers
            numbers.setdefault(number)
    notes = [f"{outside} numbers in the reply are of no candidate"] if outside else []
    notes += [f"{repeated} numbers stand in the reply twice"] if repeated else []
    notes += ["the limit of tokens may have cut the last number, which is left out"] if cut else []
    notes += [] if numbers else ["the reply names no candidate"]
    return Reply(tuple(numbers), tuple(notes))


def _span(first: str, last: str, count: int) -> range:
    """The candidates that a number or a range names; empty where it is out of range."""
    # No slate is so large, and Python refuses to read numbers of thousands of digits.
    if max(len(first.lstrip("0")), len(last.lstrip("0"))) > len(str(count)):
        return range(0)
    start = int(first.lstrip("0") or "0")
    end = int(last.lstrip("0") or "0") if last else start
    if last and not 0 < start < end:
        return range(0)
    return range(start, end + 1) if end <= count else range(0)


def _from_json(answer: str) -> list[tuple[str, str]] | None:
    """Numbers of the lists of whole numbers in a JSON answer, fenced or not; None where it is no such answer."""
    fenced = re.fullmatch(r"```\w*\n(.*?)\n?```", answer, re.S)
    try:
        value = json.loads(fenced.group(1) if fenced else answer, parse_int=str)
    except (ValueError, RecursionError):
        return None
    lists = value.values() if isinstance(value, dict) else [value]
    if not isinstance(value, (dict, list)):
        return None
    # With `parse_int=str` a number written as text reads as one too: {"keep": ["3", 1]}.
    whole = [item for part in lists if isinstance(part, list) for item in part if isinstance(item, str)]
    return [(item, "") for item in whole if re.fullmatch(_NUMBER, item)]


def _from_lines(answer: str) -> list[tuple[str, str]]:
    lines = [re.sub(r"[`*]", "", _BULLET.sub("", line.strip(), count=1)).strip() for line in answer.splitlines()]
    leading = {n: m for n, line in enumerate(lines) if (m := _LEADING.match(line))}
    rest = {n: _from_line(lines[n][m.end() :]) for n, m in leading.items()}
    counted = [m.group(1) for m in leading.values()] == [str(n + 1) for n in range(len(leading))]
    enumerated = counted and all(len(found) == 1 for found in rest.values())
    out: list[tuple[str, str]] = []
    for n, line in enumerate(lines):
        found = rest[n] if enumerated and n in rest else _from_line(line)
        out += found or ([(leading[n].group(1), "")] if n in leading else [])
    return out


def _from_line(line: str) -> list[tuple[str, str]]:
    tail = line.rpartition(":")[2]
    for part in (line, tail if tail[:1] in (" ", "\t", "[") else ""):
        if not re.search(r"[0-9]\.[0-9]", part) and _LIST.fullmatch(part):
            return [(m.group(1), m.group(2) or "") for m in _ITEM.finditer(part)]
    named = [re.findall(_NUMBER, m.group(1) or m.group(2)) for m in _NAMED.finditer(line)]
    return [(number, "") for run in named for number in run]


class GenerativeScorer:
    """A `DecisionScorer` that asks a language model to write numbers.

    Values are ranks, no probabilities: the candidate listed first has 0.75, the next ones less, all above 0.5, so that
    several slates mix by rank; all others have `UNLISTED`. A reply that names nothing lists nothing, and is noted.
    Tokens are estimated from bytes, because a server's tokenizer is not here.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        max_candidates: int = 50,
        max_candidate_tokens: int = 256,
        max_slate_tokens: int = 20_000,
        max_tokens: int = 256,
    ) -> None:
        """`max_candidate_tokens`: longer texts are cut, which costs what they say; `max_tokens`: of a reply.

        Raises:
            ValueError: a limit below 1, or a slate that cannot hold one candidate.
        """
        if min(max_candidates, max_candidate_tokens, max_tokens) < 1:
            raise ValueError("max_candidates, max_candidate_tokens and max_tokens must be 1 or more")
        if max_slate_tokens < 3 * max_candidate_tokens + _FRAME_TOKENS:
            raise ValueError(
                f"max_slate_tokens={max_slate_tokens} cannot hold one candidate of "
                f"max_candidate_tokens={max_candidate_tokens} with its title and heading; raise it"
            )
        self._lm, self._max_candidates, self._max_tokens = lm, max_candidates, max_tokens
        self._max_bytes, self._max_slate_tokens = max_candidate_tokens * _BYTES_A_TOKEN, max_slate_tokens

    @property
    def max_candidates(self) -> int:
        """How many candidates one slate may hold."""
        return self._max_candidates

    @property
    def max_candidate_tokens_per_slate(self) -> int:
        """How many tokens of candidates one slate may hold."""
        return self._max_slate_tokens

    def num_tokens(self, candidate: Candidate) -> int:
        """How many tokens a candidate takes, with a heading of its own; an estimate."""
        texts = (candidate.group, candidate.title, candidate.text)
        return _FRAME_TOKENS + sum(-(-len(self._shown(text).encode()) // _BYTES_A_TOKEN) for text in texts)

    def yes(self, slates: Sequence[Slate]) -> list[SlateScores]:
        """Values by rank in the reply, not probabilities; see the class."""
        out = []
        for slate, reply, cost in self._ask(slates, GENERATIVE_PROMPT.keep):
            values_C = np.full(len(slate.candidates), UNLISTED)
            listed = [number for number in reply.numbers if number]
            for rank, number in enumerate(listed):
                values_C[number - 1] = 0.5 + 0.5 / (rank + 2)
            out.append(SlateScores(values_C, (*reply.notes, *self._cuts(slate)), cost))
        return out

    def choose(self, slates: Sequence[Slate], *, none: bool = False) -> list[SlateScores]:
        """The first number of the reply wins; a reply without one leaves all options equal.

        Raises:
            ValueError: a slate has more than `MAX_OPTIONS` options.
        """
        for slate in slates:
            check_options(len(slate.candidates), none)
        question = GENERATIVE_PROMPT.choice + (GENERATIVE_PROMPT.choice_none if none else "")
        out = []
        for slate, reply, cost in self._ask(slates, question):
            options = range(0 if none else 1, len(slate.candidates) + 1)
            won = next((number for number in reply.numbers if number in options), None)
            notes = reply.notes
            if won is None:
                values = np.full(len(options), 1 / len(options))
                notes = tuple(dict.fromkeys((*notes, "the reply names no candidate")))
            else:
                values = np.full(len(options), _MISSING_SHARE / len(options))
                values[won - options[0]] += 1 - _MISSING_SHARE
            notes = (*notes, *self._cuts(slate))
            out.append(
                SlateScores(values[1:], notes, cost, float(values[0])) if none else SlateScores(values, notes, cost)
            )
        return out

    def _ask(self, slates: Sequence[Slate], question: str) -> list[tuple[Slate, Reply, Cost]]:
        prompts = [Prompt(GENERATIVE_PROMPT.system, self._words(slate, question)) for slate in slates]
        start = time.perf_counter()
        answers: list[Completion] = self._lm.generate(prompts, max_tokens=self._max_tokens)
        seconds = (time.perf_counter() - start) / max(1, len(slates))
        return [
            (
                slate,
                parse_numbers(a.text, len(slate.candidates), truncated=a.truncated),
                replace(a.cost, seconds=seconds),
            )
            for slate, a in zip(slates, answers, strict=True)
        ]

    def _words(self, slate: Slate, question: str) -> str:
        prompt = GENERATIVE_PROMPT
        # One line a text: none of them can look like the next candidate.
        lines, group = [], ""
        for n, candidate in enumerate(slate.candidates):
            if candidate.group != group:
                group = candidate.group
                lines += [prompt.group + self._shown(group)] if group else []
            title, text = self._shown(candidate.title), self._shown(candidate.text)
            lines.append(prompt.tag.format(n=n + 1) + ": ".join(filter(None, (title, text))))
        query = " ".join(slate.query.split())
        return f"{prompt.query}{query}{prompt.candidates}" + "\n".join(lines) + f"\n{prompt.query}{query}{question}"

    def _shown(self, text: str) -> str:
        """A text on one line, cut to the cap."""
        return " ".join(text.split()).encode(errors="replace")[: self._max_bytes].decode(errors="ignore")

    def _cuts(self, slate: Slate) -> list[str]:
        return [
            f"text of {c.id} cut to about {self._max_bytes // _BYTES_A_TOKEN} tokens"
            for c in slate.candidates
            if len(" ".join(c.text.split()).encode(errors="replace")) > self._max_bytes
        ]
