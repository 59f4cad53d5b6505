"""Tables that compare systems: on the terminal, and in Markdown for `docs/results.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from ..data_prep.hits import Cost
from .ledger import LedgerRow
from .metrics import Evaluation, describe_conventions
from .significance import paired
from .trace_view import visible


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemResult:
    """What one system scored on one suite, and what it cost.

    searched: queries that were asked; `cost` is their sum (and the largest concurrency).
    ledger: the cost of each level, and what survived it.
    """

    name: str
    evaluation: Evaluation
    cost: Cost
    searched: int
    ledger: tuple[LedgerRow, ...] = ()

    @property
    def seconds_per_query(self) -> float:
        """Mean wall time of a query."""
        return self.cost.seconds / self.searched

    @property
    def tokens_per_query(self) -> float:
        """Mean tokens that a forward pass read or wrote for a query; cached ones are not in it."""
        return (self.cost.prompt_tokens + self.cost.generated_tokens) / self.searched

    @property
    def values(self) -> dict[str, float]:
        """Metric name -> mean."""
        return self.evaluation.values

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values: name, means, counts, conventions, and cost a query."""
        return {
            "name": self.name,
            **self.evaluation.as_dict(),
            "searched": self.searched,
            "seconds_per_query": self.seconds_per_query,
            "tokens_per_query": self.tokens_per_query,
            "requests_per_query": self.cost.requests / self.searched,
            "forwards_per_query": self.cost.forwards / self.searched,
            "reused_tokens_per_query": self.cost.reused_tokens / self.searched,
            "max_concurrency": self.cost.max_concurrency,
            "usd_per_query": self.cost.usd / self.searched,
            "ledger": [{**asdict(row), "survival": row.survival} for row in self.ledger],
        }


def compare_table(results: Sequence[SystemResult], *, title: str | None = None) -> Table:
    """A rich table: a row a system, a column a metric (the best value bold), then seconds and tokens a query.

    Raises:
        ValueError: no results.
    """
    columns, rows, best = _cells(results)
    caption = " ".join(_notes(results))
    table = Table(title=None if title is None else Text(visible(title)), caption=Text(caption) if caption else None)
    table.caption_justify = "left"
    for number, column in enumerate(columns):
        # On a narrow terminal headings and names break over lines; a number is never cut.
        width = max(len(row[number]) for row in rows) if number else 8
        table.add_column(Text(column), justify="right" if number else "left", overflow="fold", min_width=width)
    for number, row in enumerate(rows):
        table.add_row(*(Text(cell, style="bold" if (number, c) in best else "") for c, cell in enumerate(row)))
    return table


def markdown_table(results: Sequence[SystemResult], *, command: str | None = None) -> str:
    """The same table in Markdown (best values bold), its notes, and the command that made it.

    Raises:
        ValueError: no results.
    """
    columns, rows, best = _cells(results)
    lines = [_markdown_row(columns), _markdown_row(["---"] + ["---:"] * (len(columns) - 1))]
    for number, row in enumerate(rows):
        cells = [_escape(cell) for cell in row]
        lines.append(_markdown_row([f"**{cell}**" if (number, c) in best else cell for c, cell in enumerate(cells)]))
    notes = _notes(results)
    if notes:
        lines += ["", *(_escape(note) for note in notes)]
    if command is not None:
        lines += ["", f"`{command}`"]
    return "\n".join(lines) + "\n"


def compare_lines(results: Sequence[SystemResult], metric: str) -> list[str]:
    """The first system against each other one on the same queries, a line each (`significance.paired`)."""
    first, *others = results
    lines = []
    for other in others:
        ours, theirs = first.evaluation.per_query[metric], other.evaluation.per_query[metric]
        if ours.keys() == theirs.keys():
            lines.append(f"{metric}, {visible(first.name)} less {visible(other.name)}: {paired(ours, theirs)}")
    return lines


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    for character in "\\|`*_<[":
        text = text.replace(character, "\\" + character)
    return text


def _cells(results: Sequence[SystemResult]) -> tuple[list[str], list[list[str]], set[tuple[int, int]]]:
    """(column names, text of each row, positions of the best values)."""
    if not results:
        raise ValueError("no results to compare")
    metrics = list(dict.fromkeys(metric for result in results for metric in result.values))
    columns = ["system", *metrics, "queries", "s/query", "tokens/query"]
    rows = [
        [
            visible(result.name),
            *(f"{result.values[m]:.3f}" if m in result.values else "-" for m in metrics),
            str(result.evaluation.counts.queries),
            f"{result.seconds_per_query:.3g}",
            f"{result.tokens_per_query:,.0f}",
        ]
        for result in results
    ]
    best: set[tuple[int, int]] = set()
    if len(results) > 1:
        for column, _ in enumerate(metrics, start=1):
            top = max(rows[r][column] for r in range(len(rows)) if rows[r][column] != "-")
            best |= {(r, column) for r in range(len(rows)) if rows[r][column] == top}
    return columns, rows, best


def _notes(results: Sequence[SystemResult]) -> list[str]:
    """What a reader of the table must know, a sentence each."""
    notes = []
    for result in results:
        counts, name = result.evaluation.counts, visible(result.name)
        if counts.missing:
            notes.append(f"{name}: {counts.missing} queries have no ranking and count 0.")
        if counts.empty:
            notes.append(f"{name}: {counts.empty} rankings are empty and count 0.")
        if counts.extra:
            notes.append(f"{name}: {counts.extra} rankings are of unjudged queries and are left out.")
    first = results[0].evaluation
    if first.counts.without_positives:
        what = "count 0" if first.conventions.no_positives == "miss" else "are left out"
        notes.append(f"{first.counts.without_positives} queries have no relevant document and {what}.")
    if first.counts.dangling:
        notes.append(f"{first.counts.dangling} relevant documents are not in the corpus.")
    if len({result.evaluation.counts.queries for result in results}) > 1:
        notes.append("The rows are means over different numbers of queries and do not compare.")
    conventions = describe_conventions(first.conventions)
    if conventions:
        notes.append(f"Conventions: {conventions}.")
    if any(result.evaluation.conventions != first.conventions for result in results):
        notes.append("The rows follow different conventions and do not compare.")
    return notes
