"""`penstock drill FILE`: a deployment under load is broken again and again; what its clients saw of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import add_flag, integer, number

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.drill.run import Drill, Place, Result, Tell


EVERY = 30.0  # seconds
TERMINATED = 128 + signal.SIGTERM  # exit code, as a shell has it


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "drill", help="break a deployment under load, and report what its clients saw", allow_abbrev=False
    )
    parser.add_argument("file", help="a YAML file; recipes/drill-demo.yaml to start from")
    parser.add_argument("--check", action="store_true", help="say what is wrong with the file and what it would do")
    add_flag(parser, "duration", number(0, 86_400), help="seconds of load, instead of the file's")
    add_flag(parser, "seed", integer(0, 2**32), help="instead of the file's")
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    parser.add_argument("--html", metavar="FILE", help="write a page with the time line here")
    parser.add_argument("--keep", metavar="FOLDER", help="keep what was started, and its logs, in this new folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when every promise was kept, 1 when one was broken or no fault met a stream, 2 for a wrong file, 143 at
    SIGTERM."""
    import uvloop
    from rich.console import Console

    from penstock.bench.document import build, check_writable
    from penstock.cli.drill_file import read_drill
    from penstock.cli.output import as_json, write
    from penstock.core.errors import ConfigError
    from penstock.drill.page import drill_page
    from penstock.drill.report import document

    for flag in ("json", "html"):
        check_writable(getattr(args, flag), f"--{flag}")
    if args.keep is not None and Path(args.keep).exists():
        raise ConfigError(f"--keep: {args.keep}, allowed is a folder that is not there yet", "--keep")
    overrides = {key: getattr(args, key) for key in ("duration", "seed") if getattr(args, key) is not None}
    try:
        drill = read_drill(args.file, overrides)
    except ConfigError as error:  # many lines, each with its place
        print(error, file=sys.stderr)
        return 2
    console = Console()
    if args.check:
        _show_schedule(console, drill)
        return 0
    try:
        with _place(drill, args.keep) as place, _live(Console(stderr=True)) as tell:
            result: Result = uvloop.run(_drilled(drill, place, tell))
    except asyncio.CancelledError:  # by SIGTERM; what was done is undone
        return TERMINATED
    found = build("drill", {"file": args.file, **overrides}, document(drill, result), sys.argv)
    _show(console, found)
    if args.html:
        write(args.html, drill_page(found))
    if args.json:
        write(args.json, as_json(found))
    return 1 if found["broken"] else 0


async def _drilled(drill: Drill, place: Place, tell: Tell) -> Result:
    from penstock.drill import run as drills

    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    return await drills.run(drill, place, tell)


@contextlib.contextmanager
def _place(drill: Drill, keep: str | None) -> Iterator[Place]:
    """Where it runs; all of that is gone at the end, but for the folder that is to be kept."""
    from penstock.cli.curve import SECRET
    from penstock.cli.run_folder import temporary_folder
    from penstock.drill.run import Place

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-", dir=temporary_folder())))
        temporary = folder / "t"  # short: sockets are in it
        temporary.mkdir()
        files = folder / "files"
        files.mkdir()
        if keep is not None:
            stack.callback(shutil.copytree, files, keep)
        environment = {**os.environ} | ({} if drill.secret is None else {SECRET: drill.secret})
        yield Place(folder=files, temporary=temporary, environment=environment)


@contextlib.contextmanager
def _live(console: Console) -> Iterator[Tell]:
    """A line that moves, where there is a terminal; else one for each thing that is begun."""
    if not console.is_terminal:
        yield _Lines().tell
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


class _Lines:
    """What is done, on standard error: when it is another thing, and how far it is every `EVERY` seconds."""

    def __init__(self) -> None:
        self._what, self._at = "", 0.0

    def tell(self, what: str, done: float, total: float) -> None:
        now = time.monotonic()
        counts = what[0].isdigit() and self._what[:1].isdigit()  # which change all the time
        if now - self._at < EVERY and (what == self._what or counts):
            return
        self._what, self._at = what, now
        far = f" ({done / total:.0%})" if done else ""
        print(f"{time.strftime('%X')} {what}{far}", file=sys.stderr, flush=True)


def _show_schedule(console: Console, drill: Drill) -> None:
    from rich.table import Table

    count = len(drill.strikes)
    table = Table(title=f"{drill.name}: {count} faults in {drill.duration:g} s", title_justify="left", box=None)
    for name in ("at (s)", "fault", "target", "lasts (s)"):
        table.add_column(name, justify="right" if "(s)" in name else "left")
    for strike in drill.strikes:
        table.add_row(f"{strike.at:.1f}", strike.kind, strike.target, f"{strike.lasts:g}" if strike.lasts else "")
    console.print(table)


def _show(console: Console, found: Mapping[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{found['name']}: {found['streams']:,} streams", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for key in ("completed", "identical", "excused", "lost", "leaks"):
        table.add_row(key, f"{found[key]:,}")
    for key in ("recovery_p50_ms", "recovery_p99_ms", "recovery_max_ms"):
        table.add_row(key.replace("_", " "), "-" if found[key] is None else f"{found[key]:,.0f}")
    table.add_row("requests/s", f"{found['requests_per_s']:.2f}")
    console.print(table)
    _show_recovery(console, found)
    for what in ("failed", "wrong_streams"):
        for line in found[what]:
            console.print(f"[yellow]{escape(line)}[/]", highlight=False)
    for line, times in found["exceptions"].items():
        console.print(f"[yellow]exception in the log, {times} times: {escape(line)}[/]", highlight=False)
    for line in found["broken"]:
        console.print(f"[bold red]broken:[/] {escape(line)}", highlight=False)
    if not found["broken"]:
        console.print("[bold green]every promise was kept[/]", highlight=False)


def _show_recovery(console: Console, found: Mapping[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="longest gap of streams that a fault met, in ms", title_justify="left")
    for name in ("fault", "times", "streams", "p50", "p99", "most"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for kind in sorted({fault["kind"] for fault in found["faults"]}):
        times = sum(fault["kind"] == kind and fault["began_s"] is not None for fault in found["faults"])
        stats = found["recovery"].get(kind)
        gaps = ["-"] * 3 if stats is None else [f"{stats[key]:,.0f}" for key in ("p50", "p99", "max")]
        table.add_row(kind, str(times), "0" if stats is None else f"{stats['count']:,}", *gaps)
    console.print(table)
