"""Every benchmark can be started, `all` finds it, and decision_packed compares what it says (on a tiny model)."""

import ast
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from retrail.scripts.bench import _common

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "bench"
FILES = sorted(f for f in FOLDER.iterdir() if f.is_file() and not f.suffix)


@pytest.fixture(scope="module")
def everything():
    loader = importlib.machinery.SourceFileLoader("bench_all", str(FOLDER / "all"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("bench_all", loader))
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = writes
    return module


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_can_be_started(file):
    assert os.access(file, os.X_OK)
    text = file.read_text()
    assert text.startswith("#!/usr/bin/env python3\n")
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert "bench_parser" in names or "--quick" in constants
    attributes = {
        (a.value.id, a.attr) for a in ast.walk(tree) if isinstance(a, ast.Attribute) and hasattr(a.value, "id")
    }
    assert ("sys", "path") not in attributes


def test_parser_has_quick():
    parser = _common.bench_parser("What it does.\n\nMore.", "less of it")
    assert parser.parse_args(["--quick"]).quick and not parser.parse_args([]).quick
    assert "less of it" in parser.format_help() and "More" not in parser.format_help()


def test_all_finds_every_bench(everything):
    assert set(everything.benches(FOLDER)) == {f.name for f in FILES} - {"all"}
    assert {"corpus_scale", "decision_packed"} <= set(everything.benches(FOLDER))


def test_median_ratio_by_hand():
    # 6/2, 8/1, 5/5: the middle one is 3, whatever the medians of the sides are.
    assert _common.median_ratio([6.0, 8.0, 5.0], [2.0, 1.0, 5.0]) == 3.0


def test_sides_take_turns():
    calls = []
    sides = {"a": lambda n: calls.append(("a", n)), "b": lambda n: calls.append(("b", n))}
    seconds = _common.in_turns(sides, 2)
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [len(seconds[name]) for name in "ab"] == [2, 2]


def test_memory_grows_by_what_is_held():
    before = _common.resident_gb()
    block = bytearray(os.urandom(1)) * 200_000_000
    assert 0.19 < _common.resident_gb() - before < 0.25
    held = len(block) / 1e9
    del block
    assert _common.peak_gb() >= before + 0.95 * held


def test_finish_rounds_and_refuses_nan(capsys):
    _common.finish({"ratio": 41.23456, "diff": 1.23456e-7, "nodes": 3_000_000}, threads=2)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["ratio"], line["diff"], line["nodes"], line["threads"]) == (41.23, 1.235e-7, 3_000_000, 2)
    assert set(line) == {"ratio", "diff", "nodes", *_common.COMMON_KEYS}
    with pytest.raises(ValueError, match="not JSON compliant"):
        _common.finish({"ratio": float("nan")}, threads=2)


PAGE = "# Results\n\nwords\n<!-- bench:start -->\n<!-- bench:end -->\nmore words\n"
GOOD = """#!/usr/bin/env python3
import json, sys
print("noise")
line = {"speed": 2.5, "quick": "--quick" in sys.argv, "machine": "m|1", "threads": 2, "torch": "2", "seconds": 0.1}
print(json.dumps(line))
"""
BAD = {
    "exits": "#!/usr/bin/env python3\nraise SystemExit(3)\n",
    "mumbles": "#!/usr/bin/env python3\nprint('done')\n",
    "forgets": "#!/usr/bin/env python3\nprint('{\"speed\": 1}')\n",
}


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def run_all(folder: Path, page: Path, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(FOLDER / "all"), "--folder", str(folder), "--results", str(page), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_all_rewrites_its_table_and_nothing_else(tmp_path):
    folder = tmp_path / "bench"
    folder.mkdir()
    program(folder, "good", GOOD)
    program(folder, "_hidden", GOOD)
    program(folder, "all", "#!/bin/false\n")
    (folder / "notes.py").write_text("")
    page = tmp_path / "results.md"
    page.write_text(PAGE)
    assert run_all(folder, page).returncode == 0
    assert run_all(folder, page, "--quick").returncode == 0
    first = page.read_text()
    assert first.startswith("# Results\n\nwords\n<!-- bench:start -->\n| command |")
    assert first.endswith("<!-- bench:end -->\nmore words\n")
    rows = [line for line in first.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["scripts/bench/good", "scripts/bench/good --quick"]
    assert "| speed 2.5, quick true (0.1 s) | m\\|1; 2 threads; torch 2 |" in rows[1]
    assert rows[0].endswith(f"{datetime.now(UTC).date().isoformat()} |")

    # One gets new numbers, the others break: their rows and the rest of the page stay.
    program(folder, "good", GOOD.replace("2.5", "9.5"))
    for name, text in BAD.items():
        program(folder, name, text)
    page.write_text(
        first.replace("| `scripts/bench/good`", "| `scripts/bench/exits` | old | | | |\n| `scripts/bench/good`", 1)
    )
    done = run_all(folder, page)
    assert done.returncode == 1
    assert "failed, old rows kept: exits, forgets, mumbles" in done.stderr
    assert "lacks machine, threads, torch, seconds" in done.stderr
    after = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert after[0] == "| `scripts/bench/exits` | old | | | |"
    assert "speed 9.5" in after[1] and after[2] == rows[1] and len(after) == 3
    assert {f.name for f in tmp_path.iterdir()} == {"bench", "results.md"}


def test_all_refuses_before_it_runs(tmp_path):
    folder = tmp_path / "bench"
    folder.mkdir()
    program(folder, "good", GOOD + f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    page = tmp_path / "results.md"
    page.write_text("no marks\n")
    assert "needs a line <!-- bench:start -->" in run_all(folder, page).stderr
    page.write_text(PAGE)
    assert "there is no benchmark godo; there are: good" in run_all(folder, page, "godo").stderr
    assert not (tmp_path / "ran").exists() and page.read_text() == PAGE


def test_the_real_page_has_the_marks(everything):
    before, _, after = everything._parts(everything.RESULTS)
    assert before and after.startswith(everything.END)


@pytest.mark.slow
def test_decision_packed_on_a_tiny_model():
    command = [sys.executable, str(FOLDER / "decision_packed"), "--quick", "--model", "tiny:llama", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = json.loads(done.stdout.splitlines()[-1])
    ratios = {"packed_vs_rows", "packed_vs_prefix_kv", "train_labels_vs_rows"}
    assert set(line) >= ratios | {"slate_extra_gb", "max_abs_diff", *_common.COMMON_KEYS}
    assert all(line[key] > 0 for key in (*ratios, "slate_extra_gb"))
    # Three independent ways to the same probabilities.
    assert line["max_abs_diff"] < 1e-6 and line["max_abs_diff_prefix_kv"] < 1e-6
    assert (line["candidates"], line["threads"]) == (16, 1)
    assert line["rows_timed"] >= 6


@pytest.mark.slow
def test_serve_on_a_tiny_model():
    command = [sys.executable, str(FOLDER / "serve"), "--quick", "--model", "tiny:llama", "--layers", "2"]
    done = subprocess.run([*command, "--threads", "1"], capture_output=True, text=True, check=True)
    line = json.loads(done.stdout.splitlines()[-1])
    assert set(line) >= {"overhead_pct", "clients", "lost", *_common.COMMON_KEYS}
    assert (line["clients"], line["lost"], line["threads"]) == (200, 0, 1)
    assert line["max_abs_diff"] < 1e-6 and line["served_s"] > 0
