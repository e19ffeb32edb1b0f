"""The greatest load at which a server keeps latency limits, found by measuring it at chosen loads."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from penstock.bench.dataset import Dataset
from penstock.bench.metrics import Summary
from penstock.bench.report import LiveCounts
from penstock.bench.serve import Bench, LoadShape
from penstock.core.errors import ConfigError
from penstock.workload.requests import WorkRequest, offered_rate, scale_rate

Measure = Callable[[float], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class LoadProbe:
    """One measurement: `load` in requests/s or concurrent requests, `attainment` from 0 to 1."""

    load: float
    attainment: float
    kept: bool


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Where the greatest load was found.

    Attributes:
        best: the greatest load that was measured to keep the target; it is below every load that was measured to miss
            it. None when even the least load missed.
        missed: the least load that was measured to miss the target; None when even the greatest load kept it.
        probes: every measurement, in order.
    """

    best: float | None
    missed: float | None
    probes: tuple[LoadProbe, ...]


async def find_greatest_load(
    measure: Measure,
    *,
    start: float,
    low: float,
    high: float,
    target: float = 0.9,
    tolerance: float = 0.05,
    whole: bool = False,
    progress: Callable[[LoadProbe], None] | None = None,
) -> SearchResult:
    """Brackets the edge by doubling from `start` (halving when `start` already misses), then bisects.

    Attainment is taken to fall with load. Where noise makes it rise again the answer errs to the low side: loads above
    the least one that missed are not looked at.

    Args:
        measure: load -> share of requests that kept their limits.
        start: the first load that is tried.
        low, high: bounds of the loads that are tried, both tried when the edge is not inside; finite.
        target: least share that counts as keeping them.
        tolerance: ends when the bracket is narrower than this share of its lower end.
        whole: loads are whole numbers, and a bracket of 1 also ends the search.
    """
    assert 0 < low <= start <= high < math.inf, (low, start, high)
    probes: list[LoadProbe] = []

    async def keeps(load: float) -> bool:
        attainment = await measure(load)
        probes.append(LoadProbe(load, attainment, attainment >= target))
        if progress:
            progress(probes[-1])
        return probes[-1].kept

    kept, missed = await _bracket(keeps, start, low, high, whole)
    while kept is not None and missed is not None:
        middle = (kept + missed) / 2
        middle = math.floor(middle) if whole else middle
        if missed - kept <= tolerance * kept or middle in (kept, missed):
            break
        if await keeps(middle):
            kept = middle
        else:
            missed = middle
    return SearchResult(kept, missed, tuple(probes))


async def _bracket(
    keeps: Callable[[float], Awaitable[bool]], start: float, low: float, high: float, whole: bool
) -> tuple[float | None, float | None]:
    """(a load that keeps the target, a load that misses it), either None when the bounds have none."""
    if await keeps(start):
        kept = start
        while kept < high:
            load = min(kept * 2, high)
            if not await keeps(load):
                return kept, load
            kept = load
        return kept, None
    missed = start
    while missed > low:
        half = missed / 2
        load = max(math.floor(half) if whole else half, low)
        if await keeps(load):
            return load, missed
        missed = load
    return None, missed


REQUESTS_PER_USER = 4  # in a closed loop: so that the start, when all send at once, does not rule the result


class LoadTester:
    """`measure` runs the workload at a load and returns the share of its requests that kept the limits.

    All rates have the same arrivals, stretched, so they are compared on one pattern. Tokens are new for every probe, so
    the server has none of them in its cache. Every probe ends before the next begins.

    Args:
        dataset: its `count` is the least number of requests of a probe; its arrivals are replaced, except that a trace
            keeps their pattern.
        closed_loop: load is concurrent requests; otherwise requests per second.
        each_limit: attainment is that of the worst limit by itself, so a target of 0.99 means that the 99th percentile
            of every metric keeps its limit; otherwise a request has to keep all limits at once.
        seconds: least time over which a rate is offered; more requests are sent than `count` when it needs them.
        live_counts: number of requests -> a context in which those that end are shown.

    Attributes:
        summaries: of every probe, in order.
    """

    def __init__(
        self,
        bench: Bench,
        dataset: Dataset,
        limits_ms: Mapping[str, float],
        *,
        closed_loop: bool,
        each_limit: bool,
        seconds: float,
        warmups: int,
        live_counts: Callable[[int], AbstractContextManager[LiveCounts]],
    ) -> None:
        self.summaries: list[Summary] = []
        self._bench = bench
        self._dataset = dataset
        self._limits_ms = limits_ms
        self._closed_loop = closed_loop
        self._each_limit = each_limit
        self._seconds = seconds
        self._warmups = warmups
        self._live_counts = live_counts

    async def measure(self, load: float) -> float:
        """Attainment, 0 to 1, at `load`."""
        requests = self._requests(load)
        shape = LoadShape(
            scheduled=not self._closed_loop,
            concurrency=int(load) if self._closed_loop else None,
            warmups=0 if self.summaries else self._warmups,
            seed=self._dataset.seed + len(self.summaries),
        )
        with self._live_counts(len(requests)) as counts:
            measurement = await self._bench.measure(requests, shape, self._limits_ms, counts.request)
        self.summaries.append(measurement.summary)
        goodput = measurement.summary.goodput
        assert goodput is not None, "a search has limits"
        return min(goodput.attainment_by_limit.values()) if self._each_limit else goodput.attainment

    def _requests(self, load: float) -> list[WorkRequest]:
        needed = math.ceil(load * (REQUESTS_PER_USER if self._closed_loop else self._seconds))
        dataset = replace(self._dataset, count=max(self._dataset.count, needed))
        if self._closed_loop:
            return dataset.build()
        if dataset.name != "trace":
            dataset = replace(dataset, request_rate=load)
        requests = dataset.build()
        rate = offered_rate(requests)
        if math.isinf(rate):
            raise ConfigError(f"--num-prompts: {len(requests)} requests at one time have no rate to be scaled")
        return scale_rate(requests, load / rate)
