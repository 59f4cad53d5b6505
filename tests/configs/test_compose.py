"""Every YAML file becomes typed settings; what the user typed wrongly ends in one message that helps."""

import ast
import dataclasses
import itertools
import re
import typing

import pytest
import yaml

from retrail.models import config as model_config
from retrail.scripts import config as command_config
from retrail.scripts.cli import COMMANDS
from retrail.scripts.compose import ConfigError, compose, to_yaml
from retrail.scripts.config import (
    AnswersRun,
    CalibrateRun,
    CurveRun,
    EvalRun,
    ExportRun,
    PlanRun,
    PoolsRun,
    PrepRun,
    SearchRun,
    ServeRun,
    StaticRun,
    TrainRun,
    WalksRun,
)
from retrail.scripts.keys import CONFIGS, groups_of, schema_of, type_words
from retrail.train import config as train_config

# Enough to run each command.
REQUIRED = {
    TrainRun: ["name=d0", "data.path=data/x"],
    PlanRun: ["data.path=data/x"],
    PrepRun: [],
    ExportRun: ["run=runs/d0", "to=export/d0"],
    CalibrateRun: ["retriever=export/d0", "data.path=data/x"],
    EvalRun: ["retriever=bm25", "data.path=data/x"],
    AnswersRun: ["retriever=bm25", "lm=package:smollm2", "data.path=data/x"],
    CurveRun: ["retriever=export/d0", "data.path=data/x"],
    PoolsRun: ["retriever=export/d0", "data.path=data/x"],
    ServeRun: ["retriever=export/d0"],
    SearchRun: ["retriever=bm25", "corpus=data/x", "query=who?"],
    WalksRun: ["retriever=export/d0", "data.path=data/x", "to=walks.jsonl"],
    StaticRun: ["retriever=export/d0", "corpus=data/x", "to=static/d0"],
}
# What a choice itself needs beside its command's.
CHOICE_NEEDS = {"tree": ["data.groups=2"], "update": ["data.remove=[d1]"]}
CHOICES = [
    (command, group, choice)
    for command in REQUIRED
    for group, known in groups_of(command.command).items()
    for choice in known.choices
]


def test_every_command_is_composed():
    assert {command.command for command in REQUIRED} == set(COMMANDS) - {"sweep"}


@pytest.mark.parametrize("command", REQUIRED, ids=lambda command: command.command)
def test_defaults(command):
    run = compose(command, REQUIRED[command])
    assert type(run) is command
    assert "DictConfig" not in {type(getattr(run, field.name)).__name__ for field in dataclasses.fields(run)}


@pytest.mark.parametrize(("command", "group", "choice"), CHOICES, ids=lambda value: getattr(value, "command", value))
def test_every_choice_of_every_group(command, group, choice):
    path = ["path=raw"] if command is PrepRun and choice != "pydocs" else []
    needs = CHOICE_NEEDS.get(choice, [])
    run = compose(command, [*REQUIRED[command], *path, *needs, f"{group}={choice}"])
    again = yaml.safe_load(to_yaml(run))
    for line in (CONFIGS / group / f"{choice}.yaml").read_text().splitlines():
        assert "_target_" not in line
    # What the file says is what came out, wherever it lands.
    stored = yaml.safe_load((CONFIGS / group / f"{choice}.yaml").read_text())
    landed = leaves(again)
    for key, value in leaves(stored).items():
        if not key.startswith("defaults") and value != "???" and key != "data.path":
            assert any(name.endswith(key) and landed[name] == value for name in landed), (key, value)


def leaves(node, prefix=""):
    if not isinstance(node, dict):
        return {prefix: node}
    parts = (leaves(value, f"{prefix}.{key}" if prefix else key).items() for key, value in node.items())
    return dict(itertools.chain.from_iterable(parts))


def test_every_yaml_file_belongs_to_a_group():
    reached = {(group, choice) for _, group, choice in CHOICES}
    files = {(path.parent.name, path.stem) for path in CONFIGS.glob("*/*.yaml")}
    assert files == reached
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {command.command for command in REQUIRED}


@pytest.mark.parametrize("experiment", groups_of("train")["experiment"].choices)
def test_experiments_need_only_a_name(experiment):
    run = compose(TrainRun, [f"experiment={experiment}", "name=x"])
    assert run.run_dir == "runs/x"
    for debug in groups_of("train")["debug"].choices:
        quick = compose(TrainRun, [f"experiment={experiment}", "name=x", f"debug={debug}"])
        assert (
            quick.loop.max_steps
            == yaml.safe_load((CONFIGS / "debug" / f"{debug}.yaml").read_text())["loop"]["max_steps"]
        )


def test_the_last_override_wins_over_group_and_experiment():
    run = compose(TrainRun, ["name=a", "experiment=decision_tiny", "adapter=lora", "adapter.rank=3", "name=b"])
    assert (run.adapter.kind, run.adapter.rank, run.name, run.model.path) == ("lora", 3, "b", "tiny:llama")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.path=a b, (c) [d] {e} 'f' \"g\" = h", "a b, (c) [d] {e} 'f' \"g\" = h"),
        ("model.path='quoted'", "quoted"),
        ("model.path=007", "007"),
        ("model.revision=null", None),
        ("model.num_layers=4", 4),
        ("optim.lr=1e-4", 1e-4),
        ("runtime.compile=true", True),
        ("navigate.keep=[10, 5]", [10, 5]),
        ("+navigate.choose=3", 3),
        ("data.mix={../data/a-1: 1, /tmp/b_2.0: 0.5}", {"../data/a-1": 1.0, "/tmp/b_2.0": 0.5}),
        ("objective.rivals=[bm25, runs/a/run.trec]", ["bm25", "runs/a/run.trec"]),
    ],
)
def test_values(override, expected):
    run = compose(TrainRun, ["name=x", "data.path=y", override])
    section, _, name = override.partition("=")[0].lstrip("+").partition(".")
    value = getattr(getattr(run, section), name)
    assert value == expected
    assert type(value) is type(expected)


def test_queries_are_never_interpreted():
    text = 'what is ${name}, "a, b" = [c] \\${d}?'
    assert compose(SearchRun, ["retriever=bm25", "corpus=c", f"query={text}"]).query == text


def test_several_keys_of_a_section_at_once():
    run = compose(TrainRun, ["name=x", "data.path=y", "loop={max_steps: 3, seed: 7}"])
    assert (run.loop.max_steps, run.loop.seed, run.loop.batch_size) == (3, 7, 8)


@pytest.mark.parametrize(
    ("command", "overrides", "parts"),
    [
        (TrainRun, [], ["retrail train also needs name=d0 data.path=data/multidoc2dial"]),
        (SearchRun, [], ["retriever=export/d0", "corpus=data/pydocs", 'query="how do I copy a list?"']),
        (TrainRun, ["adapter.rnak=8"], ["'adapter.rnak'", "Did you mean adapter.rank", "kind, rank, alpha"]),
        (TrainRun, ["rank=8"], ["'rank'", "Did you mean adapter.rank?"]),
        (TrainRun, ["lop.max_steps=8"], ["'lop.max_steps'", "loop.max_steps"]),
        (TrainRun, ["modle=tiny"], ["'modle'", "model"]),
        (TrainRun, ["experiment=decison_small"], ["decison_small", "Did you mean decision_small", "quickstart"]),
        (TrainRun, ["model=Qwen/Qwen3-8B"], ["no such choice", "qwen3_8b", "set model.path=Qwen/Qwen3-8B"]),
        (TrainRun, ["data=multidoc2dial"], ["data is a section", "data.path"]),
        (TrainRun, ["name=x", "adapter.rank=8.5"], ["adapter.rank=8.5 must be a whole number"]),
        (TrainRun, ["name=x", "runtime.compile=perhaps"], ["runtime.compile=perhaps must be true or false"]),
        (TrainRun, ["name=x", "navigate.keep=5"], ["navigate.keep=5 must be a list of whole numbers"]),
        (TrainRun, ["name=x", "navigate.keep=[a]"], ["navigate.keep", "must be a list of whole numbers"]),
        (TrainRun, ["name=x", "loop={max_stps: 3}"], ["loop.max_stps", "Did you mean loop.max_steps"]),
        (TrainRun, ["name=x", "optim.lr=1e-4,2e-4"], ["several values", "grid={optim.lr: [1e-4,2e-4]}"]),
        (TrainRun, ["name=x", "navigate.keep=[1"], ["navigate.keep=[1", "cannot be read"]),
        (TrainRun, ["name=x", "data.path=y", "adapter.rank=-1"], ["adapter.rank=-1 must be above 0"]),
        (TrainRun, ["name=x", "data.path=y", "adapter.kind=lorra"], ["adapter.kind='lorra'", "lora, qlora, full"]),
        (
            TrainRun,
            ["name=x", "data.path=y", "decision.order=query_first"],
            ["objective.queries=24 queries cannot share", "set decision.order=candidates_first or objective.queries=1"],
        ),
        (
            TrainRun,
            ["name=x", "data.path=y", "decision.max_candidates=9"],
            ["objective.max_candidates=24 is more than"],
        ),
        (TrainRun, ["name=${nope}", "data.path=y"], ["name", "'nope' not found"]),
        (TrainRun, ["name= ", "data.path=y"], ["name=' ' must not be empty"]),
        (TrainRun, ["hydra.run.dir=x"], ["hydra.run.dir", "run_dir="]),
        (TrainRun, ["~adapter.rank=3"], ["nothing can be deleted"]),
        (TrainRun, ["decision_small"], ["'decision_small' is not KEY=VALUE", "--help"]),
        (EvalRun, ["retriever=x", "baselines=[bm26]"], ["baselines='bm26'", "bm25, dense, rerank, untrained"]),
        (EvalRun, ["retriever=x", "suite=beir"], ["data.path="]),
        (PrepRun, ["data=beir"], ["data=beir also needs path=FOLDER"]),
        (PrepRun, ["data=beir", "path=x", "data.words=5"], ["data.words has no meaning for data=beir"]),
        (PrepRun, ["path=x"], ["path=x has no meaning for data=pydocs"]),
    ],
)
def test_messages(command, overrides, parts):
    with pytest.raises(ConfigError) as caught:
        compose(command, overrides)
    message = str(caught.value)
    for part in parts:
        assert part in message
    assert "\n" not in message
    assert "full_key" not in message


def test_own_folder_adds_choices_and_groups(tmp_path):
    folder = tmp_path / "my, configs=1"
    for group, text in {
        "model": "path: /models/mine\ndtype: float32\n",
        "experiment": "# @package _global_\ndefaults:\n  - override /model: mine\nloop:\n  max_steps: 5\n",
        "prices": "# @package _global_\nloop:\n  seed: 9\n",
    }.items():
        (folder / group).mkdir(parents=True)
        (folder / group / "mine.yaml").write_text(text)
    run = compose(TrainRun, ["name=x", "data.path=y", "experiment=mine", "prices=mine"], config_dir=folder)
    assert (run.model.path, run.loop.max_steps, run.loop.seed) == ("/models/mine", 5, 9)
    with pytest.raises(ConfigError, match="no such choice"):
        compose(TrainRun, ["name=x", "data.path=y", "experiment=mine"])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("adapter:\n  rnak: 3\n", ["adapter.rnak", "adapter.rank", "experiment=mine"]),
        ("adapter:\n  rank: many\n", ["adapter.rank=many must be a whole number", "experiment=mine"]),
        ("defaults:\n  - override /model: absent\n", ["experiment=mine", "model/absent"]),
        ("adapter: [1\n", ["experiment=mine", "cannot compose"]),
    ],
)
def test_mistakes_in_own_files(tmp_path, text, parts):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n" + text)
    with pytest.raises(ConfigError) as caught:
        compose(TrainRun, ["name=x", "data.path=y", "experiment=mine"], config_dir=tmp_path)
    for part in parts:
        assert part in str(caught.value)


def test_own_folder_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        compose(TrainRun, ["name=x"], config_dir=tmp_path / "absent")


def test_search_budget_keeps_what_is_stored():
    stored = model_config.NavigateConfig(keep=[10, 4], choose=5)
    assert command_config.SearchBudget().over(stored) == stored
    assert command_config.SearchBudget(keep=[3]).over(stored) == model_config.NavigateConfig(keep=[3], choose=5)
    assert command_config.SearchBudget(choose=0).over(stored) == model_config.NavigateConfig(keep=[10, 4], choose=0)
    priced = command_config.SearchBudget(price=model_config.PriceConfig(prompt=0.5)).over(stored)
    assert priced.price.prompt == 0.5 and priced.keep is not stored.keep
    calibrated = model_config.NavigateConfig(budget="calibrated", calibration="c.json")
    assert command_config.SearchBudget(budget="count").over(calibrated) == model_config.NavigateConfig()
    assert command_config.SearchBudget(choose=1).over(calibrated).calibration == "c.json"


def test_search_budget_has_every_setting_of_a_walk():
    own = {field.name for field in dataclasses.fields(command_config.SearchBudget)}
    assert own - {"join"} == {field.name for field in dataclasses.fields(model_config.NavigateConfig)}
    keys = schema_of(EvalRun).keys
    assert "navigate.price.prompt" in keys and keys["navigate.keep"].doc.startswith("how many candidates stay")
    assert keys["navigate.max_seconds"].doc.startswith("limits of a query")


def test_types_in_words():
    assert type_words(list[int] | None) == "a list of whole numbers or null"
    assert type_words(dict[str, float]) == "numbers by name, as in {a: 1, b: 2}"
    assert type_words(typing.Optional[float]) == "a number or null"  # noqa: UP045


def config_classes():
    for module in (command_config, model_config, train_config):
        for value in vars(module).values():
            if dataclasses.is_dataclass(value) and value.__module__.startswith(module.__name__):
                yield value


def test_every_field_is_read_somewhere(repository):
    """A setting that nothing reads is a promise that nobody keeps."""
    read = set()
    settings = {"models/config.py", "train/config.py"}
    settings |= {path.relative_to(repository).as_posix() for path in (repository / "scripts").glob("config*.py")}
    for folder in ("data_prep", "models", "train", "eval", "scripts"):
        for path in (repository / folder).rglob("*.py"):
            if path.relative_to(repository).as_posix() not in settings:
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                        read.add(node.attr)
    # `SearchBudget` is read by its own method, `data.name` by the interpolation in `out`.
    unread = {
        f"{cls.__name__}.{field.name}"
        for cls in config_classes()
        if cls is not command_config.SearchBudget
        for field in dataclasses.fields(cls)
        if field.name not in read
    }
    assert not unread


def test_every_key_that_a_command_has_is_explained_or_plain(repository):
    """The keys of the commands themselves are all explained in the docstrings that --help shows."""
    for command in REQUIRED:
        for key in schema_of(command).keys.values():
            if "." not in key.name and key.name != "device":
                assert re.search(r"\w+ \w+", key.doc), f"{command.command}: {key.name} has no explanation"
