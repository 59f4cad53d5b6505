"""`retrail calibrate`: labelled queries and a promise become budgets for each level of the walk."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import run_command
from .config import CalibrateRun

if TYPE_CHECKING:
    from rich.table import Table

    from ..data_prep.corpus import Corpus
    from ..models.decision.budget import Budget
    from ..models.decision.calibrate import Labelled, Walk
    from ..models.decision.calibration import Calibration
    from ..models.decision.survival import FixedBudget, Survival


def run(run: CalibrateRun) -> int:
    """Fit, write the file, and measure what it promises on the queries held out."""
    from ..data_prep.task import Task
    from ..models.decision.calibrate import fit, labelled, shuffled
    from ..models.decision.calibration import Calibration, walk_settings, write_calibration
    from ..models.decision.memo import MemoScorer
    from ..models.decision.navigate import Navigator
    from ..models.exports import RETRIEVAL, read_export
    from ..models.load import load_scorer
    from .systems import file_hash

    task, stored = Task.open(run.data.path), read_export(run.retriever).navigate
    corpus = task.corpus
    config = replace(run.navigate.over(stored), choose=0)
    queries = shuffled(labelled(corpus, task.queries(run.split), task.qrels(run.split)), run.seed)
    held_out, fitting = _divided(queries, run.holdout)
    scorer = MemoScorer(load_scorer(run.retriever, device=run.device))

    def walk(budget: Budget) -> Navigator:
        return Navigator(scorer, corpus, config, budget=budget)

    levels = fit(
        walk, corpus, fitting, run.alpha, confidence=run.confidence, score=run.score, gold=run.gold, seed=run.seed
    )
    calibration = Calibration(
        alpha=run.alpha,
        gold=run.gold,
        levels=levels,
        retriever=file_hash(Path(run.retriever) / RETRIEVAL),
        corpus=corpus.fingerprint,
        walk=walk_settings(config),
        confidence=run.confidence,
    )
    write_calibration(run.to, calibration)
    if held_out:
        _report(run, calibration, walk, corpus, held_out)
    print(f"{run.to}: search with navigate.budget=calibrated navigate.calibration={run.to}")
    return 0


def _divided(queries: list[Labelled], holdout: float) -> tuple[list[Labelled], list[Labelled]]:
    count = round(len(queries) * holdout)
    return queries[:count], queries[count:]


def _report(
    run: CalibrateRun, calibration: Calibration, walk: Walk, corpus: Corpus, held_out: Sequence[Labelled]
) -> None:
    from rich.console import Console

    from ..models.decision.budget import Calibrated
    from ..models.decision.survival import best_within, cheapest_as_safe, fixed_budgets, measure

    found = measure(walk, Calibrated(calibration.levels), corpus, held_out, gold=run.gold)
    console = Console() if sys.stdout.isatty() else Console(width=max(120, Console().width))
    console.print(survival_table(calibration, found))
    print(f"candidates a query, leaves included: {found.candidates:,.1f}")
    if not run.fixed_k:
        return
    fixed = fixed_budgets(walk, corpus, held_out, run.fixed_k, gold=run.gold)
    print(f"best fixed budget at no more candidates: {_in_words(best_within(fixed, found.candidates), found)}")
    print(f"cheapest fixed budget that is as safe:   {_in_words(cheapest_as_safe(fixed, found.survived), found)}")


def survival_table(calibration: Calibration, found: Survival) -> Table:
    """Promised and measured survival of each level (the share not lost there) and of all together."""
    from rich.table import Table

    from ..models.decision.conformal import wilson

    table = Table(title=f"survival of the gold path, alpha {calibration.alpha:g}, {found.queries} queries held out")
    for name in ("level", "score", "threshold", "fitted on", "promised", "survived", "95 % interval", "judged", "kept"):
        table.add_column(name, justify="left" if name in ("level", "score") else "right")

    def shares(survived: int, queries: int) -> tuple[str, str]:
        low, high = wilson(survived, queries)
        return f"{survived / queries:.3f} ({survived}/{queries})", f"{low:.3f} to {high:.3f}"

    for number, (rule, level) in enumerate(zip(calibration.levels, found.levels, strict=True), start=1):
        table.add_row(
            str(number),
            rule.score,
            f"{rule.threshold:.3f}",
            str(rule.queries),
            f"{1 - rule.alpha:.3f}",
            *shares(found.queries - level.reached + level.survived, found.queries),
            f"{level.judged:.1f}",
            f"{level.kept:.1f}",
        )
    overall = shares(found.survived, found.queries)
    table.add_row("all", "", "", "", f"{1 - calibration.alpha:.3f}", *overall, f"{found.candidates:.1f}", "")
    return table


def _in_words(budget: FixedBudget | None, found: Survival) -> str:
    if budget is None:
        return "none of fixed_k"
    return (
        f"keep={list(budget.keep)} survives {budget.survived}/{found.queries} with {budget.candidates:,.1f} candidates"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(CalibrateRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
