"""Moves that are over, from the threads that made them to the engine's."""

from __future__ import annotations

import os
import threading

from penstock.core.errors import EngineFailure
from penstock.kv.connector import Moved


class Finished:
    """A queue whose descriptor is readable exactly as long as something is in it."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._over: list[Moved] = []
        self._failure: BaseException | None = None

    def put(self, moved: Moved) -> None:
        with self._lock:
            self._over.append(moved)  # before it is announced: `take` looks without the lock
            if len(self._over) == 1:
                os.eventfd_write(self._fd, 1)

    def fail(self, error: BaseException) -> None:
        """A thread has failed, and what it had begun will never be over."""
        self._failure = error
        os.eventfd_write(self._fd, 1)

    def take(self) -> list[Moved]:
        """Raises EngineFailure when a thread has failed."""
        if self._failure is not None:
            raise EngineFailure(f"the thread that moves blocks failed: {self._failure!r}") from self._failure
        if not self._over:
            return []
        with self._lock:
            os.eventfd_read(self._fd)
            over, self._over = self._over, []
        return over

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """After the last `put`. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._over = -1, []
