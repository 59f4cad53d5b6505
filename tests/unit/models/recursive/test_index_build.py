"""Indexes on disk: the same however they are built, interrupted or shared between processes."""

import fcntl
import json
import multiprocessing
import time

import numpy as np
import pytest

from retrail.models.recursive.index import DocumentIndex, IndexMismatchError
from retrail.models.recursive.index_build import BUILDERS, BUILDING, SHARDS, build_index

TEXTS = [f"text {n % 17}" for n in range(50)]
IDS = [f"d{n}" for n in range(50)]


class Encoder:
    """Vectors by a hash of the text; it can be told to fail."""

    dim = 6

    def __init__(self, name="letters", fail_at=None, bad=None):
        self.contract = {"model": name}
        self.calls, self.fail_at, self.bad = 0, fail_at, bad

    def encode_documents(self, texts, *, progress=False):
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        self.calls += 1
        rows = [np.random.default_rng(list(text.encode())).standard_normal(6) for text in texts]
        vectors = np.stack([row / np.linalg.norm(row) for row in rows]).astype(np.float32)
        if self.bad in texts:
            vectors[list(texts).index(self.bad)] = np.nan
        return vectors


def build(folder, encoder=None, **options):
    settings = {"corpus": "c", "shard_size": 8, "dtype": "float32", **options}
    return build_index(folder, IDS, lambda rows: [TEXTS[n] for n in rows], encoder or Encoder(), **settings)


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir())


def test_equals_the_one_in_memory(tmp_path):
    assert build(tmp_path / "index")
    memory = DocumentIndex.build(IDS, TEXTS, Encoder(), corpus="c")
    disk = DocumentIndex.open(tmp_path / "index", contract={"model": "letters"}, corpus="c")
    assert np.array_equal(memory.vectors(range(50)), disk.vectors(range(50))) and disk.ids == tuple(IDS)
    assert leftovers(tmp_path / "index") == ["ids.arrow", "manifest.json", "vectors.npy"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types(tmp_path, dtype):
    build(tmp_path / "index", dtype=dtype)
    memory = DocumentIndex.build(IDS, TEXTS, Encoder(), dtype=dtype)
    disk = DocumentIndex.open(tmp_path / "index", dtype=dtype)
    assert np.array_equal(memory.vectors(range(50)), disk.vectors(range(50)))


def test_an_interrupted_build_goes_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "index", Encoder(fail_at=3))
    with pytest.raises(FileNotFoundError, match="no finished index"):
        DocumentIndex.open(tmp_path / "index")
    encoder = Encoder()
    assert build(tmp_path / "index", encoder) and encoder.calls == 7 - 3
    build(tmp_path / "whole")
    for name in ("vectors.npy", "ids.arrow", "manifest.json"):
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # Once more: nothing to do.
    again = Encoder()
    assert build(tmp_path / "index", again) and again.calls == 0


def test_something_else_in_the_folder_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "index", Encoder(fail_at=1))
    for change, message in [
        ({"encoder": Encoder("other")}, "contract.model was 'letters' .* is 'other' here"),
        ({"corpus": "d"}, "corpus was 'c' .* is 'd' here"),
        ({"dtype": "float16"}, "dtype was 'float32' .* is 'float16' here"),
        ({"shard_size": 9}, "shard_size was 8 .* is 9 here"),
    ]:
        with pytest.raises(IndexMismatchError, match=message):
            build(tmp_path / "index", **change)
    build(tmp_path / "index")
    with pytest.raises(IndexMismatchError, match="corpus was 'c' .* is 'd' here"):
        build(tmp_path / "index", corpus="d")


def test_processes_share_the_shards(tmp_path):
    assert not build(tmp_path / "index", rank=0, world=3)
    assert not build(tmp_path / "index", rank=2, world=3)
    assert len(list((tmp_path / "index" / SHARDS).glob("*.npy"))) == 5
    assert build(tmp_path / "index", rank=1, world=3)
    build(tmp_path / "whole")
    assert (tmp_path / "index" / "vectors.npy").read_bytes() == (tmp_path / "whole" / "vectors.npy").read_bytes()


def test_a_build_that_was_killed_while_it_joined_goes_on(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("retrail.models.recursive.index_build.write_manifest", killed)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "index")
    monkeypatch.undo()
    (tmp_path / "index" / ".vectors.npy.0123.tmp").write_bytes(b"half")
    encoder = Encoder()
    assert build(tmp_path / "index", encoder) and encoder.calls == 0
    assert leftovers(tmp_path / "index") == ["ids.arrow", "manifest.json", "vectors.npy"]


def test_nobody_joins_while_another_still_encodes(tmp_path):
    """A builder that is late finds its shards taken, and no folder that was cleared under it."""
    context = multiprocessing.get_context("fork")
    started, may_end = context.Event(), context.Event()

    class Slow(Encoder):
        def encode_documents(self, texts, *, progress=False):
            started.set()
            assert may_end.wait(60)
            return super().encode_documents(texts)

    late = context.Process(target=build, args=(tmp_path / "index", Slow()), kwargs={"rank": 1, "world": 2})
    late.start()
    assert started.wait(60)
    assert not build(tmp_path / "index", rank=0, world=2)
    may_end.set()
    late.join(60)
    assert late.exitcode == 0
    assert leftovers(tmp_path / "index") == ["ids.arrow", "manifest.json", "vectors.npy"]


def test_shards_are_joined_when_the_last_builder_has_let_go(tmp_path):
    folder = tmp_path / "index"
    build(folder, rank=0, world=2)
    with (folder / BUILDERS).open("w") as builder:
        fcntl.flock(builder, fcntl.LOCK_SH)
        last = multiprocessing.get_context("fork").Process(target=build, args=(folder,), kwargs={"rank": 1, "world": 2})
        last.start()
        while len(list((folder / SHARDS).glob("*.npy"))) < 7:
            time.sleep(0.01)
        last.join(0.5)
        waits = last.is_alive() and not (folder / "manifest.json").exists()
        fcntl.flock(builder, fcntl.LOCK_UN)  # the other process has this handle too
    last.join(60)
    assert waits
    assert last.exitcode == 0 and len(DocumentIndex.open(folder)) == 50


def test_other_ids_of_the_same_corpus_are_refused(tmp_path):
    build(tmp_path / "index")
    with pytest.raises(IndexMismatchError, match="ids was"):
        build_index(tmp_path / "index", IDS[::-1], lambda rows: [], Encoder(), corpus="c", dtype="float32")


@pytest.mark.parametrize("options", [{"rank": 2, "world": 2}, {"shard_size": 0}])
def test_shares_that_make_no_sense(tmp_path, options):
    with pytest.raises(ValueError, match="must be 0 or more and below world"):
        build(tmp_path / "index", **options)


@pytest.mark.parametrize("repeat", range(3))
def test_two_builders_of_the_same_shards_at_once(tmp_path, repeat):
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=build, args=(tmp_path / "index",)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    build(tmp_path / "whole")
    assert (tmp_path / "index" / "vectors.npy").read_bytes() == (tmp_path / "whole" / "vectors.npy").read_bytes()
    assert leftovers(tmp_path / "index") == leftovers(tmp_path / "whole")


def test_a_damaged_vector_is_named_and_nothing_of_its_shard_is_kept(tmp_path):
    with pytest.raises(ValueError, match="the vector of document 'd9' has length nan"):
        build(tmp_path / "index", Encoder(bad="text 9"))
    assert len(list((tmp_path / "index" / SHARDS).glob("*.npy"))) == 1
    assert json.loads((tmp_path / "index" / BUILDING).read_text())["count"] == 50


def test_an_empty_corpus(tmp_path):
    assert build_index(tmp_path / "index", [], lambda rows: [], Encoder(), corpus="c", dtype="float16")
    index = DocumentIndex.open(tmp_path / "index")
    assert len(index) == 0
    assert index.search(np.ones((1, 6), np.float32), 3).counts_S.tolist() == [0]
