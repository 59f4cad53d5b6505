"""`retrail search`: answer one query and show the walk as it goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from .cli import run_command
from .config import SearchRun

if TYPE_CHECKING:
    from rich.console import Console

    from ..data_prep.corpus import Corpus
    from ..data_prep.hits import Hits, Step
    from ..models.protocols import Retriever


def run(run: SearchRun) -> int:
    """Search and print."""
    from rich.console import Console
    from rich.text import Text

    from ..eval.run import hits_to_json
    from ..eval.trace_view import result_text, visible
    from ..models.load import open_corpus
    from .systems import open_retriever

    if any("\ud800" <= character <= "\udfff" for character in run.query):
        raise ValueError("query is not valid UTF-8 text")
    corpus = open_corpus(run.corpus)
    options = (run.static, run.cache_gb, run.served, run.recurse)
    retriever, _ = open_retriever(run.retriever, corpus, run.navigate, run.device, *options)
    if run.show == "json":
        [hits] = retriever.search([run.query], k=run.k)
        print(json.dumps(hits_to_json(run.query, hits), ensure_ascii=False))
        return 0
    # A long title goes on beyond the edge of the window, where breaking it would look like another line.
    console = Console(soft_wrap=True)
    console.print(Text(f"query: {visible(run.query)}", style="bold"))
    [hits] = _watched(run, retriever, corpus, console) if run.show == "walk" else retriever.search([run.query], k=run.k)
    console.print(result_text(hits, corpus=corpus, top=run.k), end="")
    return 0


def _watched(run: SearchRun, retriever: Retriever, corpus: Corpus, console: Console) -> list[Hits]:
    """The search, each step of a walk printed as soon as it is done, those of another search when it is over."""
    from ..eval.trace_view import step_text
    from ..models.decision.navigate import Navigator

    numbers = count(1)
    if not isinstance(retriever, Navigator):
        found = retriever.search([run.query], k=run.k)
        for step in (step for hits in found for step in hits.trace):
            console.print(step_text(step, next(numbers), corpus=corpus), end="")
        return found

    def watch(query: str, step: Step) -> None:
        console.print(step_text(step, next(numbers), corpus=corpus), end="")
        console.file.flush()

    return retriever.search([run.query], k=run.k, watch=watch)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(SearchRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
