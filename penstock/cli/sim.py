"""`penstock sim run | compare`: a whole cluster simulated, on recorded traffic, with the policies of production."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
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

    from penstock.bench.slo import Probe, SearchResult
    from penstock.sim.cluster import Cluster
    from penstock.sim.scenario import Scenario, Tables
    from penstock.workload.requests import WorkRequest

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"  # beside the project
TARGET = 0.9  # share of requests that keep both limits
LARGEST_SCALE, TOLERANCE = 4096.0, 0.02


def add_parser(commands: Any) -> None:
    """Adds `sim` to the command line."""
    parser = commands.add_parser("sim", allow_abbrev=False, help="simulate a cluster", description=__doc__)
    kinds = parser.add_subparsers(dest="sim_command", required=True, metavar="KIND")

    one = kinds.add_parser("run", allow_abbrev=False, help="simulate a scenario once")
    _common_flags(one)
    one.add_argument("--policy", metavar="NAME", help="instead of the file's; NAME@LAYOUT for one of its layouts")
    one.add_argument("--rate-scale", help="factor on the workload's own rate, instead of the file's")
    one.add_argument("--save-requests", action="store_true", help="keep every request in the --json file")
    one.set_defaults(run=run)

    many = kinds.add_parser(
        "compare", allow_abbrev=False, help=f"find the greatest rate at which {TARGET:.0%} of requests keep both limits"
    )
    _common_flags(many)
    many.add_argument("--policies", required=True, metavar="A,B", help="names, each with @LAYOUT if need be")
    many.add_argument("--jobs", help="processes at once (default: as many as there are cores)")
    many.set_defaults(run=compare)


def _common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", help="a YAML file; scenarios/ has some to start from")
    parser.add_argument("--json", metavar="OUT", help="write the result there")
    parser.add_argument("--seed", help="of traffic, step times and lots, instead of the file's")
    parser.add_argument(
        "--traces", metavar="DIR", help="the folder of traces (default: ../shared/traces beside the project)"
    )
    parser.add_argument("--trace", metavar="FILE", help="another trace of the same columns")


# --- what a scenario's settings may be


def make_tables() -> Tables:
    from penstock.cli.deployment import TABLES, between
    from penstock.sched.steptime import DEVICES, GEOMETRIES
    from penstock.sim.bundles import BUNDLES
    from penstock.sim.scenario import Tables

    engine = {option.name: option for option in TABLES.modelled if isinstance(option, Option)}
    names = ("max-num-seqs", "max-num-batched-tokens", "step-time-limit-ms", "kv-blocks", "enable-prefix-caching")
    devices = one_of(*(f"modelled:{name}" for name in DEVICES))
    needed = partial(Option, default=None)
    return Tables(
        top=(
            Option("description", str, "", "what it is about"),
            Option("policy", one_of(*BUNDLES), "least_loaded", "what decides"),
            Option("seed", integer(0), 0, "of traffic, step times and lots"),
            Option("latency-ms", between(0, 10_000), 0.2, "of messages between frontend, master and instances"),
        ),
        workload=(
            Option("trace", text, "", "a file in the folder of traces"),
            Option("rate-scale", number(0, LARGEST_SCALE), 1.0, "factor on the workload's own rate"),
            Option("start", between(0, 1e9), 0.0, "seconds of the trace that are left out"),
            Option("duration", number(0, 1e9), None, "seconds of arrivals; by default all of it once"),
            Option("spread", between(0, 3600), 0.0, "seconds over which a tick of the trace's clock is spread"),
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
        slo=(
            needed("ttft-ms", number(0), help="time to first token"),
            needed("tpot-ms", number(0), help="mean time per token after it"),
        ),
        engine=(
            Option("device", devices, "modelled:h200", "what the instances run on"),
            Option("geometry", one_of(*GEOMETRIES), "llama-3.1-8b", "the model whose times are modelled"),
            Option("max-model-len", integer(2), 16384, "prompt and output tokens of one sequence"),
            Option("noise", between(0, 1), 0.05, "standard deviation of a step's time, relative to it"),
            Option("slowdown", between(0.01, 100), 1.0, "factor on all times"),
            *(engine[name] for name in names),
        ),
        instances=tuple(TABLES.instances),
        heartbeat=(
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


def _simulate(given: Given, variant: str, scale: float, **more: Any) -> tuple[dict[str, Any], Cluster]:
    """More: see `simulate`."""
    from penstock.sim.simulate import simulate

    rng = random.Random(given.seed)
    return simulate(given.scenario, variant, given.trace, rng, seed=given.seed, scale=scale, **more)


# --- sim run


def run(args: argparse.Namespace) -> int:
    """Simulate once and show what came of it. Raises ConfigError."""
    from rich.console import Console

    from penstock.bench.document import check_writable
    from penstock.sim.result import request_rows

    check_writable(args.json, "--json")
    given = read_given(args)
    workload = given.scenario.workload
    scale = workload.rate_scale
    if args.rate_scale is not None:
        scale = Option("rate-scale", number(0, LARGEST_SCALE), 1.0, "").read(args.rate_scale, "--rate-scale")
    console = Console(stderr=True)
    began = perf_counter()
    with _progress(console) as progress:
        task = progress.add_task("requests", total=None)

        def watch(ended: int, total: int) -> None:
            if ended % 64 == 0 or ended == total:
                progress.update(task, completed=ended, total=total)

        variant = args.policy or given.scenario.policy
        result, cluster = _simulate(given, variant, scale, progress=watch)
    took = perf_counter() - began
    Console().print(_run_table(given.scenario, result))
    console.print(
        f"[dim]{result['duration']:.0f} s simulated in {took:.1f} s, {result['events'] / took:,.0f} events/s[/dim]"
    )
    _write(args.json, result | ({"per_request": request_rows(cluster.records)} if args.save_requests else {}))
    return 0


def _run_table(scenario: Scenario, result: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(
        title=f"{scenario.name}: {result['policy']} at {_shown(result['rate'])} requests/s", title_justify="left"
    )
    table.add_column("")
    for name in ("mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right")
    for name, unit in (("ttft", "ms"), ("tpot", "ms"), ("latency", "s")):
        cells = [result[f"{name}_{column}_{unit}"] for column in ("mean", "p50", "p90", "p95", "p99")]
        table.add_row(f"{name} ({unit})", *(_shown(cell) for cell in cells))
    table.caption_justify = "left"
    table.caption = (
        f"{result['attainment']:.1%} of {result['requests']:,} requests kept ttft {scenario.slo.ttft * 1e3:g} ms and "
        f"tpot {scenario.slo.tpot * 1e3:g} ms; {result['failed']} failed; "
        f"{_shown(result['output_tokens_per_s'])} tokens/s out; {result['reused_tokens']:,} of "
        f"{result['prompt_tokens']:,} prompt tokens reused; {result['instance_seconds']:,.0f} instance-seconds"
    )
    return table


# --- sim compare


def compare(args: argparse.Namespace) -> int:
    """Search for each policy, all at once. Raises ConfigError."""
    from rich.console import Console

    from penstock.bench.document import check_writable

    check_writable(args.json, "--json")
    given = read_given(args)
    variants = [name.strip() for name in args.policies.split(",") if name.strip()]
    for variant in variants:
        given.scenario.choose(variant)  # complains before anything is simulated
    jobs = os.cpu_count() or 1
    if args.jobs is not None:
        jobs = Option("jobs", integer(1, 1024), 1, "").read(args.jobs, "--jobs")
    console = Console(stderr=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_keep, initargs=(given,)) as pool, _progress(console) as bars:
        found = asyncio.run(_search_all(pool, bars, given, variants))
    policies = {name: _row(search, results) for name, (search, results) in zip(variants, found, strict=True)}
    Console().print(_compare_table(given.scenario, policies))
    _write(args.json, {"scenario": given.scenario.name, "seed": given.seed, "target": TARGET, "policies": policies})
    return 0


_given: Given | None = None  # in a worker process


def _keep(given: Given) -> None:
    global _given  # noqa: PLW0603
    _given = given


def _measure(variant: str, scale: float) -> dict[str, Any]:
    """In a worker process: one simulation, given up as soon as it is known to miss the target."""
    assert _given is not None
    result, _ = _simulate(_given, variant, scale, allowed_misses=1 - TARGET)
    return {key: value for key, value in result.items() if key != "timeline"}


async def _search_all(
    pool: ProcessPoolExecutor, bars: Progress, given: Given, variants: Sequence[str]
) -> list[tuple[SearchResult, dict[float, dict[str, Any]]]]:
    return await asyncio.gather(*(_search(pool, bars, given, variant) for variant in variants))


async def _search(
    pool: ProcessPoolExecutor, bars: Progress, given: Given, variant: str
) -> tuple[SearchResult, dict[float, dict[str, Any]]]:
    from penstock.bench.slo import find_greatest_load

    loop = asyncio.get_running_loop()
    results: dict[float, dict[str, Any]] = {}
    task = bars.add_task(variant, total=None)

    async def measure(scale: float) -> float:
        results[scale] = result = await loop.run_in_executor(pool, _measure, variant, scale)
        return result["attainment"] if result["complete"] else 0.0

    def show(probe: Probe) -> None:
        rate = results[probe.load]["rate"]
        bars.update(task, advance=1, description=f"{variant} {rate:.1f}/s {'kept' if probe.kept else 'missed'}")

    search = await find_greatest_load(
        measure,
        start=given.scenario.workload.rate_scale,
        low=1 / LARGEST_SCALE,
        high=LARGEST_SCALE,
        target=TARGET,
        tolerance=TOLERANCE,
        progress=show,
    )
    bars.update(task, total=len(search.probes), completed=len(search.probes))
    return search, results


def _row(search: SearchResult, results: Mapping[float, Mapping[str, Any]]) -> dict[str, Any]:
    """What is reported of a policy: at its greatest rate; null where it does not apply. The attainment of a probe that
    is not complete is of what was over when it was given up."""
    best = results[search.best] if search.best is not None else {}
    names = ("attainment", "ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "latency_mean_s", "instance_seconds")
    row = {name: best.get(name) for name in (*names, "reused_tokens", "requests", "failed")}
    row["mean_latency_s"] = row.pop("latency_mean_s")
    return {
        "max_rate_90": best.get("rate"),
        "max_scale_90": search.best,
        "missed_scale": search.missed,
        **row,
        "offline_tokens_per_s": None,
        "share_of_bound": None,
        "probes": [
            {"scale": p.load, "kept": p.kept}
            | {key: results[p.load][key] for key in ("rate", "attainment", "complete")}
            for p in search.probes
        ],
    }


def _compare_table(scenario: Scenario, policies: Mapping[str, Mapping[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title=f"{scenario.name}: greatest rate with {TARGET:.0%} attainment", title_justify="left")
    table.add_column("policy", no_wrap=True)
    columns = ("max_rate_90", "attainment", "ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "mean_latency_s")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for name, row in policies.items():
        table.add_row(name, *(_shown(row[column]) for column in columns))
    return table


# --- both


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _write(path: str | None, content: Mapping[str, Any]) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
