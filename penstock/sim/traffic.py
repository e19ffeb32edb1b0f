"""The requests of a scenario: from its trace or its distributions, at some multiple of their own rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.errors import ConfigError
from penstock.sim.scenario import Synthetic, Workload
from penstock.workload.lengths import Independent, LogNormal
from penstock.workload.requests import (
    WorkRequest,
    between,
    limit_context,
    offered_rate,
    scale_rate,
    spread_ticks,
)
from penstock.workload.synthetic import synthesise


@dataclass(frozen=True, slots=True)
class Traffic:
    """
    Attributes:
        requests: in order of arrival, numbered by it.
        native_rate: requests per second before scaling; inf when all come at once.
        cut: requests that were made to fit the model's length.
    """

    requests: list[WorkRequest]
    native_rate: float
    cut: int


def make_traffic(
    workload: Workload,
    trace: Sequence[WorkRequest] | None,
    rng: np.random.Generator,
    *,
    scale: float,
    max_model_len: int,
) -> Traffic:
    """
    Args:
        trace: what was read from `workload.trace`, or from another file in its place.
        scale: factor on the native rate.

    Raises:
        ConfigError: nothing is left of the trace.
    """
    spread_rng, synthetic_rng = rng.spawn(2)
    if trace is None:
        assert workload.synthetic is not None
        trace = _synthesise(workload.synthetic, synthetic_rng)
    elif workload.spread:
        trace = spread_ticks(trace, workload.spread, spread_rng)
    rest = between(trace, workload.start)
    if not rest:
        raise ConfigError(f"workload.start: {workload.start:g} s, no request comes after that", "start")
    native = offered_rate(rest)
    if workload.duration is not None:
        if math.isinf(native):
            raise ConfigError("workload.duration: given, and all requests come at once: there is no rate to keep up")
        rest = _repeated(rest, workload.duration * scale, 1 / native)
    numbered = [replace(work, number=number) for number, work in enumerate(scale_rate(rest, scale))]
    requests, cut = limit_context(numbered, max_model_len)
    return Traffic(requests, native, cut)


def _repeated(requests: Sequence[WorkRequest], duration: float, gap: float) -> list[WorkRequest]:
    """What arrives in so many seconds when the requests come again and again, `gap` seconds after the last one. Shared
    prefixes are new ones each time: nobody asks all the same questions again."""
    lap = requests[-1].at + gap
    blocks = 1 + max((max(work.prefix) for work in requests if work.prefix), default=0)
    found: list[WorkRequest] = []
    turn = 0
    while turn * lap < duration:
        found += [
            replace(work, at=work.at + turn * lap, prefix=tuple(block + turn * blocks for block in work.prefix))
            for work in requests
            if work.at + turn * lap < duration
        ]
        turn += 1
    return found


def _synthesise(synthetic: Synthetic, rng: np.random.Generator) -> list[WorkRequest]:
    lengths = Independent(
        LogNormal(synthetic.prompt, synthetic.prompt_cv), LogNormal(synthetic.output, synthetic.output_cv)
    )
    return synthesise(
        synthetic.requests,
        lengths,
        rng,
        rate=synthetic.rate,
        cv=synthetic.burstiness,
        prefixes=synthetic.prefixes,
        prefix_tokens=synthetic.prefix_tokens,
        zipf=synthetic.prefix_zipf,
    )
