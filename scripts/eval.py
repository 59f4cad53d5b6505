"""`retrail eval`: measure a retriever on a prepared folder, with controls in the same table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import run_command
from .config import EvalRun

if TYPE_CHECKING:
    from ..models.protocols import Retriever


def run(run: EvalRun) -> int:
    """Search, measure, print the table, and write it beside the runs."""
    from rich.console import Console

    from ..data_prep.task import Task
    from ..eval.ledger import latency_line, ledger_table
    from ..eval.report import compare_lines, compare_table, markdown_table
    from ..eval.suites import evaluate_suite, get_suite
    from ..models.decision.navigate import Navigator
    from ..train.files import write_text
    from .systems import SERVED, controls, open_retriever

    suite = get_suite(run.suite.name)
    suite = replace(
        suite,
        split=run.split or suite.split,
        k=run.k or suite.k,
        limit=run.limit,
        metrics=tuple(run.suite.metrics or suite.metrics),
    )
    task = Task.open(run.data.path)
    retriever, description = open_retriever(
        run.retriever, task.corpus, run.navigate, run.device, run.static, run.cache_gb, run.served, run.recurse
    )
    navigator = retriever if isinstance(retriever, Navigator) else None
    out = Path(run.out) if run.out else _default_out(run)
    kind = "served" if run.retriever.startswith(SERVED) else "trained"
    title = f"navigation, {kind}" if navigator is not None else _title(retriever, run.retriever)
    others = [name for name in run.baselines if name != run.retriever]
    systems = [(title, retriever, description), *controls(others, task.corpus, navigator, run.retriever, description)]
    results = [
        evaluate_suite(system, task, suite, name=name, out=out / _folder(name), description=what)
        for name, system, what in systems
    ]
    # A pipe has no width of its own, and a table cut at 80 columns says nothing.
    console = Console() if sys.stdout.isatty() else Console(width=max(160, Console().width))
    console.print(compare_table(results, title=f"{task.name}, split {suite.split}"))
    for result in results:
        if result.ledger:
            console.print(ledger_table(list(result.ledger), title=f"{result.name}: what each level cost a query"))
            console.print(latency_line(task.corpus, result.cost, result.searched), highlight=False)
    for line in compare_lines(results, suite.headline):
        console.print(line, highlight=False)
    write_text(out / "table.md", markdown_table(results) + "\n")
    print(f"runs, traces and numbers: {out}")
    return 0


def _title(retriever: Retriever, name: str) -> str:
    """How the table calls a retriever that does not navigate."""
    from ..models.recursive.retriever import RecursiveRetriever

    return f"recursive search, {Path(name).name}" if isinstance(retriever, RecursiveRetriever) else name


def _default_out(run: EvalRun) -> Path:
    return (
        (Path(run.retriever) if Path(run.retriever).is_dir() else Path("runs") / _folder(run.retriever))
        / "eval"
        / run.suite.name
    )


def _folder(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name.lower())


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(EvalRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
