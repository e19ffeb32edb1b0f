"""Moves that are over, from the threads that made them to the engine's."""

from __future__ import annotations

import os
import threading

from penstock.kv.connector import Moved


class Finished:
    """A queue whose descriptor is readable exactly as long as something is in it."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._over: list[Moved] = []

    def put(self, moved: Moved) -> None:
        with self._lock:
            self._over.append(moved)  # before it is announced: `take` looks without the lock
            if len(self._over) == 1:
                os.eventfd_write(self._fd, 1)

    def take(self) -> list[Moved]:
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
