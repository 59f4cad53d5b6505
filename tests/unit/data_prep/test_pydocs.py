import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from retrail.data_prep.formats import pydocs, pydocs_collect
from retrail.data_prep.formats.pydocs import Record, choose_queries, make_entries, pack, split_sections, split_summary


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return pydocs.prep_pydocs(tmp_path_factory.mktemp("pydocs") / "out")


def text(task, node_id):
    return task.corpus.text(task.corpus.row(node_id))


def test_is_a_large_tree_with_queries_in_every_split(task):
    corpus = task.corpus
    source = task.manifest["source"]
    assert source["leaves"] == len(corpus.leaves()) > 3_000
    assert source["top_level_modules"] > 120
    assert corpus.num_levels >= 4
    assert [len(task.queries(split)) > least for split, least in (("train", 500), ("dev", 50), ("test", 100))]
    assert source["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert corpus.title(corpus.row("topics")) == "Language reference topics"


def test_known_places(task):
    corpus = task.corpus
    fill = corpus.row("textwrap.TextWrapper.fill")
    assert [corpus.id(row) for row in corpus.path(fill)] == [
        "chapter:text-processing",
        "textwrap",
        "textwrap.TextWrapper",
        "textwrap.TextWrapper.fill",
    ]
    shelves = [corpus.id(row) for row in corpus.children(None)]
    assert shelves[0] == "chapter:text-processing" and shelves[-1] == "topics" and 20 < len(shelves) < 35
    assert len(corpus.level_rows(1)) > len(task.manifest["source"]["failed_imports"]) + 120
    assert corpus.is_leaf(fill)
    for known in ("os.path.join", "os.listdir", "io.BytesIO.read", "json.loads", "builtins.str.split", "topics/while"):
        assert known in corpus
    for absent in ("posixpath.join", "antigravity", "this", "idlelib", "test", "_io", "encodings.ascii"):
        assert absent not in corpus
    wrapper = [corpus.id(row).rpartition(".")[2] for row in corpus.children(corpus.row("textwrap.TextWrapper"))]
    defined = [name for name in vars(textwrap.TextWrapper) if name in wrapper]
    assert wrapper == defined == ["wrap", "fill"]


def test_leaf_text_is_signature_and_rest(task):
    doc = inspect.cleandoc(textwrap.shorten.__doc__)
    assert doc.startswith("Collapse and truncate the given text to fit in the given width.")
    shown = text(task, "textwrap.shorten")
    assert shown.startswith(f"shorten{inspect.signature(textwrap.shorten)}\n\nThe text first has its whitespace")
    assert "Collapse and truncate" not in shown
    queries = {query.id: query.text for split in task.splits for query in task.queries(split)}
    assert queries["q:textwrap.shorten"] == "Collapse and truncate the given text to fit in the given width."


def squeezed(value):
    return " ".join(re.findall(r"\w+", value.casefold()))


def test_no_summary_stands_in_any_searched_text(task):
    """By plain substring search in one string of everything, an independent way from the one in the code."""
    corpus = task.corpus
    everything = " | ".join(squeezed(f"{corpus.title(row)}\n{corpus.text(row)}") for row in range(len(corpus)))
    everything = f" {everything} "
    queries = [query for split in task.splits for query in task.queries(split)]
    standing = [query for query in queries if f" {squeezed(query.text)} " in everything]
    assert standing == []
    assert len({squeezed(query.text) for query in queries}) == len(queries)


def test_queries_have_one_leaf_with_enough_text(task):
    for split in task.splits:
        for query_id, gold in task.qrels(split).items():
            [leaf] = gold
            assert query_id == f"q:{leaf}"
            assert task.corpus.is_leaf(task.corpus.row(leaf))
            number = int(hashlib.sha1(leaf.partition(".")[0].encode()).hexdigest(), 16) % 10
            assert split == ("train" if number < 7 else "dev" if number == 7 else "test")
            rest = text(task, leaf).partition("\n\n")[2]
            assert len(re.findall(r"\w+", rest)) >= 8


def test_topics_are_pieces_of_similar_size_and_nothing_is_lost(task):
    from pydoc_data.topics import topics

    corpus = task.corpus
    rows = [row for row in corpus.leaves() if corpus.id(row).startswith("topics/")]
    assert len(rows) > 100
    assert max(len(corpus.text(row).split()) for row in rows) <= 150
    found = {word for row in range(len(corpus)) for word in f"{corpus.title(row)} {corpus.text(row)}".split()}
    for name, content in topics.items():
        missing = [
            word for word in content.split() if word not in found and not re.fullmatch(r"([*=\-~^\"#])\1+", word)
        ]
        assert missing == [], name


def test_is_the_same_every_time_and_tells_nothing_of_the_machine(task, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "77")
    monkeypatch.setenv("SECRET_TOKEN", "hush-hush")
    again = pydocs.prep_pydocs(tmp_path / "again")
    assert again.fingerprint == task.fingerprint
    for row in range(len(again.corpus)):
        shown = again.corpus.text(row)
        assert "hush-hush" not in shown
        assert not re.search(r" at 0x[0-9a-f]{8,}", shown)
        assert os.environ["PATH"] not in shown


def test_collecting_in_a_foreign_environment_leaks_nothing(tmp_path):
    """Even started by hand, with the whole environment: `cgi` of Python 3.11 has os.environ as a default."""
    script = Path(pydocs_collect.__file__)
    environment = os.environ | {"SECRET_TOKEN": "hush-hush"}
    out = tmp_path / "out.jsonl"
    subprocess.run([sys.executable, "-P", str(script), str(out)], check=True, env=environment, timeout=60)
    content = out.read_text()
    assert "hush-hush" not in content
    assert json.loads(content.splitlines()[-1])["kind"] == "failures"


def test_does_not_import_into_the_caller():
    code = (
        "import sys; before = set(sys.modules); from retrail.data_prep.formats.pydocs import collect; collect();"
        "print(sorted({'turtle', 'cgi', 'smtplib', 'tkinter'} & (set(sys.modules) - before)))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "[]"


def test_hard_timeout():
    with pytest.raises(RuntimeError, match=r"took longer than 0\.01 s"):
        pydocs.collect(timeout_s=0.01)


def test_a_failing_collector_is_reported(monkeypatch):
    monkeypatch.setattr(pydocs, "__file__", __file__)
    with pytest.raises(RuntimeError, match=r"failed \(exit 2\): .*pydocs_collect\.py"):
        pydocs.collect()


@pytest.mark.parametrize(
    ("doc", "summary", "rest"),
    [
        ("One line.", "One line.", ""),
        ("Do it,\n e.g. so. And then\nmore.\n\nLast\n  part.", "Do it, e.g. so.", "And then more.\n\nLast\n  part."),
        ("no end of a sentence\n\nrest", "no end of a sentence", "rest"),
        ("f(a[, b]) -> int\n\nReturn it. More.", "Return it.", "More."),
        ("S.f(sub) -> int\nS.f(x)\nReturn it.", "Return it.", ""),
        ("fit (a) the text. Rest.", "fit (a) the text.", "Rest."),
        ("Uses version 3.5 of x. Then.", "Uses version 3.5 of x.", "Then."),
        ('Say "hello there." Then go.', 'Say "hello there."', "Then go."),
        ("word " * 41 + "end.", "", ("word " * 41 + "end.")),
        ("", "", ""),
    ],
)
def test_split_summary(doc, summary, rest):
    assert split_summary(doc, "f") == (summary, rest)


def record(node, parent, kind, doc="", signature=""):
    return Record(node, parent, node, kind, signature, doc)


REST = "one two three four five six seven eight"
RECORDS = [
    record("m", None, "module", "About m. Sort the list in place."),
    record("m.f", "m", "routine", f"Return the sum of two.\n\n{REST}", "f(a)"),
    record("m.g", "m", "routine", f"Sort the list in place.\n\n{REST}", "g(a)"),
    record("m.h", "m", "routine", f"Same words in two leaves.\n\n{REST}", "h(a)"),
    record("m.i", "m", "routine", f"Same words in two leaves\n\n{REST} nine", "i(a)"),
    record("m.j", "m", "routine", "Only a summary with nothing after.", "j(a)"),
    record("m.k", "m", "routine", f"Too short.\n\n{REST}", "k(a)"),
    record("m.C", "m", "class", "A class that has a method inside.", "C()"),
    record("m.C.run", "m.C", "routine", f"Run what was given to it.\n\n{REST}", "run(self)"),
    record("m.Empty", "m", "class", "", "Empty()"),
    record("bare", None, "module"),
    record("bare.sub", "bare", "module"),
    record("full", None, "module"),
    record("full.x", "full", "routine", f"Take an item out of the queue.\n\n{REST}", "x()"),
]


def test_entries_and_queries_by_hand():
    entries = {entry.node.id: entry for entry in make_entries(RECORDS)}
    assert "m.Empty" not in entries
    assert "bare" not in entries
    assert entries["m.f"].node.text == f"f(a)\n\n{REST}"
    assert entries["m.j"].node.text == "j(a)"
    assert entries["m.C"].node.text == "C()\n\nA class that has a method inside.\n\nContents: run"
    assert entries["m"].node.text == "About m. Sort the list in place.\n\nContents: f, g, h, i, j, k, C"
    assert entries["full"].node.text == "Contents: x"
    queries, refused = choose_queries(list(entries.values()))
    assert queries == {
        "m.f": "Return the sum of two.",
        "m.C.run": "Run what was given to it.",
        "full.x": "Take an item out of the queue.",
    }
    assert refused == {
        "summary_in_searched_text": 1,
        "summary_repeats": 2,
        "text_too_short": 1,
        "summary_too_short": 1,
    }


def test_contents_stand_before_the_second_paragraph_and_without_private_names():
    records = [
        record("m", None, "module", "First words.\n\nMore words."),
        record("m.f", "m", "routine", f"Return the sum of two.\n\n{REST}", "f(a)"),
        record("m._g", "m", "routine", f"Sort the list in place.\n\n{REST}", "_g(a)"),
    ]
    assert make_entries(records)[0].node.text == "First words.\n\nContents: f\n\nMore words."


def test_topic_pieces_by_hand():
    doc = "Title\n*****\n\nIntro words.\n\n\nPart\n====\n\n   code line\n\n* a\n\n* b\n\nA | B\n---------\n"
    assert split_sections(doc) == [
        ("", []),
        ("Title", ["Intro words."]),
        ("Part", ["   code line", "* a", "* b"]),
        ("A | B", []),
    ]
    entries = make_entries([record("topics", None, "module", "T."), Record("t", "topics", "t", "topic", "", doc)])
    assert [(e.node.id, e.node.title, e.node.text) for e in entries[1:]] == [
        ("t", "Title", "Title. Intro words. code line * a * b ..."),
        ("t/0", "Title", "Intro words."),
        ("t/1", "Title / Part", "   code line\n\n* a\n\n* b"),
    ]


def test_a_long_topic_leaves_out_what_a_shorter_one_holds():
    short = "While\n*****\n\nIt loops."
    long = f"All\n***\n\nIntro.\n\n\n{short}\n\nMore of it.\n"
    topics = [Record(key, "topics", key, "topic", "", doc) for key, doc in (("all", long), ("while", short))]
    entries = make_entries([record("topics", None, "module", "T."), *topics])
    assert [(e.node.id, e.node.text) for e in entries[1:]] == [
        ("all", "All. Intro. It loops. More of it. ..."),
        ("all/0", "Intro."),
        ("all/1", "It loops.\n\nMore of it."),
        ("while", "While. It loops. ..."),
        ("while/0", "It loops."),
    ]
    same = [Record(key, "topics", key, "topic", "", doc) for key, doc in (("all", long[:-13]), ("while", short))]
    assert [e.node.id for e in make_entries([record("topics", None, "module", "T."), *same])] == [
        "topics",
        "all",
        "all/0",
        "while",
        "while/0",
    ]


def test_pack():
    assert pack(["a b", "c", "d e f"], 3) == ["a b\n\nc", "d e f"]
    assert pack(["a b c d\ne f\ng h i j k"], 4) == ["a b c d", "e f", "g h i j", "k"]
    assert pack([]) == []


def test_members_belong_where_they_say():
    found, failures = pydocs.collect()
    records = {record.id for record in found}
    assert len(records) == len(found)
    assert all(isinstance(error, str) for error in failures.values())
    assert "bisect.bisect_right" in records
    assert "bisect.bisect" not in records  # the same object under another name
    assert "json.decoder.JSONDecoder" in records
    assert "json.JSONDecoder" not in records  # imported there
    assert "collections.abc.Mapping.get" in records
    assert "collections.abc.MutableMapping.get" not in records  # inherited
    assert "heapq.heappush" in records  # says `_heapq`
    assert "collections.OrderedDict.move_to_end" in records
