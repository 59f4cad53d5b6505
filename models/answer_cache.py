"""Answers of models on disk, shared by processes: a run that was killed goes on without paying twice."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import time
from pathlib import Path

_VERSION = 1
_PATIENCE_S = 60.0


class AnswerCache:
    """Bodies of answers by a sha256 over what was asked, which is itself not stored; safe for threads and processes.

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
        self._use_wal()
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

    def _use_wal(self) -> None:
        """Of several processes that open a new file at once one switches it; sqlite does not let the others wait."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._database.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    @staticmethod
    def key(*parts: str) -> str:
        """Of all that an answer depends on. Lengths separate the parts, so that no two questions share a key."""
        raw = [part.encode(errors="surrogatepass") for part in parts]
        return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in raw)).hexdigest()

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
