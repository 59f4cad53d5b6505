"""Training rows along gold paths, against a brute-force reading of the tree."""

import random
import time

import pytest

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.examples import decision_rows, descendants, gold_paths, untrained_nodes, without
from retrail.data_prep.task import Query


def node(name):
    """`a`, `a.b`, `a.b.c`: the parent is the name without its last part."""
    parent, _, _ = name.rpartition(".")
    return Node(name, parent or None, f"title {name}", f"text {name}")


# Uneven: `c` is a leaf of the root level, `a.y` one of the second.
TREE = ["a", "b", "c", "a.x", "a.y", "b.x", "a.x.1", "a.x.2", "b.x.1", "b.x.2", "b.x.3"]


@pytest.fixture
def corpus():
    return Corpus.from_nodes(map(node, TREE))


def names(corpus, rows):
    flat = [row for part in rows for row in (part if isinstance(part, range) else [part])]
    return [corpus.id(row) for row in flat]


def rows_of(corpus, qrels, rivals=None, queries=("q",)):
    return list(decision_rows(corpus, [Query(q, f"text of {q}") for q in queries], qrels, rivals or {}))


def test_one_gold_leaf_gives_a_row_at_every_level(corpus):
    rivals = {0: {"q": ["c", "b"]}, 2: {"q": ["b.x.2", "a.x.2"]}}
    top, middle, bottom = rows_of(corpus, {"q": {"a.x.1": 1}}, rivals)
    assert [row.level for row in (top, middle, bottom)] == [0, 1, 2]
    assert [names(corpus, row.gold) for row in (top, middle, bottom)] == [["a"], ["a.x"], ["a.x.1"]]
    assert [names(corpus, row.siblings) for row in (top, middle, bottom)] == [["b", "c"], ["a.y"], ["a.x.2"]]
    assert [names(corpus, row.others) for row in (top, middle, bottom)] == [[], ["b.x"], ["b.x.1", "b.x.2", "b.x.3"]]
    assert [names(corpus, row.rivals) for row in (top, middle, bottom)] == [["c", "b"], [], ["b.x.2", "a.x.2"]]
    assert (top.query, bottom.name) == ("text of q", "q@level2")


def test_gold_of_several_paths_and_depths(corpus):
    top, middle, bottom = rows_of(corpus, {"q": {"b.x.2": 2, "a.y": 1, "a.x.1": 0}})
    assert names(corpus, top.gold) == ["a", "b"] and names(corpus, top.siblings) == ["c"]
    assert names(corpus, middle.gold) == ["a.y", "b.x"] and names(corpus, middle.siblings) == ["a.x"]
    assert names(corpus, bottom.gold) == ["b.x.2"]
    assert names(corpus, bottom.siblings) == ["b.x.1", "b.x.3"]


def test_a_gold_leaf_at_the_root_level(corpus):
    [row] = rows_of(corpus, {"q": {"c": 1}})
    assert names(corpus, row.gold) == ["c"] and names(corpus, row.siblings) == ["a", "b"]


def test_what_a_relevant_node_holds_is_neither_right_nor_wrong(corpus):
    # `a` itself is relevant, and a leaf of `b`: nobody said whether the parts of `a` are right.
    rows = rows_of(corpus, {"q": {"a": 1, "b.x.1": 1}}, {2: {"q": ["a.x.1", "b.x.3", "b.x.1"]}})
    assert names(corpus, rows[0].gold) == ["a", "b"]
    assert [row.level for row in rows] == [0, 2]  # on the second level only `b.x` and parts of `a`: nothing competes
    assert names(corpus, rows[1].siblings) == ["b.x.2", "b.x.3"]
    assert names(corpus, rows[1].others) == []
    assert names(corpus, rows[1].rivals) == ["b.x.3"]


def test_queries_without_a_positive_are_left_out(corpus):
    qrels = {"q": {"a.y": 1}, "zero": {"a.y": 0}, "gone": {"not in the corpus": 1}}
    rows = rows_of(corpus, qrels, queries=["zero", "q", "unjudged", "gone"])
    assert {row.query_id for row in rows} == {"q"}
    assert gold_paths(corpus, qrels["gone"]) == []


def test_a_level_of_one_node_asks_nothing():
    corpus = Corpus.from_nodes([node("a"), node("a.1"), node("a.2")])
    assert [row.level for row in rows_of(corpus, {"q": {"a.2": 1}})] == [1]
    assert rows_of(Corpus.from_nodes([node("a")]), {"q": {"a": 1}}) == []


def test_a_flat_corpus_takes_no_memory_a_row():
    corpus = Corpus.from_nodes(Node(f"n{i}", None, "", "x") for i in range(20_000))
    [row] = rows_of(corpus, {"q": {"n7": 1}})
    assert row.siblings == (range(0, 7), range(8, 20_000)) and row.others == ()


def random_tree(rng):
    ids = [str(i) for i in range(rng.randint(1, 4))]
    for _ in range(rng.randint(0, 25)):
        ids.append(f"{rng.choice(ids)}.{len(ids)}")
    return Corpus.from_nodes(map(node, ids)), ids


def test_random_trees_against_brute_force():
    rng = random.Random(1)
    seen = 0
    for _ in range(300):
        corpus, ids = random_tree(rng)
        gold = {name: 1 for name in rng.sample(ids, min(len(ids), rng.randint(1, 3)))}
        found = {row.level: row for row in rows_of(corpus, {"q": gold})}
        for level in range(corpus.num_levels):
            here = [n for n in ids if n.count(".") == level]
            right = {n for n in here if any(g == n or g.startswith(n + ".") for g in gold)}
            held = {n for n in here if any(n.startswith(g + ".") for g in gold)} - right
            wrong = set(here) - right - held
            family = {n for n in wrong if n.rpartition(".")[0] in {r.rpartition(".")[0] for r in right}}
            if not right or not wrong:
                assert level not in found
                continue
            row, seen = found[level], seen + 1
            assert set(names(corpus, row.gold)) == right
            assert sorted(names(corpus, row.siblings)) == sorted(family)
            assert sorted(names(corpus, row.others)) == sorted(wrong - family)
    assert seen > 200


def test_descendants_and_cut_ranges(corpus):
    assert names(corpus, descendants(corpus, corpus.row("b"), 2)) == ["b.x.1", "b.x.2", "b.x.3"]
    assert names(corpus, descendants(corpus, corpus.row("c"), 2)) == []
    assert list(descendants(corpus, corpus.row("b"), 0)) == [corpus.row("b")]
    assert without([range(0, 10), range(20, 22)], [range(3, 5), range(4, 6), range(0, 1), range(20, 22)]) == (
        range(1, 3),
        range(6, 10),
    )
    assert without([range(2, 5)], [range(0, 9)]) == ()
    assert without([range(2, 5)], [range(3, 3)]) == (range(2, 5),)
    rng = random.Random(3)
    for _ in range(500):
        rows = [range(start, start + rng.randint(0, 9)) for start in range(0, 40, 10)]
        holes = [range(start, start + rng.randint(0, 12)) for start in rng.choices(range(40), k=rng.randint(0, 6))]
        left = without(rows, holes)
        expected = sorted({n for part in rows for n in part} - {n for hole in holes for n in hole})
        assert [n for part in left for n in part] == expected and all(left)


def test_many_closed_nodes_take_no_long_time():
    corpus = Corpus.from_nodes(Node(f"n{i}", None, "", "x") for i in range(4_000))
    closed = list(range(1, 4_000, 2))
    queries = [Query(f"q{i}", "x") for i in range(0, 4_000, 20)]
    qrels = {query.id: {f"n{query.id[1:]}": 1} for query in queries}
    began = time.process_time()
    rows = list(decision_rows(corpus, queries, qrels, {}, closed=closed))
    assert len(rows) == 200 and time.process_time() - began < 5  # less than 1 s; minutes if pieces meet all holes


def test_nothing_below_a_closed_root_is_shown():
    corpus = Corpus.from_nodes(
        [
            Node("a", None, "A", "x"),
            Node("b", None, "B", "x"),
            Node("c", None, "C", "x"),
            *(Node(f"{root}{n}", root, f"{root}{n}", "x") for root in "abc" for n in range(2)),
        ]
    )
    queries, qrels = [Query("q", "text")], {"q": {"a0": 1}}
    closed = untrained_nodes(corpus, [*queries, Query("r", "text")], qrels | {"r": {"c1": 1}}, 0)
    assert [corpus.id(row) for row in closed] == ["b"]
    rivals = {0: {"q": ["b", "c"]}, 1: {"q": ["b1", "c0"]}}
    shown = []
    for row in decision_rows(corpus, queries, qrels, rivals, closed=closed):
        parts = [*row.gold, *(r for part in (*row.siblings, *row.others) for r in part), *row.rivals]
        shown.append(sorted({corpus.id(r) for r in parts}))
    assert shown == [["a", "c"], ["a0", "a1", "c0", "c1"]]


def test_what_a_search_judged_is_told_from_what_is_right(corpus):
    walked = {0: {"q": ("b", "a", "c")}, 2: {"q": ("a.x.1", "b.x.2", "a.x.2"), "r": ("b.x.1",)}}
    queries, qrels = [Query("q", "text")], {"q": {"a.x.1": 1, "b.x": 1}}
    rows = {row.level: row for row in decision_rows(corpus, queries, qrels, {}, walked=walked)}
    # `a` and `b` lie on gold paths, and what `b.x` holds is neither right nor wrong.
    assert names(corpus, rows[0].walked) == ["c"]
    assert (rows[1].walked, names(corpus, rows[2].walked)) == ((), ["a.x.2"])
    assert all(row.rivals == () for row in rows.values())
