"""Suites over a small prepared task."""

import json
from dataclasses import replace

import pytest

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.hits import Cost, Hits
from retrail.data_prep.task import Query, write_task
from retrail.eval.metrics import Conventions
from retrail.eval.suites import SUITES, Suite, evaluate_suite, get_suite, sample_queries
from retrail.models.bm25 import BM25

NODES = [
    Node("d1", None, "Fruit", "about fruit"),
    Node("d2", None, "Stone", "about stones"),
    Node("apple", "d1", "Apple", "a red one"),
    Node("pear", "d1", "Pear", "a green one"),
    Node("marble", "d2", "Marble", "a white one"),
]
QUERIES = [Query("q1", "apple"), Query("q2", "pear"), Query("q3", "marble"), Query("q4", "ruby")]
QRELS = {"q1": {"apple": 1}, "q2": {"apple": 1}, "q3": {"marble": 1, "pear": 0}, "q4": {}}
SUITE = Suite(name="tiny", split="dev", metrics=("Hit@1", "MRR@3"), k=3, document_metrics=("Hit@1",))


class Fixed:
    """The same rankings each time, whatever is asked; counts the calls."""

    def __init__(self, rankings: dict[str, tuple[str, ...]], description: str | None = None) -> None:
        self.rankings, self.calls, self.depths = rankings, 0, set()
        if description is not None:
            self.description = description

    def search(self, queries, *, k):
        self.calls += 1
        self.depths.add(k)
        return [
            Hits(ids, tuple(float(-i) for i in range(len(ids))), Cost(seconds=0.5, prompt_tokens=10, max_concurrency=3))
            for ids in (self.rankings.get(query, ())[:k] for query in queries)
        ]


@pytest.fixture
def task(tmp_path):
    return write_task(
        tmp_path / "task",
        name="tiny",
        corpus=Corpus.from_nodes(NODES),
        splits={"dev": (QUERIES, QRELS), "train": (QUERIES[:1], {})},
        source={},
    )


RANKINGS = {"apple": ("apple",), "pear": ("pear", "apple"), "marble": ("pear", "marble", "apple")}


def test_passages_and_documents(task):
    result = evaluate_suite(Fixed(RANKINGS), task, SUITE, name="fixed")
    assert result.values == pytest.approx({"Hit@1": 1 / 3, "MRR@3": 2 / 3, "document_Hit@1": 2 / 3})
    assert result.evaluation.per_query["document_Hit@1"] == {"q1": 1, "q2": 1, "q3": 0}
    assert (result.name, result.searched) == ("fixed", 4)
    assert (result.seconds_per_query, result.tokens_per_query, result.cost.max_concurrency) == (0.5, 10, 3)
    assert (result.evaluation.counts.without_positives, result.evaluation.counts.dangling) == (1, 0)


def test_empty_gold_as_a_miss(task):
    suite = replace(SUITE, conventions=Conventions(no_positives="miss"))
    values = evaluate_suite(Fixed(RANKINGS), task, suite).values
    assert values == pytest.approx({"Hit@1": 1 / 4, "MRR@3": 2 / 4, "document_Hit@1": 2 / 4})


def test_the_own_id_is_dropped_before_the_cut(task):
    retriever = Fixed(RANKINGS)
    evaluate_suite(retriever, task, replace(SUITE, conventions=Conventions(drop_self=True)))
    assert retriever.depths == {4}


def test_document_level(task):
    for level, expected in ((0, 2 / 3), (1, 1 / 3), (2, 1 / 3), (-1, 2 / 3), (-2, 2 / 3)):
        values = evaluate_suite(Fixed(RANKINGS), task, replace(SUITE, document_level=level)).values
        assert values["document_Hit@1"] == pytest.approx(expected), level


def test_files_and_resuming(task, tmp_path):
    retriever = Fixed(RANKINGS, "fixed 1")
    out = tmp_path / "eval"
    result = evaluate_suite(retriever, task, SUITE, out=out, batch_size=2)
    assert retriever.calls == 2
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["values"] == result.values
    assert (metrics["retriever"], metrics["task_fingerprint"]) == ("fixed 1", task.fingerprint)
    assert metrics["suite"]["k"] == 3
    rows = [json.loads(line) for line in (out / "per_query.jsonl").read_text().splitlines()]
    assert rows == [
        {"query": "q1", "Hit@1": 1.0, "MRR@3": 1.0, "document_Hit@1": 1.0},
        {"query": "q2", "Hit@1": 0.0, "MRR@3": 0.5, "document_Hit@1": 1.0},
        {"query": "q3", "Hit@1": 0.0, "MRR@3": 0.5, "document_Hit@1": 0.0},
    ]
    again = evaluate_suite(retriever, task, SUITE, out=out)
    assert retriever.calls == 2
    assert again == result
    with pytest.raises(ValueError, match="another evaluation"):
        evaluate_suite(Fixed(RANKINGS, "fixed 2"), task, SUITE, out=out)
    with pytest.raises(ValueError, match="Fixed has no description"):
        evaluate_suite(Fixed(RANKINGS), task, SUITE, out=tmp_path / "new")


def test_judgements_that_nobody_can_find(tmp_path):
    task = write_task(
        tmp_path / "task",
        name="holes",
        corpus=Corpus.from_nodes(NODES),
        splits={"dev": (QUERIES[:1], {"q1": {"apple": 1, "lost": 1}})},
        source={},
        allow_dangling=True,
    )
    result = evaluate_suite(Fixed(RANKINGS), task, replace(SUITE, metrics=("Recall@3",)))
    assert result.values == {"Recall@3": 0.5, "document_Hit@1": 1.0}
    assert result.evaluation.counts.dangling == 1


def test_bm25_end_to_end(task, tmp_path):
    result = evaluate_suite(BM25.from_corpus(task.corpus), task, SUITE, out=tmp_path / "out")
    assert result.values == pytest.approx({"Hit@1": 2 / 3, "MRR@3": 2 / 3, "document_Hit@1": 1})
    assert (result.name, result.evaluation.counts.empty) == ("BM25", 0)


def test_a_split_without_gold_or_none_at_all(task):
    with pytest.raises(ValueError, match="nothing to average"):
        evaluate_suite(Fixed(RANKINGS), task, replace(SUITE, split="train"))
    with pytest.raises(ValueError, match=r"split 'test', but task 'tiny' has: dev, train"):
        evaluate_suite(Fixed(RANKINGS), task, replace(SUITE, split="test"))


def test_a_limit_takes_a_fixed_sample(task):
    queries = [Query(f"q{i}", "t") for i in range(100)]
    ten = sample_queries(queries, 10)
    assert len(ten) == 10
    assert ten == sample_queries(queries, 10) == [query for query in queries if query in ten]
    assert set(ten) < set(sample_queries(queries, 20))  # a larger sample holds the smaller one
    assert sample_queries(list(reversed(queries)), 10) == list(reversed(ten))
    assert ten != queries[:10]
    assert sample_queries(queries, None) == sample_queries(queries, 500) == queries
    with pytest.raises(ValueError, match="limit=0"):
        sample_queries(queries, 0)
    assert evaluate_suite(Fixed(RANKINGS), task, replace(SUITE, limit=2)).searched == 2


def test_the_registry():
    assert set(SUITES) == {"multidoc2dial", "pydocs", "beir", "musique", "hotpotqa", "2wiki"}
    assert get_suite("multidoc2dial").conventions.no_positives == "miss"
    assert get_suite("beir").headline == "nDCG@10"
    with pytest.raises(ValueError, match="suite='mdd' is not known; use one of: multidoc2dial, pydocs, musique"):
        get_suite("mdd")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metrics": ()}, "has no metrics"),
        ({"metrics": ("Hit",)}, "'Hit' is not a metric"),
        ({"document_metrics": ("Best@1",)}, "'Best@1' is not a metric"),
        ({"k": 2}, "MRR@3 looks below k=2"),
    ],
)
def test_a_suite_is_checked(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SUITE, **change)
