"""From a request of a client to slates for a scorer, and from its answers to the response.

The state decides what a question means:

- A slate (see `wire.py`; also as the JSON text of one): yes/no questions refer to one candidate each, and a choice is
  among all candidates by their ids, with or without the option "none". All questions of a request read the same slate.
- Any other state is plain. A yes/no question is the query of a slate whose one candidate is the state. A choice or a
  score is a slate of its options or levels; its query is the question, then the state.

Names of questions and other questions change no answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from ...data_prep.hits import Cost
from ..protocols import Candidate, Slate, SlateScores
from .wire import MAX_OPTIONS, NONE, Malformed, asked_about, compact, is_slate, read_state

Loc = tuple[str | int, ...]
Json = dict[str, Any]

YES, CHOOSE, CHOOSE_OR_NONE = "yes", "choose", "choose or none"


@dataclass(frozen=True, slots=True)
class Ask:
    """A slate and what is asked about it; one that may be split holds any number of candidates."""

    kind: str
    slate: Slate
    may_split: bool = False


@dataclass(slots=True)
class Plan:
    """What a request needs, in `asks`, and how the answers become its response."""

    asks: list[Ask] = field(default_factory=list)
    respond: Callable[[Sequence[SlateScores]], Json] = lambda answers: {}

    def add(self, ask: Ask) -> int:
        """Place of the answer to `ask`; the same question is asked once."""
        if ask not in self.asks:
            self.asks.append(ask)
        return self.asks.index(ask)


@dataclass(frozen=True, slots=True)
class Question:
    """A question of either protocol. `options`: names and descriptions (choice), or levels in order (score)."""

    kind: str
    text: str
    loc: Loc
    options: tuple[tuple[str, str], ...] = ()


Reader = Callable[[Sequence[SlateScores]], np.ndarray]


def plan_systemone(body: Mapping[str, Any], model: str) -> Plan:
    """`POST /v1/systemone`. Raises Malformed."""
    _known(body, ("model", "state", "questions"), ())
    state = body.get("state")
    if not isinstance(state, (str, dict, list)):
        raise Malformed(("state",), _MISSING if state is None else "must be text, an object or a list")
    table = body.get("questions")
    if not isinstance(table, dict) or not table:
        raise Malformed(("questions",), "must be an object of at least one question")
    slate = _slate(state, ("state",))
    plan = Plan()
    questions = {name: _systemone_question(q, ("questions", name)) for name, q in table.items()}
    readers = {name: _plan_question(plan, slate, _text(state), q) for name, q in questions.items()}

    def respond(answers: Sequence[SlateScores]) -> Json:
        said = {name: _systemone_answer(questions[name], read(answers)) for name, read in readers.items()}
        cost = _total(answers)
        usage = {"input_tokens": cost.prompt_tokens + cost.reused_tokens, "output_tokens": 0}
        return _noted({"model": model, "answers": said, "usage": usage}, answers)

    plan.respond = respond
    return plan


def plan_decisions(body: Mapping[str, Any], model: str) -> Plan:
    """`POST /v1/decisions`. Raises Malformed."""
    _known(body, ("model", "input", "questions"), ("prompt_cache_key", "prompt_cache_options", "safety_identifier"))
    state = _decisions_input(body.get("input"))
    rows = body.get("questions")
    if not isinstance(rows, list) or not 1 <= len(rows) <= 400:
        raise Malformed(("questions",), "must be a list of 1 to 400 questions")
    slate = _slate(state, ("input",))
    plan = Plan()
    questions = [_decisions_question(q, ("questions", n)) for n, q in enumerate(rows)]
    readers = [_plan_question(plan, slate, state, q) for q in questions]

    def respond(answers: Sequence[SlateScores]) -> Json:
        said = [
            {**_decisions_answer(q, read(answers)), "name": row.get("name")}
            for q, read, row in zip(questions, readers, rows, strict=True)
        ]
        cost = _total(answers)
        tokens = cost.prompt_tokens + cost.reused_tokens
        usage = {
            "input_tokens": tokens,
            "input_tokens_details": {"cached_tokens": cost.reused_tokens, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens,
        }
        return _noted({"model": model, "answers": said, "usage": usage}, answers)

    plan.respond = respond
    return plan


def plan_rerank(body: Mapping[str, Any], model: str) -> Plan:
    """`POST /v1/rerank`: P(yes) of each document, in as many slates as they need. Raises Malformed."""
    _known(body, ("query", "documents"), ("model", "top_n", "return_documents"))
    query, rows, top_n = body.get("query"), body.get("documents"), body.get("top_n")
    if not isinstance(query, str):
        raise Malformed(("query",), _MISSING if query is None else "must be text")
    if not isinstance(rows, list) or not rows:
        raise Malformed(("documents",), "must be a list of at least one document")
    if top_n is not None and (not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 1):
        raise Malformed(("top_n",), "must be a whole number of 1 or more")
    documents = []
    for n, row in enumerate(rows):
        text = row.get("text") if isinstance(row, dict) else row
        if not isinstance(text, str):
            raise Malformed(("documents", n), "must be text, or an object with `text`")
        documents.append(text)
    slate = Slate(query, tuple(Candidate(f"document {n}", "", text) for n, text in enumerate(documents)))
    plan = Plan([Ask(YES, slate, may_split=True)])

    def respond(answers: Sequence[SlateScores]) -> Json:
        [scores] = answers
        order = np.argsort(-scores.values_C, kind="stable")[:top_n]
        results: list[Json] = [{"index": int(i), "relevance_score": float(scores.values_C[i])} for i in order]
        if body.get("return_documents") is True:
            results = [{**one, "document": {"text": documents[int(one["index"])]}} for one in results]
        tokens = scores.cost.prompt_tokens + scores.cost.reused_tokens
        return _noted({"model": model, "results": results, "usage": {"total_tokens": tokens}}, answers)

    plan.respond = respond
    return plan


_MISSING = "missing"


def _known(body: Mapping[str, Any], needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
    for key in body:
        # Extensions begin with x_ in the published format, and who sends one expects others to ignore it.
        if key not in (*needed, *optional) and not key.startswith("x_"):
            raise Malformed((key,), f"unknown here; there are: {', '.join((*needed, *optional))}")
    for key in needed:
        if key not in body:
            raise Malformed((key,), _MISSING)


def _slate(state: object, loc: Loc) -> Slate | None:
    """The slate that a state or its JSON text holds; None where the state is plain."""
    if isinstance(state, str) and state.startswith("{"):
        try:
            state = json.loads(state)
        except (ValueError, RecursionError):
            return None
    return read_state(state, loc) if is_slate(state) and isinstance(state, dict) else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else compact(value)


def _plan_question(plan: Plan, slate: Slate | None, state: str, question: Question) -> Reader:
    """Adds what a question needs; the reader gives [P(yes)], or the probability of each option."""
    if slate is not None:
        return _about_slate(plan, slate, question)
    if question.kind == "yes":
        place = plan.add(Ask(YES, Slate(question.text, (Candidate("state", "", state),))))
        return lambda answers: answers[place].values_C
    options = tuple(Candidate(f"option {n}", name, text) for n, (name, text) in enumerate(question.options))
    place = plan.add(Ask(CHOOSE, Slate(f"{question.text}\n{state}" if question.text else state, options)))
    return lambda answers: answers[place].values_C


def _about_slate(plan: Plan, slate: Slate, question: Question) -> Reader:
    if question.kind == "score":
        raise Malformed(question.loc, "a score needs a plain state, not a slate of candidates; ask yes/no about each")
    if question.kind == "yes":
        n = asked_about(question.text, slate, (*question.loc, "instructions"))
        place = plan.add(Ask(YES, slate))
        return lambda answers: answers[place].values_C[n : n + 1]
    ids = {candidate.id: n for n, candidate in enumerate(slate.candidates)}
    names = [name for name, _ in question.options]
    none = NONE in names and NONE not in ids
    if set(names) - ({NONE} if none else set()) != set(ids):
        raise Malformed(question.loc, 'a choice about a slate has the ids of all its candidates as options, and "none"')
    place = plan.add(Ask(CHOOSE_OR_NONE if none else CHOOSE, slate))

    def read(answers: Sequence[SlateScores]) -> np.ndarray:
        values = {name: float(answers[place].values_C[n]) for name, n in ids.items()}
        if none:
            values[NONE] = float(answers[place].none or 0.0)
        return np.array([values[name] for name in names])

    return read


def _systemone_question(row: object, loc: Loc) -> Question:
    if not isinstance(row, dict):
        raise Malformed(loc, "must be an object")
    kind = row.get("type")
    if kind not in ("noul", "choice", "score"):
        raise Malformed((*loc, "type"), f"is {kind!r}; this server answers: noul, choice, score")
    text, criteria = _text(row.get("instructions") or ""), row.get("criteria")
    where = (*loc, "criteria")
    if kind == "noul":
        if criteria is not None and (not isinstance(criteria, dict) or criteria.keys() - {"true", "false"}):
            raise Malformed(where, "must be an object with `true`, `false` or both")
        means = [f"{word}: {_text(criteria[key])}" for key, word in _WORDS if criteria and criteria.get(key)]
        text = "\n".join([text, *means] if text else means)
        if not text:
            raise Malformed((*loc, "instructions"), _MISSING)
        return Question("yes", text, loc)
    if kind == "choice":
        if not isinstance(criteria, dict):
            raise Malformed(where, "must be an object of names and descriptions")
        options = tuple((name, _text(what or "")) for name, what in criteria.items())
    else:
        if not isinstance(criteria, list):
            raise Malformed(where, "must be a list of levels")
        options = tuple(("", _text(level)) for level in criteria)
    return Question(kind, text, loc, _counted(options, where, least=1))


_WORDS = (("true", "yes"), ("false", "no"))


def _counted(options: tuple[tuple[str, str], ...], loc: Loc, least: int) -> tuple[tuple[str, str], ...]:
    if not least <= len(options) <= MAX_OPTIONS:
        raise Malformed(
            loc,
            f"has {len(options)} options, and may have {least} to {MAX_OPTIONS}; ask yes/no about each first and let "
            "the best choose",
        )
    return options


def _decisions_input(value: object) -> str:
    """The text of an input: words, or messages of text and JSON parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise Malformed(("input",), "must be text or a list of messages")
    parts = []
    for n, message in enumerate(value):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            content = [{"type": "input_text", "text": content}]
        if not isinstance(content, list):
            raise Malformed(("input", n), "must be a message with content; calls of tools are not read here")
        parts += [_part(part, ("input", n, "content", i)) for i, part in enumerate(content)]
    return "\n".join(parts)


def _part(part: object, loc: Loc) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and part.get("type") == "input_json" and "data" in part:
        return compact(part["data"])
    raise Malformed(loc, "must be a part of type input_text or input_json")


def _decisions_question(row: object, loc: Loc) -> Question:
    if not isinstance(row, dict):
        raise Malformed(loc, "must be an object")
    kind = row.get("type")
    if kind not in ("predicate", "choice", "score"):
        raise Malformed((*loc, "type"), f"is {kind!r}; this server answers: predicate, choice, score")
    if not isinstance(row.get("name"), (str, type(None))):
        raise Malformed((*loc, "name"), "must be text")
    text = row.get("instructions")
    if isinstance(text, list):
        text = "\n".join(_part(part, (*loc, "instructions", n)) for n, part in enumerate(text))
    if not isinstance(text, str) or not text:
        raise Malformed((*loc, "instructions"), _MISSING if not text else "must be text or a list of parts")
    if kind == "predicate":
        return Question("yes", text, loc)
    key, name = ("choices", "value") if kind == "choice" else ("levels", "label")
    return Question(kind, text, loc, _counted(_listed(row.get(key), name, (*loc, key)), (*loc, key), least=2))


def _listed(rows: object, name: str, loc: Loc) -> tuple[tuple[str, str], ...]:
    """Options that are objects of a name under `name` and a description."""
    if not isinstance(rows, list):
        raise Malformed(loc, "must be a list")
    options: dict[str, str] = {}
    for n, row in enumerate(rows):
        value, what = (row.get(name), row.get("description", "")) if isinstance(row, dict) else (None, "")
        if not isinstance(value, str) or not isinstance(what, str):
            raise Malformed((*loc, n), f"must be an object with the text `{name}`, and `description` if you like")
        if value in options:
            raise Malformed((*loc, n), f"{value!r} stands there twice")
        options[value] = what
    return tuple(options.items())


def _systemone_answer(question: Question, values: np.ndarray) -> Json:
    if question.kind == "yes":
        return {"type": "noul", "noul": float(values[0])}
    if question.kind == "choice":
        names = [name for name, _ in question.options]
        probabilities = dict(zip(names, map(float, values), strict=True))
        best = names[int(values.argmax())]
        confidence = choice_confidence(values)
        return {"type": "choice", "choice": best, "probabilities": probabilities, "confidence": confidence}
    return {
        "type": "score",
        "score": float(values @ np.arange(len(values))),
        "legend": {str(n): text for n, (_, text) in enumerate(question.options)},
        "probabilities": {str(n): float(value) for n, value in enumerate(values)},
        "confidence": score_confidence(values),
    }


def _decisions_answer(question: Question, values: np.ndarray) -> Json:
    if question.kind == "yes":
        return {"type": "predicate", "probability": float(values[0])}
    names = [name for name, _ in question.options]
    if question.kind == "choice":
        pairs = [{"value": name, "probability": float(p)} for name, p in zip(names, values, strict=True)]
        best = names[int(values.argmax())]
        return {"type": "choice", "choice": best, "confidence": choice_confidence(values), "probabilities": pairs}
    levels = [{"label": n, "value": i, "probability": float(values[i])} for i, n in enumerate(names)]
    score = float(values @ np.arange(len(values)))
    return {"type": "score", "score": score, "confidence": score_confidence(values), "probabilities": levels}


def choice_confidence(values: np.ndarray) -> float:
    """(p_max - 1/n) / (1 - 1/n): 0 where all n options are alike, 1 where one is certain (jevcompat, 4.5)."""
    n = len(values)
    return 1.0 if n == 1 else float(np.clip((values.max() - 1 / n) / (1 - 1 / n), 0.0, 1.0))


def score_confidence(values: np.ndarray) -> float:
    """1 - (mean distance from the likeliest level) / (the same if all levels were alike), at least 0 (as above)."""
    distance = np.abs(np.arange(len(values)) - int(values.argmax()))
    return 1.0 if len(values) == 1 else float(np.clip(1 - values @ distance / distance.mean(), 0.0, 1.0))


def _total(answers: Sequence[SlateScores]) -> Cost:
    return reduce(Cost.__add__, (answer.cost for answer in answers), Cost())


def _noted(response: Json, answers: Sequence[SlateScores]) -> Json:
    """The response, with what was cut to fit as an extension."""
    notes = list(dict.fromkeys(note for answer in answers for note in answer.notes))
    return {**response, "x_notes": notes} if notes else response
