"""Named evaluations: which split, metrics and conventions; one call measures a retriever on a prepared task."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..data_prep.corpus import Corpus
from ..data_prep.files import new_file
from ..data_prep.hits import Cost, Hits
from ..data_prep.task import Query, Task
from ..models.protocols import Retriever
from .ledger import ledger
from .metrics import (
    Conventions,
    Evaluation,
    PerQuery,
    Qrels,
    check_metrics,
    evaluate,
    qrels_to_documents,
    to_documents,
)
from .report import SystemResult
from .run import run_retriever, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """How a prepared task is measured.

    metrics: measures of the ranking, the first is the headline; see `eval.metrics.evaluate` for the names.
    k: how deep the rankings go.
    document_metrics: the same over documents, named `document_Hit@1` and so on. A document ranks where its best
        passage does.
    document_level: which node of the path to a passage is its document: 0 that on the root level, 1 that below,
        -1 the passage's parent, -2 the parent's parent. A path that is too short gives its nearest node.
    limit: measure a fixed sample of so many queries (None: all); fewer is faster and less steady.
    """

    name: str
    split: str
    metrics: tuple[str, ...]
    k: int
    document_metrics: tuple[str, ...] = ()
    document_level: int = 0
    conventions: Conventions = field(default_factory=Conventions)
    limit: int | None = None

    def __post_init__(self) -> None:
        if not self.metrics:
            raise ValueError(f"suite {self.name!r} has no metrics")
        check_metrics((*self.metrics, *self.document_metrics))
        for metric in (*self.metrics, *self.document_metrics):
            if "@" in metric and int(metric.split("@")[1]) > self.k:
                raise ValueError(f"suite {self.name!r}: {metric} looks below k={self.k}; raise k or drop the metric")

    @property
    def headline(self) -> str:
        """The measure that stands for the whole."""
        return self.metrics[0]


_PASSAGES = ("Hit@1", "Hit@5", "Hit@10", "Recall@1", "Recall@10", "MRR@10")
_CHAINS = ("Recall@5", "All@5", "Recall@2", "Recall@10", "All@10", "Recall@20", "Recall@100", "nDCG@10")
SUITES = {
    suite.name: suite
    for suite in (
        # Empty gold counts as a miss, as in the benchmark's own evaluation.
        Suite(
            name="multidoc2dial",
            split="dev",
            metrics=_PASSAGES,
            k=20,
            document_metrics=("Hit@1", "Hit@5"),
            document_level=-1,
            conventions=Conventions(no_positives="miss"),
        ),
        Suite(name="pydocs", split="dev", metrics=_PASSAGES, k=20, document_metrics=("Hit@1",)),
        # RDR's recall over gold groups, |{G: G meets the top k}| / |groups|, is Recall@k here: equal paragraphs are one
        # document, so a group is one document. Gold that the corpus lacks stays in the denominator.
        *(Suite(name=name, split="dev", metrics=_CHAINS, k=100) for name in ("musique", "hotpotqa", "2wiki")),
        Suite(name="beir", split="test", metrics=("nDCG@10", "Recall@100", "MRR@10", "MAP@100"), k=100),
    )
}


def get_suite(name: str) -> Suite:
    """The suite of that name.

    Raises:
        ValueError: no such suite; lists those there are.
    """
    if name not in SUITES:
        raise ValueError(f"suite={name!r} is not known; use one of: {', '.join(SUITES)}")
    return SUITES[name]


def sample_queries(queries: Sequence[Query], limit: int | None) -> list[Query]:
    """At most `limit` queries (None: all) in their order, the same ones each time.

    Those with the smallest hashes of their ids, not the first: neighbours in a file share a dialogue or a page.

    Raises:
        ValueError: a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be 1 or more")
    if limit is None or limit >= len(queries):
        return list(queries)
    by_hash = sorted(queries, key=lambda query: hashlib.sha256(query.id.encode(errors="surrogatepass")).digest())
    chosen = {query.id for query in by_hash[:limit]}
    return [query for query in queries if query.id in chosen]


def evaluate_suite(
    retriever: Retriever,
    task: Task,
    suite: Suite,
    *,
    name: str | None = None,
    out: str | Path | None = None,
    batch_size: int = 32,
    description: str | None = None,
) -> SystemResult:
    """Search the suite's queries and measure the rankings.

    Args:
        retriever: what is measured.
        task: a prepared folder.
        suite: what is measured; `dataclasses.replace(suite, split=..., limit=...)` for another split or a sample.
        name: the system's name in tables; by default the retriever's class.
        out: a folder for `hits.jsonl` with traces, `run.trec`, `per_query.jsonl` and `metrics.json`; a search that
            was stopped goes on from there.
        batch_size: queries a call of the retriever; progress and what survives a stop are counted in these.
        description: which retriever this is (see `run_retriever`); needed with `out`, unless it says so itself.

    Raises:
        ValueError: the task lacks the split, and as `run_retriever` and `evaluate`.
    """
    if suite.split not in task.splits:
        raise ValueError(
            f"suite {suite.name!r} measures split {suite.split!r}, but task {task.name!r} has: "
            f"{', '.join(task.splits)}; choose one of these"
        )
    queries = sample_queries(task.queries(suite.split), suite.limit)
    who = description if description is not None else getattr(retriever, "description", None)
    run = run_retriever(
        retriever,
        queries,
        k=suite.k + suite.conventions.drop_self,
        out=out,
        batch_size=batch_size,
        description=None if who is None else f"{who} on {task.name} {task.fingerprint[:16]}",
        save_trace=True,
    )
    judged = task.qrels(suite.split)
    qrels = {query.id: judged.get(query.id, {}) for query in queries}
    evaluation = _evaluate(run, qrels, task.corpus, suite)
    cost = functools.reduce(operator.add, (hits.cost for hits in run.values()), Cost())
    label = type(retriever).__name__ if name is None else name
    levels = tuple(ledger(run, qrels, task.corpus))
    result = SystemResult(name=label, evaluation=evaluation, cost=cost, searched=len(run), ledger=levels)
    if out is not None:
        _write(Path(out), result, suite, task, who)
    return result


def _evaluate(run: dict[str, Hits], qrels: Qrels, corpus: Corpus, suite: Suite) -> Evaluation:
    passages = evaluate(run, qrels, suite.metrics, conventions=suite.conventions, corpus=corpus)
    if not suite.document_metrics:
        return passages

    @functools.cache
    def document_of(passage: str) -> str:
        if passage not in corpus:
            return passage  # judged but absent: stays a document that nobody can find
        path = corpus.path(corpus.row(passage))
        level = suite.document_level if suite.document_level >= 0 else len(path) - 1 + suite.document_level
        return corpus.id(path[max(0, min(level, len(path) - 1))])

    documents = evaluate(
        {query: to_documents(hits, document_of) for query, hits in run.items()},
        qrels_to_documents(qrels, document_of),
        suite.document_metrics,
        conventions=suite.conventions,
    )
    values = {f"document_{metric}": value for metric, value in documents.values.items()}
    per_query: PerQuery = {f"document_{metric}": value for metric, value in documents.per_query.items()}
    return replace(passages, values=passages.values | values, per_query=passages.per_query | per_query)


def _write(out: Path, result: SystemResult, suite: Suite, task: Task, description: str | None) -> None:
    with new_file(out / "per_query.jsonl") as file:
        per_query = result.evaluation.per_query
        for query in per_query[suite.headline]:
            row = {"query": query} | {metric: values[query] for metric, values in per_query.items()}
            file.write((json.dumps(row) + "\n").encode())
    settings = {"suite": asdict(suite), "task": task.name, "task_fingerprint": task.fingerprint}
    write_json(out / "metrics.json", {**result.as_dict(), "retriever": description, **settings})
