"""Strict reading of text, JSON and JSON Lines, plain or gzipped: every error names file and line or JSON path."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_NAMES = {dict: "an object", list: "an array", str: "a string", int: "an integer", float: "a number", bool: "a boolean"}


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end) of a UTF-8 file, gzipped (told by its first bytes) or plain.

    A byte order mark at the start is dropped; lines end at newline characters only.

    Raises:
        FileNotFoundError: no such file.
        ValueError: damaged or truncated gzip, or bytes that are not UTF-8; names file and line.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    with file.open("rb") as plain:
        zipped = plain.read(2) == b"\x1f\x8b"
        plain.seek(0)
        number = 0
        with gzip.open(plain) if zipped else plain as handle:
            lines = iter(handle)
            while True:
                try:
                    raw = next(lines, None)
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    raise ValueError(
                        f"{file}: gzip data are damaged or cut off after line {number} ({error}); get the file again"
                    ) from error
                if raw is None:
                    return
                number += 1
                yield number, _decode(raw, file, number)


def _decode(raw: bytes, file: Path, number: int) -> str:
    if number == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}:{number}: not UTF-8 at byte {error.start} of the line ({error.reason})") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} appears twice in one object")
    return result


def _loads(text: str, file: Path, first_line: int) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"{file}:{first_line + error.lineno - 1}"
        raise ValueError(f"{where}: not JSON at column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}:{first_line}: not strict JSON: {error}") from error


def read_json(path: str | Path) -> Any:
    """The one JSON value of a file (plain or gzipped).

    Raises:
        ValueError: not UTF-8, damaged gzip, not JSON, NaN, or a key twice in one object; names file and line.
    """
    text = "\n".join(line for _, line in read_lines(path))
    return _loads(text, Path(path), 1)


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank.

    Raises:
        ValueError: as `read_json`, and a line that is not an object; names file and line.
    """
    file = Path(path)
    for number, line in read_lines(file):
        if line.strip():
            value = _loads(line, file, number)
            if not isinstance(value, dict):
                raise ValueError(f"{file}:{number}: a line must be a JSON object, not {describe(value)}")
            yield number, value


def describe(value: object) -> str:
    """What a JSON value is, for an error message."""
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)


def expect(value: object, kind: type[T], where: str) -> T:
    """`value`, if it is of that kind (true is no integer; an integer is a number).

    Raises:
        ValueError: another kind; names `where`.
    """
    if kind is float and type(value) is int:
        return float(value)  # type: ignore[return-value]
    if isinstance(value, kind) and not (kind in (int, float) and isinstance(value, bool)):
        return value
    raise ValueError(f"{where} must be {_NAMES.get(kind, kind.__name__)}, not {describe(value)}")


def require(obj: dict[str, Any], key: str, kind: type[T], where: str) -> T:
    """`obj[key]`, which must be there and of that kind; `where` is file and JSON path of `obj`.

    Raises:
        ValueError: the key is missing or of another kind; names `where` and the key.
    """
    if key not in obj:
        raise ValueError(f"{where} has no key {key!r} (it has: {', '.join(map(repr, obj)) or 'none'})")
    return expect(obj[key], kind, f"{where}[{key!r}]")


def optional(obj: dict[str, Any], key: str, kind: type[T], where: str, default: T) -> T:
    """`obj[key]` of that kind, or `default` where the key is missing or null."""
    return default if obj.get(key) is None else require(obj, key, kind, where)
