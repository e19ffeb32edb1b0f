"""`penstock sim run --slices`: one long simulation in slices of time, in all processes that there are cores for."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cli.deployment import between
from penstock.cli.options import Option, integer
from penstock.cli.processes import lost_processes
from penstock.cli.sim import Given, make_progress
from penstock.core.errors import ConfigError
from penstock.sim.outcomes import Outcomes, joined
from penstock.sim.simulate import TRAFFIC_STREAM, Simulated, check_sliceable, result_of, simulate_slice
from penstock.sim.slices import Slice, cut
from penstock.sim.traffic import make_traffic

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import SynchronizedArray
    from multiprocessing.synchronize import Event

    from rich.console import Console

WARM_UP = 60.0  # seconds
WATCH = 256  # requests between two looks at whether anybody still wants the answer
LOOK = 0.2  # seconds between two looks at how far they are


# --- in front of the processes


def run_slices(
    args: argparse.Namespace, given: Given, variant: str, scale: float, console: Console
) -> tuple[dict[str, Any], Outcomes]:
    """What came of all slices together; the same with any number of processes. Raises ConfigError."""
    if args.save_requests:
        raise ConfigError("--save-requests: not with --slices", "--save-requests")
    count = Option("slices", integer(1, 100_000), 1, "").read(args.slices, "--slices")
    warm_up, jobs = WARM_UP, len(os.sched_getaffinity(0))
    if args.warm_up is not None:
        warm_up = Option("warm-up", between(0, 1e6), WARM_UP, "").read(args.warm_up, "--warm-up")
    if args.jobs is not None:
        jobs = Option("jobs", integer(1, 1024), 1, "").read(args.jobs, "--jobs")
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
    _, groups = given.scenario.choose(variant)
    longest = min(group.max_model_len for group in groups)
    rng = np.random.default_rng((given.seed, TRAFFIC_STREAM))
    seconds = make_traffic(workload, given.trace, rng, scale=scale, max_model_len=longest).requests[-1].at
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


# --- in a process


class _Unwanted(Exception):
    """Nobody waits for the answer any more."""


_given: Given | None = None
_over: Event | None = None
_far: SynchronizedArray[float] | None = None


def _begin(given: Given, over: Event, far: SynchronizedArray[float]) -> None:
    global _given, _over, _far
    _given, _over, _far = given, over, far
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when it is over


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
