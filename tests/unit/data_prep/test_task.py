import json

import pytest

from retrail.data_prep.chains import read_chains
from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.task import Chain, Query, Task, qrels_at_level, write_task

CORPUS = Corpus.from_nodes(
    [
        Node("domain", None, "", "x"),
        Node("doc 1", "domain", "", "x"),
        Node("doc 2", "domain", "", "x"),
        Node("p1", "doc 1", "", "x"),
        Node("p2", "doc 1", "", "x"),
        Node("p3", "doc 2", "", "x"),
    ]
)
QUERIES = [Query("q 1", "ein\nFräge 🚀"), Query("q2", "two"), Query("q3", "three")]
QRELS = {"q2": {"p1": 2, "p3": 0}, "q 1": {"p2": 1}}


def write(path, **changes):
    arguments = {"name": "toy", "corpus": CORPUS, "splits": {"dev": (QUERIES, QRELS)}, "source": {"made": "here"}}
    return write_task(path, **(arguments | changes))


def test_round_trip(tmp_path):
    write(tmp_path / "t", splits={"train": (QUERIES[:1], {}), "dev": (QUERIES, QRELS)})
    task = Task.open(tmp_path / "t")
    assert (task.name, task.splits) == ("toy", ("train", "dev"))
    assert task.queries("dev") == QUERIES
    assert task.qrels("dev") == {"q 1": {"p2": 1}, "q2": {"p1": 2, "p3": 0}, "q3": {}}
    assert list(task.qrels("dev")) == ["q 1", "q2", "q3"]
    assert task.qrels("train") == {"q 1": {}}
    assert task.corpus.fingerprint == CORPUS.fingerprint
    assert task.manifest["splits"]["dev"] == {
        "queries": 3,
        "judgements": 3,
        "dangling_judgements": 0,
        "queries_without_gold": 1,
    }
    assert task.manifest["source"] == {"made": "here"}
    assert (tmp_path / "t/qrels/dev.tsv").read_text().splitlines()[0] == "query-id\tcorpus-id\tscore"


def test_fingerprint_follows_content(tmp_path):
    first = write(tmp_path / "a").fingerprint
    assert write(tmp_path / "b", name="other", source={}).fingerprint == first
    assert write(tmp_path / "c", splits={"dev": (QUERIES, {"q2": {"p1": 1}})}).fingerprint != first
    assert write(tmp_path / "d", splits={"test": (QUERIES, QRELS)}).fingerprint != first


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({}, "task 'toy' has no splits"),
        ({"a/b": (QUERIES, {})}, "split name 'a/b' cannot be a file name"),
        ({"..": (QUERIES, {})}, "split name '..' cannot"),
        ({"dev": ([], {})}, "split 'dev' has no queries"),
        ({"dev": ([Query("q", " \n")], {})}, "query 'q' has an empty id or text"),
        ({"dev": ([Query("", "x")], {})}, "query '' has an empty id or text"),
        ({"dev": ([QUERIES[0], QUERIES[0]], {})}, "query id 'q 1' appears twice"),
        ({"dev": (QUERIES, {"zz": {"p1": 1}})}, "1 judged queries are not its queries, first 'zz'"),
        ({"dev": (QUERIES, {"q2": {"gone": 1}})}, "1 judgements name documents that the corpus lacks, first 'gone'"),
        ({"dev": (QUERIES, {"q2": {"p1": 0.5}})}, "relevance 0.5 is not an int"),
        ({"dev": ([Query("q\t1", "x")], {"q\t1": {"p1": 1}})}, "which a BEIR file cannot hold"),
    ],
)
def test_refuses_and_leaves_nothing(tmp_path, splits, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "t", splits=splits)
    assert list(tmp_path.iterdir()) == []


def test_dangling_judgements_stay_when_allowed(tmp_path):
    task = write(tmp_path / "t", splits={"dev": (QUERIES, {"q2": {"gone": 1}})}, allow_dangling=True)
    assert task.qrels("dev")["q2"] == {"gone": 1}
    assert task.manifest["splits"]["dev"]["dangling_judgements"] == 1


def test_overwrites_nothing(tmp_path):
    write(tmp_path / "t")
    with pytest.raises(FileExistsError, match="exists already"):
        write(tmp_path / "t")
    assert Task.open(tmp_path / "t").queries("dev") == QUERIES


def test_unknown_split_names_the_splits(tmp_path):
    task = write(tmp_path / "t", splits={"train": (QUERIES, {}), "dev": (QUERIES, {})})
    for read in (task.queries, task.qrels):
        with pytest.raises(KeyError, match="no split 'test'; it has: train, dev"):
            read("test")


def test_open_says_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        Task.open(tmp_path / "nowhere")
    write(tmp_path / "t")
    manifest_file = tmp_path / "t/manifest.json"
    manifest = json.loads(manifest_file.read_text())
    for changes, message in [
        ({"format": "x"}, "not the manifest of a task"),
        ({"format_version": 2}, "task format version 2, but this code reads version 1"),
        ({"corpus_fingerprint": "0"}, "its corpus is not the one that the task was written with"),
        ({"name": None}, r"\['name'\] must be a string, not null"),
    ]:
        manifest_file.write_text(json.dumps(manifest | changes))
        with pytest.raises(ValueError, match=message):
            Task.open(tmp_path / "t")
    manifest_file.write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json:1: not JSON"):
        Task.open(tmp_path / "t")
    manifest_file.write_text(json.dumps(manifest))
    (tmp_path / "t/qrels/dev.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"qrels/dev\.tsv: missing"):
        Task.open(tmp_path / "t")


def test_a_changed_file_is_noticed(tmp_path):
    task = write(tmp_path / "t")
    with (tmp_path / "t/queries/dev.jsonl").open("a") as file:
        file.write('{"id": "q4", "text": "four"}\n')
    with pytest.raises(ValueError, match=r"queries/dev\.jsonl was changed after"):
        task.queries("dev")


def test_qrels_at_level():
    qrels = {"q1": {"p2": 2, "p1": 0, "p3": 1}, "q2": {}, "q3": {"doc 2": 1}, "q4": {"p3": -1}}
    assert qrels_at_level(qrels, CORPUS, 1) == {
        "q1": {"doc 1": 2, "doc 2": 1},
        "q2": {},
        "q3": {"doc 2": 1},
        "q4": {"doc 2": -1},
    }
    assert qrels_at_level({"q1": {"p1": 1}}, CORPUS, 0) == {"q1": {"domain": 1}}
    with pytest.raises(ValueError, match="'doc 2' is on level 1, above level 2"):
        qrels_at_level(qrels, CORPUS, 2)
    with pytest.raises(KeyError, match="no node 'gone'"):
        qrels_at_level({"q": {"gone": 1}}, CORPUS, 0)


CHAINS = {"q2": Chain(("p1",), False, ("p3", "p2"), "kind ä"), "q 1": Chain(("p2",), True)}


def test_chains_come_back(tmp_path):
    splits = {"train": (QUERIES[:1], {}), "dev": (QUERIES, QRELS)}
    task = write(tmp_path / "t", splits=splits, chains={"dev": CHAINS, "train": {}})
    assert task.chains("dev") == CHAINS and list(task.chains("dev")) == ["q2", "q 1"]
    assert task.chains("train") == {} == write(tmp_path / "none").chains("dev")
    line = (tmp_path / "t/chains/dev.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert json.loads(line) == {
        "id": "q2",
        "gold": ["p1"],
        "ordered": False,
        "distractors": ["p3", "p2"],
        "kind": "kind ä",
    }
    assert task.fingerprint != Task.open(tmp_path / "none").fingerprint
    with pytest.raises(KeyError, match="no split 'test'"):
        task.chains("test")


@pytest.mark.parametrize(
    ("chains", "message"),
    [
        ({"zz": Chain(("p1",), True)}, "'zz' is to no query of that split"),
        ({"q2": Chain((), True)}, "'q2': a chain needs at least one gold document"),
        ({"q2": Chain(("p1", "p1"), True)}, "'p1' appears twice among gold and distractors"),
        ({"q2": Chain(("p1",), True, ("p1",))}, "'p1' appears twice among gold and distractors"),
        ({"q2": Chain(("p1",), True, ("",))}, "a document id is empty"),
        ({"q2": Chain(("p1",), True, ("gone",))}, "1 documents are not in the corpus, first 'gone'"),
        ({"q2": Chain(("p1", "p3"), True)}, "has not the gold documents of the judgements: they differ in 'p3'"),
        ({"q3": Chain(("p1",), True)}, "they differ in 'p1'"),
    ],
)
def test_chains_that_do_not_fit(tmp_path, chains, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "t", chains={"dev": chains})
    with pytest.raises(ValueError, match="is to no query"):
        write(tmp_path / "t", chains={"test": {"q2": Chain(("p1",), True)}})
    assert list(tmp_path.iterdir()) == []


def test_a_chain_may_hold_gold_that_is_missing_where_the_judgements_do(tmp_path):
    qrels = {"q2": {"p1": 1, "gone": 1}}
    chains = {"dev": {"q2": Chain(("gone", "p1"), True)}}
    with pytest.raises(ValueError, match="first 'gone'"):
        write(tmp_path / "t", splits={"dev": (QUERIES, qrels)}, chains=chains)
    task = write(tmp_path / "t", splits={"dev": (QUERIES, qrels)}, chains=chains, allow_dangling=True)
    assert task.chains("dev")["q2"].gold == ("gone", "p1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "q2"}', "has no key 'gold'"),
        ('{"id": "zz", "gold": ["p1"], "distractors": [], "ordered": true}', "query 'zz' is not of this split"),
        ('{"id": "q 1", "gold": ["p1"], "distractors": [], "ordered": true}', "query 'q 1' has two chains"),
        ('{"id": "q2", "gold": [1], "distractors": [], "ordered": true}', r"\['gold'\] must be a string"),
        ('{"id": "q2", "gold": ["p1"], "distractors": [], "ordered": "yes"}', r"\['ordered'\] must be a boolean"),
        ('{"id": "q2", "gold": ["gone"], "distractors": [], "ordered": true}', "first 'gone'"),
        ("[]", "a line must be a JSON object"),
    ],
)
def test_a_damaged_file_of_chains_is_named_by_its_line(tmp_path, line, message):
    first = '{"id": "q 1", "gold": ["p2"], "distractors": [], "ordered": true}'
    (tmp_path / "dev.jsonl").write_text(f"{first}\n{line}\n")
    with pytest.raises(ValueError, match=rf"dev\.jsonl:2.*{message}"):
        read_chains(tmp_path / "dev.jsonl", {"q 1", "q2"}, CORPUS)
