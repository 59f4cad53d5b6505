"""`retrail pools`: the same candidates, judged with fewer or more rivals in each request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import run_command
from .config import PoolsRun

if TYPE_CHECKING:
    from ..data_prep.corpus import Corpus
    from ..models.config import NavigateConfig
    from ..models.decision.scorer import LocalScorer
    from ..models.protocols import Retriever

_COOLED = ", temperature of the other half"


def run(run: PoolsRun) -> int:
    """Draw the pools, judge them with each size, print the table and the paired comparisons, write both."""
    from rich.console import Console

    from ..data_prep.hits import Cost
    from ..data_prep.task import Task
    from ..eval.pools import cooled_pools, fixed_pools, judge_pools, pool_evaluation
    from ..eval.report import SystemResult, compare_lines, compare_table, markdown_table
    from ..eval.suites import sample_queries
    from ..train.files import write_text

    task = Task.open(run.data.path)
    qrels, queries = task.qrels(run.split), sample_queries(task.queries(run.split), run.limit)
    retrievers = [_negatives(name, task.corpus) for name in run.negatives]
    pools = fixed_pools(task.corpus, queries, qrels, retrievers, run.depth)
    scorer = _scorer(run)
    results = []
    for name, config in _settings(run).items():
        judge = (scorer, task.corpus, pools)
        hits = cooled_pools(*judge, qrels, config) if name.endswith(_COOLED) else judge_pools(*judge, config)
        cost = reduce(add, (h.cost for h in hits.values()), Cost())
        evaluation = pool_evaluation(hits, qrels, run.metrics)
        results.append(SystemResult(name=name, evaluation=evaluation, cost=cost, searched=len(hits)))
    console = Console() if sys.stdout.isatty() else Console(width=max(160, Console().width))
    console.print(compare_table(results, title=f"{task.name}, {len(pools)} pools of {run.depth}"))
    lines = compare_lines([results[-1], *results[:-1]], run.metrics[0])
    each = "; ".join(f"{result.name}: {result.cost.requests / result.searched:.1f}" for result in results)
    lines.append(f"requests a pool, which are more where the model's context holds fewer candidates: {each}")
    for line in lines:
        console.print(line, highlight=False)
    out = Path(run.out) if run.out else Path(run.retriever) / "pools"
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "pools.md", markdown_table(results) + "\n" + "\n".join(f"- {line}" for line in lines) + "\n")
    print(f"table: {out / 'pools.md'}")
    return 0


def _settings(run: PoolsRun) -> dict[str, NavigateConfig]:
    """How the pools are judged, by the name of the row; the last is what the others are compared with."""
    from ..models.config import NavigateConfig

    rows: dict[str, NavigateConfig] = {}
    if run.pages:
        pages = NavigateConfig(scoring="page_by_page")
        rows |= {"page by page": pages, f"page by page{_COOLED}": pages}
    if run.anchors:
        rows |= {
            f"{size} a request, {run.anchors} anchors": NavigateConfig(slate_size=size, anchors=run.anchors)
            for size in run.sizes
            if run.anchors < size < run.depth
        }
    return rows | {f"{size} a request": NavigateConfig(slate_size=size) for size in run.sizes}


def _scorer(run: PoolsRun) -> LocalScorer:
    """The exported model, with as many candidates in a request as the largest size asks for."""
    from ..models.decision.build import open_layout
    from ..models.decision.scorer import LocalScorer
    from ..models.load import load_scorer

    scorer = load_scorer(run.retriever, device=run.device)
    config = replace(scorer.layout.config, max_candidates=max(run.sizes))
    return LocalScorer(scorer.model, open_layout(scorer.layout.tokenizer.hf, config, scorer.model.backbone))


def _negatives(name: str, corpus: Corpus) -> Retriever:
    if name == "splade":
        from ..eval.sparse import SparseRetriever

        return SparseRetriever.from_corpus(corpus)
    from .systems import controls

    return next(controls([name], corpus))[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(PoolsRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
