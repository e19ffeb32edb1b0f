"""Clocks. Code that decides takes times as arguments; code that acts is given one of these."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds from a fixed but arbitrary origin; monotonic."""


class SystemClock:
    """The machine's monotonic clock. Comparable between processes of one host."""

    now = staticmethod(time.monotonic)


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
