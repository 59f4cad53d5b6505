import math

import ir_measures
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrail.data_prep.formats.trec import read_qrels, read_run, scores_path, write_qrels, write_run
from retrail.data_prep.hits import Hits


def run_file(tmp_path, text):
    (tmp_path / "run.trec").write_text(text, encoding="utf-8")
    return tmp_path / "run.trec"


def test_reads_by_rank_whatever_the_order_of_lines(tmp_path):
    file = run_file(
        tmp_path,
        "q2 Q0 d1 0 7 tag\n\nq1 Q0 漢字 2 0.5 tag\n  q1\tQ0  🚀\t1 1e1 tag \n"
        "q1 Q0 c 3 0.5 tag\nq2 Q0 a\u3000b 1 -3 tag\n",
    )
    assert read_run(file) == {
        "q2": Hits(("d1", "a\u3000b"), (7.0, -3.0)),
        "q1": Hits(("🚀", "漢字", "c"), (10.0, 0.5, 0.5)),
    }
    assert list(read_run(file)) == ["q2", "q1"]


def test_complains_when_rank_and_score_disagree(tmp_path):
    file = run_file(tmp_path, "q Q0 a 1 0.5 t\nq Q0 b 2 0.9 t\nq Q0 c 3 0.5 t\n")
    message = r"run\.trec:2: query 'q': rank 2 has the score 0\.9, above rank 1 with 0\.5 \(line 1\).*order='score'"
    with pytest.raises(ValueError, match=message):
        read_run(file)
    assert read_run(file, order="score") == {"q": Hits(("b", "a", "c"), (0.9, 0.5, 0.5))}
    assert read_run(file, order="rank") == {"q": Hits(("a", "b", "c"), (3.0, 2.0, 1.0))}
    with pytest.raises(ValueError, match="order='file' is not a choice; use one of: strict, score, rank"):
        read_run(file, order="file")


def test_equal_ranks_follow_the_score(tmp_path):
    file = run_file(tmp_path, "q Q0 a 0 0.5 t\nq Q0 b 0 0.9 t\n")
    assert read_run(file) == {"q": Hits(("b", "a"), (0.9, 0.5))}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q Q0 d 1 0.5", r"run\.trec:2: 5 fields, but a run has 6"),
        ("q Q0 a doc 1 0.5 t", r":2: 7 fields"),
        ("q Q0 d one 0.5 t", r":2: the rank 'one' is not a whole number"),
        ("q Q0 d 1 high t", r":2: the score 'high' is not a number"),
        ("q Q0 d 2 nan t", r":2: the score 'nan' is not finite"),
        ("q Q0 d 2 -inf t", r":2: the score '-inf' is not finite"),
        ("q Q0 first 2 0.5 t", r":2: document 'first' is there twice for query 'q' \(line 1\)"),
    ],
)
def test_bad_run_lines_are_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read_run(run_file(tmp_path, f"q Q0 first 1 9 t\n{line}\n"))


def test_writes_whole_decreasing_scores_and_keeps_the_true_ones(tmp_path):
    run = {"q2": Hits(("b", "a", "é"), (0.25, 0.25, -1.5)), "none": Hits((), ()), "q1": Hits(("x",), (1e-300,))}
    write_run(tmp_path / "r", run, tag="mine")
    assert (tmp_path / "r").read_text(encoding="utf-8").splitlines() == [
        "q2 Q0 b 1 3 mine",
        "q2 Q0 a 2 2 mine",
        "q2 Q0 é 3 1 mine",
        "q1 Q0 x 1 1 mine",
    ]
    assert read_run(tmp_path / "r") == {"q2": Hits(("b", "a", "é"), (3.0, 2.0, 1.0)), "q1": Hits(("x",), (1.0,))}
    assert read_run(tmp_path / "r", true_scores=True) == run
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r", "r.scores.jsonl"]


def test_trec_eval_ranks_a_written_run_as_we_do(tmp_path):
    """trec_eval breaks ties by descending id and compares float32; neither may change a written run."""
    tied = Hits(("a", "b", "c"), (1.0 + 1e-9, 1.0, 1.0))
    write_run(tmp_path / "r", {"q": tied})
    runs = list(ir_measures.read_trec_run(str(tmp_path / "r")))
    for relevant, rank in (("a", 1), ("b", 2), ("c", 3)):
        qrels = [ir_measures.Qrel("q", relevant, 1)]
        value = ir_measures.calc_aggregate([ir_measures.RR], qrels, runs)[ir_measures.RR]
        assert value == pytest.approx(1 / rank)


@pytest.mark.parametrize(
    ("run", "tag", "message"),
    [
        ({"q 1": Hits(("a",), (1.0,))}, "t", r"query id 'q 1' has ' ' in it, which a TREC file cannot hold"),
        ({"q": Hits(("a\tb",), (1.0,))}, "t", r"query 'q': document id 'a\\tb' has '\\t'"),
        ({"q": Hits(("a\n",), (1.0,))}, "t", r"document id 'a\\n' has '\\n'"),
        ({"q": Hits(("",), (1.0,))}, "t", "document id is empty"),
        ({"q": Hits(("a",), (1.0,))}, "my tag", "the tag 'my tag' has ' '"),
    ],
)
def test_refuses_ids_that_break_a_run(tmp_path, run, tag, message):
    with pytest.raises(ValueError, match=message):
        write_run(tmp_path / "r", run, tag=tag)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "q", "docs": ["b"], "scores": [1]}', "query 'q' is not as in"),
        ('{"id": "other", "docs": ["a"], "scores": [1]}', "query 'other' is not as in"),
        ('{"id": "other", "docs": [], "scores": []}', "query 'q' of .* is missing"),
        ('{"id": "q", "docs": ["a"], "scores": ["1"]}', r"r\.scores\.jsonl:1\['scores'\] must be a number"),
        ('{"id": "q", "docs": ["a"], "scores": [1, 2]}', "1 ids but 2 scores"),
    ],
)
def test_a_sidecar_of_another_run_is_refused(tmp_path, line, message):
    write_run(tmp_path / "r", {"q": Hits(("a",), (0.5,))})
    scores_path(tmp_path / "r").write_text(line)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path / "r", true_scores=True)


def test_true_scores_without_sidecar(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.trec\.scores\.jsonl: no such file"):
        read_run(run_file(tmp_path, "q Q0 a 1 1 t\n"), true_scores=True)


IDS = st.text(st.characters(codec="utf-8", exclude_characters=" \t\n\r\f\v\0"), min_size=1, max_size=6)


@given(st.dictionaries(IDS, st.dictionaries(IDS, st.floats(allow_nan=False, allow_infinity=False), max_size=5)))
def test_any_run_survives(tmp_path_factory, scores):
    run = {q: Hits.from_scores(list(docs), list(docs.values())) for q, docs in scores.items()}
    file = tmp_path_factory.mktemp("run") / "r"
    write_run(file, run)
    assert read_run(file, true_scores=True) == run
    assert {q: hits.ids for q, hits in read_run(file).items()} == {q: hits.ids for q, hits in run.items() if hits.ids}


QRELS = {"q1": {"d1": 1, "漢字": 0}, "q2": {"🚀": -1}}


@pytest.mark.parametrize("layout", ["trec", "beir"])
def test_qrels_round_trip(tmp_path, layout):
    write_qrels(tmp_path / "q", QRELS | {"none": {}}, layout=layout)
    assert read_qrels(tmp_path / "q") == QRELS
    first = (tmp_path / "q").read_text(encoding="utf-8").splitlines()[0]
    assert first == ("q1 0 d1 1" if layout == "trec" else "query-id\tcorpus-id\tscore")


def test_beir_qrels_hold_spaces_and_trec_ones_do_not(tmp_path):
    qrels = {"my query": {" a doc ": 1}}
    write_qrels(tmp_path / "q", qrels)
    assert read_qrels(tmp_path / "q") == qrels
    with pytest.raises(ValueError, match="query id 'my query' has ' ' in it, which a TREC file cannot hold"):
        write_qrels(tmp_path / "t", qrels, layout="trec")
    with pytest.raises(ValueError, match="a BEIR file cannot hold"):
        write_qrels(tmp_path / "t", {"q": {"a\tb": 1}})
    with pytest.raises(ValueError, match="layout='csv' is not a choice"):
        write_qrels(tmp_path / "t", qrels, layout="csv")
    with pytest.raises(ValueError, match="relevance True is not an int"):
        write_qrels(tmp_path / "t", {"q": {"a": True}})
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q 0 a 1\nq 0 b\n", r"q:2: 3 fields, not 4: qid 0 docid rel; a BEIR file starts with"),
        ("q 0 a 1\nq 0 b yes\n", r"q:2: the relevance 'yes' is not a whole number"),
        ("q 0 a 1\nq 0 a 1\n", r"q:2: document 'a' is judged twice for query 'q'"),
        ("query-id\tcorpus-id\tscore\nq\ta\n", r"q:2: 2 fields, not 3 \(tab-separated\)"),
        ("query-id\tcorpus-id\tscore\nq\ta\t1.5\n", r"q:2: the relevance '1\.5' is not a whole number"),
        ("q\ta\t1\n", r"q:1: 3 fields, not 4"),
    ],
)
def test_bad_qrels_lines_are_named(tmp_path, text, message):
    (tmp_path / "q").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_qrels(tmp_path / "q")


def test_scores_keep_every_bit(tmp_path):
    score = math.nextafter(0.1, 1)
    write_run(tmp_path / "r", {"q": Hits(("a",), (score,))})
    assert read_run(tmp_path / "r", true_scores=True)["q"].scores == (score,)
