"""The reader of MTRAG on a small folder of the same layout, and on the real one."""

import gzip
import json

import pytest

from retrail.data_prep.formats.mtrag import prep_mtrag
from retrail.scripts.cli import main


def lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(text.encode()))
    else:
        file.write_text(text)


def task(task_id, *said, target="an answer"):
    turns = [{"speaker": who, "text": text} for who, text in said]
    return {"task_id": task_id, "input": turns, "targets": [{"speaker": "agent", "text": target}], "contexts": []}


@pytest.fixture
def raw(tmp_path):
    home = tmp_path / "raw"
    passages = [("p1", "One", "\nfirst"), ("p2", "", "second "), ("p3", "", "\n"), ("p4", "Only a title", "")]
    lines(home / "cloud/corpus_pool.jsonl.gz", [{"_id": i, "title": t, "text": x, "url": "u"} for i, t, x in passages])
    forms = {
        "lastturn": "|user|: and that?",
        "questions": "|user|: what?\n|user|: and that?",
        "rewrite": "|user|: x|user|: y",
    }
    for form, text in forms.items():
        lines(home / f"cloud/cloud_{form}.jsonl", [{"_id": f"c<::>{n}", "text": text} for n in (1, 2)])
    qrels = "query-id\tcorpus-id\tscore\n"
    (home / "cloud/qrels").mkdir()
    (home / "cloud/qrels/dev.tsv").write_text(qrels + "c<::>1\tp1\t1\nc<::>2\tp2\t1\nc<::>2\tgone\t1\n")
    un = [
        task("u<::>2", ("user", "what?"), ("agent", "this"), ("user", "and that? ")),
        task("u<::>9", ("user", "of another domain"), target=" "),
    ]
    lines(home / "mtrag_un/reference.jsonl.gz", un)
    (home / "mtrag_un/qrels").mkdir()
    (home / "mtrag_un/qrels/cloud.tsv").write_text(qrels + "u<::>2\tp4\t1\n")
    lines(home / "reference.jsonl", [task("c<::>1", ("user", "what?"), target="human answer")])
    return home


def test_a_domain_by_hand(raw, tmp_path):
    done = prep_mtrag(raw, tmp_path / "out", domain="cloud", skip_missing=True)
    assert [(n.id, n.title, n.text) for n in done.corpus] == [
        ("p1", "One", "first"),
        ("p2", "", "second"),
        ("p4", "Only a title", "Only a title"),
    ]
    assert done.splits == ("lastturn", "questions", "rewrite", "un_lastturn", "un_questions")
    texts = {split: [(q.id, q.text) for q in done.queries(split)] for split in done.splits}
    assert texts == {
        "lastturn": [("c<::>1", "and that?")],
        "questions": [("c<::>1", "what?\nand that?")],
        "rewrite": [("c<::>1", "x|user|: y")],
        "un_lastturn": [("u<::>2", "and that?")],
        "un_questions": [("u<::>2", "what?\nand that?")],
    }
    assert done.qrels("un_questions") == {"u<::>2": {"p4": 1}}
    assert done.answers("lastturn") == {"c<::>1": "human answer"}
    assert done.answers("un_questions") == {"u<::>2": "an answer"}
    source = done.manifest["source"]
    assert source["skipped_empty_passages"] == 1 and source["skipped_queries"]["rewrite"] == 1
    assert {file["name"] for file in source["files"]} >= {"corpus_pool.jsonl.gz", "reference.jsonl.gz", "cloud.tsv"}


def test_missing_gold_stops_unless_it_is_skipped(raw, tmp_path):
    with pytest.raises(ValueError, match="first 'gone' for query 'c<::>2'"):
        prep_mtrag(raw, tmp_path / "out", domain="cloud")
    assert not (tmp_path / "out").exists()
    (raw / "cloud/qrels/dev.tsv").write_text("query-id\tcorpus-id\tscore\nc<::>1\tgone\t1\n")
    with pytest.raises(ValueError, match="'lastturn': no query has all its gold passages"):
        prep_mtrag(raw, tmp_path / "out", domain="cloud", skip_missing=True)


def test_without_references(raw, tmp_path):
    (raw / "reference.jsonl").unlink()
    for file in sorted((raw / "mtrag_un").rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    done = prep_mtrag(raw, tmp_path / "out", domain="cloud", skip_missing=True)
    assert done.splits == ("lastturn", "questions", "rewrite") and done.answers("lastturn") == {}


def test_bad_folders(raw, tmp_path):
    with pytest.raises(FileNotFoundError, match="govt: no such folder; the domains here are: cloud"):
        prep_mtrag(raw, tmp_path / "out", domain="govt")
    (raw / "cloud/cloud_rewrite.jsonl").write_text('{"_id": "c<::>1", "text": "x"}\n')
    with pytest.raises(ValueError, match="'rewrite': 1 judged queries have no text, first 'c<::>2'"):
        prep_mtrag(raw, tmp_path / "out", domain="cloud", skip_missing=True)
    (raw / "cloud/corpus_pool.jsonl.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds none of corpus\.jsonl, corpus_pool\.jsonl"):
        prep_mtrag(raw, tmp_path / "out", domain="cloud")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"task_id": "x", "targets": []}, r"reference\.jsonl\.gz:1 has no key 'input'"),
        ({"task_id": "x", "input": [{"speaker": "agent", "text": "hi"}], "targets": []}, "has no turn of the user"),
        ({"task_id": "x", "input": [], "targets": ["words"]}, r"\['targets'\]\[0\] must be an object"),
    ],
)
def test_bad_references(raw, tmp_path, row, message):
    lines(raw / "mtrag_un/reference.jsonl.gz", [row])
    with pytest.raises(ValueError, match=message):
        prep_mtrag(raw, tmp_path / "out", domain="cloud", skip_missing=True)


def test_command(raw, tmp_path, capsys):
    assert main(["prep", "data=mtrag", f"path={raw}", f"out={tmp_path / 'out'}", "data.skip_missing=true"]) == 0
    assert "un_questions: 1 queries, 1 of them with judgements" in capsys.readouterr().out
    assert main(["prep", "data=mtrag", f"path={raw}", f"out={tmp_path / 'o2'}", "data.domain=clod"]) == 2
    assert "data.domain" in capsys.readouterr().err


@pytest.mark.parametrize(("domain", "passages", "covered"), [("cloud", 4797, 175), ("govt", 697, 63)])
def test_real_domains(data_dir, tmp_path, domain, passages, covered):
    """As many passages and covered queries as the notes of the data say, less the three empty passages."""
    done = prep_mtrag(data_dir / "mtrag", tmp_path / "out", domain=domain, skip_missing=True)
    assert len(done.corpus) == passages
    assert [len(done.queries(form)) for form in ("lastturn", "questions", "rewrite")] == [covered] * 3
    unanswered = [q.id for q in done.queries("un_questions") if q.id not in done.answers("un_questions")]
    assert not unanswered
