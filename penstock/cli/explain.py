"""`penstock explain`: why a request ran where it did, as a running server remembers it, or from what the flight
recorder wrote."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

import msgspec

from penstock.cli.chat import DEFAULT_URL, Server, parse_url
from penstock.cli.options import Option, add_flag, client_key, integer, one_of
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

Show: TypeAlias = "Callable[[Console, Mapping[str, Any]], None]"
VARIABLE = "PENSTOCK_FLIGHT_RECORDER"
WIDE = 120  # columns of text for tables, also where a terminal is narrower
SHOWN = 16  # candidates that are shown of a stage; --json has all


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="why a request ran where it did",
        description="Asks a running server, which remembers the last thousands of decisions, or with --file reads what "
        "a flight recorder wrote: start the server with --flight-recorder FILE, or put flight-recorder: FILE into a "
        "deployment's file. It may still be running.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "request",
        nargs="?",
        metavar="REQUEST",
        help="its X-Request-Id, or the answer's id; without one, of a recording: all in short",
    )
    parser.add_argument("--url", help=f"of the server (default: {DEFAULT_URL}, where there is no recording)")
    parser.add_argument("--api-key", help="for the server (default: the first of PENSTOCK_API_KEY)")
    parser.add_argument("--file", metavar="FILE", help=f"a recording (default: {VARIABLE})")
    parser.add_argument("--policy", metavar="NAME", help="of a recording: decide again with this policy, and compare")
    add_flag(parser, "seed", integer(0), 0, help="of the lots that this policy draws (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError when the request is not known, or there is no such recording; PenstockError when the server
    does not answer."""
    if args.file is not None and args.url is not None:
        raise ConfigError("--file: given, allowed only without --url", "file")
    file = None if args.url is not None else args.file or os.environ.get(VARIABLE)
    show, content = _ask(args) if file is None else _read(Path(file), args)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(content), indent=1).decode())  # infinity is null
    else:
        from rich.console import Console

        show(Console(width=max(Console().width, WIDE)), content)
    return 0


def _ask(args: argparse.Namespace) -> tuple[Show, Mapping[str, Any]]:
    """What a running server remembers of a request."""
    recorded = f"allowed only with a recording: --file FILE or {VARIABLE}"
    if args.policy is not None:
        raise ConfigError(f"--policy: {args.policy}, {recorded}", "policy")
    if args.request is None:
        raise ConfigError(f"REQUEST: missing, {recorded}", "request")
    server = Server(parse_url(args.url or DEFAULT_URL), args.api_key or client_key(os.environ))
    content = server.get(f"/explain/{quote(args.request, safe='')}")
    if not isinstance(content, dict) or "sequences" not in content:
        raise ConfigError(f"--url: {args.url or DEFAULT_URL} is no penstock server", "url")
    return _show_request, content


def _read(file: Path, args: argparse.Namespace) -> tuple[Show, Mapping[str, Any]]:
    from penstock.cli.history import explain, replay_all, summarise
    from penstock.sim.baselines import POLICIES

    if args.policy is not None:
        names = [name for name, bundle in POLICIES.items() if not bundle.scales]
        Option("policy", one_of(*names), None, "").read(args.policy, "--policy")
    if args.request is not None:
        return _show_request, explain(file, args.request, args.policy, args.seed)
    if args.policy is not None:
        return _show_replay, replay_all(file, args.policy, args.seed)
    return _show_summary, summarise(file)


# --- for people


def _show_request(console: Console, content: Mapping[str, Any]) -> None:
    for sequence in content["sequences"]:
        console.print(f"[bold]{_plain(sequence['id'])}[/bold]", highlight=False, soft_wrap=True)
        for line in _sentences(sequence):
            console.print(line, highlight=False, soft_wrap=True)
        for placement in sequence["placements"]:
            for line in _why(placement):
                console.print(line, highlight=False, soft_wrap=True)
            for stage, rows in placement["stages"].items():
                console.print(_stage_table(stage, rows, placement["instances"]))
            if placement["replayed"] is not None:
                console.print(_other_choice(content["policy"], placement["replayed"]), highlight=False, soft_wrap=True)
        for line in _afterwards(sequence):
            console.print(line, highlight=False, soft_wrap=True)


def _sentences(sequence: Mapping[str, Any]) -> Iterator[str]:
    demand = sequence["demand"]
    if demand is None:
        yield "What it asked for was before this recording."
        return
    targets = [
        f"{name} {demand[key]:,.0f} ms"
        for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
        if demand[key] is not None and isfinite(demand[key])  # what is infinite is null in JSON
    ]
    kind = "offline" if demand["offline"] else f"priority {demand['priority']}"
    excluded = f"; not to {', '.join(demand['excluded'])}" if demand["excluded"] else ""
    more = f"at most {demand['max_tokens']:,} more" if demand["max_tokens"] else "to be embedded"
    yield _plain(
        f"asked: {demand['prompt_tokens']:,} prompt tokens{_seen_tokens(demand)}, {more}, "
        f"{' and '.join(targets) or 'no targets'}, {kind}, through {sequence['frontend']}{excluded}"
    )
    for held in sequence["held"]:
        after = held["asked_again_after_ms"]
        until = (
            f"to be asked again after {after:,.1f} ms"
            if after is not None and isfinite(after)
            else "until something changes"
        )
        yield f"{held['at']}: the policy let it wait, {until}"


def _why(placement: Mapping[str, Any]) -> Iterator[str]:
    target = placement["prefill"] + (f" > {placement['decode']}" if placement["decode"] is not None else "")
    yield f"{placement['at']}: [bold]{_plain(target)}[/bold] by {placement['policy']}: {_plain(placement['reason'])}"
    queue = ""
    if placement["in_queue_ms"]:
        queue = f", {placement['in_queue_ms']:,.1f} ms of it in the master's queue"
        queue += f" while {placement['placed_meanwhile']:,} of the others got a place"
    yield f"  waited {placement['waited_ms']:,.1f} ms{queue}; others in the queue: {placement['waiting']:,}"
    for move in placement["moves"]:
        yield f"  moved for it: {_plain(_told(move))}"
    if (way := placement["way"]) is not None and way["how"] != "recompute":
        source = way["source"] or "what a failed instance left in the KV pool"
        yield _plain(
            f"  {way['tokens']:,} tokens by {way['how']} from {source}: next token in {way['ms']:,.1f} ms "
            f"instead of {way['recompute_ms']:,.1f} ms, as predicted"
        )
    if placement["images"]:
        yield _plain(f"  images by {placement['media_route']}: {'; '.join(map(_image_way, placement['images']))}")
    if placement["predicted_ttft_ms"] is not None:
        yield f"  predicted TTFT {placement['predicted_ttft_ms']:,.1f} ms, by the {placement['predicted_by']}"


def _seen_tokens(demand: Mapping[str, Any]) -> str:
    return f" ({demand['image_tokens']:,} of them of images)" if demand["image_tokens"] else ""


def _image_way(way: Mapping[str, Any]) -> str:
    what = f"{way['images']:,} ({way['tokens']:,} tokens)"
    return f"{way['at']} {'is to look' if way['how'] == 'looks' else 'has looked'} at {what}"


def _became(images: Mapping[str, Any]) -> str:
    """Of a request's images."""
    kinds = (
        ("cached", "in the prefix cache"),
        ("found", "whose embeddings were there"),
        ("brought", "brought from other instances"),
        ("looked", "looked at where it was prefilled"),
    )
    parts = [f"{images[key]:,} {name}" for key, name in kinds if images[key]]
    took = f"; looking took {images['encode_ms']:,.1f} ms" if images["encode_ms"] else ""
    return f"{', '.join(parts)}{took}; it waited {images['waited_ms']:,.1f} ms for them"


def _told(move: Mapping[str, Any]) -> str:
    to = f" to {move['role']}" if move["role"] is not None else ""
    return f"{move['what']} {move['instance']}{to}: {move['reason']}"


def _stage_table(stage: str, rows: Sequence[Mapping[str, Any]], instances: int) -> Any:
    from rich.table import Table

    shown = rows[:SHOWN]
    what = "ms to the first token" if stage == "prefill" else "ms of a step with it"
    title = f"{stage}, {len(shown)} of {instances} instances: cost as the policy has it, and {what}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("")
    table.add_column("instance", no_wrap=True)
    # of what is cached, and only where some of it is not on a device
    loaded = ("loaded",) if any(row["loaded_tokens"] for row in shown) else ()
    for name in ("cost", "ms", "margin", "role", "seqs", "unread", "held", "blocks", "busy ms", "cached", *loaded):
        table.add_column(name, justify="left" if name == "role" else "right", no_wrap=True)
    for row in shown:
        table.add_row(
            ">" if row["chosen"] else "",
            _plain(row["instance"]),
            _number(row["cost"]),
            _number(row["ms"]),
            "" if row["chosen"] or row["margin_ms"] is None else f"{row['margin_ms']:+,.1f}",
            row["role"],
            f"{row['requests']:,}",
            f"{row['pending_tokens']:,}",
            f"{row['held_tokens']:,}",
            f"{row['free_blocks']:,}",
            f"{row['free_in_ms']:,.1f}",
            f"{row['cached_tokens']:,}",
            *(f"{row['loaded_tokens']:,}" for _ in loaded),
            style="bold" if row["chosen"] else None,
        )
    return table


def _other_choice(policy: str, again: Mapping[str, Any]) -> str:
    if again["prefill"] is None:
        return f"  {policy} would have let it wait until something changes"
    if again["agrees"] and not again["waits_ms"]:
        return f"  {policy} would have chosen the same: regret {again['regret_ms']:,.1f} ms"
    target = again["prefill"] + (f" > {again['decode']}" if again["decode"] is not None else "")
    what = "" if again["same_request"] else "placed another request first, "
    waits = f"waited {again['waits_ms']:,.1f} ms and " if again["waits_ms"] else ""
    return _plain(
        f"  {policy} would have {what}{waits}chosen {target} ({again['reason']}): regret {again['regret_ms']:,.1f} ms, "
        f"of the recorded choice {again['recorded_regret_ms']:,.1f} ms"
    )


def _afterwards(sequence: Mapping[str, Any]) -> Iterator[str]:
    for went in sequence["relocated"]:
        goes = f"goes on at {went['to']}" if went["to"] != went["from"] else "stays"
        yield _plain(f"{went['at']}: from {went['from']} it {goes}: {went['reason']}")
    for move in sequence["moves"]:
        yield f"{move['at']}: {_plain(_told(move))}"
    outcome = sequence["outcome"]
    if sequence["ended_at"] is None:
        yield "It had not ended when this was written."
    elif sequence["refused"]:
        yield _plain(f"{sequence['ended_at']}: it was given up: {sequence['refused']}")
    elif outcome is None:
        yield f"{sequence['ended_at']}: it ended without an answer: cancelled, failed, or its instance died"
    else:
        tpot = "" if outcome["tpot_ms"] is None else f", TPOT {outcome['tpot_ms']:,.1f} ms"
        yield (
            f"{sequence['ended_at']}: it ended with {outcome['tokens']:,} tokens, TTFT {outcome['ttft_ms']:,.1f} ms "
            f"({outcome['queue_ms']:,.1f} ms until an engine was sent it){tpot}"
        )
        for went in outcome["recoveries"]:
            source = f" from {went['source']}" if went["source"] else ""
            foretold = "" if went["predicted_ms"] is None else f" ({went['predicted_ms']:,.1f} ms predicted"
            if foretold and went["recompute_ms"] is not None and went["how"] in ("fetch", "remap"):
                foretold += f", {went['recompute_ms']:,.1f} ms by computing it"
            foretold += ")" if foretold else ""
            yield _plain(
                f"  interrupted, it went on at {went['at']} by {went['how']}{source}, {went['tokens']:,} tokens of it: "
                f"{went['took_ms']:,.1f} ms from its place to its next token{foretold}, "
                f"a pause of {went['paused_ms']:,.1f} ms"
            )
        if outcome["images"]:
            yield f"  {outcome['images']['count']:,} images: {_became(outcome['images'])}"
        for fallback in outcome["image_fallbacks"]:
            yield _plain(f"  {fallback}")
        if outcome["wait"]:
            yield _plain(f"  until its first token, in the engine: {outcome['wait']}")
        gap = outcome["predicted_minus_actual_ttft_ms"]
        if gap is not None:
            yield f"  predicted minus actual TTFT: {gap:+,.1f} ms"


def _show_replay(console: Console, content: Mapping[str, Any]) -> None:
    from rich.table import Table

    recorded = ", ".join(content["recorded"])
    table = Table(title="regret, ms", title_justify="left", box=None, padding=(0, 2))
    for name in ("policy", "mean", "p50", "p95"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for name, key in ((f"{recorded} (recorded)", "recorded"), (content["policy"], "replayed")):
        table.add_row(name, *(_number(content["regret_ms"][key][column]) for column in ("mean", "p50", "p95")))
    console.print(table)
    console.print(
        f"{content['agreement']:.1%} of {content['decisions']:,} decisions are the same; in {content['waits']:,} it "
        "would have waited until something changes",
        highlight=False,
        soft_wrap=True,
    )


def _show_summary(console: Console, content: Mapping[str, Any]) -> None:
    from rich.table import Table

    console.print(
        f"{content['decisions']:,} decisions, {content['begins']} to {content['ends']}", highlight=False, soft_wrap=True
    )
    for row in content["reasons"]:
        console.print(
            f"  {row['decisions']:,} by {row['policy']}: {_plain(row['reason'])}", highlight=False, soft_wrap=True
        )
    gaps = content["predicted_minus_actual_ttft_ms"]
    if gaps["requests"]:
        spread = ", ".join(f"{name} {gaps[name]:+,.1f} ms" for name in ("mean", "p50", "p95"))
        console.print(
            f"predicted minus actual TTFT of {gaps['requests']:,} requests: {spread}", highlight=False, soft_wrap=True
        )
    table = Table(title="the latest", title_justify="left", box=None, padding=(0, 2))
    for name in ("time", "request", "instance", "reason"):
        table.add_column(name, no_wrap=name == "time", overflow="fold")
    for row in content["latest"]:
        target = row["prefill"] + (f" > {row['decode']}" if row["decode"] is not None else "")
        table.add_row(row["at"], _plain(row["id"]), target, _plain(row["reason"]))
    console.print(table)
    for move in content["moves"]:
        console.print(f"{move['at']}: {_plain(_told(move))}", highlight=False, soft_wrap=True)
    for look in content["scaling"]:
        for stage in look["stages"]:
            wish = f"{stage['more']:+,} instances wished" if stage["more"] else "no other number wished"
            told = f"{stage['role']}: {stage['serving']:,} serve, {wish} ({stage['reason']}); {stage['outcome']}"
            console.print(f"{look['at']}: {_plain(told)}", highlight=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _plain(text: str) -> str:
    """Untrusted text, without markup."""
    from rich.markup import escape

    return escape(text)
