"""Runs that are killed, interrupted or told to stop, in processes of their own."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy_run
from forked import fork
from safetensors.numpy import load_file

HELPERS = Path(__file__).parents[1] / "helpers"
TIMES = {"seconds", "tokens_per_second", "rss_gb"}


class Forked:
    """A fork of this process that runs the toy."""

    def __init__(self, run_dir, *options):
        out, child_out = os.pipe()
        err, child_err = os.pipe()
        self.pid = fork(lambda: toy_run.main(str(run_dir), *options), child_out, child_err)
        os.close(child_out)
        os.close(child_err)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)

    def send_signal(self, signum):
        os.kill(self.pid, signum)

    def communicate(self):
        """What it still writes, until it has ended. A hang is ended by the test's own timeout."""
        out, err = self.stdout.read(), self.stderr.read()
        self.stdout.close()
        self.stderr.close()
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return out, err


def started_anew(run_dir, *options):
    return subprocess.Popen(
        [sys.executable, str(HELPERS / "toy_run.py"), str(run_dir), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for(process, text):
    assert any(line.startswith(text) for line in process.stdout), f"{text!r} never came: {process.stderr.read()}"


def finish(run_dir, *options):
    process = Forked(run_dir, *options)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


def log(run_dir):
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def assert_same_run(one, two):
    assert log(one) == log(two)
    assert [line["step"] for line in log(one)] == list(range(1, 13))
    for name in ("parameters", "optimizer", "buffers"):
        a, b = (load_file(run / "checkpoints" / "step_00000012" / f"{name}.safetensors") for run in (one, two))
        assert a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a), name
    states = [json.loads((run / "checkpoints" / "step_00000012" / "state.json").read_text()) for run in (one, two)]
    assert states[0]["rng"] == states[1]["rng"]
    assert not [p for run in (one, two) for p in run.rglob("*.tmp")]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    finish(run_dir)
    return run_dir


def test_killed_at_any_moment(unbroken, tmp_path):
    run_dir = tmp_path / "run"
    chance = random.Random()
    kills = []
    for _ in range(4):
        process = Forked(run_dir, "pause=0.05")
        batch, seconds = chance.randint(1, 3), chance.uniform(0.0, 0.15)
        kills.append((batch, seconds))
        # A late kill may find the run at its last steps: it then ends by itself.
        if not any(line.startswith(f"batch {batch}") for line in process.stdout):
            assert process.communicate() and process.returncode == 0
            break
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0)
    print("killed at (batch, seconds later):", kills)
    finish(run_dir)
    assert_same_run(run_dir, unbroken)


def test_killed_while_it_saves(unbroken, tmp_path):
    run_dir = tmp_path / "run"
    process = Forked(run_dir, "pause=0.1")
    wait_for(process, "batch 5")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # What a kill between writing and renaming leaves, and a log line cut short.
    half = run_dir / "checkpoints" / "step_00000006.tmp"
    half.mkdir(exist_ok=True)
    (half / "parameters.safetensors").write_bytes(b"half")
    (run_dir / "best.json.tmp").write_text("{")
    with (run_dir / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    finish(run_dir)
    assert_same_run(run_dir, unbroken)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_and_says_how_to_go_on(unbroken, tmp_path, signum, code):
    run_dir = tmp_path / "run"
    process = started_anew(run_dir, "pause=0.1")
    wait_for(process, "batch 5")
    process.send_signal(signum)
    _, err = process.communicate(timeout=100)
    assert process.returncode == code
    assert f"stopped by {signum.name} after step 5 of 12" in err and "same command" in err
    assert (run_dir / "checkpoints" / "step_00000005" / "manifest.json").exists()
    assert "Traceback" not in err
    finish(run_dir)
    assert_same_run(run_dir, unbroken)


def test_second_signal_ends_at_once(tmp_path):
    process = Forked(tmp_path / "run", "pause=100")
    wait_for(process, "batch 1")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert os.waitpid(process.pid, os.WNOHANG) == (0, 0)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_signal_during_an_evaluation(unbroken, tmp_path):
    run_dir = tmp_path / "run"
    process = Forked(run_dir, "evaluate=100")
    wait_for(process, "evaluating 4")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130 and "after step 4 of 12" in err
    out, _ = finish(run_dir, "evaluate=0")
    assert "evaluating 4" in out
    assert_same_run(run_dir, unbroken)
    steps = [json.loads(line)["step"] for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    assert steps == [4, 8, 12]
