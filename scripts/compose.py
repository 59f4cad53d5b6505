"""From what the user typed to typed settings: YAML groups are composed once, and below this no config object exists.

Hydra composes the YAML files only. It starts no job, changes no folder, takes no log over: a run's folder is
what `run_dir` says, on every rank of a launcher alike. Values are checked against the dataclasses of `config`
before anything else happens.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from .config import REQUIRED, Command
from .keys import Group, Schema, groups_of, schema_of, suggest, type_words

T = TypeVar("T", bound=Command)


class ConfigError(ValueError):
    """What the user typed, or a YAML file that it names, cannot be understood; the message says what to do."""


@dataclass(slots=True)
class _Request:
    """What the user asked for: choices of groups, then values of keys."""

    choices: dict[str, str] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # shown and searched, never interpreted


def compose(command: type[T], overrides: Sequence[str], *, config_dir: Path | None = None) -> T:
    """The settings of `command` with `overrides` (`GROUP=CHOICE` or `KEY=VALUE`; the last of a key wins).

    `config_dir` is a folder of the user's own YAML files, laid out like `configs/`; they add to the choices.

    Raises:
        ConfigError: an unknown key, group or choice, a value of the wrong type or out of range, or a
            missing value; the message names it.
    """
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir {config_dir} is not a folder")
    name, schema = command.command, schema_of(command)
    groups = groups_of(name, [config_dir] if config_dir else [])
    request = _read(overrides, name, schema, groups)
    composed = _compose_yaml(name, request, groups, config_dir)
    return _to_dataclass(command, composed, request, schema)


def to_yaml(run: Command) -> str:
    """Resolved settings as YAML."""
    return cast(str, yaml.safe_dump(asdict(cast(Any, run)), sort_keys=False, allow_unicode=True))


def _read(overrides: Sequence[str], command: str, schema: Schema, groups: dict[str, Group]) -> _Request:
    request = _Request()
    for override in overrides:
        key, equals, value = override.partition("=")
        key = key.strip().lstrip("+")
        if not equals or not key:
            raise ConfigError(f"{override!r} is not KEY=VALUE; `retrail {command} --help` lists the keys")
        if key.startswith("~"):
            raise ConfigError(f"{override!r}: nothing can be deleted; give the key a value (null means none)")
        if key in groups:
            request.choices[key] = _choice(command, key, value.strip(), groups[key], schema)
        elif key in schema.keys and schema.keys[key].is_text:
            request.texts[key] = value
        elif key in schema.keys:
            request.values[key] = _value(key, value, schema.keys[key].type)
        elif key in schema.sections:
            request.values[key] = _section(key, value, schema)
        else:
            raise ConfigError(_unknown(key, command, schema, groups))
    return request


def _choice(command: str, group: str, value: str, known: Group, schema: Schema) -> str:
    if value in known.choices or (value == "null" and known.default is None):
        return value
    text = f"{group}={value}: no such choice.{suggest(value, known.choices)} {group} has: {', '.join(known.choices)}"
    if f"{group}.path" in schema.keys:
        text += f"; or set {group}.path={value or '...'}"
    raise ConfigError(f"{text} (`retrail {command} --help`)")


def _value(key: str, value: str, hint: object) -> object:
    """Text stays as it was typed, whatever commas, brackets or quotes it holds; other types are parsed."""
    kinds = typing.get_args(hint) or (hint,)
    if str not in kinds or typing.get_origin(hint) in (list, dict):
        return parse_value(key, value)
    if value == "null" and type(None) in kinds:
        return None
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value


def _section(key: str, value: str, schema: Schema) -> object:
    """Several keys of one section at once: `loop={max_steps: 3, seed: 1}`."""
    parsed = parse_value(key, value)
    if not isinstance(parsed, dict):
        inside = ", ".join(name for name in schema.keys if name.startswith(f"{key}."))
        raise ConfigError(f"{key}={value}: {key} is a section, not a value; set {inside}")
    return parsed


def parse_value(key: str, value: str) -> object:
    """A value as Hydra's grammar reads it: numbers, `true`, `null`, `[1, 2]`, `{a: 1}`; anything else is text."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(f"{key}={value}")
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{key}={value}: the value cannot be read ({reason})") from error
    if parsed.is_sweep_override():
        grid = f"'grid={{{key}: [{value}]}}'"
        raise ConfigError(f"{key}={value} is several values; one run takes one. Try: retrail sweep {grid}")
    return parsed.value()


def _unknown(key: str, command: str, schema: Schema, groups: dict[str, Group]) -> str:
    if key.partition(".")[0] == "hydra":
        return f"{key}: settings of Hydra itself have no effect here; the folder of a run is run_dir=..."
    known = schema.keys if "." in key else [*schema.keys, *groups]
    text = f"unknown key {key!r}.{suggest(key, known)}"
    section = key.rpartition(".")[0]
    if section in schema.sections:
        inside = [name for name in schema.keys if name.rpartition(".")[0] == section]
        return f"{text} {section} has: {', '.join(name.rpartition('.')[2] for name in inside)}"
    return f"{text} `retrail {command} --help` lists groups and keys"


@contextmanager
def _hydra() -> Iterator[None]:
    from hydra import initialize_config_module

    package = __package__.rpartition(".")[0]
    with initialize_config_module(f"{package}.configs", version_base="1.3"):
        yield


def _compose_yaml(command: str, request: _Request, groups: dict[str, Group], config_dir: Path | None) -> Any:
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    # A quoted folder: `=`, `,` or blanks in it are not syntax.
    lines = [f"hydra.searchpath=['file://{config_dir.resolve()}']"] if config_dir else []
    lines += [f"{'' if groups[group].listed else '+'}{group}={choice}" for group, choice in request.choices.items()]
    try:
        with _hydra():
            return hydra_compose(command, overrides=lines)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        chosen = ", ".join(lines) or f"the defaults of {command}"
        raise ConfigError(f"cannot compose {chosen}: {_one_paragraph(str(error))}") from error


def _to_dataclass(command: type[T], composed: Any, request: _Request, schema: Schema) -> T:
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    groups = ", ".join(f"{group}={choice}" for group, choice in request.choices.items())
    origin = f" (in the YAML of {groups or command.command + '.yaml'})"
    merged: Any = OmegaConf.structured(command)
    try:
        merged = OmegaConf.merge(merged, composed)
        origin = ""
        for key, value in request.values.items():
            OmegaConf.update(merged, key, value, merge=key in schema.sections)
        for key in request.texts:
            OmegaConf.update(merged, key, "text")
        _refuse_missing(command, OmegaConf.to_container(merged, resolve=False), schema)
        run = cast(T, OmegaConf.to_object(merged))
    except ConfigKeyError as error:
        raise ConfigError(_unknown(str(error.full_key), command.command, schema, {}) + origin) from error
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, composed, request, schema) + origin) from error
    except ValueError as error:  # from a dataclass that checked its values
        raise ConfigError(str(error)) from error
    for key, text in request.texts.items():
        setattr(run, key, text)
    return run


def _refuse_missing(command: type[Command], values: Any, schema: Schema) -> None:
    missing = [key for key in schema.keys if reduce(lambda node, part: node[part], key.split("."), values) == REQUIRED]
    if missing:
        wanted = [f"{key}={schema.keys[key].example or '...'}" for key in missing]
        raise ConfigError(f"retrail {command.command} also needs {' '.join(wanted)} (the values are examples)")


def _explain(error: Any, composed: Any, request: _Request, schema: Schema) -> str:
    from omegaconf import OmegaConf

    key = str(error.full_key or "").partition("[")[0]
    if key in schema.keys:
        value = request.values.get(key)
        if value is None:
            value = OmegaConf.select(composed, key, throw_on_resolution_failure=False)
        if value is not None and "interpolation" not in str(error).lower():
            return f"{key}={value} must be {type_words(schema.keys[key].type)}"
    return f"{key or 'the settings'}: {_one_paragraph(str(error))}"


def _one_paragraph(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("full_key", "object_type", "provider=")))
