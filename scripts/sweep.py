"""`retrail sweep`: one training process for every point of a grid, then one table.

Each point is a launcher process of its own (a second run inside a process that has already set its ranks up
would share their state), with its own run folder. A point whose `result.json` is there is not run again, so
that a sweep can be stopped and started at will.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..train.files import write_json
from .cli import guarded, parse_options
from .compose import ConfigError, compose, parse_value, to_yaml
from .config import TrainRun

HELP = """\
retrail sweep: train once for every point of a grid, and compare.

usage: retrail sweep 'grid={KEY: [VALUE, ...], ...}' [name=NAME] [what retrail train takes]

keys, besides those of `retrail train --help`
  grid: values of each key; every combination is one point. Groups are keys too: {model: [tiny, smollm2]}
  name: name of the sweep; a point is the run NAME/POINT; sweep_EXPERIMENT
  launcher: how a point is started; (empty), e.g. launcher="torchrun --nproc-per-node 2"
  metric: the measure that the table is sorted by, the largest first; (empty)
"""

RESULT = "result.json"
SETTINGS = "sweep.json"


@dataclass(frozen=True, slots=True)
class Point:
    """One combination: what is put on the command line of `retrail train`, and where the run goes."""

    label: str
    arguments: tuple[str, ...]
    run_dir: Path
    settings: str  # resolved, as YAML


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a point: its metrics, or the exit status of its process."""

    point: Point
    metrics: Mapping[str, float]
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep before it starts; every point has been composed, so that a typo ends it here."""

    name: str
    points: tuple[Point, ...]
    launcher: str
    metric: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sweep; the exit status is 1 if a point failed."""
    options = parse_options("sweep", argv)
    if options.help:
        print(HELP, end="")
        return 0

    def body() -> int:
        plan = make_plan(options.overrides, options.config_dir)
        if options.print_config:
            for point in plan.points:
                print(f"# {point.label}\n{point.settings}")
            return 0
        return run_plan(plan, options.config_dir)

    return guarded(body, show_stack=options.traceback)


def make_plan(overrides: Sequence[str], config_dir: Path | None = None) -> Plan:
    """Every point of the grid, composed.

    Raises:
        ConfigError: no grid, an empty list of values, or a point that `retrail train` would refuse.
    """
    own = {"grid": "", "name": "", "launcher": "", "metric": ""}
    shared = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in own:
            own[key] = value
        else:
            shared.append(override)
    experiment = next((text.partition("=")[2] for text in shared if text.startswith("experiment=")), "")
    own["name"] = own["name"].strip() or "_".join(filter(None, ["sweep", experiment]))
    grid = _read_grid(own["grid"])
    labels = _short_names(list(grid))
    points = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        label = "_".join(f"{labels[key]}-{_in_a_name(value)}" for key, value in chosen.items())
        arguments = (*shared, *(f"{key}={_typed(value)}" for key, value in chosen.items()))
        arguments = (*arguments, f"name={own['name']}/{label}")
        run = compose(TrainRun, arguments, config_dir=config_dir)
        points.append(Point(label, arguments, Path(run.run_dir), to_yaml(run)))
    _refuse_shared_folders(points)
    return Plan(own["name"], tuple(points), own["launcher"], own["metric"])


def _read_grid(text: str) -> dict[str, list[object]]:
    example = "'grid={adapter.rank: [8, 16], optim.lr: [1e-4, 2e-4]}'"
    if not text:
        raise ConfigError(f"retrail sweep also needs a grid, e.g. {example}")
    grid = parse_value("grid", text)
    if not isinstance(grid, dict) or not grid:
        raise ConfigError(f"grid={text} is not a list of values for each key; e.g. {example}")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid: {key} has {values!r}, not a list of values; e.g. {example}")
    return {str(key): values for key, values in grid.items()}


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    last = [key.rpartition(".")[2] for key in keys]
    return {key: short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)}


def _typed(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _in_a_name(value: object) -> str:
    return re.sub(r"[^A-Za-z0-9.+]+", "-", _typed(value)).strip("-") or "none"


def _refuse_shared_folders(points: Sequence[Point]) -> None:
    seen: dict[Path, str] = {}
    for point in points:
        if point.run_dir in seen:
            raise ConfigError(
                f"points {seen[point.run_dir]!r} and {point.label!r} would both write to {point.run_dir}; "
                "give each value once, and let run_dir hold ${name}"
            )
        seen[point.run_dir] = point.label


def run_plan(plan: Plan, config_dir: Path | None, start: Callable[[list[str]], int] | None = None) -> int:
    """Run the points that are not done, print the table, and return 1 if one failed.

    `start` runs a command and returns its exit status. A point that a signal stopped ends the sweep.
    """
    start = start or _start
    outcomes: list[Outcome] = []
    status = 0
    for number, point in enumerate(plan.points, 1):
        done = _metrics_of(point)
        if done is None:
            print(f"sweep: {number}/{len(plan.points)} {point.label}", file=sys.stderr)
            _remember(point)
            code = start(_command(plan, point, config_dir))
            done = _metrics_of(point)
            if code:
                status = max(status, 1)
                done, failure = {}, f"exit status {code}"
            elif done is None:
                status, done, failure = 1, {}, f"no {RESULT} in {point.run_dir}"
            else:
                failure = ""
            outcomes.append(Outcome(point, done, failure))
            if code in (130, 143, -2, -15):
                status = 128 + abs(code) if code < 0 else code
                break
        else:
            print(f"sweep: {number}/{len(plan.points)} {point.label}: done before", file=sys.stderr)
            outcomes.append(Outcome(point, done))
    _print_table(plan, outcomes)
    return status


def _command(plan: Plan, point: Point, config_dir: Path | None) -> list[str]:
    launcher = shlex.split(plan.launcher)
    if launcher[:1] == ["torchrun"]:  # the one of this environment
        launcher[:1] = [sys.executable, "-m", "torch.distributed.run"]
    options = ["--config-dir", str(config_dir)] if config_dir else []
    package = __package__.rpartition(".")[0]
    return [*(launcher or [sys.executable]), "-m", f"{package}.scripts.train", *point.arguments, *options]


def _start(command: list[str]) -> int:
    process = subprocess.Popen(command)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal sent it to the process as well, which saves before it ends.
            continue


def _remember(point: Point) -> None:
    """Keep the settings of a point beside its result, so that a later sweep sees whether it is the same one."""
    point.run_dir.parent.mkdir(parents=True, exist_ok=True)
    file = _settings_file(point)
    stored = _stored_settings(file)
    if stored.get(point.run_dir.name, point.settings) != point.settings and point.run_dir.exists():
        raise ConfigError(f"{point.run_dir} holds a run with other settings; use another name=, or remove it")
    stored[point.run_dir.name] = point.settings
    write_json(file, stored)


def _settings_file(point: Point) -> Path:
    return point.run_dir.parent / SETTINGS


def _stored_settings(file: Path) -> dict[str, str]:
    return dict(_read_json(file)) if file.exists() else {}


def _metrics_of(point: Point) -> Mapping[str, float] | None:
    """Metrics of a finished point; None if it is not finished.

    Raises:
        ConfigError: it finished with other settings than this sweep has.
    """
    file = point.run_dir / RESULT
    if not file.exists():
        return None
    if _stored_settings(_settings_file(point)).get(point.run_dir.name) != point.settings:
        raise ConfigError(f"{point.run_dir} was finished with other settings; use another name=, or remove it")
    metrics = _read_json(file).get("metrics")
    if not isinstance(metrics, dict):
        raise ConfigError(f'{file}: no "metrics"; remove {point.run_dir} and run the point again')
    return {str(name): math.nan if value is None else float(value) for name, value in metrics.items()}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error}); remove it and run the point again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a JSON object; remove it and run the point again")
    return content


def _print_table(plan: Plan, outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.metrics))
    if plan.metric in names:
        names.sort(key=lambda name: name != plan.metric)
        outcomes = sorted(outcomes, key=lambda outcome: -outcome.metrics.get(plan.metric, float("-inf")))
    table = Table(title=plan.name)
    table.add_column("point", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for outcome in outcomes:
        cells = [f"{outcome.metrics[name]:.4g}" if name in outcome.metrics else "" for name in names]
        table.add_row(outcome.point.label + (f" ({outcome.failure})" if outcome.failure else ""), *cells)
    Console().print(table)
    if len(outcomes) < len(plan.points):
        print(f"sweep: stopped after {len(outcomes)} of {len(plan.points)} points", file=sys.stderr)
    if plan.metric and plan.metric not in names:
        print(f"sweep: no point has the metric {plan.metric!r}; they have: {', '.join(names)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
