"""The words of `instructions.yaml`: what a state is told, in several wordings each.

The first wording is the one that is searched with; training draws among all of them, because an encoder that has
seen one wording only fails under another.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from .yaml_file import close_keys, read_yaml

_FILE = Path(__file__).with_name("instructions.yaml")


def wordings(preset: str, role: str) -> tuple[str, ...]:
    """All wordings of a preset's instruction for a role, the preset's own one first.

    Raises:
        ValueError: no such preset or role; lists those that there are.
    """
    presets = _instructions()["presets"]
    roles = _look_up(presets, preset, "prompt preset with instructions")
    return tuple(_look_up(roles, role, f"role of the prompt preset {preset!r}"))


def root_wordings(suite: str, task: str | None = None) -> tuple[str, ...]:
    """All wordings of a benchmark's root instruction; `task` is one of the suite's (None: of the suite as a whole).

    Raises:
        ValueError: no such suite or task, or a suite whose tasks differ and no task; lists those that there are.
    """
    found = _look_up(_instructions()["roots"], suite, "suite with root instructions")
    tasks: dict[str, Any] = found.get("tasks", {})
    shared: list[str] = found.get("wordings", [])
    if task is None:
        if not shared or any("{subject}" in text for text in shared):
            raise ValueError(
                f"the tasks of the suite {suite!r} have instructions of their own: name one of {_listed(tasks)}"
            )
        return tuple(shared)
    if task not in tasks and shared and not any("{subject}" in text for text in shared):
        return tuple(shared)
    own = _look_up(tasks, task, f"task of the suite {suite!r}")
    if isinstance(own, str):  # what the suite's wordings speak of
        return tuple(text.replace("{subject}", own) for text in shared)
    return tuple(own)


def root_instruction(suite: str, task: str | None = None) -> str:
    """The root instruction of a benchmark, in the wording that is searched with. Raises as `root_wordings`."""
    return root_wordings(suite, task)[0]


def suites() -> dict[str, tuple[str, ...]]:
    """Every suite with root instructions, and its tasks that have one of their own."""
    return {suite: tuple(found.get("tasks", {})) for suite, found in _instructions()["roots"].items()}


def _look_up(values: dict[str, Any], key: str, what: str) -> Any:
    if key not in values:
        raise ValueError(f"there is no {what} named {key!r}{close_keys(key, values)}; there are: {_listed(values)}")
    return values[key]


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(values)


@cache
def _instructions() -> dict[str, Any]:
    return read_yaml(_FILE)
