"""What is in the wheel, and that it runs without the checkout."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from setuptools import find_packages

FOLDERS = ("configs", "data_prep", "eval", "models", "scripts", "train")


@pytest.fixture(scope="module")
def project(repository):
    return tomllib.loads((repository / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory) -> Path:
    """Built from a copy, so that nothing of an earlier build gets in."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*FOLDERS, "tests", "docs"):
        shutil.copytree(repository / name, source / name, ignore=ignored)
    for path in repository.glob("*"):
        if path.is_file():
            shutil.copy(path, source)
    (source / "README.md").touch()
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "-w", str(work), str(source)], check=True, stdin=subprocess.DEVNULL)
    return next(work.glob("*.whl"))


def test_declared_packages_are_those_on_disk(project, repository):
    on_disk = ["retrail"]
    for folder in FOLDERS:
        on_disk += [f"retrail.{folder}"]
        on_disk += [f"retrail.{folder}.{name}" for name in find_packages(str(repository / folder))]
    assert project["tool"]["setuptools"]["packages"] == sorted(on_disk)


def test_every_folder_with_modules_is_a_package(repository):
    for folder in FOLDERS:
        for module in (repository / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module} would not be installed"


def test_wheel_holds_the_package_and_nothing_else(wheel, repository):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == {"retrail"}
    wanted = {"retrail/__init__.py", "retrail/py.typed"}
    for folder in FOLDERS:
        for path in (repository / folder).rglob("*"):
            if path.suffix == ".py" or (folder in ("configs", "models") and path.suffix == ".yaml"):
                wanted.add(f"retrail/{path.relative_to(repository).as_posix()}")
    assert set(names) == wanted
    assert sum(name.endswith(".yaml") for name in names) > 20


def test_wheel_runs_outside_the_repository(wheel, tmp_path):
    site, outside = tmp_path / "site", tmp_path / "outside"
    outside.mkdir()
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True, stdin=subprocess.DEVNULL)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=outside,
            env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    assert run("-c", "import retrail; print(retrail.__file__)").strip() == str(site / "retrail" / "__init__.py")
    assert "usage: retrail COMMAND" in run(str(site / "bin" / "retrail"), "--help")
    composed = run(str(site / "bin" / "retrail"), "prep", "data=beir", "path=raw", "--print-config")
    assert "out: data/beir" in composed
    assert list(outside.iterdir()) == []


def test_every_dependency_has_a_tested_version(project, repository):
    pins = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (repository / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"]]
    for extra in ("train", "dense", "small", "wandb", "dev"):  # those that scripts/test installs
        wanted += extras[extra]
    missing = {name for line in wanted if (name := re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")) not in pins}
    assert not missing
