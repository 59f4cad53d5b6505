"""One search, step by step, as text: what was shown to the model, what it thought, what went on.

Titles, ids and notes come from documents and models: they are printed as data. A control or direction character
in them shows as an escape and moves no cursor, and rich markup in them stays text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from ..data_prep.hits import Cost, Hits, Step

if TYPE_CHECKING:
    from ..data_prep.corpus import Corpus

_TITLE_LENGTH = 72
_JOINERS = "\u200c\u200d"  # part of correct spelling in Persian and Indic scripts, and harmless


def visible(text: str, length: int | None = None) -> str:
    r"""`text` on one line, at most `length` characters, with every character that could steer a terminal escaped.

    Runs of white space become one space; control, format, surrogate, private and line separating characters become
    `\x1b`, `\u202e` and so on.
    """
    text = " ".join(text.split())
    if length is not None and len(text) > length:
        text = text[: length - 1] + "…"
    return "".join(_escaped(character) for character in text)


def _escaped(character: str) -> str:
    category = unicodedata.category(character)
    if character in _JOINERS or (category[0] != "C" and category not in ("Zl", "Zp")):
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def trace_text(
    hits: Hits,
    *,
    corpus: Corpus | None = None,
    gold: Collection[str] = (),
    query: str | None = None,
    top: int = 10,
) -> Text:
    """The walk of one query for a rich console; `.plain` is the same without colours.

    Each step shows its `top` candidates by score: `>` went on, `*` is gold or leads to gold. Where a gold
    candidate ranks below those, or nothing gold was among the candidates, a line says so. The final ranking follows.

    Args:
        hits: a ranking with its trace.
        corpus: gives titles, and the parents of gold nodes.
        gold: ids of the relevant nodes.
        query: shown above.
        top: candidates shown a step.
    """
    if top < 1:
        raise ValueError(f"top={top} must be 1 or more")
    text = Text()
    if query is not None:
        text.append(f"query: {visible(query)}\n", style="bold")
    for number, step in enumerate(hits.trace, start=1):
        text.append_text(step_text(step, number, corpus=corpus, gold=gold, top=top))
    if not hits.trace:
        text.append("no trace was kept for this search\n")
    return text.append_text(result_text(hits, corpus=corpus, gold=gold, top=top))


def step_text(
    step: Step, number: int, *, corpus: Corpus | None = None, gold: Collection[str] = (), top: int = 10
) -> Text:
    """One step as `trace_text` shows it, to print while a search is still going on; `number` counts from 1."""
    text = Text()
    for line in _step_lines(number, step, corpus, _with_ancestors(gold, corpus), top):
        text.append_text(line).append("\n")
    return text


def result_text(hits: Hits, *, corpus: Corpus | None = None, gold: Collection[str] = (), top: int = 10) -> Text:
    """The final ranking and its cost, as `trace_text` shows them below the steps."""
    leads = _with_ancestors(gold, corpus)
    text = Text(f"result: {len(hits)} hits{_cost(hits.cost)}\n", style="bold")
    lines = Text()
    for rank, (node, score) in enumerate(zip(hits.ids[:top], hits.scores[:top], strict=True), start=1):
        lines.append_text(_candidate(rank, node, score, False, node in leads, corpus)).append("\n")
    return Text().append_text(text).append_text(lines)


def _step_lines(number: int, step: Step, corpus: Corpus | None, leads: Collection[str], top: int) -> Iterator[Text]:
    scored = sorted(zip(step.ids, step.scores, strict=True), key=lambda pair: -pair[1])
    kept = set(step.kept)
    cut = len(scored) - sum(node in kept for node, _ in scored)
    name = visible(step.name)
    yield Text(f"{number}. {name}: {len(scored)} candidates, {cut} cut{_cost(step.cost)}", style="bold")
    gold_shown = False
    for rank, (node, score) in enumerate(scored, start=1):
        is_gold = node in leads
        if rank <= top or is_gold:
            yield _candidate(rank, node, score, node in kept, is_gold, corpus)
        gold_shown |= is_gold
    below = len(scored) - top - sum(node in leads for node, _ in scored[top:])
    if below > 0:
        yield Text(f"       ... {below} more", style="dim")
    if leads and not gold_shown:
        yield Text("       no candidate is gold or leads to it", style="red")
    for note in step.notes:
        yield Text(f"       note: {visible(note)}", style="yellow")


def _candidate(rank: int, node: str, score: float, kept: bool, gold: bool, corpus: Corpus | None) -> Text:
    title = _title(node, corpus)
    label = f"{title}  [{visible(node)}]" if title else visible(node)
    marks = (">" if kept else " ") + ("*" if gold else " ")
    style = "green" if gold else "" if kept else "dim"
    return Text(f"  {marks} {rank:>4} {_number(score):>7}  {label}", style=style)


def _title(node: str, corpus: Corpus | None) -> str:
    if corpus is None or node not in corpus:
        return ""
    row = corpus.row(node)
    return visible(corpus.title(row), _TITLE_LENGTH) or visible(corpus.text(row), _TITLE_LENGTH)


def _number(score: float) -> str:
    """Three digits for probabilities; four significant ones for anything else."""
    return f"{score:.3f}" if 0.001 <= abs(score) < 10 or score == 0 else f"{score:.3g}"


def _cost(cost: Cost) -> str:
    parts: Sequence[tuple[float, str]] = (
        (cost.requests, f"{cost.requests} requests"),
        (cost.prompt_tokens, f"{cost.prompt_tokens:,} tokens read"),
        (cost.reused_tokens, f"{cost.reused_tokens:,} reused"),
        (cost.generated_tokens, f"{cost.generated_tokens:,} written"),
        (cost.seconds, f"{cost.seconds:.3g} s"),
    )
    shown = [text for value, text in parts if value]
    return f" ({', '.join(shown)})" if shown else ""


def _with_ancestors(gold: Collection[str], corpus: Corpus | None) -> set[str]:
    found = set(gold)
    if corpus is not None:
        for node in gold:
            if node in corpus:
                found.update(corpus.id(row) for row in corpus.path(corpus.row(node)))
    return found
