"""Processes that compute for a command."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager

from penstock.core.errors import PenstockError


@contextmanager
def lost_processes() -> Iterator[None]:
    """Around what waits for them: if one is killed, that is said in a line. Raises PenstockError."""
    try:
        yield
    except BrokenExecutor:
        message = "a process that simulated was killed; if for want of memory, fewer at once need less"
        raise PenstockError(message) from None
