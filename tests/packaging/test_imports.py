"""What an import costs, the public names, doctests, and that no module exists under two names."""

import doctest
import importlib
import json
import pkgutil
import statistics
import subprocess
import sys
import time

import pytest

import retrail

HEAVY = ("torch", "transformers", "hydra", "omegaconf", "pyarrow", "numpy", "rich")


def fresh(code: str, cwd) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=cwd).stdout


@pytest.mark.parametrize(
    "statement",
    ["import retrail", "from retrail.scripts.cli import main; main(['--help'])", "import retrail.scripts.config"],
)
def test_light_imports(statement, tmp_path):
    code = f"import sys\n{statement}\nprint('\\n' + ' '.join(name for name in {HEAVY} if name in sys.modules))"
    loaded = fresh(code, tmp_path).splitlines()[-1].split()
    assert loaded == []


def test_help_of_a_command_needs_no_torch(tmp_path):
    code = "import sys\nfrom retrail.scripts.cli import run_command\nfrom retrail.scripts.config import TrainRun\n"
    code += "run_command(TrainRun, print, ['--help'])\nprint([n for n in ('torch', 'pyarrow') if n in sys.modules])"
    out = fresh(code, tmp_path)
    assert out.splitlines()[-1] == "[]"
    assert "decision_small" in out
    assert "adapter.rank: a whole number; 16" in out


def test_help_answers_at_once(tmp_path):
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        fresh("from retrail.scripts.cli import main; main(['--help'])", tmp_path)
        seconds.append(time.perf_counter() - start)
    # What Python itself takes on this machine now, with the import hook of an editable install.
    start = time.perf_counter()
    fresh("pass", tmp_path)
    assert min(seconds) < 0.3 + (time.perf_counter() - start), statistics.median(seconds)


def test_every_public_name_resolves():
    assert retrail.__all__ == sorted(retrail.__all__)
    assert set(retrail.__all__) <= set(dir(retrail))
    assert set(retrail._HOMES) == set(retrail.__all__) - {"__version__"}
    for name in retrail.__all__:
        value = getattr(retrail, name)
        if name != "__version__":
            assert value.__module__ == "retrail" + retrail._HOMES[name], name


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'Naviagtor'"):
        retrail.Naviagtor  # noqa: B018


def modules() -> list[str]:
    return [module.name for module in pkgutil.walk_packages(retrail.__path__, "retrail.")]


def test_walk_sees_the_package_and_nothing_else():
    found = modules()
    assert {"retrail.data_prep.hits", "retrail.models.decision", "retrail.train.objectives.base"} <= set(found)
    assert not [name for name in found if name.split(".")[1] in ("tests", "build", "docs")]


@pytest.mark.parametrize("name", modules())
def test_doctests(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


def test_no_module_under_two_names(tmp_path, repository):
    """From the repository root `import train` is possible, and would make a second copy of every class."""
    code = "import importlib, json, pkgutil, sys, retrail\n"
    code += "for m in pkgutil.walk_packages(retrail.__path__, 'retrail.'): importlib.import_module(m.name)\n"
    code += "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    loaded = set(json.loads(fresh(code, repository)))
    assert not loaded & {"data_prep", "models", "train", "eval", "scripts", "configs"}
