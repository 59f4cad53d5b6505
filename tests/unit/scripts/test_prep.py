"""`retrail prep`: which files are read, and that a prepared folder is replaced whole or not at all."""

import json
from pathlib import Path

import pytest

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.task import Query, Task, write_task
from retrail.scripts import prep
from retrail.scripts.config import PrepData, PrepRun


def small_task(out, text="a question"):
    corpus = Corpus.from_nodes([Node("root", None, "Root", "Root"), Node("leaf", "root", "Leaf", "words")])
    splits = {"train": ([Query("q1", text), Query("q2", "unanswered")], {"q1": {"leaf": 1}})}
    return write_task(out, name="small", corpus=corpus, splits=splits, source={})


@pytest.fixture
def reader(monkeypatch):
    """Stands in for the reader of BEIR's layout."""
    texts = ["a question"]
    monkeypatch.setattr(prep, "_read", lambda run, out: small_task(out, texts[0]))
    return texts


def run_of(out, **settings):
    return PrepRun(data=PrepData(name="beir"), path="raw", out=str(out), **settings)


def test_says_what_was_written(tmp_path, reader, capsys):
    prep.prepare(run_of(tmp_path / "task"))
    out = capsys.readouterr().out
    assert "2 nodes on 2 levels, 1 of them leaves" in out
    assert "train: 2 queries, 1 of them with judgements" in out


def test_a_finished_task_is_refused(tmp_path, reader):
    prep.prepare(run_of(tmp_path / "task"))
    with pytest.raises(FileExistsError, match="already prepared; overwrite=true"):
        prep.prepare(run_of(tmp_path / "task"))


def test_overwrite_replaces_it_whole(tmp_path, reader):
    prep.prepare(run_of(tmp_path / "task"))
    reader[0] = "another question"
    prep.prepare(run_of(tmp_path / "task", overwrite=True))
    assert Task.open(tmp_path / "task").queries("train")[0].text == "another question"
    assert [path.name for path in tmp_path.iterdir()] == ["task"]


def test_overwrite_of_nothing(tmp_path, reader):
    prep.prepare(run_of(tmp_path / "task", overwrite=True))
    assert Task.open(tmp_path / "task").splits == ("train",)


def test_a_failing_overwrite_leaves_the_old_one(tmp_path, reader, monkeypatch):
    prep.prepare(run_of(tmp_path / "task"))
    before = Task.open(tmp_path / "task").fingerprint

    def broken(run, out):
        small_task(out)
        raise ValueError("line 7: broken")

    monkeypatch.setattr(prep, "_read", broken)
    with pytest.raises(ValueError, match="line 7"):
        prep.prepare(run_of(tmp_path / "task", overwrite=True))
    assert Task.open(tmp_path / "task").fingerprint == before
    assert [path.name for path in tmp_path.iterdir()] == ["task"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_folders_are_never_replaced(tmp_path, reader, overwrite):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "manifest.json").write_text(json.dumps({"format": "mine"}))
    with pytest.raises(FileExistsError, match="not a prepared folder"):
        prep.prepare(run_of(tmp_path / "thesis", overwrite=overwrite))
    assert (tmp_path / "thesis" / "manifest.json").exists()


def files_read(monkeypatch, folder, **settings):
    """Documents, dialogues as they are given to the reader."""
    seen = []
    import retrail.data_prep.formats.multidoc2dial as module

    monkeypatch.setattr(module, "prep_multidoc2dial", lambda *args, **kwargs: seen.append((*args[:2], kwargs)))
    prep._read_multidoc2dial(PrepData(name="multidoc2dial", **settings), folder, Path("out"))
    return seen[0]


def test_official_files_keep_their_splits(tmp_path, monkeypatch):
    for name in ("doc", "dial_train", "dial_validation", "dial_test"):
        (tmp_path / f"multidoc2dial_{name}.json").touch()
    documents, dialogues, options = files_read(monkeypatch, tmp_path, words=50, segmentation="token")
    assert documents.name == "multidoc2dial_doc.json"
    assert {split: path.name for split, path in dialogues.items()} == {
        "train": "multidoc2dial_dial_train.json",
        "dev": "multidoc2dial_dial_validation.json",
        "test": "multidoc2dial_dial_test.json",
    }
    assert options == {"segmentation": "token", "words": 50, "domain_level": True, "skip_missing": False}


def test_one_file_is_split_by_dialogue(tmp_path, monkeypatch):
    for name in ("doc2dial_doc.v1.json.gz", "doc2dial_dial_validation.json.gz"):
        (tmp_path / name).touch()
    assert files_read(monkeypatch, tmp_path)[1] == [tmp_path / "doc2dial_dial_validation.json.gz"]
    by_file = files_read(monkeypatch, tmp_path, split_by="files")[1]
    assert by_file == {"dev": tmp_path / "doc2dial_dial_validation.json.gz"}


def test_named_files(tmp_path, monkeypatch):
    documents, dialogues, _ = files_read(
        monkeypatch, tmp_path, documents="d.json", dialogues=["a.json"], split_by="hash"
    )
    assert (documents, dialogues) == (tmp_path / "d.json", [tmp_path / "a.json"])


@pytest.mark.parametrize(
    ("names", "settings", "part"),
    [
        ([], {}, "has 0 files named"),
        (["doc2dial_doc.json", "multidoc2dial_doc.json"], {}, "has 2 files named"),
        (["doc2dial_doc.json"], {}, "has no file named"),
        (["doc2dial_doc.json", "doc2dial_dial_a.json", "doc2dial_dial_b.json"], {}, "no split in its name"),
        (["doc2dial_doc.json", "doc2dial_dial_dev.json", "doc2dial_dial_validation.json"], {}, "are both 'dev'"),
    ],
)
def test_files_that_do_not_fit(tmp_path, monkeypatch, names, settings, part):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises((FileNotFoundError, ValueError), match=part):
        files_read(monkeypatch, tmp_path, **settings)


def test_real_data(data_dir, tmp_path, capsys):
    folder = data_dir / "doc2dial_multidoc2dial"
    status = prep.main(["data=multidoc2dial", f"path={folder}", f"out={tmp_path / 'mdd'}"])
    assert status == 0
    task = Task.open(tmp_path / "mdd")
    assert task.splits == ("train", "dev")
    assert "2,203 of them leaves" in capsys.readouterr().out
    assert len(task.corpus.children(None)) == 4  # domains


def test_missing_folder(tmp_path, capsys):
    assert prep.main(["data=beir", f"path={tmp_path / 'absent'}", f"out={tmp_path / 'x'}"]) == 2
    assert "absent: no such folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def multihop_files(monkeypatch, folder, name="musique", **settings):
    """The files that the reader of multi-hop data gets, by split, and the pool."""
    seen = []
    import retrail.data_prep.formats.multihop as module

    monkeypatch.setattr(module, "prep_multihop", lambda *args, **options: seen.append((*args, options)))
    prep._read_multihop(PrepData(name=name, **settings), folder, Path("out"))
    [(dataset, files, _, options)] = seen
    assert dataset == name
    return {split: file.name for split, file in files.items()}, options


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        (
            "musique",
            ["musique_ans_v1.0_train.jsonl", "musique_ans_v1.0_dev.jsonl.gz", "musique_ans_v1.0_test.jsonl"],
            {"train": "musique_ans_v1.0_train.jsonl", "dev": "musique_ans_v1.0_dev.jsonl.gz"},
        ),
        (
            "hotpotqa",
            ["hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json"],
            {"train": "hotpot_train_v1.1.json", "dev": "hotpot_dev_distractor_v1.json"},
        ),
        (
            "2wiki",
            ["train.json", "dev.json", "id_aliases.json", "test.json"],
            {"train": "train.json", "dev": "dev.json"},
        ),
        ("2wiki", ["dev.json"], {"dev": "dev.json"}),
    ],
)
def test_official_names_of_multihop_files(tmp_path, monkeypatch, name, files, expected):
    for file in [*files, "README.md", "2wikimultihopqa_corpus.json.gz"]:
        (tmp_path / file).touch()
    found, options = multihop_files(monkeypatch, tmp_path, name)
    assert found == expected and list(found) == [split for split in ("train", "dev") if split in expected]
    assert options == {"corpus": "paragraphs", "pool": None}
    pool = tmp_path / "2wikimultihopqa_corpus.json.gz"
    assert multihop_files(monkeypatch, tmp_path, name, corpus="both")[1] == {"corpus": "both", "pool": pool}


def test_chosen_multihop_files(tmp_path, monkeypatch):
    names = ["musique_ans_v1.0_dev.jsonl", "musique_full_v1.0_dev.jsonl", "musique_ans_v1.0_test.jsonl", "pool.json"]
    for file in names:
        (tmp_path / file).touch()
    with pytest.raises(ValueError, match="are both 'dev'; name the files with data.files"):
        multihop_files(monkeypatch, tmp_path)
    assert multihop_files(monkeypatch, tmp_path, files=names[1:3])[0] == {"dev": names[1], "test": names[2]}
    assert multihop_files(monkeypatch, tmp_path, files=names[1:3], splits=["dev"])[0] == {"dev": names[1]}
    assert multihop_files(monkeypatch, tmp_path, splits=["test"])[0] == {"test": names[2]}
    options = multihop_files(monkeypatch, tmp_path, splits=["test"], corpus="pool", documents="pool.json")[1]
    assert options == {"corpus": "pool", "pool": tmp_path / "pool.json"}
    for settings, message in [
        ({"splits": ["train"]}, r"no file of train named musique_\*\.json\*"),
        ({"splits": ["night"]}, "data.splits: night is none of train, dev, test"),
        ({"splits": ["test"], "corpus": "pool"}, r"has 0 files named \*corpus\*\.json"),
        ({"files": ["musique.jsonl"]}, r"no split in its name \(.*\)$"),
    ]:
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            multihop_files(monkeypatch, tmp_path, **settings)


def test_a_pool_file_that_nobody_reads_is_refused():
    with pytest.raises(ValueError, match="data.documents names the pool file, which data.corpus=paragraphs"):
        PrepData(name="2wiki", documents="pool.json")
    with pytest.raises(ValueError, match="data.corpus has no meaning for data=beir"):
        PrepData(name="beir", corpus="pool")


def test_the_command_says_what_a_multihop_data_set_holds(data_dir, tmp_path, capsys):
    folder, out = data_dir / "2wikimultihopqa", tmp_path / "2wiki"
    assert prep.main(["data=2wiki", "data.corpus=pool", "data.splits=[dev]", f"path={folder}", f"out={out}"]) == 0
    said = capsys.readouterr().out
    assert "6,119 documents; 0 equal paragraphs" in said
    assert "dev: 131 questions, chains of gold documents: 97 of 2, 34 of 4; 66.4% ordered; 518 distractors" in said
    assert "dev: 254 of 330 gold documents are not in the corpus (109 questions); they count as not found" in said
    assert Task.open(out).splits == ("dev",)
