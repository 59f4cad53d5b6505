import random
from collections import Counter

import pytest

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.negatives import drop_ids, drop_relatives, drop_same_text, interleave, rank_window, sample

IDS = [f"d{i}" for i in range(1, 11)]


def test_rank_window_counts_from_one():
    assert rank_window(IDS, 3, 5) == ["d3", "d4", "d5"]
    assert rank_window(IDS, 9, 99) == ["d9", "d10"]
    assert rank_window(IDS, 11, 12) == []
    for first, last in [(0, 3), (4, 3)]:
        with pytest.raises(ValueError, match=f"ranks {first} to {last} are no window"):
            rank_window(IDS, first, last)


def test_drop_ids():
    assert drop_ids(IDS[:4], ["d4", "d1", "unknown"]) == ["d2", "d3"]


def test_drop_same_text():
    corpus = Corpus.from_nodes(
        [Node("gold", None, "", "The  Answer\n"), Node("copy", None, "t", "the answer"), Node("other", None, "", "no")]
    )
    assert drop_same_text(["copy", "other", "gold"], ["gold"], corpus) == ["other"]
    assert drop_same_text(["copy"], [], corpus) == ["copy"]
    with pytest.raises(KeyError, match="no node 'gone'"):
        drop_same_text(["gone"], ["gold"], corpus)


def test_drop_relatives():
    corpus = Corpus.from_nodes(
        [
            Node("root", None, "", "x"),
            Node("gold", "root", "", "x"),
            Node("sibling", "root", "", "x"),
            Node("child", "gold", "", "x"),
            Node("nephew", "sibling", "", "x"),
            Node("elsewhere", None, "", "x"),
        ]
    )
    every = ["root", "gold", "sibling", "child", "nephew", "elsewhere"]
    assert drop_relatives(every, ["gold"], corpus) == ["sibling", "nephew", "elsewhere"]


def test_sample_keeps_order_and_follows_the_seed():
    drawn = sample(IDS, 4, random.Random(3))
    assert len(set(drawn)) == 4
    assert drawn == sorted(drawn, key=IDS.index)
    assert drawn == sample(IDS, 4, random.Random(3))
    assert sample(IDS, 99, random.Random(3)) == IDS
    assert sample(IDS, 0, random.Random(3)) == []
    with pytest.raises(ValueError, match="count=-1"):
        sample(IDS, -1, random.Random(3))


def test_sample_is_even():
    rng = random.Random(0)
    times = Counter(node_id for _ in range(5_000) for node_id in sample(IDS, 3, rng))
    assert all(abs(count - 1_500) < 150 for count in times.values())
    assert len(times) == 10


def test_rankings_take_turns():
    assert interleave([["a", "b", "c", "d"], ["x", "a"], []]) == ["a", "x", "b", "c", "d"]
    assert interleave([]) == []
