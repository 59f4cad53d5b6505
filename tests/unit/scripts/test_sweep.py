"""Sweeps: points, resuming, failures. A stand-in for the training process writes the results."""

import json
from pathlib import Path

import pytest

from retrail.scripts import sweep
from retrail.scripts.compose import ConfigError
from retrail.scripts.sweep import main, make_plan, run_plan

GRID = "grid={adapter.rank: [8, 16], optim.lr: [1e-4, 2e-4]}"
BASE = ["experiment=decision_tiny", "name=s", GRID]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "RETRAIL_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


class Trainer:
    """Pretends to be `python -m retrail.scripts.train`: writes the result that the point's rank says, or fails."""

    def __init__(self, failing=(), code=1):
        self.failing, self.code, self.started = failing, code, []

    def __call__(self, command):
        settings = dict(argument.partition("=")[::2] for argument in command[3:])
        self.started.append(settings["name"])
        if any(text in settings["name"] for text in self.failing):
            return self.code
        run_dir = Path("runs") / settings["name"]
        run_dir.mkdir(parents=True)
        metrics = {"Hit@1": int(settings["adapter.rank"]) / 100, "loss": None}
        (run_dir / "result.json").write_text(json.dumps({"metrics": metrics}))
        return 0


def test_points_are_all_combinations():
    plan = make_plan(BASE)
    assert [point.label for point in plan.points] == [
        "rank-8_lr-0.0001",
        "rank-8_lr-0.0002",
        "rank-16_lr-0.0001",
        "rank-16_lr-0.0002",
    ]
    last = plan.points[-1]
    assert last.run_dir == Path("runs/s/rank-16_lr-0.0002")
    assert last.arguments == (
        "experiment=decision_tiny",
        "adapter.rank=16",
        "optim.lr=0.0002",
        "name=s/rank-16_lr-0.0002",
    )
    assert "rank: 16" in last.settings


def test_values_of_every_kind_reach_the_command_line():
    grid = "grid={model: [tiny], navigate.keep: [[10, 3], [5]], runtime.compile: [true], model.num_layers: [null]}"
    points = make_plan(["name=s", "data.path=x", grid]).points
    assert points[0].label == "model-tiny_keep-10-3_compile-true_num-layers-null".replace("num-layers", "num_layers")
    assert {"model=tiny", "navigate.keep=[10, 3]", "runtime.compile=true", "model.num_layers=null"} < set(
        points[0].arguments
    )


def test_a_name_that_two_keys_share_is_written_whole():
    points = make_plan(["name=s", "grid={data.path: [a/b], model.path: [c]}"]).points
    assert points[0].label == "data.path-a-b_model.path-c"


def test_a_sweep_without_a_name_is_called_after_its_experiment():
    assert make_plan(["experiment=decision_tiny", GRID]).points[0].run_dir.parent == Path("runs/sweep_decision_tiny")
    assert make_plan(["data.path=x", GRID]).points[0].run_dir.parent == Path("runs/sweep")


def test_run_prints_a_sorted_table(capsys):
    trainer = Trainer()
    assert run_plan(make_plan([*BASE, "metric=Hit@1"]), None, trainer) == 0
    assert len(trainer.started) == 4
    rows = [line for line in capsys.readouterr().out.splitlines() if "rank-" in line]
    assert [("0.16" in row, "0.08" in row) for row in rows] == [(True, False)] * 2 + [(False, True)] * 2


def test_finished_points_are_not_run_again():
    first = Trainer(failing=["rank-16"])
    assert run_plan(make_plan(BASE), None, first) == 1
    second = Trainer()
    assert run_plan(make_plan(BASE), None, second) == 0
    assert second.started == ["s/rank-16_lr-0.0001", "s/rank-16_lr-0.0002"]


def test_a_failing_point_does_not_stop_the_others(capsys):
    trainer = Trainer(failing=["rank-8_lr-0.0001"])
    assert run_plan(make_plan(BASE), None, trainer) == 1
    assert len(trainer.started) == 4
    out = capsys.readouterr().out
    assert "rank-8_lr-0.0001 (exit status 1)" in out
    assert "0.16" in out


def test_a_point_without_a_result_failed(capsys):
    assert run_plan(make_plan(BASE), None, lambda command: 0) == 1
    assert "no result.json" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "status"), [(130, 130), (143, 143), (-15, 143)])
def test_a_signal_ends_the_sweep(code, status, capsys):
    trainer = Trainer(failing=["rank-8_lr-0.0002"], code=code)
    assert run_plan(make_plan(BASE), None, trainer) == status
    assert len(trainer.started) == 2
    assert "stopped after 2 of 4 points" in capsys.readouterr().err


def test_results_of_other_settings_are_not_taken():
    run_plan(make_plan(BASE), None, Trainer())
    with pytest.raises(ConfigError, match="finished with other settings"):
        run_plan(make_plan([*BASE, "loop.seed=5"]), None, Trainer())


def test_a_started_run_of_other_settings_is_not_continued():
    run_plan(make_plan(BASE), None, lambda command: Path("runs/s/rank-8_lr-0.0001").mkdir(exist_ok=True) or 1)
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        run_plan(make_plan([*BASE, "loop.seed=5"]), None, Trainer())


def test_a_broken_result_is_named():
    run_plan(make_plan(BASE), None, Trainer())
    Path("runs/s/rank-8_lr-0.0001/result.json").write_text("{")
    with pytest.raises(ConfigError, match=r"rank-8_lr-0\.0001/result\.json: not JSON"):
        run_plan(make_plan(BASE), None, Trainer())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["name=s"], "needs a grid"),
        (["name=s", "grid={adapter.rank: 8}"], "adapter.rank has 8, not a list"),
        (["name=s", "grid={adapter.rank: []}"], "adapter.rank has [], not a list"),
        (["name=s", "grid=[1]"], "is not a list of values for each key"),
        (["name=s", "data.path=x", "grid={adapter.rnak: [8]}"], "'adapter.rnak'"),
        (["name=s", "data.path=x", "grid={adapter.rank: [8, 0]}"], "adapter.rank=0 must be above 0"),
        (["name=s", "data.path=x", "grid={adapter.rank: [8, 8]}"], "both write to runs/s/rank-8"),
        (["name=s", "data.path=x", "run_dir=here", "grid={adapter.rank: [8, 9]}"], "both write to here"),
    ],
)
def test_mistakes_end_the_sweep_before_it_starts(arguments, part, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "_start", lambda command: pytest.fail("started"))
    assert main(arguments) == 2
    assert part in capsys.readouterr().err


def test_help_and_print_config(capsys):
    assert main(["--help"]) == 0
    assert "usage: retrail sweep" in capsys.readouterr().out
    assert main([*BASE, "--print-config"]) == 0
    assert capsys.readouterr().out.count("# rank-") == 4
    assert not Path("runs").exists()


def test_launcher_and_own_configs():
    plan = make_plan([*BASE, "launcher=torchrun --nproc-per-node 2"])
    command = sweep._command(plan, plan.points[0], Path("mine"))
    assert command[1:7] == ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "retrail.scripts.train"]
    assert command[-2:] == ["--config-dir", "mine"]


def test_the_real_process(capfd):
    """A point whose data does not exist: the process starts, says what is missing, and the sweep reports it."""
    assert main(["experiment=decision_tiny", "name=s", "data.path=absent", "grid={adapter.rank: [8]}"]) == 1
    out, err = capfd.readouterr()
    assert "rank-8 (exit status 2)" in out
    assert "absent: no such folder" in err
