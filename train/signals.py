"""SIGINT and SIGTERM: finish the step, save, stop. A second signal ends the process at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A run that a signal stopped, after saving. `exit_code` is the shell's: 130 for SIGINT, 143 for SIGTERM."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_code = 128 + signum


class StopWaiting(BaseException):
    """Raised out of a long wait by the first signal; not an Exception, so that nothing on the way swallows it."""


class SignalFlag:
    """Remembers the first signal between `__enter__` and `__exit__`, which puts the earlier handlers back.

    Handlers can only be set in the main thread; elsewhere the flag never rises, and a warning says so.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._earlier: dict[int, Any] = {}
        self._raise_now = False

    def __enter__(self) -> SignalFlag:
        if threading.current_thread() is not threading.main_thread():
            logger.warning("training outside the main thread: a signal stops it without saving")
            return self
        self._earlier = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._earlier.items():
            signal.signal(signum, handler)
        self._earlier = {}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        self.signum = signum
        if self._raise_now:
            raise StopWaiting

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, the first signal raises StopWaiting instead of waiting for the end of a step."""
        if self.signum:
            raise StopWaiting
        self._raise_now = True
        try:
            yield
        finally:
            self._raise_now = False
