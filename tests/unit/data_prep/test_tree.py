import numpy as np
import pytest

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.tree import Tree, balance, balanced_tree, cluster_pages, nearest, page_text
from retrail.data_prep.tree_update import add_documents, remove_documents

pytest.importorskip("faiss")


def flat(count):
    return Corpus.from_nodes(Node(f"d{i}", None, f"title {i}", f"text {i}") for i in range(count))


def blobs(sizes, dims=8, seed=0):
    rng = np.random.default_rng(seed)
    centres = np.eye(dims)[: len(sizes)]
    return np.concatenate([c + 0.05 * rng.normal(size=(n, dims)) for c, n in zip(centres, sizes, strict=True)])


def sizes(tree):
    return [len(tree.corpus.children(tree.corpus.row(group))) for group in tree.group_ids]


def members(tree):
    corpus = tree.corpus
    return {group: {corpus.id(r) for r in corpus.children(corpus.row(group))} for group in tree.group_ids}


def test_groups_are_the_blobs():
    tree = cluster_pages(flat(12), blobs([2, 4, 6]), 3)
    assert sorted(map(sorted, members(tree).values())) == sorted(
        sorted(f"d{i}" for i in part) for part in (range(2), range(2, 6), range(6, 12))
    )
    assert tree.corpus.num_levels == 2
    assert [tree.corpus.text(row) for row in tree.corpus.leaves()].count("text 3") == 1


def test_balanced_sizes_differ_by_at_most_one():
    tree = cluster_pages(flat(103), blobs([90, 8, 5]), 10, balanced=True)
    assert set(sizes(tree)) == {10, 11} and sum(sizes(tree)) == 103


def test_balance_equals_a_plain_loop():
    rng = np.random.default_rng(1)
    for count, groups in ((7, 3), (40, 6), (41, 7)):
        vectors, centroids = (rng.normal(size=(n, 5)).astype(np.float32) for n in (count, groups))
        similar = vectors @ centroids.T
        wishes = [int(np.argmax(row)) for row in similar]
        larger = sorted(range(groups), key=lambda g: -wishes.count(g))[: count % groups]
        room = [count // groups + (g in larger) for g in range(groups)]
        label = [-1] * count
        while -1 in label:
            asking = {}
            for page in (p for p in range(count) if label[p] < 0):
                wish = max((g for g in range(groups) if room[g]), key=lambda g: similar[page, g])
                asking.setdefault(wish, []).append(page)
            for wish, pages in asking.items():
                taken = sorted(pages, key=lambda p: -similar[p, wish])[: room[wish]]
                for page in taken:
                    label[page] = wish
                room[wish] -= len(taken)
        assert balance(vectors, centroids).tolist() == label


@pytest.mark.parametrize(("pages", "branching"), [(3, 2), (8, 2), (9, 2), (10, 3), (100, 10), (101, 10), (1001, 10)])
def test_balanced_tree_is_narrow_and_shallow(pages, branching):
    tree = balanced_tree(flat(pages), np.random.default_rng(0).normal(size=(pages, 6)), branching)
    corpus = tree.corpus
    assert max(len(corpus.children(row)) for row in (None, *range(len(corpus)))) <= branching
    depth = 1
    while branching**depth < pages:
        depth += 1
    assert corpus.num_levels == depth
    assert len(corpus.leaves()) == pages


def test_same_seed_same_tree_and_round_trip(tmp_path):
    trees = [cluster_pages(flat(60), blobs([30, 30]), 7, seed=3, encoder="e") for _ in range(2)]
    assert trees[0].corpus.fingerprint == trees[1].corpus.fingerprint
    trees[0].save(tmp_path / "tree")
    opened = Tree.open(tmp_path / "tree")
    assert (opened.group_ids, opened.encoder) == (trees[0].group_ids, "e")
    np.testing.assert_array_equal(opened.centroids_GD, trees[0].centroids_GD)
    (tmp_path / "tree" / "groups.json").write_text(
        (tmp_path / "tree" / "groups.json").read_text().replace(trees[0].corpus.fingerprint, "0" * 64)
    )
    with pytest.raises(ValueError, match="those of another corpus"):
        Tree.open(tmp_path / "tree")
    flat(3).save(tmp_path / "flat")
    with pytest.raises(FileNotFoundError, match="data=tree"):
        Tree.open(tmp_path / "flat")


def test_groups_above_groups_and_above_deeper_pages():
    corpus = Corpus.from_nodes([*flat(6), Node("p", "d0", "", "part")])
    once = cluster_pages(corpus, blobs([3, 3]), 2)
    twice = cluster_pages(once.corpus, once.centroids_GD, 1)
    assert twice.corpus.num_levels == 4 and twice.group_ids == ("group2:0",)
    assert [twice.corpus.id(r) for r in twice.corpus.path(twice.corpus.row("p"))][2:] == ["d0", "p"]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: cluster_pages(flat(3), np.ones((3, 2)), 4), "number of pages, which is 3"),
        (lambda: cluster_pages(flat(3), np.ones((3, 2)), 0), "from 1"),
        (lambda: cluster_pages(flat(3), np.ones((2, 2)), 1), r"shape \(2, 2\) for 3 pages"),
        (lambda: cluster_pages(flat(2), np.full((2, 2), np.nan), 1), "not finite"),
        (lambda: balanced_tree(flat(3), np.ones((3, 2)), 1), "branching=1 must be 2"),
        (lambda: balanced_tree(flat(1), np.ones((1, 2)), 2), "need no level above"),
    ],
)
def test_bad_input(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_equal_pages_and_titles():
    corpus = Corpus.from_nodes(Node(f"d{i}", None, "same", "same") for i in range(6))
    assert sum(sizes(cluster_pages(corpus, np.ones((6, 2)), 3))) == 6
    tree = cluster_pages(corpus, np.ones((6, 2)), 3, balanced=True)
    assert sizes(tree) == [2, 2, 2] and tree.corpus.title(0) == "same"


def test_page_text():
    assert page_text("T", "One two.  Three.") == "T. One two."
    assert page_text("", "v1.2 is out\nnow") == "v1.2 is out now"


def test_a_group_is_named_by_what_is_nearest_its_centre():
    vectors = np.array([[1, 0.5], [1, 0.1], [1, -0.3], [1, 0.2], [1, 0]])
    tree = cluster_pages(flat(5), vectors, 1)
    names = [f"title {i}" for i in sorted(range(5), key=lambda i: -float(_cosine(vectors[i], vectors)))]
    assert tree.corpus.title(0) == "; ".join(names[:3]) and tree.corpus.text(0) == "; ".join(names)


def _cosine(vector, vectors):
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    mean = units.mean(axis=0)
    return vector @ mean / np.linalg.norm(vector) / np.linalg.norm(mean)


def test_only_directions_count():
    vectors = np.random.default_rng(4).normal(size=(30, 4))
    lengths = np.random.default_rng(5).uniform(0.1, 50, size=(30, 1))
    plain, scaled = (cluster_pages(flat(30), v, 4, balanced=True) for v in (vectors, vectors * lengths))
    assert plain.corpus.fingerprint == scaled.corpus.fingerprint


def test_what_is_below_a_page_goes_with_it():
    corpus = Corpus.from_nodes([*flat(4), Node("p", "d0", "", "part"), Node("pp", "p", "", "part of part")])
    update = remove_documents(cluster_pages(corpus, blobs([2, 2]), 2), ["d0"])
    assert not any(node in update.tree.corpus for node in ("d0", "p", "pp")) and "d1" in update.tree.corpus


def test_updates_equal_a_brute_force_twin():
    rng = np.random.default_rng(5)
    tree = cluster_pages(flat(30), rng.normal(size=(30, 4)), 5)
    expected = members(tree)
    new = rng.normal(size=(9, 4))
    nodes = [Node(f"n{i}", None, "", f"new {i}") for i in range(9)]
    nodes.append(Node("n0/part", "n0", "", "part"))
    update = add_documents(tree, nodes, new)
    added = {}
    for i, vector in enumerate(new):
        group = max(tree.group_ids, key=lambda g: vector @ tree.centroids_GD[tree.group_ids.index(g)])
        added.setdefault(group, []).append(f"n{i}")
        expected[group].add(f"n{i}")
    assert members(update.tree) == expected
    assert {(s.id, s.added, s.removed) for s in update.stale} == {(g, len(ids), 0) for g, ids in added.items()}
    assert update.tree.corpus.parent(update.tree.corpus.row("n0/part")) == update.tree.corpus.row("n0")

    first = tree.group_ids[0]
    other = next(page for page in sorted(expected[tree.group_ids[1]]) if page != "n0")
    gone = [*sorted(expected[first]), other]
    after = remove_documents(update.tree, gone)
    assert after.dropped == (first,) and first not in after.tree.corpus
    expected = {group: pages - set(gone) for group, pages in expected.items() if group != first}
    assert members(after.tree) == expected
    [stale] = after.stale
    assert (stale.id, stale.removed, stale.before) == (tree.group_ids[1], 1, len(expected[tree.group_ids[1]]) + 1)
    np.testing.assert_array_equal(after.tree.centroids_GD, tree.centroids_GD[1:])


def test_upper_groups_are_stale_and_dropped_too():
    tree = balanced_tree(flat(8), blobs([4, 4]), 2)
    corpus = tree.corpus
    top = corpus.id(0)
    below = [corpus.id(row) for row in corpus.leaves() if corpus.path(row)[0] == 0]
    update = remove_documents(tree, below[:1])
    assert [(s.id, s.before, s.change) for s in update.stale] == [(top, 4, 0.25), (f"{top}.0", 2, 0.5)]
    assert set(remove_documents(tree, below).dropped) == {top, f"{top}.0", f"{top}.1"}


def test_bad_updates():
    tree = cluster_pages(Corpus.from_nodes([*flat(4), Node("p", "d0", "", "part")]), blobs([2, 2]), 2)
    with pytest.raises(ValueError, match="'d1' is in the tree already"):
        add_documents(tree, [Node("d1", None, "", "x")], np.ones((1, 8)))
    with pytest.raises(ValueError, match="3 dimensions, the tree's 8"):
        add_documents(tree, [Node("x", None, "", "x")], np.ones((1, 3)))
    with pytest.raises(ValueError, match="parent 'd0', which is not in the corpus"):  # though the tree has one
        add_documents(tree, [Node("x", None, "", "x"), Node("y", "d0", "", "y")], np.ones((1, 8)))
    with pytest.raises(KeyError, match="absent"):
        remove_documents(tree, ["absent"])
    for no_page in ("p", tree.group_ids[0]):
        with pytest.raises(ValueError, match="is no page"):
            remove_documents(tree, [no_page])
    with pytest.raises(ValueError, match="no page would be left"):
        remove_documents(tree, [f"d{i}" for i in range(4)])


def test_nearest_in_blocks(monkeypatch):
    rng = np.random.default_rng(2)
    vectors, centroids = (rng.normal(size=(n, 3)).astype(np.float32) for n in (50, 7))
    whole = nearest(vectors, centroids)
    monkeypatch.setattr("retrail.data_prep.tree._BLOCK_SCORES", 21)
    np.testing.assert_array_equal(nearest(vectors, centroids), whole)
