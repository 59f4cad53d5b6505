"""`retrail static`: the upper levels of a corpus, read once by an exported model and stored."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .cli import run_command
from .config import StaticRun


def run(run: StaticRun) -> int:
    """Say what it will take, read the slates, and store them.

    Raises:
        FileExistsError: `to` is finished already, or holds something else.
    """
    from ..models.decision.static_build import build_static, check_target, plan_static
    from ..models.load import load_scorer, open_corpus

    check_target(Path(run.to))
    corpus = open_corpus(run.corpus)
    scorer = load_scorer(run.retriever, device=run.device)
    plan = plan_static(scorer, corpus, run.levels, None if run.max_gb is None else run.max_gb * 1e9)
    print("\n".join(plan.lines()), flush=True)
    store = build_static(scorer, corpus, plan, run.to)
    print(f"{run.to}: {len(store)} slates, {store.num_bytes / 1e6:,.1f} MB; use them with static={run.to}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(StaticRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
