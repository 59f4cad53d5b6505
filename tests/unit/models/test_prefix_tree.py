"""Token lists that begin alike, as a tree."""

from hypothesis import given
from hypothesis import strategies as st

from retrail.models.prefix_tree import PrefixTree


def test_branches_that_begin_alike_share_tokens_by_hand():
    tree = PrefixTree([[5, 1, 9], [5, 1, 0, 9], [7], [5, 2, 9], [5, 1]])
    # Depth-first: 5 -> 1 -> (0 -> 9, 9), 2 -> 9; then 7.
    assert tree.ids == [5, 1, 0, 9, 9, 2, 9, 7]
    assert tree.depths == [0, 1, 2, 3, 2, 1, 2, 0]
    assert tree.before == [-1, 0, 1, 2, 1, 0, 5, -1]
    assert tree.until == [6, 4, 3, 3, 4, 6, 6, 7]
    assert tree.paths == [[0, 1, 4], [0, 1, 2, 3], [7], [0, 5, 6], [0, 1]]


def test_no_lists_make_no_tree():
    tree = PrefixTree([])
    assert (tree.ids, tree.paths) == ([], [])


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=12))
def test_every_list_is_a_path_and_nothing_is_stored_twice(lists):
    tree = PrefixTree(lists)
    assert [[tree.ids[i] for i in path] for path in tree.paths] == lists
    assert len(tree.ids) == len({tuple(words[: n + 1]) for words in lists for n in range(len(words))})
    for path in tree.paths:
        assert [tree.depths[i] for i in path] == list(range(len(path)))
        assert [tree.before[i] for i in path] == [-1, *path[:-1]]
    # Who may look back at whom: exactly those on whose way down it lies.
    ancestors = [set() for _ in tree.ids]
    for place, parent in enumerate(tree.before):
        ancestors[place] = {place} | (ancestors[parent] if parent >= 0 else set())
    for reader in range(len(tree.ids)):
        seen = {k for k in range(len(tree.ids)) if k <= reader <= tree.until[k]}
        assert seen == ancestors[reader]


def test_lists_are_not_changed():
    lists = [[2, 1], [1]]
    PrefixTree(lists)
    assert lists == [[2, 1], [1]]
