"""Traversals in a file come back as they were, and nowhere else."""

from dataclasses import fields, replace

import numpy as np
import pytest
from recursive_fakes import HashEncoder

from retrail.models.recursive.engine import Engine, Request
from retrail.models.recursive.index import DocumentIndex, IndexMismatchError
from retrail.models.recursive.search import JointFeedback, TreeSearch
from retrail.models.recursive.traversal_store import read_traversals, save_traversals

TEXTS = [f"document {n}" for n in range(60)]
INDEX = {"corpus": "c", "contract": {"model": "hash"}}


def searched(search=None, queries=("q", "другой", "")):
    encoder = HashEncoder()
    engine = Engine(encoder, DocumentIndex.build(TEXTS, TEXTS, encoder), lambda row: TEXTS[row], candidate_k=20)
    requests = [Request(query, None if n else "find", excluded=(n, 30)) for n, query in enumerate(queries)]
    found = engine.run(requests, search or TreeSearch(3, 2, path_score="minmax"))
    views = engine.form_view(found)
    return [replace(t, views={"recovery": view}) for t, view in zip(found, views, strict=True)]


def same(one, other):
    assert type(one) is type(other)
    for item in fields(one):
        a, b = getattr(one, item.name), getattr(other, item.name)
        if item.name in ("states", "proposals"):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                same(x, y)
        elif item.name == "views":
            assert a.keys() == b.keys()
            for name in a:
                for x, y in zip(a[name], b[name], strict=True):
                    same(x, y)
        elif isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and np.array_equal(a, b)
        else:
            assert a == b and type(a) is type(b), item.name


@pytest.mark.parametrize("ids", [("a", "7", "ü b"), (7, 0, 12)])
@pytest.mark.parametrize("search", [None, JointFeedback(2)])
def test_round_trip(tmp_path, ids, search):
    traversals = dict(zip(ids, searched(search), strict=True))
    save_traversals(tmp_path / "t.safetensors", traversals, index=INDEX)
    again = read_traversals(tmp_path / "t.safetensors", index=INDEX)
    assert list(again) == list(traversals)
    for query in traversals:
        same(traversals[query], again[query])
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


def test_nothing_found_and_nothing_asked(tmp_path):
    encoder = HashEncoder()
    engine = Engine(encoder, DocumentIndex.build([], [], encoder), lambda row: "", candidate_k=20)
    [empty] = engine.run([Request("q")], TreeSearch())
    save_traversals(tmp_path / "t", {"a": empty}, index={})
    same(empty, read_traversals(tmp_path / "t")["a"])
    save_traversals(tmp_path / "t", {}, index={})
    assert read_traversals(tmp_path / "t") == {}


def test_of_another_index_or_damaged(tmp_path):
    file = tmp_path / "t"
    save_traversals(file, {"a": searched()[0]}, index=INDEX)
    with pytest.raises(IndexMismatchError, match="corpus of the index was 'c' when it was searched and is 'd' here"):
        read_traversals(file, index=INDEX | {"corpus": "d"})
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged or cut off"):
        read_traversals(file)
    file.write_bytes(whole.replace(b'\\"version\\": 1', b'\\"version\\": 9'))
    with pytest.raises(ValueError, match="no retrail-traversals of version 1"):
        read_traversals(file)
    with pytest.raises(FileNotFoundError, match="there are no traversals"):
        read_traversals(tmp_path / "nothing")
    with pytest.raises(ValueError, match="all be str or all int"):
        save_traversals(file, {"a": searched()[0], 7: searched()[0]}, index={})
