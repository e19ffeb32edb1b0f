"""Progress of what takes long, for who looks at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

Report = Callable[[int, int], None]  # called with the bytes that are done, and all of them


@contextmanager
def byte_progress(what: str) -> Iterator[Report | None]:
    """A bar on standard error from the first report on, until this is left; None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    bar: Progress | None = None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = _started(what, total)
        bar.update(bar.task_ids[0], completed=done)

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()


def _started(what: str, total: int) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(what, total=total)
    bar.start()
    return bar
