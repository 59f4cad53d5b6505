import json
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrail.data_prep import corpus_build
from retrail.data_prep.corpus import Corpus, Node, build_corpus

SMALL = [
    Node("b", None, "B", "text b"),
    Node("b2x", "b2", "", "text b2x"),  # before its parent
    Node("b1", "b", "B1", "text b1"),
    Node("a", None, "A", "text a"),
    Node("b2", "b", "B2", "text b2"),
    Node("a1", "a", "A1", "text a1"),
]


def ids(corpus, rows):
    return [corpus.id(row) for row in rows]


def make(how, nodes, tmp_path):
    """The same corpus by each way of making one."""
    if how == "memory":
        return Corpus.from_nodes(nodes)
    if how == "saved":
        Corpus.from_nodes(nodes).save(tmp_path / "c")
        return Corpus.open(tmp_path / "c")
    return build_corpus(iter(nodes), tmp_path / "c")


@pytest.mark.parametrize("how", ["memory", "saved", "built"])
def test_small_tree(how, tmp_path):
    corpus = make(how, SMALL, tmp_path)
    assert len(corpus) == 6
    assert corpus.num_levels == 3
    assert ids(corpus, range(6)) == ["b", "a", "b1", "b2", "a1", "b2x"]
    assert corpus.children(None) == range(0, 2)
    assert [corpus.children(row) for row in range(6)] == [
        range(2, 4),
        range(4, 5),
        range(5, 5),
        range(5, 6),
        range(6, 6),
        range(6, 6),
    ]
    assert [corpus.parent(row) for row in range(6)] == [-1, -1, 0, 0, 1, 3]
    assert [corpus.level(row) for row in range(6)] == [0, 0, 1, 1, 1, 2]
    assert corpus.level_rows(1) == range(2, 5)
    assert [corpus.is_leaf(row) for row in range(6)] == [False, False, True, False, True, True]
    assert corpus.path(5) == (0, 3, 5)
    assert corpus.path(0) == (0,)
    assert ids(corpus, corpus.leaves()) == ["b1", "b2x", "a1"]
    assert (corpus.title(3), corpus.text(3), corpus.title(5)) == ("B2", "text b2", "")
    assert corpus.node(5) == SMALL[1]
    assert [corpus.row(node.id) for node in SMALL] == [0, 5, 2, 1, 3, 4]
    assert "b2" in corpus
    assert "B2" not in corpus
    assert 3 not in corpus


def test_every_way_gives_the_same_fingerprint(tmp_path):
    made = {make(how, SMALL, tmp_path / how).fingerprint for how in ("memory", "saved", "built")}
    assert len(made) == 1
    assert Corpus.from_nodes(Corpus.from_nodes(SMALL)).fingerprint in made


def test_fingerprint_depends_on_everything_but_the_interleaving(monkeypatch):
    def fingerprint(nodes):
        return Corpus.from_nodes(nodes).fingerprint

    base = fingerprint(SMALL)
    changes = [
        [Node(n.id + "!", n.parent, n.title, n.text) if n.id == "b1" else n for n in SMALL],
        [Node(n.id, "a", n.title, n.text) if n.id == "b1" else n for n in SMALL],
        [Node(n.id, n.parent, n.title + "!", n.text) if n.id == "b1" else n for n in SMALL],
        [Node(n.id, n.parent, n.title, n.text + "!") if n.id == "b1" else n for n in SMALL],
        [Node(n.id, n.parent, "", n.title + n.text) if n.id == "b1" else n for n in SMALL],
        [SMALL[3], *SMALL[:3], *SMALL[4:]],  # a before b
    ]
    prints = [fingerprint(nodes) for nodes in changes]
    assert len({base, *prints}) == len(changes) + 1
    assert fingerprint([SMALL[1], SMALL[0], *SMALL[2:]]) == base
    a, b = Node("a", None, "ab", "x"), Node("b", None, "c", "x")
    child = Node("c", "a", "", "x")
    assert fingerprint([a, b, child]) != fingerprint(
        [a, b, Node("c", "b", "", "x")]
    )  # the same columns but for parents
    assert fingerprint([a, b]) != fingerprint([Node("a", None, "a", "x"), Node("b", None, "bc", "x")])
    monkeypatch.setattr(corpus_build, "ROWS_PER_BATCH", 2)
    assert fingerprint(SMALL) == base


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "the corpus is empty"),
        ([Node("a", None, "", "x"), Node("b", None, "", "x"), Node("a", "b", "", "x")], "'a' appears twice.* 1 and 3"),
        ([Node("a", None, "", "x"), Node("b", "zz", "", "x")], "node 'b' has the parent 'zz', which is not"),
        ([Node("a", "a", "", "x")], "cycle of 1: 'a' -> 'a'"),
        (
            [Node("r", None, "", "x"), Node("d", "b", "", "x"), Node("a", "b", "", "x"), Node("b", "a", "", "x")],
            "cycle of 2: 'b' -> 'a' -> 'b'",
        ),
        ([Node("", None, "", "x")], "node number 1: its id is empty"),
        ([Node("ok", None, "", "x"), Node(" ", None, "", "x")], "node number 2: its id is empty"),
        ([Node("a", "", "", "x")], "node number 1: the parent of node 'a' is empty"),
        ([Node("a", None, "t", " \n\t\u3000")], "node 'a' has an empty text"),
        ([Node("a\nb", None, "", "x")], r"'a\\nb'; ids must not contain '\\n'"),
        ([Node("a\0", None, "", "x")], "ids must not contain"),
        ([Node("a\r", None, "", "x")], "ids must not contain"),
        ([Node(7, None, "", "x")], "its id is 7, not a string"),
        ([Node("a", None, None, "x")], "node 'a': its title is NoneType"),
        ([Node("a", None, "", b"x")], "node 'a': its text is bytes"),
        ([Node("a", None, "", "\ud800")], "node 'a': its title or text has a lone surrogate"),
        ([Node("\udfff", None, "", "x")], "lone surrogate"),
    ],
)
def test_refuses_and_leaves_nothing(nodes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Corpus.from_nodes(nodes)
    with pytest.raises(ValueError, match=message):
        build_corpus(nodes, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_long_cycles_are_shortened():
    nodes = [Node(f"n{i}", f"n{(i + 1) % 1000}", "", "x") for i in range(1000)]
    with pytest.raises(ValueError, match="cycle of 1000: 'n0' -> 'n1'") as error:
        Corpus.from_nodes(nodes)
    assert len(str(error.value)) < 200


def test_one_document(tmp_path):
    corpus = build_corpus([Node("only", None, "", "x")], tmp_path / "c")
    assert (len(corpus), corpus.num_levels, corpus.children(None), corpus.children(0)) == (1, 1, range(1), range(1, 1))
    assert corpus.path(0) == (0,)
    assert corpus.leaves().tolist() == [0]


def test_ten_thousand_children_and_a_deep_chain():
    wide = Corpus.from_nodes([Node("r", None, "", "x"), *(Node(str(i), "r", "", f"t{i}") for i in range(10_000))])
    assert wide.children(0) == range(1, 10_001)
    assert wide.text(wide.row("9999")) == "t9999"
    deep = Corpus.from_nodes(Node(str(i), str(i - 1) if i else None, "", "x") for i in range(2_000))
    assert deep.num_levels == 2_000
    assert deep.path(1_999) == tuple(range(2_000))
    assert deep.leaves().tolist() == [1_999]


def test_unicode(tmp_path):
    texts = {
        "漢字": "日本語のテキスト",
        "🚀 rocket": "👩‍🚀 \u0301",
        "with space": "x\0y\r\nz",
        "é": "precomposed",
        "e\u0301": "not",
    }
    corpus = build_corpus((Node(k, None, k, v) for k, v in texts.items()), tmp_path / "c")
    assert {corpus.id(row): corpus.text(row) for row in range(len(corpus))} == texts
    assert all(corpus.title(corpus.row(key)) == key for key in texts)


def test_outside_rows_and_unknown_ids():
    corpus = Corpus.from_nodes(SMALL)
    for row in (-1, 6):
        for call in (
            corpus.id,
            corpus.title,
            corpus.text,
            corpus.parent,
            corpus.level,
            corpus.children,
            corpus.path,
            corpus.is_leaf,
        ):
            with pytest.raises(IndexError, match=f"row {row} is outside this corpus of 6 nodes"):
                call(row)
    for level in (-1, 3):
        with pytest.raises(IndexError, match=f"level {level}"):
            corpus.level_rows(level)
    for unknown in ("zz", "", "\ud800"):
        with pytest.raises(KeyError, match="no node"):
            corpus.row(unknown)
        assert unknown not in corpus


def test_arrays_are_read_only():
    corpus = Corpus.from_nodes(SMALL)
    for array in (corpus.parents, corpus.leaves()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 3


def brute_force(nodes):
    """(ids in level order, leaves depth-first, children by parent) by dictionaries and recursion."""
    children = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node.id)
    order, level = [], children.get(None, [])
    while level:
        order += level
        level = [child for node in level for child in children.get(node, [])]

    def leaves(node):
        below = children.get(node, [])
        return [leaf for child in below for leaf in leaves(child)] if below else [node]

    return order, leaves(None), children


def random_nodes(rng, size):
    nodes = []
    for i in range(size):
        parent = None if not nodes or rng.random() < 0.15 else f"n{rng.randrange(i)}"
        nodes.append(Node(f"n{i}", parent, rng.choice(["", "título"]), "é" * rng.randrange(1, 9) + str(i)))
    rng.shuffle(nodes)
    return nodes


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 60), st.integers(1, 7), st.sampled_from([1, 25, 1 << 20]))
def test_as_a_brute_force_twin(rng, size, rows_per_batch, bytes_per_batch):
    nodes = random_nodes(rng, size)
    order, leaves, children = brute_force(nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_build, "ROWS_PER_BATCH", rows_per_batch)
        patch.setattr(corpus_build, "BYTES_PER_BATCH", bytes_per_batch)
        corpus = Corpus.from_nodes(nodes)
    assert ids(corpus, range(size)) == order
    assert ids(corpus, corpus.leaves()) == leaves
    for node in nodes:
        row = corpus.row(node.id)
        assert corpus.node(row) == node
        assert ids(corpus, corpus.children(row)) == children.get(node.id, [])


def test_built_in_many_batches_equals_memory(tmp_path, monkeypatch):
    nodes = random_nodes(random.Random(5), 3_000)
    expected = Corpus.from_nodes(nodes)
    monkeypatch.setattr(corpus_build, "ROWS_PER_BATCH", 64)
    built = build_corpus(nodes, tmp_path / "c")
    assert list(built) == list(expected)
    assert built.fingerprint == expected.fingerprint


@pytest.mark.parametrize("width", [1, 3, 1000])
def test_equal_hashes_are_told_apart(width, monkeypatch):
    """With a hash of `width` values, ids, parents and look-ups must still be exact."""
    real = corpus_build.hash_id
    monkeypatch.setattr(corpus_build, "hash_id", lambda raw: real(raw) % width)
    nodes = random_nodes(random.Random(6), 80)
    corpus = Corpus.from_nodes(nodes)
    assert [corpus.node(corpus.row(node.id)) for node in nodes] == nodes
    assert "n80" not in corpus
    with pytest.raises(ValueError, match="'n7' appears twice"):
        Corpus.from_nodes([*nodes, Node("n7", None, "", "x")])
    with pytest.raises(ValueError, match="the parent 'n80', which is not"):
        Corpus.from_nodes([*nodes, Node("new", "n80", "", "x")])


def test_hash_is_fixed():
    """BLAKE2b-64 of known bytes, little-endian: a stored index must mean the same everywhere."""
    assert corpus_build.hash_id(b"") == int.from_bytes(bytes.fromhex("e4a6a0577479b2b4"), "little")


@pytest.fixture
def folder(tmp_path):
    Corpus.from_nodes(SMALL).save(tmp_path / "c")
    return tmp_path / "c"


def edit(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def test_open_names_what_is_missing(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such folder"):
        Corpus.open(tmp_path / "nowhere")
    (folder / "structure.arrow").unlink()
    with pytest.raises(FileNotFoundError, match=r"structure.arrow: missing"):
        Corpus.open(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"manifest.json: no such file"):
        Corpus.open(folder)


@pytest.mark.parametrize("name", ["nodes.arrow", "structure.arrow"])
def test_open_refuses_files_that_were_cut_off(folder, name):
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ValueError, match=rf"{name}: {len(raw) // 2} bytes, but its manifest says {len(raw)}"):
        Corpus.open(folder)
    (folder / name).write_bytes(b"\0" * len(raw))
    with pytest.raises(ValueError, match=rf"{name}: damaged"):
        Corpus.open(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "not the manifest of a corpus"),
        ({"format_version": 99}, "corpus format version 99, but this code reads version 1"),
        ({"nodes": 5}, "disagree on the number of nodes"),
        ({"nodes": "6"}, r"\['nodes'\] must be an integer, not a string"),
    ],
)
def test_open_refuses_other_manifests(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=message):
        Corpus.open(folder)


def test_save_overwrites_nothing(folder):
    before = sorted((p.name, p.read_bytes()) for p in folder.iterdir())
    for write in (lambda: Corpus.from_nodes(SMALL[:1]).save(folder), lambda: build_corpus(SMALL[:1], folder)):
        with pytest.raises(FileExistsError, match="exists already"):
            write()
    assert sorted((p.name, p.read_bytes()) for p in folder.iterdir()) == before


def test_a_mapped_corpus_outlives_its_folder(folder):
    corpus = Corpus.open(folder)
    shutil.rmtree(folder)
    assert list(corpus) == list(Corpus.from_nodes(SMALL))


def test_reads_a_folder_in_another_process(folder):
    """Nothing of the index depends on this process's hash seed."""
    code = f"from retrail.data_prep.corpus import Corpus; print(Corpus.open({str(folder)!r}).row('b2x'))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=folder)
    assert out.stdout.strip() == "5"


def test_batches_are_bounded_by_rows_and_by_bytes(monkeypatch):
    arrivals = corpus_build.Arrivals()
    arrivals.extend(Node(str(i), None, "", "x" * (200 if i == 3 else 9)) for i in range(8))  # 10 bytes each, and 201
    order = np.arange(8)
    monkeypatch.setattr(corpus_build, "ROWS_PER_BATCH", 3)
    assert [batch.num_rows for batch in arrivals.batches(order)] == [3, 3, 2]
    monkeypatch.setattr(corpus_build, "BYTES_PER_BATCH", 20)
    assert [batch.num_rows for batch in arrivals.batches(order)] == [2, 1, 1, 2, 2]


def test_preorder_by_hand():
    """The tree of SMALL: b(b1, b2(b2x)), a(a1), in rows b, a, b1, b2, a1, b2x."""
    arrivals = corpus_build.Arrivals()
    arrivals.extend(SMALL)
    structure, _ = arrivals.arrange()
    assert corpus_build.preorder(structure, [0, 2, 5, 6]).tolist() == [0, 4, 1, 2, 5, 3]


def test_level_order_leaves_out_what_hangs_on_a_cycle():
    parent = np.array([-1, 0, 3, 2, 3, 0])
    assert corpus_build.level_order(parent).tolist() == [0, 1, 5]
