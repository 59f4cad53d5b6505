"""What `retrail COMMAND --help` prints, read from the dataclasses and the YAML folders themselves."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from .config import REQUIRED, Command
from .keys import Group, Key, groups_of, schema_of, type_words

WIDTH = 110


def command_help(command: type[Command], config_dirs: Sequence[Path] = ()) -> str:
    """The page of a command: what it does, its groups with their choices, its keys with types and defaults."""
    name = command.command
    first_line = (command.__doc__ or "").partition("\n")[0]
    parts = [
        f"retrail {name}: {first_line}",
        f"usage: retrail {name} [GROUP=CHOICE ...] [KEY=VALUE ...] [--config-dir DIR] [--print-config] [--traceback]",
    ]
    groups = groups_of(name, config_dirs)
    if groups:
        parts.append("groups (* is chosen unless you say otherwise)\n" + _groups(groups))
    parts.append("keys (defaults of the code; groups change them, --print-config shows what holds)")
    parts.append("\n".join(_key(key) for key in schema_of(command).keys.values()))
    return "\n\n".join(parts) + "\n"


def _groups(groups: Mapping[str, Group]) -> str:
    width = max(map(len, groups)) + 2
    lines = []
    for name, group in groups.items():
        choices = "  ".join(f"*{choice}" if choice == group.default else choice for choice in group.choices)
        lines.append(textwrap.fill(choices, WIDTH, initial_indent=f"  {name:<{width}}", subsequent_indent=" " * 16))
    return "\n".join(lines)


def _key(key: Key) -> str:
    default = _default_words(key.default)
    if key.example:
        default += f", e.g. {key.name}={key.example}"
    lines = [f"  {key.name}: {type_words(key.type)}; {default}"]
    if key.doc:
        lines.append(textwrap.fill(key.doc, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines)


def _default_words(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if default is None:
        return "null"
    return "required" if default == REQUIRED else str(default) or "(empty)"
