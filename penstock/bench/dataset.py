"""The workload that a benchmark sends, from what its user asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from penstock.core.errors import ConfigError
from penstock.workload.arrivals import arrival_times
from penstock.workload.lengths import Independent, LengthPairs, around, read_lengths
from penstock.workload.requests import WorkImage, WorkRequest, between, repeat_images, scale_rate, spread_ticks
from penstock.workload.synthetic import synthesise
from penstock.workload.traces import read_trace

NAMES = ("random", "prefix", "trace", "lengths")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What to send.

    Attributes:
        name: `random` lengths; `prefix`, the same behind shared prefixes; `trace`, a recorded one; `lengths`, pairs
            drawn from a file.
        path: the file, for `trace` and `lengths`.
        count: requests at most.
        input_len, output_len: tokens; drawn uniformly within `range_ratio` (0 to 1) of them.
        prefix_len, num_prefixes, prefix_zipf: length in tokens, number and popularity of the shared prefixes.
        request_rate: requests per second, infinite for all at once; None is a trace's own arrivals, else infinite.
        burstiness: shape of the gamma distribution of the gaps: 1 Poisson, below it burstier, infinite constant.
        trace_scale: factor on the rate of a trace's own arrivals.
        trace_start, trace_duration: the part of the trace that is used, in seconds of the trace's own time.
        trace_spread: seconds over which arrivals are spread, for traces with a coarse clock.
        images: of each request, of as many tokens as the server makes of them; `image_repeats`: the share of them that
            came before.
        seed: of lengths, prefixes, arrivals and images.
    """

    name: str = "random"
    path: str | None = None
    count: int = 1000
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 512
    num_prefixes: int = 10
    prefix_zipf: float = 0.0
    request_rate: float | None = None
    burstiness: float = 1.0
    trace_scale: float = 1.0
    trace_start: float = 0.0
    trace_duration: float = math.inf
    trace_spread: float = 0.0
    images: int = 0
    image_repeats: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"--dataset-name: {self.name}, allowed is {', '.join(NAMES)}", "dataset_name")
        if (self.path is None) == (self.name in ("trace", "lengths")):
            given = "not given, a file is needed" if self.path is None else f"{self.path}, which is not used"
            raise ConfigError(f"--dataset-path: {given} with --dataset-name {self.name}", "dataset_path")
        if self.name == "trace" and self.request_rate is not None and self.trace_scale != 1.0:
            raise ConfigError(
                f"--trace-scale: {self.trace_scale:g} with --request-rate {self.request_rate:g}; "
                "the one scales the trace's arrivals, the other replaces them",
                "trace_scale",
            )
        if self.image_repeats and not self.images:
            raise ConfigError(f"--image-repeats: {self.image_repeats:g}, allowed with --images alone", "image_repeats")

    @property
    def has_schedule(self) -> bool:
        """Whether requests are due at different times, rather than all at once."""
        if self.request_rate is None:
            return self.name == "trace"
        return math.isfinite(self.request_rate)

    def build(self) -> list[WorkRequest]:
        """The requests in order of arrival. Raises `ConfigError` for a file that is missing, wrong or has none."""
        rng = np.random.default_rng(self.seed)
        image_rng = np.random.default_rng((self.seed, 1))
        requests = self._text(rng)
        if not self.images:
            return requests
        seeing = [replace(request, images=self._images(i)) for i, request in enumerate(requests)]
        return repeat_images(seeing, self.image_repeats, image_rng)

    def _images(self, place: int) -> tuple[WorkImage, ...]:
        return tuple(WorkImage(place * self.images + i, 0) for i in range(self.images))

    def _text(self, rng: np.random.Generator) -> list[WorkRequest]:
        rate = math.inf if self.request_rate is None else self.request_rate
        cv = self.burstiness**-0.5
        if self.name == "trace":
            return self._from_trace(rng, cv)
        return synthesise(
            self.count,
            self._lengths(),
            rng,
            rate=rate,
            cv=cv,
            prefixes=self.num_prefixes if self.name == "prefix" else 0,
            prefix_tokens=self.prefix_len,
            zipf=self.prefix_zipf,
        )

    def _lengths(self) -> LengthPairs:
        if self.name == "lengths":
            assert self.path is not None
            return read_lengths(self.path)
        return Independent(around(self.input_len, self.range_ratio), around(self.output_len, self.range_ratio))

    def _from_trace(self, rng: np.random.Generator, cv: float) -> list[WorkRequest]:
        assert self.path is not None
        requests = between(read_trace(self.path), self.trace_start, self.trace_start + self.trace_duration)[
            : self.count
        ]
        if not requests:
            end = self.trace_start + self.trace_duration
            raise ConfigError(f"--trace-start: no request of {self.path} lies in [{self.trace_start:g}, {end:g}) s")
        if self.trace_spread:
            requests = spread_ticks(requests, self.trace_spread, rng)
        if self.request_rate is None:
            return scale_rate(requests, self.trace_scale)
        times = arrival_times(len(requests), self.request_rate, rng, cv)
        return [replace(request, at=float(at)) for request, at in zip(requests, times, strict=True)]
