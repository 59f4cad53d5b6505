import gzip
import json

import pytest

from retrail.data_prep.formats.beir import prep_beir

DOCS = [
    {"_id": "d 1", "title": "Title", "text": "text é", "metadata": {}},
    {"_id": "d2", "title": "only a title", "text": "  "},
    {"_id": "d3", "text": "no title 🚀"},
]
QUERIES = [{"_id": "q1", "text": "one"}, {"_id": "q2", "text": "two"}, {"_id": "q3", "text": "not judged"}]


def folder(tmp_path, docs=DOCS, queries=QUERIES, zipped=False, **splits):
    raw = tmp_path / "toy"
    (raw / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", docs), ("queries", queries)):
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if zipped:
            (raw / f"{name}.jsonl.gz").write_bytes(gzip.compress(content))
        else:
            (raw / f"{name}.jsonl").write_bytes(content)
    for split, lines in (splits or {"test": ["q2\td 1\t1", "q1\td3\t2"]}).items():
        (raw / "qrels" / f"{split}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))
    return raw


@pytest.mark.parametrize("zipped", [False, True])
def test_reads_a_folder(tmp_path, zipped):
    task = prep_beir(folder(tmp_path, zipped=zipped), tmp_path / "out")
    assert [(n.id, n.parent, n.title, n.text) for n in task.corpus] == [
        ("d 1", None, "Title", "text é"),
        ("d2", None, "only a title", "only a title"),
        ("d3", None, "", "no title 🚀"),
    ]
    assert [(q.id, q.text) for q in task.queries("test")] == [("q2", "two"), ("q1", "one")]
    assert task.qrels("test") == {"q2": {"d 1": 1}, "q1": {"d3": 2}}
    assert task.corpus.num_levels == 1
    assert task.name == "toy"
    assert [f["name"] for f in task.manifest["source"]["files"]][2] == "test.tsv"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "toy"]


def test_chosen_splits(tmp_path):
    raw = folder(tmp_path, train=["q1\td3\t1"], dev=["q2\td2\t1"], test=["q3\td2\t1"])
    assert prep_beir(raw, tmp_path / "all").splits == ("dev", "test", "train")
    assert prep_beir(raw, tmp_path / "two", splits=["train", "dev"]).splits == ("train", "dev")
    with pytest.raises(FileNotFoundError, match=r"no judgements for \['val'\]; there are: \['dev', 'test', 'train'\]"):
        prep_beir(raw, tmp_path / "x", splits=["val"])


@pytest.mark.parametrize(
    ("docs", "queries", "lines", "message"),
    [
        (
            [*DOCS, {"_id": "e", "title": "", "text": ""}],
            QUERIES,
            [],
            r"corpus\.jsonl:4: document 'e' has no title and no",
        ),
        ([{"id": "d"}], QUERIES, [], r"corpus\.jsonl:1 has no key '_id'"),
        ([{"_id": 3, "text": "x"}], QUERIES, [], r"corpus\.jsonl:1\['_id'\] must be a string, not an integer"),
        ([*DOCS, DOCS[0]], QUERIES, [], "id 'd 1' appears twice"),
        ([], QUERIES, [], "the corpus is empty"),
        (DOCS, [QUERIES[0], QUERIES[0]], [], r"queries\.jsonl:2: query id 'q1' appears twice"),
        (DOCS, QUERIES, ["q9\td2\t1"], r"test\.tsv: 1 judged queries are not in .*first 'q9'"),
        (DOCS, QUERIES, ["q2\tgone\t1"], "documents that the corpus lacks, first 'gone'"),
    ],
)
def test_bad_folders(tmp_path, docs, queries, lines, message):
    raw = folder(tmp_path, docs, queries, test=["q1\td2\t1", *lines])
    with pytest.raises(ValueError, match=message):
        prep_beir(raw, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]


def test_skips_and_counts_empty_documents(tmp_path):
    raw = folder(tmp_path, [*DOCS, {"_id": "e", "text": None}], test=["q1\te\t1", "q1\td2\t1"])
    with pytest.raises(ValueError, match="first 'e'"):
        prep_beir(raw, tmp_path / "out", skip_empty=True)
    task = prep_beir(raw, tmp_path / "out", skip_empty=True, allow_dangling=True)
    assert len(task.corpus) == 3
    assert task.manifest["source"]["skipped_empty_documents"] == 1


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"])
def test_missing_files_are_named(tmp_path, name):
    raw = folder(tmp_path)
    (raw / name).unlink()
    with pytest.raises(FileNotFoundError, match=name.removesuffix("/test.tsv")):
        prep_beir(raw, tmp_path / "out")


def test_scifact(data_dir, tmp_path):
    raw = data_dir / "scifact"
    if not (raw / "queries.jsonl.gz").exists() and not (raw / "queries.jsonl").exists():
        pytest.skip(f"no SciFact in BEIR layout in {raw}")
    task = prep_beir(raw, tmp_path / "out")
    assert len(task.corpus) == 5_183
    assert len(task.queries("test")) == 300
