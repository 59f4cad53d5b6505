"""What the settings of every command share."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

REQUIRED = "???"


def required(example: str) -> Any:
    """A text field that the user has to give, with a value to show as an example."""
    return field(default=REQUIRED, metadata={"example": example})


class Command:
    """Settings of one command; `command` is its name on the command line and that of its YAML file."""

    __slots__ = ()
    command: ClassVar[str]


def check_text(key: str, value: str) -> None:
    """Raise ValueError that names the key if `value` is empty or blank."""
    if not value.strip():
        raise ValueError(f"{key}={value!r} must not be empty")
