"""What a user sees of the command line: dispatch, one-message errors, exit statuses."""

import json
import signal

import pytest

from retrail.data_prep.hits import Hits
from retrail.scripts import cli
from retrail.scripts.cli import guarded, is_deliberate, main, run_command
from retrail.scripts.config import TrainRun
from retrail.train.signals import Interrupted

TRAIN = ["name=x", "data.path=y"]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "RETRAIL_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


def test_usage_lists_every_command(capsys):
    assert main([]) == 0
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n  {name} " in out


def test_version(capsys):
    import retrail

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == retrail.__version__


def test_unknown_command_suggests(capsys):
    assert main(["tarin", "name=x"]) == 2
    message = capsys.readouterr().err
    assert "unknown command 'tarin'. Did you mean train?" in message
    assert "sweep" in message


def test_dispatch_hands_the_arguments_on(monkeypatch):
    seen = []

    class Module:
        @staticmethod
        def main(argv):
            seen.append(argv)
            return 7

    monkeypatch.setattr(cli.importlib, "import_module", lambda name, package: seen.append((name, package)) or Module)
    assert main(["train", "name=x", "--traceback"]) == 7
    assert seen == [(".train", "retrail.scripts"), ["name=x", "--traceback"]]


def test_body_gets_typed_settings(capsys):
    runs = []
    assert run_command(TrainRun, runs.append, [*TRAIN, "adapter.rank=3"]) == 0
    assert runs[0].adapter.rank == 3


def test_print_config_does_nothing_else(capsys):
    assert run_command(TrainRun, lambda run: pytest.fail("ran"), [*TRAIN, "--print-config"]) == 0
    assert "run_dir: runs/x" in capsys.readouterr().out


def test_options_may_stand_anywhere(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("path: /mine\n")
    assert run_command(TrainRun, print, ["name=x", "--config-dir", str(tmp_path), "model=mine", "data.path=y"]) == 0
    assert "path='/mine'" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["adapter.rnak=3"], ["model=timy"], ["name=x", "adapter.rank=many"], []])
def test_mistyped_settings_stop_before_any_work(arguments, capsys):
    assert run_command(TrainRun, lambda run: pytest.fail("ran"), arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("retrail: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_traceback_on_request(capsys, monkeypatch):
    run_command(TrainRun, print, ["adapter.rnak=3", "--traceback"])
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("RETRAIL_TRACEBACK", "1")
    run_command(TrainRun, print, ["adapter.rnak=3"])
    assert "Traceback" in capsys.readouterr().err


def test_only_the_first_rank_tells_of_mistyped_settings(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run_command(TrainRun, print, ["adapter.rnak=3"]) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert run_command(TrainRun, print, ["adapter.rnak=3"]) == 2
    assert "retrail (rank 0): unknown key" in capsys.readouterr().err


def raised_on_purpose():
    Hits(("a", "a"), (1.0, 1.0))


def raised_by_python():
    {}["absent"]  # noqa: B018


def raised_by_json():
    json.loads("{")


def missing_file():
    open("/nonexistent/file")


def test_deliberate_errors_are_one_message(capsys):
    assert guarded(raised_on_purpose) == 2
    assert capsys.readouterr().err == "retrail: id 'a' appears twice in one ranking\n"
    assert guarded(missing_file) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("body", [raised_by_python, raised_by_json])
def test_bugs_show_their_stack(body, capsys):
    assert guarded(body) == 1
    assert "Traceback" in capsys.readouterr().err


def test_is_deliberate_looks_at_the_innermost_frame():
    for body, expected in ((raised_on_purpose, True), (raised_by_json, False), (raised_by_python, False)):
        try:
            body()
        except Exception as error:
            assert is_deliberate(error) is expected


def test_interruptions_keep_their_exit_code(capsys):
    def stopped():
        raise Interrupted("stopped after step 3; the same command goes on", signal.SIGTERM)

    def ctrl_c():
        raise KeyboardInterrupt

    assert guarded(stopped) == 143
    assert "stopped after step 3" in capsys.readouterr().err
    assert guarded(ctrl_c) == 130
