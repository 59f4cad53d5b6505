"""Which keys and groups a command has: for checking what the user typed, and for `--help`. Needs no Hydra."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path

import yaml

from .config import REQUIRED, Command

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: its dotted name, its type, the code's default (`???`: none), an example, and what it means."""

    name: str
    type: object
    default: object
    example: str | None
    is_text: bool
    doc: str


@dataclass(frozen=True, slots=True)
class Schema:
    """Every key of a command, and the sections (nested dataclasses) that hold them."""

    keys: Mapping[str, Key]
    sections: Mapping[str, type]


@dataclass(frozen=True, slots=True)
class Group:
    """A folder of YAML files of which one is chosen. `listed`: it stands in the command's own defaults."""

    choices: tuple[str, ...]
    default: str | None
    listed: bool


def schema_of(command: type[Command]) -> Schema:
    """All keys of a command, in the order of its dataclass."""
    keys: dict[str, Key] = {}
    sections: dict[str, type] = {}
    _collect(command, "", keys, sections)
    return Schema(keys, sections)


def _collect(cls: type, prefix: str, keys: dict[str, Key], sections: dict[str, type]) -> None:
    hints = typing.get_type_hints(cls)
    docs = _field_docs(cls)
    for item in fields(typing.cast(typing.Any, cls)):
        name, hint = prefix + item.name, hints[item.name]
        if isinstance(hint, type) and is_dataclass(hint):
            sections[name] = hint
            _collect(hint, name + ".", keys, sections)
        else:
            example = item.metadata.get("example")
            is_text = bool(item.metadata.get("text"))
            keys[name] = Key(name, hint, _default(item), example, is_text, docs.get(item.name, ""))


def _default(item: Field[object]) -> object:
    if item.default is not MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not MISSING else REQUIRED


def _field_docs(cls: type) -> dict[str, str]:
    """What the docstrings of a class and those that it extends say of each field.

    From their `name: text` or `name, name: text` paragraphs.
    """
    names = {item.name for item in fields(typing.cast(typing.Any, cls))}
    docs: dict[str, list[str]] = {}
    current: list[str] = []
    texts = [base.__dict__.get("__doc__") or "" for base in reversed(cls.__mro__)]
    for line in "\n\n".join(texts).splitlines():
        head = re.match(r" {4}([a-z0-9_]+(?:, [a-z0-9_]+)*): (.*)", line)
        found = [name for name in head[1].split(", ") if name in names] if head else []
        if head and found:
            current = [head[2].strip()]
            docs.update((name, current) for name in found)
        elif line.strip():
            current.append(line.strip())
        else:
            current = []
    return {name: " ".join(lines) for name, lines in docs.items()}


def type_words(hint: object) -> str:
    """A type in words for a user: `a whole number`, `a list of text`, `a number or null`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(type_words(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        inner = typing.get_args(hint)[0]
        return f"a list of {'whole numbers' if inner is int else 'numbers' if inner is float else 'text'}"
    if typing.get_origin(hint) is dict:
        return "numbers by name, as in {a: 1, b: 2}"
    return _WORDS.get(typing.cast(type, hint), str(hint))


def groups_of(command: str, config_dirs: Sequence[Path] = ()) -> dict[str, Group]:
    """The groups of a command: those in the defaults of its YAML, then any other that the user's folders add."""
    stored = yaml.safe_load((CONFIGS / f"{command}.yaml").read_text(encoding="utf-8"))
    defaults = {
        group: choice for entry in stored["defaults"] if isinstance(entry, dict) for group, choice in entry.items()
    }
    groups = {
        group: Group(_choices(group, (CONFIGS, *config_dirs)), default, True) for group, default in defaults.items()
    }
    for folder in config_dirs:
        for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
            if inner.name not in groups and not (CONFIGS / inner.name).is_dir():
                groups[inner.name] = Group(_choices(inner.name, config_dirs), None, False)
    return groups


def _choices(group: str, folders: Iterable[Path]) -> tuple[str, ...]:
    return tuple(sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")}))


def suggest(word: str, known: Iterable[str]) -> str:
    """` Did you mean ...?` with the known words nearest to `word`, or nothing."""
    words = list(known)
    near = [name for name in words if name.rpartition(".")[2] == word]
    near += [name for name in difflib.get_close_matches(word, words, n=3, cutoff=0.6) if name not in near]
    if not near:  # a key typed without, or with another, section
        last = word.rpartition(".")[2]
        leaves = difflib.get_close_matches(last, {name.rpartition(".")[2] for name in words}, n=2, cutoff=0.75)
        near = [name for name in words if name.rpartition(".")[2] in leaves]
    return f" Did you mean {' or '.join(near[:3])}?" if near else ""
