"""Searches by name, and settings that cannot be."""

import dataclasses

import pytest

from retrail.models.recursive.search import (
    SEARCHES,
    AdaptiveSearch,
    JointFeedback,
    TreeSearch,
    make_search,
)


@pytest.mark.parametrize(
    ("name", "options", "made"),
    [
        ("tree", {}, TreeSearch(4, 3)),
        ("tree", {"depth": 2, "dedup": "none"}, TreeSearch(2, 3, dedup="none")),
        ("dense", {}, TreeSearch(1, 0)),
        ("root", {}, TreeSearch(1, 0)),
        ("chain", {"depth": 3}, TreeSearch(3, 1)),
        ("breadth", {"documents": 8}, TreeSearch(2, 8)),
        ("beam", {"width": 5}, TreeSearch(4, 5, root_branching=5, beam=5)),
        ("beam", {"path_score": "minmax"}, TreeSearch(4, 5, root_branching=5, beam=5, path_score="minmax")),
        ("doc_as_query", {"branching": 2}, TreeSearch(4, 2, observe="document")),
        ("joint_feedback", {"documents": 2}, JointFeedback(2)),
        ("adaptive", {"max_states": 9}, AdaptiveSearch(max_states=9)),
    ],
)
def test_by_name(name, options, made):
    assert make_search(name, options) == made
    assert make_search(made) is made


def test_every_name_can_be_made():
    assert all(make_search(name) for name in SEARCHES)


@pytest.mark.parametrize(
    ("search", "options", "message"),
    [
        ("treee", {}, "search='treee' is not a choice; use one of: dense, root, tree, chain"),
        ("tree", {"width": 5}, "search=tree has no option 'width'; it has: depth, branching"),
        ("chain", {"branching": 5}, "search=chain has no option 'branching'; it has: depth, dedup, path_score"),
        ("dense", {"depth": 5}, "search=dense has no option 'depth'; it has: none"),
        ("tree", {"depth": 0}, "search.depth=0 must be 1 or more"),
        ("tree", {"branching": -1}, "search.branching=-1 must be 0 or more"),
        ("tree", {"branching": 0}, "search.branching=0 selects all candidates, but search.depth=4; set it to 1"),
        ("tree", {"beam": 0}, "search.beam=0 must be 1 or more"),
        ("tree", {"dedup": "all"}, "search.dedup='all' is not a choice; use one of: level, none, sequential"),
        ("tree", {"path_score": "max"}, "search.path_score='max' is not a choice"),
        ("joint_feedback", {"documents": 0}, "search.documents=0 must be 1 or more"),
        ("adaptive", {"stop_overlap": 0.0}, r"search.stop_overlap=0.0 must be above 0 and at most 1"),
        ("adaptive", {"depth": 0}, "search.depth=0 must be 1 or more"),
        ("adaptive", {"max_ms": 0}, "search.max_ms=0 must be above 0"),
        (TreeSearch(), {"depth": 2}, "belong to a search that is named"),
    ],
)
def test_what_cannot_be(search, options, message):
    with pytest.raises(ValueError, match=message):
        make_search(search, options)


def test_searches_never_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TreeSearch().depth = 2
