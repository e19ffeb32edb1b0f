"""What came of a simulation, as plain values for JSON. Everything in it is a function of scenario, policy and seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.sim.cluster import Cluster, Sample
from penstock.sim.frontend import Record
from penstock.sim.scenario import SLO

PERCENTILES = (50, 90, 95, 99)


def kept(record: Record, slo: SLO) -> bool:
    """Whether a request that is over got all it asked for, within both limits."""
    if record.error or record.ttft is None or record.ttft > slo.ttft:
        return False
    return record.tpot is None or record.tpot <= slo.tpot


def summarise(cluster: Cluster, slo: SLO) -> dict[str, Any]:
    """Times in ms where the name says so, else in seconds. null where nothing was measured.

    `attainment`: share of requests that kept both limits; what failed did not. `duration`: from the start to the end of
    the last request. Percentiles are of requests that did not fail.
    """
    records = cluster.records
    over = [record for record in records if record.ended is not None]
    good = [record for record in over if not record.error]
    end = cluster.timeline.now
    received = sum(record.received for record in over)
    return {
        "requests": len(over),
        "failed": len(over) - len(good),
        "errors": _errors(over),
        "attainment": sum(kept(record, slo) for record in over) / len(over) if over else None,
        "ttft_attainment": _share([r.ttft is not None and r.ttft <= slo.ttft for r in good], len(over)),
        "tpot_attainment": _share([r.tpot is None or r.tpot <= slo.tpot for r in good], len(over)),
        **_distribution("ttft", "ms", [record.ttft for record in good]),
        **_distribution("tpot", "ms", [record.tpot for record in good]),
        **_distribution("latency", "s", [r.ended - r.arrival for r in good if r.ended is not None]),
        "duration": end,
        "request_throughput": len(good) / end if end else None,
        "output_tokens": received,
        "output_tokens_per_s": received / end if end else None,
        "prompt_tokens": sum(record.prompt_tokens for record in over),
        "reused_tokens": sum(record.cached_tokens for record in over),
        "handed_over": sum(record.decode != record.prefill for record in good),
        "regret": _regret(over),
        "instance_seconds": sum(place.alive_seconds(end) for place in cluster.places.values()),
        "instances": {
            name: {"steps": place.steps, "busy_share": place.busy / end if end else None, "lives": place.lives}
            for name, place in cluster.places.items()
        },
        "events": cluster.timeline.happened,
        "timeline": _timeline(cluster.samples),
    }


def request_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every request by itself, in order of arrival."""
    return [
        {
            "number": r.number,
            "arrival": r.arrival,
            "first": r.first,
            "ended": r.ended,
            "prompt_tokens": r.prompt_tokens,
            "output_tokens": r.received,
            "cached_tokens": r.cached_tokens,
            "prefill": r.prefill,
            "decode": r.decode,
            "reason": r.reason,
            "attempts": r.attempts,
            "costs": r.costs,
            "error": r.error,
        }
        for r in records
    ]


def _share(flags: Sequence[bool], total: int) -> float | None:
    return sum(flags) / total if total else None


def _distribution(name: str, unit: str, seconds: Sequence[float | None]) -> dict[str, float | None]:
    values = np.array([value for value in seconds if value is not None]) * (1e3 if unit == "ms" else 1)
    found: dict[str, float | None] = {f"{name}_mean_{unit}": float(values.mean()) if len(values) else None}
    for p in PERCENTILES:
        found[f"{name}_p{p}_{unit}"] = float(np.percentile(values, p)) if len(values) else None
    return found


def _regret(records: Sequence[Record]) -> dict[str, float]:
    """By stage, how much worse the choice was than the best candidate, in the policy's own costs, on average."""
    stages = sorted({stage for record in records for stage in record.costs})
    return {
        stage: float(np.mean([r.costs[stage][0] - r.costs[stage][1] for r in records if stage in r.costs]))
        for stage in stages
    }


def _errors(records: Sequence[Record]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        if record.error:
            counts[record.error] = counts.get(record.error, 0) + 1
    return counts


def _timeline(samples: Sequence[tuple[float, dict[str, Sample]]]) -> dict[str, Any]:
    """Seconds, and for each instance the columns pool, running, waiting, used_blocks over them."""
    names = list(samples[0][1]) if samples else []
    columns = ("pool", "running", "waiting", "used_blocks")
    return {
        "at": [at for at, _ in samples],
        "instances": {
            name: {column: [getattr(states[name], column) for _, states in samples] for column in columns}
            for name in names
        },
    }
