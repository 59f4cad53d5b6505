"""What each protocol is asked about a slate, and how its answer is read and checked.

`yes` and `choice` read a parsed answer to probabilities in the order of the slate, or say what is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...data_prep.hits import Cost
from ..prompts import SERVED_PROMPT
from ..protocols import Slate
from .wire import NONE, compact, option, write_state

# Probabilities of a choice may sum to 1 but for rounding: some servers send four digits of 255 options.
_SUM_TOLERANCE = 0.02
_LEAST = 1e-9


class WrongAnswer(ValueError):
    """What an answer lacks, or holds that cannot be."""


class WireProtocol(Protocol):
    """One way to ask. `path` is the endpoint; C candidates of a slate, O options (the candidates, then "none")."""

    path: str
    has_none: bool

    def ask_yes(self, model: str, slate: Slate) -> dict[str, Any]:
        """The request for one P(yes) a candidate."""
        ...

    def ask_choice(self, model: str, slate: Slate, names: list[str]) -> dict[str, Any]:
        """The request for one choice among options of these names."""
        ...

    def yes(self, answer: Mapping[str, Any], count: int) -> np.ndarray:
        """P(yes) of each candidate (C,)."""
        ...

    def choice(self, answer: Mapping[str, Any], names: list[str]) -> np.ndarray:
        """Probability of each option (O,), as sent."""
        ...


class SystemOne:
    """`POST /v1/systemone`: answers are a table by our ids of the questions."""

    path, has_none = "/v1/systemone", True

    def ask_yes(self, model: str, slate: Slate) -> dict[str, Any]:
        """One `noul` question a candidate."""
        questions = {option(n): {"type": "noul", "instructions": _question(n)} for n in range(len(slate.candidates))}
        return {"model": model, "state": write_state(slate), "questions": questions}

    def ask_choice(self, model: str, slate: Slate, names: list[str]) -> dict[str, Any]:
        """One `choice` question."""
        criteria = {name: _describe(name) for name in names}
        question = {"type": "choice", "instructions": SERVED_PROMPT.choice, "criteria": criteria}
        return {"model": model, "state": write_state(slate), "questions": {"choice": question}}

    def yes(self, answer: Mapping[str, Any], count: int) -> np.ndarray:
        """By id."""
        answers = _field(answer, "answers", dict)
        return np.array([_probability(self._of(answers, option(n), "noul"), "noul", option(n)) for n in range(count)])

    def choice(self, answer: Mapping[str, Any], names: list[str]) -> np.ndarray:
        """By the names of the options."""
        one = self._of(_field(answer, "answers", dict), "choice", "choice")
        return _by_name(_field(one, "probabilities", dict), names)

    def _of(self, answers: Mapping[str, Any], name: str, kind: str) -> Mapping[str, Any]:
        return _typed(_field(answers, name, dict), kind, name)


class Decisions:
    """`POST /v1/decisions`: answers are a list, with our names of the questions where the server repeats them.

    The state is JSON text: every server takes text, and no document can pretend to be another candidate.
    """

    path, has_none = "/v1/decisions", True

    def ask_yes(self, model: str, slate: Slate) -> dict[str, Any]:
        """One `predicate` question a candidate."""
        questions = [
            {"type": "predicate", "name": option(n), "instructions": _question(n)} for n in range(len(slate.candidates))
        ]
        return {"model": model, "input": compact(write_state(slate)), "questions": questions}

    def ask_choice(self, model: str, slate: Slate, names: list[str]) -> dict[str, Any]:
        """One `choice` question."""
        choices = [{"value": name} | ({"description": text} if (text := _describe(name)) else {}) for name in names]
        question = {"type": "choice", "name": "choice", "instructions": SERVED_PROMPT.choice, "choices": choices}
        return {"model": model, "input": compact(write_state(slate)), "questions": [question]}

    def yes(self, answer: Mapping[str, Any], count: int) -> np.ndarray:
        """By name."""
        answers = self._matched(answer, [option(n) for n in range(count)])
        return np.array([_probability(_typed(a, "predicate", name), "probability", name) for name, a in answers])

    def choice(self, answer: Mapping[str, Any], names: list[str]) -> np.ndarray:
        """By the values of the options."""
        [(name, one)] = self._matched(answer, ["choice"])
        table: dict[str, Any] = {}
        for item in _field(_typed(one, "choice", name), "probabilities", list):
            if not isinstance(item, dict) or not isinstance(item.get("value"), str):
                raise WrongAnswer("probabilities must be a list of objects with value and probability")
            if item["value"] in table:
                raise WrongAnswer(f"the option {item['value']!r} has two probabilities")
            table[item["value"]] = item.get("probability")
        return _by_name(table, names)

    def _matched(self, answer: Mapping[str, Any], names: list[str]) -> list[tuple[str, Mapping[str, Any]]]:
        """The answers in the order of `names`: by name, or by place where none has a name and none is missing."""
        answers = _field(answer, "answers", list)
        for one in answers:
            if not isinstance(one, dict):
                raise WrongAnswer("answers must be a list of objects")
        if all(one.get("name") is None for one in answers):
            if len(answers) != len(names):
                raise WrongAnswer(f"{len(answers)} answers without names to {len(names)} questions")
            return list(zip(names, answers, strict=True))
        by_name: dict[str, Mapping[str, Any]] = {}
        for one in answers:
            name = one.get("name")
            if not isinstance(name, str) or name in by_name:
                raise WrongAnswer(f"an answer is named {name!r}, which is no name, or that of another answer")
            by_name[name] = one
        return [(name, _field(by_name, name, dict)) for name in names]


@dataclass(slots=True)
class Rerank:
    """`POST /v1/rerank`: relevance scores by `index`; documents are judged by whatever the server does.

    A score is a probability, or with `logits` any number s that becomes 1 / (1 + exp(-s)): one fixed increasing map,
    so that values of several requests compare. The choice is the softmax of s, the log-odds of the values.
    """

    logits: bool = False
    path: str = "/v1/rerank"
    has_none: bool = False

    def ask_yes(self, model: str, slate: Slate) -> dict[str, Any]:
        """All candidates as documents under their headings."""
        documents = [
            "\n".join(part for part in (c.group, f"{c.title}: {c.text}" if c.title else c.text) if part)
            for c in slate.candidates
        ]
        return {"model": model, "query": slate.query, "documents": documents, "top_n": len(documents)}

    def ask_choice(self, model: str, slate: Slate, names: list[str]) -> dict[str, Any]:
        """The same."""
        return self.ask_yes(model, slate)

    def yes(self, answer: Mapping[str, Any], count: int) -> np.ndarray:
        """By index."""
        scores = self._scores(answer, count)
        if self.logits:
            return 0.5 * (1 + np.tanh(scores / 2))  # no overflow, whatever the score
        for n, score in enumerate(scores):
            if not 0 <= score <= 1:
                raise WrongAnswer(
                    f"the relevance of document {n} is {score:g}, no probability; use the protocol rerank_logits"
                )
        return scores

    def choice(self, answer: Mapping[str, Any], names: list[str]) -> np.ndarray:
        """Softmax of the log-odds."""
        if self.logits:
            scores = self._scores(answer, len(names))
        else:
            safe = np.clip(self.yes(answer, len(names)), _LEAST, 1 - _LEAST)
            scores = np.log(safe / (1 - safe))
        odds = np.exp(scores - scores.max())
        return np.asarray(odds / odds.sum())

    def _scores(self, answer: Mapping[str, Any], count: int) -> np.ndarray:
        scores: dict[int, float] = {}
        for one in _field(answer, "results", list):
            index = one.get("index") if isinstance(one, dict) else None
            if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
                raise WrongAnswer(f"a result has the index {index!r} where {count} documents were sent")
            if index in scores:
                raise WrongAnswer(f"document {index} has two results")
            scores[index] = _number(one.get("relevance_score"), f"the relevance of document {index}")
        for n in range(count):
            if n not in scores:
                raise WrongAnswer(f"the answer to document {n} is missing")
        return np.array([scores[n] for n in range(count)])


PROTOCOLS: dict[str, WireProtocol] = {
    "systemone": SystemOne(),
    "decisions": Decisions(),
    "rerank": Rerank(),
    "rerank_logits": Rerank(logits=True),
}


def normalised(values_O: np.ndarray) -> np.ndarray:
    """Probabilities of a choice that sum to 1; WrongAnswer where they are off by more than rounding."""
    total = float(values_O.sum())
    if abs(total - 1) > _SUM_TOLERANCE:
        raise WrongAnswer(f"the probabilities of the options sum to {total:.4g}, not to 1")
    # What is exact but for its last bits stays as it was sent.
    return values_O if abs(total - 1) < 1e-12 else values_O / total


def usage_cost(answer: Mapping[str, Any]) -> Cost:
    """Tokens that the server counted; nothing where it tells nothing."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return Cost()
    details = usage.get("input_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    read = next((_count(usage[k]) for k in ("input_tokens", "prompt_tokens", "total_tokens") if k in usage), 0)
    return Cost(
        prompt_tokens=max(0, read - cached), reused_tokens=cached, generated_tokens=_count(usage.get("output_tokens"))
    )


def _question(n: int) -> str:
    return SERVED_PROMPT.yes.format(id=option(n))


def _describe(name: str) -> str | None:
    return SERVED_PROMPT.none if name == NONE else None


def _by_name(table: Mapping[str, Any], names: list[str]) -> np.ndarray:
    if extra := [name for name in table if name not in names]:
        raise WrongAnswer(f"an option {extra[0]!r} that was not among the choices")
    return np.array([_probability(table, name, f"option {name}") for name in names])


def _field(table: Mapping[str, Any], key: str, kind: type) -> Any:
    if key not in table:
        raise WrongAnswer(f"the answer to {key!r} is missing" if key.isdigit() else f"{key!r} is missing")
    if not isinstance(table[key], kind):
        raise WrongAnswer(f"{key!r} must be {'a list' if kind is list else 'an object'}")
    return table[key]


def _typed(one: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
    if one.get("type") == "refusal":
        raise WrongAnswer(f"the model refuses to answer {name!r}")
    if one.get("type", kind) != kind:
        raise WrongAnswer(f"the answer to {name!r} has the type {one['type']!r} instead of {kind!r}")
    return one


def _probability(table: Mapping[str, Any], key: str, name: str) -> float:
    value = _number(table.get(key), f"the probability of {name}")
    if not 0 <= value <= 1:
        raise WrongAnswer(f"the probability of {name} is {value:g}, not between 0 and 1")
    return value


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise WrongAnswer(f"{what} is {'missing' if value is None else repr(value)[:40]}")
    try:
        number = float(value)
    except OverflowError as error:
        raise WrongAnswer(f"{what} is out of range") from error
    if not math.isfinite(number):
        raise WrongAnswer(f"{what} is {number}")
    return number


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
