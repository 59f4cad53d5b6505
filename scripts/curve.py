"""`retrail curve`: how much of the first level must stay, and what that costs (DecisionRAG's 15 %, 5 % and 1 %)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import run_command
from .config import CurveRun

if TYPE_CHECKING:
    from ..eval.report import SystemResult
    from ..models.decision.navigate import Navigator


def run(run: CurveRun) -> int:
    """Walk with each share, and with nothing lost above; print and write the table and the picture."""
    from rich.console import Console

    from ..data_prep.task import Task
    from ..eval.plots import plot_curve
    from ..eval.report import compare_table, markdown_table
    from ..eval.run import write_json
    from ..eval.suites import evaluate_suite, get_suite
    from ..models.decision.navigate import Navigator
    from ..train.files import write_text
    from .systems import VARIANTS, changed, open_retriever, settings_text

    suite = get_suite(run.suite.name)
    metrics = tuple(run.suite.metrics or dict.fromkeys((run.metric, *suite.metrics)))
    suite = replace(suite, split=run.split or suite.split, limit=run.limit, metrics=metrics)
    task = Task.open(run.data.path)
    navigator, description = open_retriever(run.retriever, task.corpus, run.navigate, run.device)
    if not isinstance(navigator, Navigator):
        raise ValueError(f"retriever={run.retriever} keeps no levels; a curve needs an exported decision model")
    out = Path(run.out) if run.out else Path(run.retriever) / "curve"

    def measure(name: str, walker: Navigator) -> SystemResult:
        what = f"{description} {settings_text(walker.config)}"
        return evaluate_suite(walker, task, suite, name=name, out=out / name.replace(" ", "_"), description=what)

    results = {share: measure(f"{share:g} kept", _keeping(navigator, share)) for share in run.shares}
    reference = measure("flat", changed(navigator, **VARIANTS["flat"](task.corpus)))
    console = Console() if sys.stdout.isatty() else Console(width=max(160, Console().width))
    everything = [*results.values(), reference]
    console.print(compare_table(everything, title=f"{task.name}: share of the first level that stays"))
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "curve.md", markdown_table(everything) + "\n")
    points = [(share, result.values[run.metric], result.tokens_per_query) for share, result in results.items()]
    write_json(out / "curve.json", [result.as_dict() for result in everything])
    plot_curve(
        out / "curve.png",
        points,
        reference=(reference.values[run.metric], reference.tokens_per_query),
        metric=run.metric,
    )
    print(f"table, numbers and picture: {out}")
    return 0


def _keeping(navigator: Navigator, share: float) -> Navigator:
    """The same walk with this share of the first level kept, rounded up."""
    from .systems import changed

    config = navigator.config
    first = config.start_level
    count = math.ceil(share * len(navigator.corpus.level_rows(first)) - 1e-9)
    deeper = config.keep[first + 1 :] or config.keep[-1:]
    keep = [*config.keep[:first], *([config.keep[-1]] * (first - len(config.keep))), max(1, count), *deeper]
    return changed(navigator, budget="count", calibration=None, keep=keep)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(CurveRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
