"""Files and folders that are either whole or not there, and checksums of what was read."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def _temporary_sibling(path: Path) -> Path:
    """An unused name in the same folder, hence on the same file system, so that a rename is atomic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.parent / f".{path.name}.{uuid.uuid4().hex[:12]}.tmp"


def sync(path: str | Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder beside `path` that becomes `path` when the block ends without an error.

    Raises:
        FileExistsError: `path` exists and is not an empty folder; nothing is ever overwritten.
    """
    target = Path(path)
    check_new_folder(target)
    temporary = _temporary_sibling(target)
    temporary.mkdir()
    try:
        yield temporary
        for file in sorted(temporary.rglob("*")):
            if file.is_dir():
                sync(file)
            else:
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        sync(temporary)
        temporary.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_new_folder(path: str | Path) -> None:
    """Raise FileExistsError unless `path` is absent or an empty folder (checked before long work starts)."""
    target = Path(path)
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target} exists already; remove it or choose another name")


@contextmanager
def new_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that appears under `path`, replacing what was there, when the block ends without an error."""
    target = Path(path)
    temporary = _temporary_sibling(target)
    try:
        with temporary.open("xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(target)
        sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sha256_file(path: str | Path) -> str:
    """Hex sha256 of a file's bytes."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def describe_file(path: str | Path) -> dict[str, object]:
    """Name (without folder), size in bytes and sha256 of a source file, for a manifest."""
    file = Path(path)
    return {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256_file(file)}


def swap_folder(new: Path, target: Path, aside: Path) -> None:
    """Put `new` where `target` is, which moves to `aside`, and back if that fails. All on one file system."""
    target.rename(aside)
    try:
        new.rename(target)
    except BaseException:
        aside.rename(target)
        raise


@contextmanager
def scratch_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder beside `path` (so on the same disk), removed when the block ends."""
    temporary = _temporary_sibling(Path(path))
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
