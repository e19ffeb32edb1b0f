"""What came of a simulation, as plain values for JSON. Everything in it is a function of scenario, policy and seed.

Attainment, times and series are of online requests; what offline ones got is told by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.sim.cluster import Cluster, Sample
from penstock.sim.frontend import Record

PERCENTILES = (50, 90, 95, 99)
BINS = 30  # of a task's attainment over time


def kept(record: Record) -> bool:
    """Whether a request that is over got all it asked for, within both of its targets."""
    return not record.error and _in_time(record) and _at_pace(record)


def summarise(cluster: Cluster) -> dict[str, Any]:
    """Times in ms where the name says so, else in seconds. null where nothing was measured.

    `attainment`: share of requests that kept both targets; what failed did not. `duration`: from the start to the end.
    Percentiles are of requests that did not fail. `instance_seconds` is what it all costs.
    """
    records, end = cluster.records, cluster.timeline.now
    over = [record for record in records if record.ended is not None]
    online = [record for record in over if not record.offline]
    good = [record for record in online if not record.error]
    received = sum(record.received for record in online)
    return {
        "failed": len(online) - len(good),
        "errors": _errors(over),
        **_service(online),
        "ttft_attainment": _share([not r.error and _in_time(r) for r in online]),
        "tpot_attainment": _share([not r.error and _at_pace(r) for r in online]),
        "tasks": {
            task: _service([record for record in online if record.task == task])
            for task in sorted({record.task for record in online if record.task})
        },
        **offline_work(records, end),
        "duration": end,
        "request_throughput": len(good) / end if end else None,
        "output_tokens": received,
        "output_tokens_per_s": received / end if end else None,
        "prompt_tokens": sum(record.prompt_tokens for record in over),
        "reused_tokens": sum(record.cached_tokens for record in over),
        "handed_over": sum(record.decode != record.prefill for record in good),
        "recovered": sum(record.recoveries > 0 for record in good),
        "regret": _regret(over),
        "instance_seconds": sum(place.alive_seconds(end) for place in cluster.places.values()),
        "instances": {
            name: {"steps": place.steps, "busy_share": place.busy / end if end else None, "lives": place.lives}
            for name, place in cluster.places.items()
        },
        "events": cluster.timeline.happened,
        "timeline": _timeline(cluster.samples, records),
        "series": by_second(online),
        "tasks_over_time": tasks_over_time(online),
    }


def offline_work(records: Sequence[Record], end: float) -> dict[str, Any]:
    """What offline requests came to while there were online ones, all null when there were none.

    `offline_tokens_per_s` counts what was generated and what was read of prompts, of requests that were over by the
    last online one's end; the other two are its parts. What was found in a cache was not read.
    """
    offline = [record for record in records if record.offline]
    names = ("offline_tokens_per_s", "offline_generated_tokens_per_s", "offline_read_tokens_per_s")
    if not offline:
        return dict.fromkeys(("offline_requests", "offline_left", *names))
    until = max((r.ended for r in records if r.ended is not None and not r.offline), default=end)
    done = [r for r in offline if r.ended is not None and r.ended <= until and not r.error]
    generated = sum(record.received for record in done)
    read = sum(record.prompt_tokens - record.cached_tokens for record in done)
    rates = [tokens / until if until else None for tokens in (generated + read, generated, read)]
    return {
        "offline_requests": len(done),
        "offline_left": len(offline) - len(done),
        **dict(zip(names, rates, strict=True)),
    }


def by_second(records: Sequence[Record]) -> dict[str, list[int]]:
    """Of the requests that came in each second, from the first on: how many there were, and how many kept their
    targets."""
    seconds = np.array([int(record.arrival) for record in records], dtype=np.int64)
    attained = np.array([kept(record) for record in records], dtype=bool)
    count = int(seconds.max()) + 1 if len(seconds) else 0
    return {
        "arrivals": np.bincount(seconds, minlength=count).tolist(),
        "attained": np.bincount(seconds[attained], minlength=count).tolist(),
    }


def tasks_over_time(records: Sequence[Record]) -> dict[str, Any] | None:
    """By task, the share of those requests that kept their targets which came in each of `BINS` equal spans, null where
    none came; `seconds` is such a span's length. None unless there are several tasks."""
    names = sorted({record.task for record in records if record.task})
    if len(names) < 2:
        return None
    width = (max(record.arrival for record in records) or 1.0) / BINS
    spans: dict[str, list[list[bool]]] = {name: [[] for _ in range(BINS)] for name in names}
    for record in records:
        if record.task:
            spans[record.task][min(int(record.arrival / width), BINS - 1)].append(kept(record))
    return {"seconds": width, "tasks": {name: [_share(flags) for flags in each] for name, each in spans.items()}}


def request_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every request by itself, in order of arrival."""
    return [
        {
            "number": r.number,
            "task": r.task,
            "offline": r.offline,
            "priority": r.priority,
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


def _in_time(record: Record) -> bool:
    return record.ttft is not None and record.ttft <= record.ttft_target


def _at_pace(record: Record) -> bool:
    return record.tpot is None or record.tpot <= record.tpot_target


def _service(records: Sequence[Record]) -> dict[str, Any]:
    """How well requests that are over were served."""
    good = [record for record in records if not record.error]
    return {
        "requests": len(records),
        "attainment": _share([kept(record) for record in records]),
        **_distribution("ttft", "ms", [record.ttft for record in good]),
        **_distribution("tpot", "ms", [record.tpot for record in good]),
        **_distribution("latency", "s", [r.ended - r.arrival for r in good if r.ended is not None]),
    }


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


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


def _timeline(samples: Sequence[tuple[float, dict[str, Sample]]], records: Sequence[Record]) -> dict[str, Any]:
    """Seconds; over them how many online and offline requests were without a place, how many instances each pool had,
    and for each instance the columns pool, running, waiting, used_blocks."""
    at = [moment for moment, _ in samples]
    names = list(samples[0][1]) if samples else []
    columns = ("pool", "running", "waiting", "used_blocks")
    pools = sorted({state.pool for _, states in samples for state in states.values() if state.pool is not None})
    return {
        "at": at,
        "queued": without_place([record for record in records if not record.offline], at),
        "offline_queued": without_place([record for record in records if record.offline], at),
        "pools": {
            pool: [sum(state.pool == pool for state in states.values()) for _, states in samples] for pool in pools
        },
        "instances": {
            name: {column: [getattr(states[name], column) for _, states in samples] for column in columns}
            for name in names
        },
    }


def without_place(records: Sequence[Record], at: Sequence[float]) -> list[int]:
    """How many requests had come and were neither sent to an instance nor over, at each of these moments."""
    came = np.sort([record.arrival for record in records])
    placed = (record.ended if record.launched is None else record.launched for record in records)
    went = np.sort([moment for moment in placed if moment is not None])
    return (np.searchsorted(came, at, side="right") - np.searchsorted(went, at, side="right")).tolist()
