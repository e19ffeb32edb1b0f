"""`penstock sim run`: one simulation, whole or in slices of time in all processes that there are cores for."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.bench.document import check_writable
from penstock.cli.output import as_json, lost_processes, make_progress, shown, write
from penstock.cli.scenario_file import Given, read_given
from penstock.core.errors import ConfigError
from penstock.sim.cluster import Cluster
from penstock.sim.report import curves, run_page
from penstock.sim.result import Outcomes, joined, outcomes_of, request_rows
from penstock.sim.scenario import Scenario
from penstock.sim.simulate import Simulated, check_sliceable, result_of, simulate_slice, traffic_of
from penstock.sim.workload import Slice, cut

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import SynchronizedArray
    from multiprocessing.synchronize import Event


WARM_UP = 60.0  # seconds
WATCH = 256  # requests between two checks for cancellation
LOOK = 0.2  # seconds between two checks of their progress


def run(args: argparse.Namespace) -> int:
    """Simulate once and show the result. Raises ConfigError."""
    for flag in ("json", "html"):
        check_writable(getattr(args, flag), f"--{flag}")
    given = read_given(args)
    scale = given.scenario.workload.scale if args.rate_scale is None else args.rate_scale
    variant = args.policy or given.scenario.policy
    console = Console(stderr=True)
    began = perf_counter()
    rows: list[dict[str, Any]] = []
    if args.slices is not None:
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

        return given.simulate(variant, scale, progress=watch)


def _run_table(scenario: Scenario, result: Mapping[str, Any]) -> Any:

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
        + f"{result['reused_tokens']:,} of {result['prompt_tokens']:,} prompt tokens reused"
        + f"{_loaded(result)}{_ideal(result)}; "
        + f"{result['instance_seconds']:,.0f} instance-seconds"
    )


def _loaded(result: Mapping[str, Any]) -> str:
    return (
        f", {result['loaded_tokens']:,} of these loaded from below the devices" if result.get("loaded_tokens") else ""
    )


def _ideal(result: Mapping[str, Any]) -> str:
    """The share of what a cache without end would have found."""
    share = result.get("share_of_ideal")
    return "" if share is None else f", {share:.1%} of the ideal"


# --- slices, simulated beside each other


def run_slices(
    args: argparse.Namespace, given: Given, variant: str, scale: float, console: Console
) -> tuple[dict[str, Any], Outcomes]:
    """What came of all slices together; the same with any number of processes. Raises ConfigError."""
    if args.save_requests:
        raise ConfigError("--save-requests: not with --slices", "--save-requests")
    count, jobs = args.slices, args.jobs or len(os.sched_getaffinity(0))
    warm_up = WARM_UP if args.warm_up is None else args.warm_up
    check_sliceable(given.scenario)
    parts = list(cut(_seconds(given, variant, scale), count, warm_up))
    done = _simulate_all(given, parts, variant, scale, min(jobs, count), console)
    result = result_of(done, variant, seed=given.seed, scale=scale)
    return result | {"slices": {"count": count, "warm_up": warm_up}}, joined([each.account.outcomes for each in done])


def _seconds(given: Given, variant: str, scale: float) -> float:
    """Of arrivals. Raises ConfigError."""
    workload = given.scenario.workload
    if workload.duration is not None:
        return workload.duration
    seconds = traffic_of(given.scenario, variant, given.trace, seed=given.seed, scale=scale).requests[-1].at
    if not seconds:
        raise ConfigError("--slices: all requests come at once, there is no time to cut", "--slices")
    return seconds


@lost_processes()
def _simulate_all(
    given: Given, parts: list[Slice], variant: str, scale: float, jobs: int, console: Console
) -> list[Simulated]:
    context = multiprocessing.get_context("spawn")
    over, far = context.Event(), context.Array("d", len(parts))
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(given, over, far))
    try:
        with make_progress(console) as progress:
            bar = progress.add_task("slices", total=len(parts))
            futures = [pool.submit(_run, part, variant, scale) for part in parts]
            left = set(futures)
            while left:
                done, left = wait(left, LOOK, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                progress.update(bar, completed=sum(far[:]))
        return [future.result() for future in futures]
    finally:
        over.set()
        pool.shutdown(cancel_futures=True)


# --- in a process of those


class _Unwanted(Exception):
    """The result is no longer wanted."""


_given: Given | None = None
_over: Event | None = None
_far: SynchronizedArray[float] | None = None


def _begin(given: Given, over: Event, far: SynchronizedArray[float]) -> None:
    global _given, _over, _far
    _given, _over, _far = given, over, far
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it


def _run(part: Slice, variant: str, scale: float) -> Simulated:
    given, over, far = _given, _over, _far
    assert given is not None
    assert over is not None
    assert far is not None

    def watch(ended: int, total: int) -> None:
        if ended % WATCH == 0:
            far[part.number] = ended / total
            if over.is_set():
                raise _Unwanted

    rng = random.Random(f"{given.seed}.{part.number}" if part.number else given.seed)
    done = simulate_slice(given.scenario, variant, given.trace, rng, part, seed=given.seed, scale=scale, progress=watch)
    far[part.number] = 1.0
    return done
