"""Simulations in worker processes, for `penstock sim compare`: the tasks, and the pool."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from penstock.cli.scenario_file import Given
from penstock.core.errors import ConfigError
from penstock.sim.baselines import POLICIES
from penstock.sim.bound import bound_scale
from penstock.sim.report import curves
from penstock.sim.result import outcomes_of
from penstock.sim.scenario import InstanceGroup, Scenario
from penstock.sim.simulate import traffic_of
from penstock.sim.traffic import Traffic

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

WATCH = 256  # requests between two checks for cancellation
LARGE = ("timeline", "series", "instances")  # parts of a result that only its page needs


# --- in a worker process


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation that is asked for.

    Attributes:
        share: of the workload, from its beginning.
        patient: it goes on to the end even when the target is missed.
    """

    variant: str
    seed: int
    scale: float
    share: float = 1.0
    patient: bool = False


@dataclass(frozen=True, slots=True)
class Offered:
    """Traffic as the scenario's file has it.

    Attributes:
        native_rate: see `Traffic`.
        seconds: of arrivals.
        requests: in that time.
    """

    native_rate: float
    seconds: float
    requests: int

    def seconds_at(self, scenario: Scenario, scale: float) -> float:
        """Of arrivals at another scale."""
        workload = scenario.workload
        if workload.duration is not None:
            return workload.duration
        return self.seconds if workload.vary == "offline" else self.seconds * workload.scale / scale


def layout_of(variant: str) -> str:
    """Of two variants with the same one, the traffic is the same."""
    return variant.partition("@")[2].replace("_", "-")


def scales(variant: str) -> bool:
    """Whether it has more instances when it wants them. Of two variants that both do or do not, with the same layout,
    the bound is the same."""
    return POLICIES[variant.partition("@")[0]].scales


class _Unwanted(Exception):
    """The result is no longer wanted."""


_given: Given | None = None
_saves = False
_over: Event | None = None


def _begin(given: Given, saves: bool, over: Event) -> None:
    global _given, _saves, _over
    _given, _saves, _over = given, saves, over
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it


def _traffic(variant: str, seed: int, scale: float) -> Traffic:
    assert _given is not None
    return traffic_of(_given.scenario, variant, _given.trace, seed=seed, scale=scale)


def _look(variant: str, seed: int) -> Offered:
    """Raises ConfigError."""
    assert _given is not None
    traffic = _traffic(variant, seed, _given.scenario.workload.scale)
    if not isfinite(traffic.native_rate):
        raise ConfigError("workload: all requests come at once, and what is compared are rates", "workload")
    return Offered(traffic.native_rate, traffic.requests[-1].at, len(traffic.requests))


def _bound(variant: str, seed: int) -> float | None:
    """The greatest scale that any policy could keep up with on the same instances: if the policy scales, as many as
    there may be. None when there is none."""
    assert _given is not None
    scenario = _given.scenario
    _, groups = scenario.choose(variant)
    found = bound_scale(
        lambda scale: _traffic(variant, seed, scale).requests,
        _most(scenario, groups) if scales(variant) else groups,
        scenario.target,
        max_tokens=scenario.workload.max_tokens,
    )
    return found if isfinite(found) else None


def _most(scenario: Scenario, groups: Sequence[InstanceGroup]) -> list[InstanceGroup]:
    """With all the instances that there may ever be."""
    first, *rest = groups
    more = 0 if scenario.scaling is None else scenario.scaling.most - sum(group.count for group in groups)
    return [replace(first, count=first.count + max(0, more)), *rest]


def _run(run: Run, seconds: float) -> dict[str, Any] | None:
    """The result, without its large parts unless it is to be saved; None when no request comes at so small a scale.

    Args:
        seconds: of arrivals, in all of the workload at this scale.
    """
    assert _given is not None
    assert _over is not None
    scenario, over = _given.scenario, _over
    if run.share < 1:
        scenario = replace(scenario, workload=replace(scenario.workload, duration=run.share * seconds))

    def watch(ended: int, total: int) -> None:
        if ended % WATCH == 0 and over.is_set():
            raise _Unwanted

    missing = None if run.patient else 1 - scenario.target
    given = replace(_given, scenario=scenario, seed=run.seed)
    try:
        result, cluster = given.simulate(run.variant, run.scale, allowed_misses=missing, progress=watch)
    except ConfigError:
        if run.scale < scenario.workload.scale:
            return None
        raise
    if _saves and run.share == 1 and result["complete"]:
        return result | curves(outcomes_of(cluster.records))
    return {key: value for key, value in result.items() if key not in LARGE}


# --- in front of them


class Workers:
    """Processes that simulate; nothing is simulated twice. To be used in one event loop.

    Args:
        saves: whether results are wanted whole.
        jobs: processes.
    """

    def __init__(self, given: Given, jobs: int, *, saves: bool = False) -> None:
        self._given, self._jobs = given, jobs
        self._known: dict[Run, dict[str, Any] | None] = {}
        self._runs: dict[Run, asyncio.Future[dict[str, Any] | None]] = {}
        self._looks: dict[tuple[str, int], asyncio.Future[Offered]] = {}
        self._open = 0
        context = multiprocessing.get_context("spawn")
        self._over = context.Event()
        self._pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(given, saves, self._over))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown(cancel_futures=True)

    async def run(self, run: Run) -> dict[str, Any] | None:
        """Raises ConfigError."""
        if run not in self._known:
            self._known[run] = await self._started(run, await self.offered(run.variant, run.seed))
        return self._known[run]

    async def offered(self, variant: str, seed: int) -> Offered:
        """Raises ConfigError."""
        key = (layout_of(variant), seed)
        if key not in self._looks:
            self._looks[key] = self._submit(_look, variant, seed)
        return await self._looks[key]

    async def bound(self, variant: str, seed: int) -> float | None:
        return await self._submit(_bound, variant, seed)

    def guess(self, run: Run) -> None:
        """A speculative simulation: run if a process remains for the next request."""
        look = self._looks.get((layout_of(run.variant), run.seed))
        if self._open + 1 < self._jobs and look is not None and look.done() and run not in self._known:
            self._started(run, look.result())

    def _started(self, run: Run, offered: Offered) -> asyncio.Future[dict[str, Any] | None]:
        if run not in self._runs:
            seconds = offered.seconds_at(self._given.scenario, run.scale)
            self._runs[run] = self._submit(_run, run, seconds)
        return self._runs[run]

    def _submit(self, function: Any, *arguments: Any) -> asyncio.Future[Any]:
        self._open += 1
        future = asyncio.wrap_future(self._pool.submit(function, *arguments))
        future.add_done_callback(self._closed)
        return future

    def _closed(self, future: asyncio.Future[Any]) -> None:
        self._open -= 1
        if not future.cancelled():
            future.exception()  # of an unused speculative run: ignored
