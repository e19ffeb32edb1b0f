"""One server measured again and again at different loads, for the search of the greatest one that keeps limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

from penstock.bench.dataset import Dataset
from penstock.bench.report import LiveCounts
from penstock.bench.serve import Bench, LoadShape
from penstock.bench.summary import Summary
from penstock.core.errors import ConfigError
from penstock.workload.requests import WorkRequest, offered_rate, scale_rate

REQUESTS_PER_USER = 4  # in a closed loop: so that the start, when all send at once, does not rule the result


class LoadProbes:
    """`measure` runs the workload at a load and says which share of its requests kept the limits.

    The arrivals of every rate are the same, stretched: rates are compared on the same luck. Tokens are new for every
    probe, so none profits from what the server cached of the one before. Every probe ends before the next begins.

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
