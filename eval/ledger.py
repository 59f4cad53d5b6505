"""The ledger: what each level of a search cost, whether the right path survived it, and the latency to expect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
from rich.table import Table
from rich.text import Text

from ..data_prep.corpus import Corpus
from ..data_prep.hits import Cost, Hits, Step
from .metrics import Qrels
from .trace_view import visible


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One level (or other step) of all searches that came to it.

    queries: how many did. candidates: how many nodes were judged there, kept: how many went on, of all queries.
    survived: queries of which a gold node, or one that leads to it, went on; reachable: those that have any gold node
        in the corpus. cost: of all queries.
    """

    name: str
    queries: int
    candidates: int
    kept: int
    survived: int
    reachable: int
    cost: Cost

    @property
    def survival(self) -> float | None:
        """Share of the reachable queries whose right path went on; None without any."""
        return self.survived / self.reachable if self.reachable else None


@dataclass(slots=True)
class _Sum:
    queries: set[str] = field(default_factory=set)
    survived: set[str] = field(default_factory=set)
    candidates: int = 0
    kept: int = 0
    costs: list[Cost] = field(default_factory=list)


def ledger(run: Mapping[str, Hits], qrels: Qrels, corpus: Corpus) -> list[LedgerRow]:
    """A row for each kind of step, in the order in which they first come; all rounds of a best-first search are one."""
    sums: dict[str, _Sum] = {}
    reachable = set()
    for query, hits in run.items():
        gold = {
            corpus.id(row)
            for node, value in qrels.get(query, {}).items()
            if value > 0 and node in corpus
            for row in corpus.path(corpus.row(node))
        }
        if gold:
            reachable.add(query)
        for step in hits.trace:
            _add(sums.setdefault(_kind(step), _Sum()), query, step, gold)
    return [
        LedgerRow(
            name=name,
            queries=len(total.queries),
            candidates=total.candidates,
            kept=total.kept,
            survived=len(total.survived & reachable),
            reachable=len(total.queries & reachable),
            cost=reduce(Cost.__add__, total.costs, Cost()),
        )
        for name, total in sums.items()
    ]


def _add(total: _Sum, query: str, step: Step, gold: set[str]) -> None:
    total.queries.add(query)
    total.candidates += len(step.ids)
    total.kept += len(step.kept)
    total.costs.append(step.cost)
    if not gold.isdisjoint(step.kept):
        total.survived.add(query)


def _kind(step: Step) -> str:
    return "rounds" if step.name.startswith("round ") else step.name


def ledger_table(rows: list[LedgerRow], *, title: str | None = None) -> Table:
    """A rich table: a row a level, numbers a query that came to it, and the sum of all."""
    table = Table(title=None if title is None else Text(visible(title)))
    table.add_column("step")
    for column in ("queries", "candidates", "kept", "gold kept", "requests", "tokens", "reused", "seconds", "USD"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(Text(visible(row.name)), *_cells(row))
    total = reduce(Cost.__add__, (row.cost for row in rows), Cost())
    table.add_section()
    table.add_row("in all", "", "", "", "", *_cost_cells(total, 1))
    return table


def _cells(row: LedgerRow) -> tuple[str, ...]:
    survival = "-" if row.survival is None else f"{row.survival:.1%}"
    counts = (f"{n / row.queries:,.1f}" for n in (row.candidates, row.kept))
    return (str(row.queries), *counts, survival, *_cost_cells(row.cost, row.queries))


def _cost_cells(cost: Cost, queries: int) -> tuple[str, ...]:
    tokens = (cost.prompt_tokens + cost.generated_tokens, cost.reused_tokens)
    return (
        f"{cost.requests / queries:,.1f}",
        *(f"{n / queries:,.0f}" for n in tokens),
        f"{cost.seconds / queries:.3g}",
        f"{cost.usd / queries:.3g}",
    )


def latency_estimate(corpus: Corpus, seconds_per_request: float) -> float:
    """T(N) = t_req * ceil(log_b N) in seconds (DecisionRAG), with N leaves and at most b children a node.

    It takes all requests of a level to run at the same time.
    """
    widest, leaves = _widest(corpus), len(corpus.leaves())
    levels = math.ceil(math.log(leaves) / math.log(widest) - 1e-9) if leaves > 1 and widest > 1 else 1
    return seconds_per_request * max(1, levels)


def _widest(corpus: Corpus) -> int:
    """The most children of one node; the root level counts as the children of one."""
    return int(np.bincount(corpus.parents + 1).max())


def latency_line(corpus: Corpus, cost: Cost, queries: int) -> str:
    """The estimate beside what was measured, in words."""
    if not cost.requests:
        return "no request was made"
    each = cost.seconds / cost.requests
    return (
        f"T(N) = t_req * ceil(log_b N) = {each:.3g} s * ceil(log_{_widest(corpus)} {len(corpus.leaves())}) = "
        f"{latency_estimate(corpus, each):.3g} s a query if the requests of a level ran at the same time; "
        f"one after the other they took {cost.seconds / queries:.3g} s"
    )
