"""The benchmark's own parts, and that `--quick` keeps its promises, at a hundredth of its size."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys

import pytest


@pytest.fixture
def bench(repository):
    path = repository / "scripts" / "bench" / "corpus_scale"
    loader = importlib.machinery.SourceFileLoader("corpus_scale", str(path))
    spec = importlib.util.spec_from_loader("corpus_scale", loader)
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = writes
    return module


def test_makes_the_tree_it_says(bench, tmp_path):
    size = {"clusters": 10, "pages": 107, "nodes": 3_000}
    result = bench.build(tmp_path / "c", size)
    assert result["nodes"] == 3_000
    corpus = bench.Corpus.open(tmp_path / "c")
    assert [len(corpus.level_rows(level)) for level in range(3)] == [10, 107, 2_883]
    assert all(len(corpus.children(row)) for row in range(117))
    assert len({corpus.text(row) for row in corpus.level_rows(2)}) == 2_883


def test_full_size_is_three_million(bench):
    assert bench.FULL == {"clusters": 1_000, "pages": 108_626, "nodes": 3_000_000}


@pytest.mark.slow
def test_quick_line(repository, tmp_path):
    command = [sys.executable, "scripts/bench/corpus_scale", "--quick", "--folder", str(tmp_path)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=repository, timeout=50)
    line = json.loads(out.stdout.splitlines()[-1])
    assert set(line) >= {
        "nodes",
        "build_s",
        "build_peak_gb",
        "open_s",
        "children_us",
        "machine",
        "threads",
        "torch",
        "seconds",
    }
    assert line["nodes"] == 300_000
    assert line["build_peak_gb"] < 1
    assert line["open_s"] < 1
    assert list(tmp_path.iterdir()) == []
