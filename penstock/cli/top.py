"""`penstock top`: a running deployment, live: instances by role, queues, KV, attainment, throughput, the latest
decisions."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from penstock.cli.chat import DEFAULT_URL, Server, parse_url
from penstock.cli.options import add_flag, between, client_key
from penstock.core.errors import ConfigError, PenstockError, UserError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SHOWN = 32  # instances of a role, those with the most to do, that are shown one by one
WIDE = 120  # columns, at least, of text that is not for a terminal


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("top", help="a running deployment, live", description=__doc__, allow_abbrev=False)
    parser.add_argument("--url", default=DEFAULT_URL, help="of a server or a frontend (default: %(default)s)")
    parser.add_argument("--model", help="a name of the one to look at, where the server has several")
    parser.add_argument("--api-key", help="default: the first of PENSTOCK_API_KEY")
    add_flag(parser, "interval", between(0.1, 3600), 1.0, help="seconds between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one look, and end; so does a pipe")
    parser.add_argument("--json", action="store_true", help="print one look as JSON, and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError for a bad flag, and PenstockError when the first look fails."""
    server = Server(parse_url(args.url), args.api_key or client_key(os.environ))

    def look() -> Look:
        content = server.get("/overview" + ("" if args.model is None else f"?model={quote(args.model, safe='')}"))
        if not isinstance(content, dict) or not {"frontend", "master"} <= content.keys():
            raise ConfigError(f"--url: {args.url} is no penstock server", "url")
        return Look(args.url, content, time.monotonic())

    if args.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(look().content), indent=1).decode())
        return 0
    from rich.console import Console

    console = Console(highlight=False)
    if args.once or not console.is_terminal:
        if not console.is_terminal:
            console.width = max(console.width, WIDE)
        console.print(screen(look(), None))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        watch(console, look, lambda: time.sleep(args.interval))
    return 0


@dataclass(frozen=True, slots=True)
class Look:
    """
    Attributes:
        content: of /overview.
        at: seconds, by this process's clock.
    """

    url: str
    content: Mapping[str, Any]
    at: float


def watch(console: Console, look: Callable[[], Look], wait: Callable[[], object]) -> None:
    """Show one look after another, until `wait` raises something. A server that does not answer is waited for, once it
    has."""
    from rich.console import Group
    from rich.live import Live

    before, newest, trouble = None, look(), ""
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            shown = screen(newest, before)
            live.update(Group(f"[red]{_plain(trouble)}[/red]", shown) if trouble else shown, refresh=True)
            wait()
            try:
                before, newest, trouble = newest, look(), ""
            except UserError:
                raise
            except PenstockError as error:
                trouble = str(error)


# --- what is shown


def screen(look: Look, before: Look | None) -> RenderableType:
    """
    Args:
        before: an earlier look, for what is a rate.
    """
    from rich.console import Group

    content = look.content
    frontend, master = content["frontend"], content["master"]
    parts: list[RenderableType] = [
        f"[bold]{_plain(content['model'])}[/bold] at {_plain(look.url)}, {content['at']}",
        _queues(master),
        _rates(master),
        _of_frontend(frontend, _tokens_per_second(look, before)),
        _prefixes(frontend["prefixes"], master["prefixes"]),
    ]
    by_role: dict[str, list[Mapping[str, Any]]] = {}
    for row in master["instances"]:
        by_role.setdefault(row["role"], []).append(row)
    for role, rows in by_role.items():
        parts += ["", _pool(role, rows), _instances(rows)]
    parts += [f"[red]{_plain(name)}: {_plain(why)}[/red]" for name, why in frontend["troubles"].items()]
    slow = [row for row in master["instances"] if row["slow"]]
    parts += [f"[red]{_plain(row['name'])} is slow: {_plain(row['slow'])}[/red]" for row in slow]
    parts += scaling_lines(master)
    parts += ["", _decisions(master["decisions"])]
    if master["moves"]:
        parts += ["", _moves(master["moves"])]
    if master["relocations"]:
        parts += ["", _relocations(master["relocations"])]
    return Group(*parts)


def scaling_lines(master: Mapping[str, Any]) -> list[str]:
    """What the instances cost, how long they took to start, and what a scaling policy says of each stage."""
    fleet, stages = master["fleet"], master["stages"]
    if not stages:
        return []
    took = ", ".join(
        f"{row['count']:,} by {row['path']} in {row['seconds'] / row['count']:,.1f} s" for row in fleet["starts"]
    )
    lines = [
        f"[bold]scaling[/bold]: {fleet['instances']:,} instances hold devices, {fleet['instance_seconds']:,.0f} "
        f"instance-seconds so far; started: {_plain(took) or '-'}"
    ]
    for stage in stages:
        coming = f", {stage['starting']:,} start" if stage["starting"] else ""
        wish = f"{stage['more']:+,} wished" if stage["more"] else "as many as are wished"
        lines.append(
            f"  {stage['role']}: {stage['serving']:,} serve{coming}, {wish} ({_plain(stage['reason'])}); "
            f"{_plain(stage['outcome'])}"
        )
    return ["", *lines]


def _queues(master: Mapping[str, Any]) -> str:
    hopeless = f", {master['unplaceable']:,} that no instance can take" if master["unplaceable"] else ""
    return (
        f"master: {master['waiting']:,} online and {master['offline_waiting']:,} offline in its queue{hopeless}; "
        f"{master['placed']:,} placed; {master['frontends']:,} frontend{'s' * (master['frontends'] != 1)}"
    )


def _rates(master: Mapping[str, Any]) -> str:
    window, ended = master["window"], master["completions"]
    kept = f", {master['attained'] / ended:.1%} within targets" if ended else ""
    return (
        f"last {window:g} s, online: {master['arrivals'] / window:,.1f} requests/s of {master['prompt_tokens']:,.0f} "
        f"tokens came, {ended / window:,.1f} of {master['output_tokens']:,.0f} ended{kept}"
    )


def _of_frontend(frontend: Mapping[str, Any], speed: float | None) -> str:
    rate = "" if speed is None else f"{speed:,.0f} tokens/s; "
    kept = [
        f"{name} {_share(of['kept'], of['requests'])} of the last {of['requests']:,}"
        for name, of in frontend["attainment"].items()
        if of["requests"]
    ]
    return f"this frontend: {frontend['sequences']:,} sequences; {rate}within targets: {', '.join(kept) or '-'}"


def _prefixes(seen: Mapping[str, Any], ideal: Mapping[str, Any] | None) -> str:
    """What was found of the prompts, and what an ideal cache would have found."""
    asked, found = seen["prompt_tokens"], seen["found_tokens"]
    places = [f"{_plain(where)} {_share(tokens, asked)}" for where, tokens in found.items() if tokens]
    line = f"prompts: {_share(sum(found.values()), asked)} of {asked:,} tokens were cached"
    line += f" ({', '.join(places)})" if places else ""
    if ideal is None or not ideal["prompt_tokens"]:
        return line
    least = "" if ideal["complete"] else "at least "
    would = _share(ideal["ideal_tokens"], ideal["prompt_tokens"])
    return f"{line}; a cache without end would have had {least}{would}"


def _tokens_per_second(look: Look, before: Look | None) -> float | None:
    if before is None or look.at <= before.at:
        return None
    made = look.content["frontend"]["generated_tokens"] - before.content["frontend"]["generated_tokens"]
    return made / (look.at - before.at) if made >= 0 else None  # else it has been restarted


def _pool(role: str, rows: Sequence[Mapping[str, Any]]) -> str:
    states: dict[str, int] = {}
    for row in rows:
        states[row["state"]] = states.get(row["state"], 0) + 1
    counts = ", ".join(f"{count:,} {state}" for state, count in states.items())
    used, blocks = _sum(rows, "used_blocks"), _sum(rows, "num_blocks")
    return (
        f"[bold]{role}[/bold]: {counts}; {_sum(rows, 'running'):,} running, {_sum(rows, 'waiting'):,} waiting, "
        f"KV {_share(used, blocks)} of {blocks:,} blocks"
    )


def _sum(rows: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(row[name] for row in rows)


def _instances(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich.table import Table

    shown = rows
    if len(rows) > SHOWN:
        shown = sorted(rows, key=lambda row: (row["waiting"], row["running"]), reverse=True)[:SHOWN]
    seeing = any(row["encodes"] or row["image_tokens"] for row in shown)
    moving = any(row["migrating"] or row["migration_queue"] for row in shown)
    table = Table(box=None, padding=(0, 1), caption=f"{len(rows) - len(shown)} more" if shown is not rows else None)
    table.add_column("instance", no_wrap=True)
    numbers = ("running", "waiting", "unread", "held", "KV", "ttft ms", "tpot ms", "step ms")
    for name in (
        "state",
        *numbers,
        *(("images", "to look at", "ms/image token") if seeing else ()),
        *(("leaving", "coming") if moving else ()),
    ):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for row in shown:
        table.add_row(
            _plain(row["name"]),
            row["state"],
            *(f"{row[name]:,}" for name in ("running", "waiting", "pending_tokens", "held_tokens")),
            _share(row["used_blocks"], row["num_blocks"]),
            *("-" if row[name] is None else f"{row[name]:,.1f}" for name in ("ttft_ms", "tpot_ms", "interval_ms")),
            *(_seeing(row) if seeing else ()),
            *((f"{row['migrating']:,}", f"{row['migration_queue']:,}") if moving else ()),
            style=None if row["state"] == "ready" else "dim",
        )
    return table


def _seeing(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Of images: how many it has looked at, tokens of those that it is to look at, and what one of them takes."""
    each = row["encode_ms"]
    return f"{row['encodes']:,}", f"{row['image_tokens']:,}", "-" if each is None else f"{each:,.3f}"


def _decisions(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich.table import Table

    table = Table(title="latest decisions", title_justify="left", box=None, padding=(0, 1))
    for name in ("time", "request", "instance", "waited ms", "reason"):
        folds = name in ("request", "reason")
        table.add_column(
            name,
            no_wrap=not folds,
            overflow="fold" if folds else "ellipsis",
            justify="right" if "ms" in name else "left",
        )
    for row in rows:
        target = row["prefill"] + (f" > {row['decode']}" if row["decode"] is not None else "")
        reason = f"{row['policy']}: {row['reason']}"
        table.add_row(
            _clock(row["at"]), _plain(row["request_id"] or "-"), target, f"{row['waited_ms']:,.1f}", _plain(reason)
        )
    return table


def _moves(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich.table import Table

    table = Table(title="latest moves", title_justify="left", box=None, padding=(0, 1))
    for name in ("time", "what", "reason"):
        table.add_column(name, no_wrap=name != "reason")
    for row in rows:
        to = f" to {row['role']}" if row["role"] is not None else ""
        table.add_row(_clock(row["at"]), _plain(f"{row['what']} {row['instance']}{to}"), _plain(row["reason"]))
    return table


def _relocations(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich.table import Table

    table = Table(title="latest sequences that go on elsewhere", title_justify="left", box=None, padding=(0, 1))
    for name in ("time", "request", "instances", "reason"):
        folds = name in ("request", "reason")
        table.add_column(name, no_wrap=not folds, overflow="fold" if folds else "ellipsis")
    for row in rows:
        instances = f"{row['source']} > {row['target']}"
        table.add_row(_clock(row["at"]), _plain(row["request_id"] or "-"), _plain(instances), _plain(row["reason"]))
    return table


def _clock(at: str) -> str:
    """Of a time with its date, UTC."""
    return at.partition("T")[2].rstrip("Z")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _plain(text: str) -> str:
    """Untrusted text, without markup."""
    from rich.markup import escape

    return escape(text)
