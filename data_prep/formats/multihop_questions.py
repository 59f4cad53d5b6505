"""Questions of MuSiQue, HotpotQA and 2WikiMultihopQA in their official files, with the order of their gold paragraphs.

- MuSiQue (Trivedi et al. 2022), JSON Lines: `id, question, answer, paragraphs [{idx, title, paragraph_text,
  is_supporting}], question_decomposition [{question, answer, paragraph_support_idx}]`.
- HotpotQA (Yang et al. 2018), one JSON array: `_id, question, answer, type, supporting_facts [[title, sentence]],
  context [[title, [sentences]]]`.
- 2WikiMultihopQA (Ho et al. 2020), as HotpotQA, with `evidences [[subject, relation, object]]`, and `evidences_id` and
  `entity_ids`, which name the same in Wikidata.

All may be gzipped; an array may also be written as JSON Lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .jsonio import expect, optional, read_json, read_jsonl, require

_BRACKETED_END = re.compile(r"\s*\([^()]*\)\s*$")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Title and text of a paragraph, without white space around them; its text is its title where it had none."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """One question with what was given to answer it.

    gold: the paragraphs that it needs, none twice, in the order in which they are found where `ordered`. A paragraph
        that the record names but does not hold is its name, a string.
    others: the wrong paragraphs of the record, none twice.
    paragraphs: all of them in the record's order, which says nothing about which are gold; none twice.
    empty: how many paragraphs of the record had neither title nor text, and were left out.
    answerable: False where the record itself says that its paragraphs do not hold the answer (half of MuSiQue-Full);
        then nothing is gold.
    """

    id: str
    text: str
    answer: str
    kind: str
    gold: tuple[Paragraph | str, ...]
    ordered: bool
    others: tuple[Paragraph, ...]
    paragraphs: tuple[Paragraph, ...]
    empty: int = 0
    answerable: bool = True


def read_musique(path: str | Path, *, labelled: bool = True) -> Iterator[Question]:
    """The questions of a file; the order of the gold paragraphs is that of the decomposition.

    labelled: whether gold paragraphs must be there (they are not in the test file).

    Raises:
        ValueError: a missing or mistyped field, an id twice, or decomposition and `is_supporting` that disagree; names
            file and line.
    """
    for where, row in _records(path, "id"):
        paragraphs: dict[int, Paragraph] = {}
        supporting: set[int] = set()
        for number, value in enumerate(require(row, "paragraphs", list, where)):
            place = f"{where}['paragraphs'][{number}]"
            fields = expect(value, dict, place)
            index = require(fields, "idx", int, place)
            if index in paragraphs:
                raise ValueError(f"{place}: idx {index} appears twice")
            title, text = (require(fields, key, str, place).strip() for key in ("title", "paragraph_text"))
            paragraphs[index] = Paragraph(title, text or title)
            if optional(fields, "is_supporting", bool, place, False):
                supporting.add(index)
        if not optional(row, "answerable", bool, where, True):
            yield _question(row, "id", "unanswerable", ((), False), list(paragraphs.values()), where)
            continue
        steps = _musique_steps(row, where, labelled)
        gold = [paragraphs[s] if isinstance(s, int) and s in paragraphs else f"paragraph {s}" for s in steps]
        known = {step for step in steps if isinstance(step, int) and step in paragraphs}
        if known != supporting:
            raise ValueError(
                f"{where}: paragraphs {sorted(supporting)} are marked is_supporting, but the decomposition uses "
                f"{sorted(known)}"
            )
        kind = require(row, "id", str, where).partition("__")[0]
        yield _question(row, "id", kind, (gold, True), list(paragraphs.values()), where)


def _musique_steps(row: dict[str, Any], where: str, labelled: bool) -> list[int | str]:
    """For each step of the decomposition the number of its paragraph, or words where it has none."""
    steps: list[int | str] = []
    values = require(row, "question_decomposition", list, where) if labelled else []
    for number, value in enumerate(values):
        place = f"{where}['question_decomposition'][{number}]"
        fields = expect(value, dict, place)
        none = fields.get("paragraph_support_idx", 0) is None
        steps.append(f"of step {number + 1}" if none else require(fields, "paragraph_support_idx", int, place))
    return steps


def read_hotpotqa(path: str | Path, *, labelled: bool = True) -> Iterator[Question]:
    """The questions of a file; see `bridge_order` for the order of the gold paragraphs of a bridge question.

    Raises:
        ValueError: a missing or mistyped field, or an id twice; names file and record.
    """
    return _read_titled(path, labelled, _hotpotqa_order)


def read_2wiki(path: str | Path, *, labelled: bool = True) -> Iterator[Question]:
    """The questions of a file; the order of the gold paragraphs is that of the subjects of the evidence triples.

    Comparison questions have no order; bridge comparisons have: each second paragraph comes after its first one.

    Raises:
        ValueError: a missing or mistyped field, or an id twice; names file and record.
    """
    return _read_titled(path, labelled, _2wiki_order)


READERS: Mapping[str, Callable[..., Iterator[Question]]] = {
    "musique": read_musique,
    "hotpotqa": read_hotpotqa,
    "2wiki": read_2wiki,
}

_Order = Callable[[dict[str, Any], Sequence[str], Mapping[str, Paragraph], str], tuple[list[str], bool]]


def _read_titled(path: str | Path, labelled: bool, order: _Order) -> Iterator[Question]:
    for where, row in _records(path, "_id"):
        paragraphs = []
        for number, value in enumerate(require(row, "context", list, where)):
            place = f"{where}['context'][{number}]"
            title, sentences = _pair(value, place, list)
            parts = [expect(sentence, str, f"{place}[1]") for sentence in sentences]
            title = title.strip()
            paragraphs.append(Paragraph(title, join_sentences(parts) or title))
        by_title: dict[str, Paragraph] = {}
        for paragraph in paragraphs:
            by_title.setdefault(paragraph.title, paragraph)
        facts = require(row, "supporting_facts", list, where) if labelled else []
        titles = [_pair(fact, f"{where}['supporting_facts'][{n}]", int)[0].strip() for n, fact in enumerate(facts)]
        in_order, ordered = order(row, list(dict.fromkeys(titles)), by_title, where)
        kind = optional(row, "type", str, where, "")
        gold: list[Paragraph | str] = [by_title.get(title, title) for title in in_order]
        yield _question(row, "_id", kind, (gold, ordered), paragraphs, where)


def join_sentences(sentences: Sequence[str]) -> str:
    """One text of a paragraph's sentences: HotpotQA keeps the space between two with the second, 2Wiki with neither."""
    text = ""
    for sentence in sentences:
        gap = "" if not text or text[-1:].isspace() or sentence[:1].isspace() else " "
        text += f"{gap}{sentence}" if sentence.strip() else ""
    return text.strip()


def bridge_order(titles: Sequence[str], texts: Sequence[str]) -> list[int] | None:
    """Positions of two paragraphs in the order of reading: the one whose title stands in the other's text comes second.

    Titles are looked for as whole words, first as they are, then without regard to case, then without what stands in
    brackets at their end. None: not two paragraphs, neither title stands in the other's text, or both do.
    """
    if len(titles) != 2:
        return None
    bare = [_BRACKETED_END.sub("", title) for title in titles]
    for names, flags in ((titles, 0), (titles, re.IGNORECASE), (bare, re.IGNORECASE)):
        second_in_first, first_in_second = (_mentions(texts[i], names[1 - i], flags) for i in (0, 1))
        if second_in_first != first_in_second:
            return [0, 1] if second_in_first else [1, 0]
        if second_in_first:
            return None
    return None


def _mentions(text: str, name: str, flags: int) -> bool:
    return bool(name) and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, flags) is not None


def _hotpotqa_order(
    row: dict[str, Any], titles: Sequence[str], paragraphs: Mapping[str, Paragraph], where: str
) -> tuple[list[str], bool]:
    order = None
    if titles and require(row, "type", str, where) == "bridge":
        order = bridge_order(titles, [paragraphs[t].text if t in paragraphs else "" for t in titles])
    return (list(titles), False) if order is None else ([titles[i] for i in order], True)


def _2wiki_order(
    row: dict[str, Any], titles: Sequence[str], paragraphs: Mapping[str, Paragraph], where: str
) -> tuple[list[str], bool]:
    if not titles or require(row, "type", str, where) == "comparison":
        return list(titles), False
    names = _subjects(require(row, "evidences", list, where), f"{where}['evidences']")
    ids = _subjects(optional(row, "evidences_id", list, where, []), f"{where}['evidences_id']")
    entities = optional(row, "entity_ids", str, where, "").split("_")
    order = evidence_order(titles, names)
    # A name may be an alias of the title; its id is not, but the ids are not always given.
    if order is None and len(entities) == len(titles) and sorted(ids) == sorted(entities):
        order = [entities.index(entity) for entity in ids]
    return (list(titles), False) if order is None else ([titles[i] for i in order], True)


def evidence_order(titles: Sequence[str], subjects: Sequence[str]) -> list[int] | None:
    """Positions of the titles in the order of the subjects (none twice); None where the two are not the same names."""
    for change in (str, lambda name: _BRACKETED_END.sub("", name).casefold()):
        places = {change(title): position for position, title in enumerate(titles)}
        found = [places.get(change(subject)) for subject in subjects]
        order = [position for position in found if position is not None]
        if len(order) == len(found) and len(places) == len(titles) and sorted(order) == list(range(len(titles))):
            return order
    return None


def _subjects(triples: list[object], where: str) -> list[str]:
    """The first part of each triple, none twice."""
    firsts = []
    for number, triple in enumerate(triples):
        parts = expect(triple, list, f"{where}[{number}]")
        if len(parts) != 3:
            raise ValueError(f"{where}[{number}] has {len(parts)} parts, not subject, relation, object")
        firsts.append(expect(parts[0], str, f"{where}[{number}][0]").strip())
    return list(dict.fromkeys(firsts))


def _records(path: str | Path, id_key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, record) of JSON Lines or of a JSON array, told by the file's name; no id twice."""
    file = Path(path)
    if ".jsonl" in file.name:
        rows = ((f"{file}:{number}", row) for number, row in read_jsonl(file))
    else:
        values = expect(read_json(file), list, str(file))
        rows = ((f"{file}[{number}]", expect(row, dict, f"{file}[{number}]")) for number, row in enumerate(values))
    seen: set[str] = set()
    for where, row in rows:
        record_id = require(row, id_key, str, where)
        if optional(row, "answerable", bool, where, True):  # MuSiQue-Full has the others under the same ids
            if record_id in seen:
                raise ValueError(f"{where}: {id_key} {record_id!r} appears twice")
            seen.add(record_id)
        yield where, row


def _pair(value: object, where: str, kind: type) -> tuple[str, Any]:
    parts = expect(value, list, where)
    if len(parts) != 2:
        raise ValueError(f"{where} has {len(parts)} parts, not 2")
    return expect(parts[0], str, f"{where}[0]"), expect(parts[1], kind, f"{where}[1]")


def _question(
    row: dict[str, Any],
    id_key: str,
    kind: str,
    chain: tuple[Sequence[Paragraph | str], bool],
    paragraphs: Sequence[Paragraph],
    where: str,
) -> Question:
    gold, ordered = chain
    # What has no text at all cannot be found: as gold it is missing, otherwise it is left out.
    named = tuple(dict.fromkeys(f"number {n} without text" if _empty(p) else p for n, p in enumerate(gold, 1)))
    given = tuple(dict.fromkeys(p for p in paragraphs if not _empty(p)))
    text = require(row, "question", str, where)
    if not text.strip():
        raise ValueError(f"{where}['question'] is empty")
    return Question(
        id=require(row, id_key, str, where),
        text=text.strip(),
        answer=optional(row, "answer", str, where, "").strip(),
        kind=kind,
        gold=named,
        ordered=ordered and len(named) > 1,
        others=tuple(p for p in given if p not in named),
        paragraphs=given,
        empty=sum(_empty(p) for p in paragraphs),
        answerable=optional(row, "answerable", bool, where, True),
    )


def _empty(paragraph: Paragraph | str) -> bool:
    return isinstance(paragraph, Paragraph) and not paragraph.text
