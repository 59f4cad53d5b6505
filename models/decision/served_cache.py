"""Answers of servers on disk, shared by processes: an interrupted evaluation does not pay twice."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from pathlib import Path

_VERSION = 1
_PATIENCE_S = 60.0


class AnswerCache:
    """Bodies of checked answers by sha256 of (url, protocol, model, request); safe for threads and processes.

    Raises:
        ValueError: the file is something else, or of another version.
    """

    def __init__(self, path: str | Path) -> None:
        """Open or create the file, and its folder."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._database = sqlite3.connect(self.path, timeout=_PATIENCE_S, check_same_thread=False, isolation_level=None)
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise ValueError(f"{self.path} is no cache of answers ({error}); delete it or name another file") from error
        except ValueError:
            self._database.close()
            raise

    def _prepare(self) -> None:
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        # Immediate: two processes that create the same file would otherwise both read version 0 and one would fail.
        self._database.execute("BEGIN IMMEDIATE")
        [version] = self._database.execute("PRAGMA user_version").fetchone()
        [tables] = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == 0 and tables == 0:
            self._database.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID")
            self._database.execute(f"PRAGMA user_version={_VERSION}")
            version = _VERSION
        self._database.execute("COMMIT")
        if version != _VERSION:
            raise ValueError(f"{self.path} is no cache of answers of this version; delete it or name another file")

    @staticmethod
    def key(url: str, protocol: str, model: str, body: str) -> str:
        """Lengths separate the parts, so that no two requests share a key."""
        parts = [part.encode() for part in (url, protocol, model, body)]
        return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).hexdigest()

    def get(self, key: str) -> str | None:
        """The stored body, or None."""
        with self._lock:
            row = self._database.execute("SELECT body FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, body: str) -> None:
        """Store a body; what another process stored under the key meanwhile is replaced."""
        with self._lock:
            self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, body))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()
