"""Files that are either whole or absent."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data_prep.files import sync

TEMPORARY = ".tmp"


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one move: readers see the old text or the new, never a part."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def dumps(value: Mapping[str, Any]) -> str:
    """One line of JSON. Numbers that JSON cannot hold (NaN, infinities) become null."""
    return json.dumps(_finite(value), ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by `value` in one move, indented for reading."""
    write_text(path, json.dumps(_finite(value), ensure_ascii=False, indent=2) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines ([] if there is none), up to a last line that a killed writer cut short.

    Raises ValueError that names file and line for a broken line that is not the last.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not JSON ({error}); move the file away to go on") from error
    return found
