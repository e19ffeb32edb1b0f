"""Clocks. Code that decides takes times as arguments; code that acts is given one of these."""

from __future__ import annotations

import time
from typing import Protocol

PAUSE = 2.0  # seconds between two signs of a process that runs, after which it did not run


class Clock(Protocol):
    def now(self) -> float:
        """Seconds from a fixed but arbitrary origin; monotonic."""


class SystemClock:
    """The machine's monotonic clock. Comparable between processes of one host."""

    now = staticmethod(time.monotonic)


class RunningClock:
    """The same without the time in which nobody asked for it. A process that asks several times a second did not run
    then, and whoever was silent meanwhile perhaps did not either."""

    def __init__(self) -> None:
        self._asked = time.monotonic()
        self._left_out = 0.0

    def now(self) -> float:
        now = time.monotonic()
        if now - self._asked > PAUSE:
            self._left_out += now - self._asked
        self._asked = now
        return now - self._left_out


class ManualClock:
    """A clock that a test or a simulator advances."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"seconds: {seconds}, a clock does not go back")
        self._now += seconds
