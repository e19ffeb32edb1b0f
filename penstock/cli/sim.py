"""`penstock sim run | compare`: a whole cluster simulated, on recorded traffic, with the policies of production."""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.cli.options import Option, integer, number, one_of, text
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from penstock.sim.cluster import Cluster
    from penstock.sim.scenario import Scenario, Tables
    from penstock.workload.requests import WorkRequest

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"  # beside the project
TARGET = 0.9  # share of requests that keep both limits
LARGEST_SCALE = 4096.0


def add_parser(commands: Any) -> None:
    """Adds `sim` to the command line."""
    parser = commands.add_parser("sim", allow_abbrev=False, help="simulate a cluster", description=__doc__)
    kinds = parser.add_subparsers(dest="sim_command", required=True, metavar="KIND")

    one = kinds.add_parser("run", allow_abbrev=False, help="simulate a scenario once")
    _common_flags(one)
    one.add_argument("--policy", metavar="NAME", help="instead of the file's; NAME@LAYOUT for one of its layouts")
    one.add_argument("--rate-scale", help="factor on the workload's own rate, instead of the file's")
    one.add_argument("--save-requests", action="store_true", help="keep every request in the --json file")
    one.add_argument("--slices", metavar="N", help="cut the time into so many, simulated beside each other")
    one.add_argument("--warm-up", metavar="S", help="seconds that a slice begins earlier (default: 60)")
    one.add_argument("--jobs", help="processes for slices (default: as many as there are cores)")
    one.set_defaults(run=run)

    many = kinds.add_parser(
        "compare", allow_abbrev=False, help="find the greatest rate at which enough requests keep both of their targets"
    )
    _common_flags(many)
    many.add_argument("--policies", metavar="A,B", help="names, each with @LAYOUT if need be (default: all)")
    many.add_argument("--seeds", metavar="N", help="so many, from --seed on; the median is reported (default: 1)")
    many.add_argument("--rates", metavar="A,B", help="requests per second to simulate, instead of a search")
    many.add_argument(
        "--resume", metavar="FILE", help="an earlier --json file of the same: what it has is not simulated again"
    )
    many.add_argument(
        "--journal", metavar="FILE", help="keep what ended there, and go on with it when this was stopped before"
    )
    many.add_argument(
        "--bound", action=argparse.BooleanOptionalAction, default=True, help="tell what nobody could do better than"
    )
    many.add_argument("--save", metavar="FOLDER", help="write each policy's result and its page there")
    many.add_argument("--jobs", help="processes at once (default: as many as there are cores)")
    many.set_defaults(run=compare)


def _common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", help="a YAML file; scenarios/ has some to start from")
    parser.add_argument("--json", metavar="OUT", help="write the result there")
    parser.add_argument("--html", metavar="OUT", help="write a page about it there")
    parser.add_argument("--seed", help="of traffic, step times and lots, instead of the file's")
    parser.add_argument(
        "--traces", metavar="DIR", help="the folder of traces (default: ../shared/traces beside the project)"
    )
    parser.add_argument("--trace", metavar="FILE", help="another trace of the same columns")


# --- what a scenario's settings may be


def modelled(text: str) -> str:
    """The way to name a device in a scenario; whether there is such a one is seen when it is loaded."""
    if not text.removeprefix("modelled:") or not text.startswith("modelled:"):
        raise ValueError("modelled:NAME, as modelled:h200, modelled:this-machine or modelled:FILE.json")
    return text


def make_tables() -> Tables:
    from penstock.cli.deployment import TABLES, between
    from penstock.cli.devices import load_device, load_factors, load_geometry
    from penstock.cli.options import size, switch
    from penstock.sched.local import LOCAL_POLICIES
    from penstock.service.bundles import BUNDLES
    from penstock.sim.scenario import Tables

    engine = {option.name: option for option in TABLES.modelled if isinstance(option, Option)}
    names = ("max-num-seqs", "max-num-batched-tokens", "step-time-limit-ms", "kv-blocks", "enable-prefix-caching")
    needed = partial(Option, default=None)
    targets = (
        needed("ttft-ms", number(0), help="time to first token"),
        needed("tpot-ms", number(0), help="mean time per token after it"),
    )
    return Tables(
        load_device=load_device,
        load_factors=load_factors,
        load_geometry=load_geometry,
        top=(
            Option("description", str, "", "what it is about"),
            Option("policy", one_of(*BUNDLES), "least_loaded", "what decides"),
            Option("seed", integer(0), 0, "of traffic, step times and lots"),
            Option("target", number(0, 1), TARGET, "share of online requests that have to keep their targets"),
            Option("latency-ms", between(0, 10_000), 0.2, "of messages between frontend, master and instances"),
        ),
        workload=(
            Option("trace", text, "", "a file in the folder of traces"),
            Option("rate-scale", number(0, LARGEST_SCALE), 1.0, "factor on the workload's own rate"),
            Option("vary", one_of("online", "offline"), "online", "whose rate other scales than the file's are for"),
            Option("most-scale", number(0, LARGEST_SCALE), LARGEST_SCALE, "beyond which no greater one is sought"),
            Option("start", between(0, 1e9), 0.0, "seconds of the trace that are left out"),
            Option("duration", number(0, 1e9), None, "seconds of arrivals; by default all of it once"),
            Option("spread", between(0, 3600), 0.0, "seconds over which a tick of the trace's clock is spread"),
            Option("chats", switch, False, "requests that share a beginning are turns of a chat"),
            Option("tide", between(1, 1e6), None, "highest rate over lowest, of a day that takes the duration"),
            Option("max-tokens", integer(1), 4096, "limit on outputs that clients set"),
        ),
        synthetic=(
            Option("requests", integer(2, 10**8), 1000, "how many"),
            Option("rate", number(0, 1e6), 1.0, "requests per second"),
            Option("burstiness", between(0, 100), 1.0, "coefficient of variation of the gaps; 1 is Poisson"),
            Option("prompt", integer(1), 1024, "mean tokens that a prompt has to itself"),
            Option("prompt-cv", between(0, 10), 1.0, "coefficient of variation of that"),
            Option("output", integer(1), 128, "mean tokens of an output"),
            Option("output-cv", between(0, 10), 1.0, "coefficient of variation of that"),
            Option("prefixes", integer(0, 1 << 29), 0, "shared beginnings"),
            Option("prefix-tokens", integer(1), 512, "tokens of each"),
            Option("prefix-zipf", between(0, 10), 0.0, "how unevenly they are taken"),
        ),
        tasks=(
            needed("name", text, help="of the class of requests"),
            needed("rate", number(0, 1e6), help="requests per second at a rate-scale of 1"),
            needed("prompt", number(0, 1e7), help="mean tokens of a prompt"),
            Option("prompt-sd", between(0, 1e7), 0.0, "standard deviation of that"),
            needed("output", number(0, 1e7), help="mean tokens of an output"),
            Option("output-sd", between(0, 1e7), 0.0, "standard deviation of that"),
            *targets,
            Option("priority", integer(0, 1000), 0, "lower runs first"),
            Option("priority-only", switch, False, "the cluster is told the priority and not the targets"),
            Option("start", between(0, 1e9), 0.0, "seconds until they begin to come"),
            Option("duration", number(0, 1e9), None, "seconds for which they come; by default to the end"),
        ),
        offline=(
            needed("rate", number(0, 1e6), help="requests per second"),
            needed("backlog", integer(1, 10**8), help="requests that are there from the start"),
            Option("like-online", switch, False, "lengths are drawn from those of the online requests"),
            Option("prompt", number(0, 1e7), 4096.0, "mean tokens of a prompt"),
            Option("prompt-sd", between(0, 1e7), 2048.0, "standard deviation of that"),
            Option("output", number(0, 1e7), 512.0, "mean tokens of an output"),
            Option("output-sd", between(0, 1e7), 256.0, "standard deviation of that"),
        ),
        slo=targets,
        engine=(
            Option("device", modelled, "modelled:h200", "what the instances run on"),
            Option("tensor-parallel-size", integer(1, 64), 1, "devices that every layer is spread over"),
            Option("efficiency", number(0, 1), 1.0, "share of its data sheet that a device reaches"),
            Option("geometry", text, "llama-3.1-8b", "the model whose times are modelled: a name, a folder, or demo"),
            Option(
                "scheduling-policy", one_of(*LOCAL_POLICIES), None, "of the engines, instead of what the policy has"
            ),
            Option("max-model-len", integer(2), 16384, "prompt and output tokens of one sequence"),
            Option("noise", between(0, 1), 0.05, "standard deviation of a step's time, relative to it"),
            Option("slowdown", between(0.01, 100), 1.0, "factor on all times, of which nobody is told"),
            Option("step-time-error", between(0.01, 100), 1.0, "factor by which steps are believed to take longer"),
            *(engine[name] for name in names),
            Option("host-cache-memory", size, None, "of a tier of KV cache in the host's memory, such as 64G"),
        ),
        instances=tuple(TABLES.instances),
        scaling=(
            needed("least", integer(1, 4096), help="instances that serve"),
            needed("most", integer(1, 4096), help="instances that serve"),
            Option("start-seconds", between(0, 86_400), 2.05, "from the decision until an instance serves"),
            Option("interval", number(0, 86_400), None, "seconds between decisions; by default the policy's"),
        ),
        status_reports=(
            Option("every-ms", number(0, 60_000), 50.0, "between snapshots while the load changes"),
            Option("delay-ms", between(0, 60_000), 5.0, "by which the master hears of them later"),
        ),
        transport=(
            Option("kind", one_of("shared", "copy"), "copy", "blocks change their owner, or are copied"),
            Option("gbps", number(0, 1e6), 400.0, "gigabits per second into and out of each instance"),
            Option("latency-us", between(0, 1e6), 20.0, "of every message between instances"),
            Option("lease", number(0, 3600), 5.0, "seconds that a hand-off may hear nothing from the other side"),
        ),
        failures=(
            needed("instance", text, help="which dies"),
            needed("at", between(0, 1e9), help="seconds from the start"),
            needed("restart-after", between(0, 1e9), help="seconds until it lives again; by default never"),
        ),
    )


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line asks to be simulated; it can be sent to another process."""

    scenario: Scenario
    trace: Sequence[WorkRequest] | None
    seed: int


def read_given(args: argparse.Namespace) -> Given:
    """Raises ConfigError on a file, a trace or a flag that cannot be used."""
    from penstock.sim.scenario import parse
    from penstock.workload.traces import read_trace

    try:
        content = Path(args.scenario).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{args.scenario}: cannot be read ({reason})") from None
    scenario = parse(args.scenario, content, make_tables())
    seed = scenario.seed if args.seed is None else Option("seed", integer(0), 0, "").read(args.seed, "--seed")
    file = args.trace or scenario.workload.trace
    if not file:
        return Given(scenario, None, seed)
    folder = Path(args.traces) if args.traces else TRACES
    return Given(scenario, read_trace(file if args.trace else folder / file), seed)


def simulate_given(given: Given, variant: str, scale: float, **more: Any) -> tuple[dict[str, Any], Cluster]:
    """More: see `simulate`."""
    from penstock.sim.simulate import simulate

    rng = random.Random(given.seed)
    return simulate(given.scenario, variant, given.trace, rng, seed=given.seed, scale=scale, **more)


# --- sim run


def run(args: argparse.Namespace) -> int:
    """Simulate once and show what came of it. Raises ConfigError."""
    from rich.console import Console

    from penstock.bench.document import check_writable
    from penstock.sim.outcomes import outcomes_of
    from penstock.sim.report import curves, run_page
    from penstock.sim.result import request_rows

    for flag in ("json", "html"):
        check_writable(getattr(args, flag), f"--{flag}")
    given = read_given(args)
    scale = given.scenario.workload.scale
    if args.rate_scale is not None:
        scale = Option("rate-scale", number(0, LARGEST_SCALE), 1.0, "").read(args.rate_scale, "--rate-scale")
    variant = args.policy or given.scenario.policy
    console = Console(stderr=True)
    began = perf_counter()
    rows: list[dict[str, Any]] = []
    if args.slices is not None:
        from penstock.cli.sim_slices import run_slices

        result, outcomes = run_slices(args, given, variant, scale, console)
    else:
        result, cluster = _run_whole(args, given, variant, scale, console)
        outcomes = outcomes_of(cluster.records)
        rows = request_rows(cluster.records) if args.save_requests else []
    took = perf_counter() - began
    Console().print(_run_table(given.scenario, result))
    console.print(
        f"[dim]{result['duration']:,.0f} s simulated in {took:,.1f} s, {result['events'] / took:,.0f} events/s[/dim]"
    )
    if args.html:
        write(args.html, run_page({"scenario": given.scenario.name, **result, **curves(outcomes)}))
    if args.json:
        write(args.json, as_json(result | ({"per_request": rows} if args.save_requests else {})))
    return 0


def _run_whole(
    args: argparse.Namespace, given: Given, variant: str, scale: float, console: Console
) -> tuple[dict[str, Any], Cluster]:
    for flag in ("warm_up", "jobs"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag.replace('_', '-')}: only with --slices", f"--{flag.replace('_', '-')}")
    with make_progress(console) as progress:
        task = progress.add_task("requests", total=None)

        def watch(ended: int, total: int) -> None:
            if ended % 64 == 0 or ended == total:
                progress.update(task, completed=ended, total=total)

        return simulate_given(given, variant, scale, progress=watch)


def _run_table(scenario: Scenario, result: Mapping[str, Any]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    columns = ("mean", "p50", "p90", "p95", "p99")
    table = Table(
        title=f"{scenario.name}: {result['policy']} at {shown(result['rate'])} requests/s", title_justify="left"
    )
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    tasks = result.get("tasks") or {}
    parts = {"": result} if len(tasks) < 2 else {"all": result, **tasks}
    for part, of in parts.items():
        kept = f": {of['attainment']:.1%} of {of['requests']:,} kept" if of["attainment"] is not None else ""
        if part:
            table.add_row(f"[bold]{escape(part)}[/bold]{kept}")
        for name, unit in (("ttft", "ms"), ("tpot", "ms"), ("latency", "s")):
            cells = [of[f"{name}_{column}_{unit}"] for column in columns]
            table.add_row(f"{name} ({unit})", *(shown(cell) for cell in cells), end_section=name == "latency")
    table.caption_justify = "left"
    table.caption = _caption(scenario, result)
    return table


def _caption(scenario: Scenario, result: Mapping[str, Any]) -> str:
    slo = scenario.slo
    targets = "their targets" if result.get("tasks") else f"ttft {slo.ttft * 1e3:g} ms and tpot {slo.tpot * 1e3:g} ms"
    offline = result.get("offline_tokens_per_s")
    return (
        (f"{result['attainment']:.1%} of " if result["attainment"] is not None else "")
        + f"{result['requests']:,} requests kept {targets}; {result['failed']} failed; "
        + f"{shown(result['output_tokens_per_s'])} tokens/s out; "
        + (f"{shown(offline)} tokens/s of offline work; " if offline is not None else "")
        + f"{result['reused_tokens']:,} of {result['prompt_tokens']:,} prompt tokens reused{_loaded(result)}; "
        + f"{result['instance_seconds']:,.0f} instance-seconds"
    )


def _loaded(result: Mapping[str, Any]) -> str:
    return f", {result['loaded_tokens']:,} of these loaded from hosts' memory" if result.get("loaded_tokens") else ""


def compare(args: argparse.Namespace) -> int:
    """Search for each policy, all at once. Raises ConfigError."""
    from penstock.cli.sim_compare import compare

    return compare(args)


# --- both


def make_progress(console: Console) -> Progress:
    """Bars that are gone when it is over."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, refresh_per_second=2)  # simulating takes all cores


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"


def as_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def write(path: str | Path, content: str) -> None:
    """All of it or nothing. Raises ConfigError."""
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
