"""Small YAML files of words: read so that every mistake is named with its file, key and value."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that stands twice, of which YAML would silently keep the last."""


def _no_repeats(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} cannot be a key", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return dict(yaml.SafeLoader.construct_mapping(loader, node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _no_repeats)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The keys and values of a file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no YAML, a key that stands twice, or something else than keys and values; names file and line.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        raise ValueError(
            f"{file}{line}: no YAML that can be read: {getattr(error, 'problem', None) or error}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file}: {values!r} must be keys and values")
    return values


def check_keys(values: Mapping[Any, Any], known: Iterable[str], where: str) -> None:
    """Raise ValueError that names the first unknown key, and the one that may have been meant."""
    choices = tuple(known)
    for key, value in values.items():
        if key not in choices:
            raise ValueError(
                f"{where}: unknown key {key!r} (={value!r}){close_keys(key, choices)}; use {', '.join(choices)}"
            )


def close_keys(name: object, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` where one is close, else nothing."""
    close = difflib.get_close_matches(str(name), tuple(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def text_of(value: Any, spot: str) -> str:
    """The value, which must be text. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{spot}={value!r} must be text; put it in quotes if it is meant as such")
    return value
