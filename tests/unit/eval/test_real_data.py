"""Published numbers, reproduced on the real data."""

import gzip
import json
from pathlib import Path

import pytest

from retrail.data_prep.formats.multidoc2dial import prep_multidoc2dial
from retrail.data_prep.formats.trec import read_qrels, read_run
from retrail.eval.metrics import Conventions, evaluate
from retrail.eval.suites import evaluate_suite, get_suite
from retrail.models.bm25 import BM25


def read_jsonl(path: Path) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize(("year", "ndcg", "queries"), [("19", 0.5058, 43), ("20", 0.4796, 54)])
def test_the_bm25_runs_of_trec_dl_score_what_anserini_prints(data_dir, year, ndcg, queries):
    run = read_run(data_dir / f"trec_dl/run.dl{year}.bm25.top100.txt.gz", order="score")
    qrels = read_qrels(data_dir / f"trec_dl/qrels.dl{year}-passage.txt.gz")
    for ties in ("rank", "trec"):
        result = evaluate(run, qrels, ["nDCG@10"], conventions=Conventions(ties=ties, min_rel=2))
        assert result.values["nDCG@10"] == pytest.approx(ndcg, abs=5e-5)
        assert (result.counts.queries, result.counts.missing) == (queries, 0)


def test_bm25_on_scifact(data_dir):
    documents = read_jsonl(data_dir / "scifact/corpus.jsonl.gz")
    texts = {row["_id"]: row["text"] for row in read_jsonl(data_dir / "scifact/queries.jsonl.gz")}
    qrels = read_qrels(data_dir / "scifact/qrels/test.tsv")
    ids = [row["_id"] for row in documents]
    values = {}
    for language in (None, "english"):
        index = BM25(ids, [f"{row['title']} {row['text']}" for row in documents], language=language)
        run = dict(zip(qrels, index.search([texts[query] for query in qrels], k=100), strict=True))
        values[language] = evaluate(run, qrels, ["nDCG@10"]).values["nDCG@10"]
    assert values[None] == pytest.approx(0.661, abs=0.005)  # a plain BM25 without stemming
    assert values["english"] == pytest.approx(0.679, abs=0.006)  # Pyserini's flat index: 0.6789


def test_bm25_on_dialogues(data_dir, tmp_path):
    folder = data_dir / "doc2dial_multidoc2dial"
    task = prep_multidoc2dial(
        folder / "doc2dial_doc.val273.rebuilt.json.gz",
        [folder / "doc2dial_dial_validation.rebuilt.json.gz"],
        tmp_path / "task",
    )
    result = evaluate_suite(BM25.from_corpus(task.corpus), task, get_suite("multidoc2dial"))
    assert result.values["Hit@1"] == pytest.approx(0.28, abs=0.03)
    assert result.values["Hit@10"] == pytest.approx(0.69, abs=0.03)
    # A document is the parent of a section, not the domain above it: those would be hit far more often.
    assert 0.70 < result.values["document_Hit@1"] < 0.80
