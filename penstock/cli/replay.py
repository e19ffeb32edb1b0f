"""`penstock replay RECORD`: requests that a server has recorded run again, and their tokens compared."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.chat import DEFAULT_URL, parse_url
from penstock.cli.options import add_flag, between, client_key, integer, number
from penstock.core.errors import Unavailable

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.drill.replay import Pace, Result
    from penstock.service.request_record import RequestRecord

TOLERANCE = 1e-3  # devices sum in different orders; on one they are equal to the bit
AT_ONCE = 32  # requests in flight where no speed is given
READY = re.compile(r'ready: \S+ on (http://[^\s"]+)/v1')  # says a server
KEPT, STOPS = 30, 60.0  # lines of its log that an error shows; seconds that it has for its end
SHOWN = 20  # of each kind; --json has all


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="run recorded requests again, and compare their tokens",
        description="Sends what a server has written with --record-requests FOLDER to a running deployment again, each "
        "with the seed that was used, and compares the tokens. 0 when all that was compared is the same, 1 when "
        "something differs, was not answered, or nothing could be compared.",
        allow_abbrev=False,
    )
    parser.add_argument("record", metavar="RECORD", help="the folder, or a file of it; it may still be written")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", default=DEFAULT_URL, help=f"of the deployment (default: {DEFAULT_URL})")
    where.add_argument(
        "--serve",
        metavar="MODEL",
        help="instead: what `penstock serve` takes, which is started for this and ends with it; its flags are those of "
        "the environment (PENSTOCK_DTYPE for --dtype, and so on)",
    )
    parser.add_argument("--api-key", help="for it (default: the first of PENSTOCK_API_KEY)")
    parser.add_argument("--model", metavar="NAME", help="a name that it lists (default: its first)")
    parser.add_argument(
        "--any-model", action="store_true", help="compare also what another model, or other types of it, generated"
    )
    parser.add_argument(
        "--request", action="append", default=[], metavar="ID", help="only this one; may be given several times"
    )
    add_flag(
        parser,
        "speed",
        number(0, endless=True),
        inf,
        help="factor on the rate at which the requests came: 1 keeps their times; inf, the default, sends one as soon "
        "as another has ended",
    )
    add_flag(
        parser, "max-concurrency", integer(1), help=f"requests in flight at most (default: {AT_ONCE}; with a speed any)"
    )
    add_flag(
        parser,
        "timeout",
        number(0, 1e6),
        600.0,
        help="seconds that one request may take, and be refused as too much meanwhile (default: 600)",
    )
    add_flag(
        parser,
        "tolerance",
        between(0, 10),
        TOLERANCE,
        help="by which log-probabilities of the same tokens, and numbers of embeddings, may differ; 0 is to the bit "
        f"(default: {TOLERANCE})",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError for a bad flag or record, Unavailable when no server answers; returns the exit code."""
    import uvloop
    from rich.console import Console

    from penstock.bench.document import build, check_writable
    from penstock.cli.output import as_json, write
    from penstock.drill.replay import Pace
    from penstock.service.request_record import RequestRecord

    check_writable(args.json, "--json")
    url = parse_url(args.url).geturl()
    served = nullcontext(url) if args.serve is None else serving(args.serve)
    speed = None if args.speed == inf else args.speed
    at_once = AT_ONCE if speed is None and args.max_concurrency is None else args.max_concurrency
    with RequestRecord(Path(args.record)) as record, served as url:
        result = uvloop.run(_replayed(args, url, record, Pace(speed=speed, at_once=at_once)))
    flags = (
        "record",
        "url",
        "serve",
        "model",
        "any_model",
        "request",
        "speed",
        "max_concurrency",
        "timeout",
        "tolerance",
    )
    found = build("replay", {flag: getattr(args, flag) for flag in flags}, result.document(), sys.argv)
    _show(Console(), found)
    if args.json:
        write(args.json, as_json(found))
    return 0 if result.good else 1


@contextmanager
def serving(model: str, *flags: str) -> Iterator[str]:
    """The URL of a server of its own. Raises Unavailable when it does not start."""
    words = [sys.executable, "-m", "penstock.cli.main", "serve", model, "--host", "127.0.0.1", "--port", "0", *flags]
    last: deque[str] = deque(maxlen=KEPT)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                last.append(line)
                if found := READY.search(line):
                    break
            else:
                raise Unavailable(f"penstock serve {model} did not start:\n{''.join(last)}")
            threading.Thread(target=server.stderr.read, daemon=True).start()  # or it would wait for that at some time
            yield found[1]
        finally:
            server.terminate()
            try:
                server.wait(STOPS)
            except subprocess.TimeoutExpired:
                server.kill()


async def _replayed(args: argparse.Namespace, url: str, record: RequestRecord, pace: Pace) -> Result:
    from rich.console import Console

    from penstock.bench.client import Client
    from penstock.cli.output import make_progress
    from penstock.drill.replay import chosen, find_target, replay

    lines = chosen(record, args.request, args.record)
    key = args.api_key or client_key(os.environ)
    async with Client(url, timeout=args.timeout, api_key=key) as client:
        target = await find_target(client, args.model, any_model=args.any_model, tolerance=args.tolerance)
        console = Console(stderr=True)
        console.quiet = not console.is_terminal
        with make_progress(console) as bars:
            bar = bars.add_task("replaying", total=len(lines))
            return await replay(record, lines, target, pace, lambda count: bars.advance(bar, count))


def _show(console: Console, found: Mapping[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    differences = found["differences"]
    if differences:
        table = Table(title="first difference of each output", title_justify="left")
        for name in ("request", "output", "position", "recorded", "replayed", "of"):
            table.add_column(name, justify="left" if name == "request" else "right", overflow="fold")
        for row in differences[:SHOWN]:
            table.add_row(escape(row["request"]), *(str(row[key]) for key in list(row)[1:]))
        console.print(table)
        _rest(console, len(differences))
    for title, key in (("not answered", "failed_requests"), ("not compared", "not_compared_requests")):
        for row in found[key][:SHOWN]:
            line = f"[yellow]{title}:[/] {escape(row['request'])}: {escape(row['why'])}"
            console.print(line, highlight=False, soft_wrap=True)
        _rest(console, len(found[key]))
    kinds = {"same": "the same", "differ": "differ", "failed": "not answered", "not_compared": "not compared"}
    counts = ", ".join(f"{found[key]:,} {what}" for key, what in kinds.items())
    compared = f"{found['tokens']:,} tokens of {found['outputs']:,} outputs compared in {found['duration_s']:,.1f} s"
    console.print(f"{found['requests']:,} requests: {counts}; {compared}", highlight=False, soft_wrap=True)
    if found["numbers"]:
        equal = f"{found['equal_numbers']:,} of {found['numbers']:,} are equal to the bit"
        text = f"log-probabilities and numbers of embeddings: {equal}, the largest gap is {found['largest_gap']:.2g}"
        console.print(text, highlight=False, soft_wrap=True)
    if found["beginnings"]:
        note = f"of {found['beginnings']:,} that had ended early the beginnings are the same"
        console.print(note, highlight=False, soft_wrap=True)
    if not found["same"] and not found["differ"]:
        console.print("[bold red]nothing was compared[/]", highlight=False)


def _rest(console: Console, count: int) -> None:
    if count > SHOWN:
        console.print(f"and {count - SHOWN:,} more; --json has all", highlight=False)
