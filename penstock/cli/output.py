"""Output of commands, and how far the processes are that compute it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"


def as_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def write(path: str | Path, content: str) -> None:
    """Write a file atomically. Raises ConfigError."""
    path = Path(path)
    special = path.exists() and not path.is_file()  # as /dev/stdout, which must not be replaced
    part = path if special else path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(content, encoding="utf-8")
        if not special:
            part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        if not special:
            part.unlink(missing_ok=True)


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
