"""Processes that compute for a command, and how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


@contextmanager
def lost_processes() -> Iterator[None]:
    """A context for waiting on worker processes: a killed one raises PenstockError with one line."""
    try:
        yield
    except BrokenExecutor:
        message = "a process that simulated was killed; if for want of memory, fewer at once need less"
        raise PenstockError(message) from None


def make_progress(console: Console) -> Progress:
    """Progress bars, removed at the end."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, refresh_per_second=2)  # simulating takes all cores
