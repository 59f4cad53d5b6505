"""`retrail train` killed, interrupted, refused, and on two ranks: the run is the one that nobody disturbed."""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest
from decision_toy import toy_corpus, toy_task
from dist import run_ranks
from forked import fork
from safetensors.numpy import load_file

from retrail.data_prep.corpus import Corpus, Node
from retrail.scripts import train as command
from retrail.scripts.run_folder import load_settings

TIMES = {"seconds", "tokens_per_second", "rss_gb"}
STEPS = 14
SETTINGS = [
    "experiment=decision_tiny",
    "adapter=lora",
    "adapter.dropout=0.1",  # draws random numbers in every step
    f"loop.max_steps={STEPS}",
    "loop.save_every=4",
    "loop.eval_every=7",
    "eval.limit=3",
    "runtime.threads=1",
    "name=r",
]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RETRAIL_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task") / "toy"
    toy_task(folder)
    return folder


def arguments(task, run_dir, *more):
    return [*SETTINGS, f"data.path={task}", f"run_dir={run_dir}", *more]


class Forked:
    """The command in a fork of this process."""

    def __init__(self, out, argv):
        self.out = out
        file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.pid = fork(lambda: command.main(argv), file, file)
        os.close(file)

    def wait(self):
        """(exit code, what it wrote)."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code, self.out.read_text()


def run(argv):
    """(exit code, what it wrote), in this process."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        code = command.main(argv)
    return code, text.getvalue()


def log(run_dir):
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def steps_logged(run_dir):
    file = run_dir / "log.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def killed_at(process, run_dir, step, signum):
    """Send the signal once that step is logged."""
    end = time.monotonic() + 60
    while steps_logged(run_dir) < step:
        assert time.monotonic() < end, process.out.read_text()
        time.sleep(0.002)
    os.kill(process.pid, signum)


@pytest.fixture(scope="module")
def unbroken(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    code, text = run(arguments(task, folder / "r"))
    assert code == 0, text
    return folder / "r"


def assert_same_run(one, two):
    assert [line["step"] for line in log(one)] == list(range(1, STEPS + 1))
    assert log(one) == log(two)
    for name in ("parameters", "optimizer"):
        a, b = (load_file(r / "checkpoints" / f"step_{STEPS:08d}" / f"{name}.safetensors") for r in (one, two))
        assert a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a), name
    a, b = (json.loads((r / "result.json").read_text()) for r in (one, two))
    assert a["steps"] == STEPS and a == b
    assert not [path for path in one.rglob("*.tmp")]


def test_what_an_unbroken_run_leaves(unbroken, task):
    names = {path.name for path in unbroken.iterdir()}
    assert names >= {"config.json", "log.jsonl", "eval.jsonl", "best.json", "result.json", "checkpoints"}
    settings = load_settings(unbroken)
    assert (settings.adapter.kind, settings.loop.max_steps, settings.data.path) == ("lora", STEPS, str(task))
    assert len({line["loss"] for line in log(unbroken)}) == STEPS


def test_killed_twice_at_random_steps(unbroken, task, tmp_path):
    chance = random.Random()
    for _ in range(2):
        step = steps_logged(tmp_path / "r") // 4 * 4 + chance.randint(1, 5)
        process = Forked(tmp_path / "out.txt", arguments(task, tmp_path / "r"))
        killed_at(process, tmp_path / "r", min(step, STEPS - 1), signal.SIGKILL)
        print("killed after step", step)
        code, text = process.wait()
        # A late kill may find the run at its end.
        assert code in (-signal.SIGKILL, 0), text
    code, text = run(arguments(task, tmp_path / "r"))
    assert code == 0, text
    assert_same_run(tmp_path / "r", unbroken)


def test_asked_to_stop(unbroken, task, tmp_path):
    process = Forked(tmp_path / "out.txt", arguments(task, tmp_path / "r"))
    killed_at(process, tmp_path / "r", 2, signal.SIGTERM)
    code, text = process.wait()
    assert code == 143
    assert "stopped by SIGTERM after step" in text and "same command" in text and "Traceback" not in text
    assert not (tmp_path / "r" / "result.json").exists()
    code, text = run(arguments(task, tmp_path / "r"))
    assert code == 0, text
    assert_same_run(tmp_path / "r", unbroken)


def test_started_anew_as_users_do(unbroken, task, tmp_path):
    """The module as a program, killed and started again."""
    argv = [sys.executable, "-m", "retrail.scripts.train", *arguments(task, tmp_path / "r")]
    with (tmp_path / "out.txt").open("w") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out)
        process.out = tmp_path / "out.txt"
        killed_at(process, tmp_path / "r", 6, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    code, text = run(arguments(task, tmp_path / "r"))
    assert code == 0, text
    assert f"trained {STEPS} steps" in text and "next: retrail export run=" in text
    assert_same_run(tmp_path / "r", unbroken)


@pytest.fixture(scope="module")
def four_steps(task, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("four") / "r"
    assert run(arguments(task, run_dir, "loop.max_steps=4"))[0] == 0
    return run_dir


@pytest.fixture
def stopped(four_steps, tmp_path):
    """A finished run of 4 steps."""
    folder = shutil.copytree(four_steps, tmp_path / "r")
    settings = (folder / "config.json").read_text()
    (folder / "config.json").write_text(settings.replace(str(four_steps), str(folder)))
    return folder


def before(stopped):
    """What no refused run may change."""
    files = [p for p in stopped.rglob("*") if p.is_file() and p.name != ".lock"]
    return {p.relative_to(stopped): p.read_bytes() for p in files}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("adapter.rank=3", "adapter.rank=16, now it is 3"),
        ("decision.max_candidate_tokens=31", "decision.max_candidate_tokens=32, now it is 31"),
        ("objective.sibling_share=0.25", "objective.sibling_share=0.5, now it is 0.25"),
        ("model.path=tiny:qwen3", "model.path=tiny:llama, now it is tiny:qwen3"),
        ("data.split=dev", "data.split=train, now it is dev"),
    ],
)
def test_other_settings_are_refused_by_name(stopped, task, change, named):
    kept = before(stopped)
    code, text = run(arguments(task, stopped, "loop.max_steps=4", change))
    assert code != 0 and "Traceback" not in text
    assert named in text
    # Not even the stored settings: an export of the run must still find those that it was trained with.
    assert before(stopped) == kept


def test_other_data_are_refused(stopped, tmp_path):
    corpus = Corpus.from_nodes([*toy_corpus(), Node("p9", None, "Page 9", "A new page.")])
    toy_task(tmp_path / "other", corpus)
    kept = before(stopped)
    code, text = run(arguments(tmp_path / "other", stopped, "loop.max_steps=4"))
    assert code != 0 and "started with data.fingerprint=" in text and "Traceback" not in text
    assert before(stopped) == kept


def test_an_existing_run_is_not_continued_against_ones_will(stopped, task, tmp_path):
    kept = before(stopped)
    code, text = run(arguments(task, stopped, "loop.max_steps=4", "resume=false"))
    assert code == 2 and "already holds a run" in text and "resume=true" in text
    assert before(stopped) == kept
    assert run(arguments(task, tmp_path / "new", "loop.max_steps=1", "resume=false"))[0] == 0


def test_the_same_command_of_a_finished_run(stopped, task, tmp_path):
    kept = before(stopped)
    code, text = run(arguments(task, stopped, "loop.max_steps=4"))
    assert code == 0 and "trained 4 steps" in text
    assert before(stopped) == kept


def test_the_result_of_a_shorter_run_does_not_stay(task, tmp_path):
    constant = ["optim.schedule=constant", "optim.warmup_ratio=0"]
    assert run(arguments(task, tmp_path / "r", "loop.max_steps=2", *constant))[0] == 0
    process = Forked(tmp_path / "out.txt", arguments(task, tmp_path / "r", "loop.max_steps=13", *constant))
    killed_at(process, tmp_path / "r", 3, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "r" / "result.json").exists()
    assert load_settings(tmp_path / "r").loop.max_steps == 13


@pytest.mark.dist
def test_two_ranks_train_one_run(task, tmp_path):
    settings = ["adapter.dropout=0", "loop.max_steps=5", "runtime.num_processes=null"]
    argv = arguments(task, tmp_path / "one", *settings)
    assert run(argv)[0] == 0
    first, second = run_ranks(run, 2, arguments(task, tmp_path / "two", *settings, "resume=false"))
    assert (first[0], second[0]) == (0, 0)
    assert "trained 5 steps" in first[1] and "trained" not in second[1]
    assert "rivals" in first[1] and "rivals" not in second[1]  # one progress bar
    assert [line["loss"] for line in log(tmp_path / "two")] == pytest.approx(
        [line["loss"] for line in log(tmp_path / "one")], rel=1e-4
    )
    assert (tmp_path / "two" / "result.json").is_file()
    kept = before(tmp_path / "two")
    refused = run_ranks(run, 2, arguments(task, tmp_path / "two", *settings, "resume=false"))
    assert [status for status, _ in refused] == [2, 1]  # together: neither waits for the other
    assert before(tmp_path / "two") == kept
