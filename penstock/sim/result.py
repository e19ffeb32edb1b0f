"""A simulation's result, as plain values for JSON. Everything in it is a function of scenario, policy and seed.

Attainment, times and series are of online requests; offline ones are measured in tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.sched.cluster import FleetChange, Restart, Stop
from penstock.sim.cluster import Cluster
from penstock.sim.frontend import SimRecord
from penstock.sim.slots import Sample, Use
from penstock.sim.workload import WHOLE, Slice

Column = npt.NDArray[Any]


def kept(record: SimRecord) -> bool:
    """Whether a request that is over got all it asked for, within both of its targets."""
    return not record.error and _in_time(record) and _at_pace(record)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Of all requests, in order of arrival. Every column has the shape [requests]; times are in seconds, and nan where
    there was no such thing.

    Attributes:
        placed: when it was sent to an instance or, if it never was, was over.
        ttft, tpot, latency: as its client saw them; `latency` is to its end.
        kept: whether it got all it asked for, within both of its targets.
        in_time, at_pace: whether it kept the one or the other; what failed may have.
        received: tokens that it got.
        cached: tokens of its prompt that were found in a cache.
        task, error: words; "" where there is none.
        handed_over: whether another instance generated than the one that prefilled its prompt.
        recovered: whether it was interrupted and went on elsewhere; `recovered_by`: how, by the words of `Recovery`.
        regret: by stage, how much worse its place was than the best candidate, in the policy's own costs.
        targets: of each task of online requests, (TTFT, TPOT) in seconds, as its first request had them.
    """

    arrival: Column
    placed: Column
    ended: Column
    ttft: Column
    tpot: Column
    latency: Column
    kept: Column
    in_time: Column
    at_pace: Column
    offline: Column
    prompt: Column
    received: Column
    cached: Column
    task: Column
    error: Column
    handed_over: Column
    recovered: Column
    recovered_by: Column
    regret: dict[str, Column]
    targets: dict[str, tuple[float, float]]

    @property
    def online(self) -> Column:
        """The online requests that have ended."""
        return ~self.offline & self.over

    @property
    def over(self) -> Column:
        return ~np.isnan(self.ended)

    @property
    def good(self) -> Column:
        """Those that did not fail."""
        return self.error == ""

    def __len__(self) -> int:
        return len(self.arrival)


COLUMNS = tuple(field.name for field in fields(Outcomes) if field.name not in ("regret", "targets"))


def outcomes_of(records: Sequence[SimRecord], since: float = 0.0) -> Outcomes:
    """
    Args:
        since: of their times; the columns' begin at 0.
    """
    ended = _times((r.ended for r in records), since)
    return Outcomes(
        arrival=_times((r.arrival for r in records), since),
        placed=_times((r.ended if r.launched is None else r.launched for r in records), since),
        ended=ended,
        ttft=_times(r.ttft for r in records),
        tpot=_times(r.tpot for r in records),
        latency=_times(None if r.ended is None else r.ended - r.arrival for r in records),
        kept=_flags(kept(r) for r in records),
        in_time=_flags(_in_time(r) for r in records),
        at_pace=_flags(_at_pace(r) for r in records),
        offline=_flags(r.offline for r in records),
        prompt=_counts(r.prompt_tokens for r in records),
        received=_counts(r.received for r in records),
        cached=_counts(r.cached_tokens for r in records),
        task=_words(r.task for r in records),
        error=_words(r.error for r in records),
        handed_over=_flags(r.decode != r.prefill for r in records),
        recovered=_flags(r.recoveries > 0 for r in records),
        recovered_by=_words(r.recovered_by for r in records),
        regret={
            stage: _times(r.costs[stage][0] - r.costs[stage][1] if stage in r.costs else None for r in records)
            for stage in sorted({stage for r in records for stage in r.costs})
        },
        targets={r.task: (r.ttft_target, r.tpot_target) for r in reversed(records) if not r.offline},
    )


def joined(parts: Sequence[Outcomes]) -> Outcomes:
    """As if all of them had been simulated at once; each part's requests came after the last one's."""
    if len(parts) == 1:
        return parts[0]
    regret = {
        stage: np.concatenate([part.regret.get(stage, np.full(len(part), nan)) for part in parts])
        for stage in sorted({stage for part in parts for stage in part.regret})
    }
    return Outcomes(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS},
        regret=regret,
        targets={task: targets for part in reversed(parts) for task, targets in part.targets.items()},
    )


def _times(seconds: Iterable[float | None], since: float = 0.0) -> Column:
    return np.array([nan if moment is None else moment for moment in seconds], dtype=np.float64) + since


def _flags(values: Iterable[bool]) -> Column:
    return np.array(list(values), dtype=bool)


def _counts(values: Iterable[int]) -> Column:
    return np.array(list(values), dtype=np.int64)


def _words(values: Iterable[str]) -> Column:
    return np.array(list(values), dtype=object)


def _in_time(record: SimRecord) -> bool:
    return record.ttft is not None and record.ttft <= record.ttft_target


def _at_pace(record: SimRecord) -> bool:
    return record.tpot is None or record.tpot <= record.tpot_target


PERCENTILES = (50, 90, 95, 99)
BINS = 30  # of a task's attainment over time


@dataclass(frozen=True, slots=True)
class Account:
    """What a simulation, or a slice of one, leaves behind. It can be sent to another process.

    Attributes:
        end: seconds from the start of the workload.
        seconds: that it is about, up to its end.
        events: that were simulated, also to warm up.
        samples: (seconds, every instance's state).
        instances: what each did in that time.
        instance_seconds: that they were paid for in that time.
        changes: (seconds, what was decided) of roles, and of how many instances there are.
        starts: (seconds, path, how long it takes) of instances that were ordered.
    """

    outcomes: Outcomes
    end: float
    seconds: float
    events: int
    samples: list[tuple[float, dict[str, Sample]]]
    instances: dict[str, Use]
    instance_seconds: float
    changes: list[tuple[float, FleetChange]]
    starts: list[tuple[float, str, float]]


def account_of(cluster: Cluster, part: Slice = WHOLE) -> Account:
    """Of a simulation that is over."""
    begin, end = part.begin - part.since, min(part.end - part.since, cluster.timeline.now)
    judged = [record for record in cluster.records if record.number in cluster.judged]
    samples = [(at, states) for at, states in cluster.samples if begin <= at and (part.last or at < end)]
    return Account(
        outcomes=outcomes_of(judged, part.since),
        end=part.since + end,
        seconds=end - begin,
        events=cluster.timeline.happened,
        samples=[(part.since + at, states) for at, states in samples],
        instances=cluster.used(begin, end),
        instance_seconds=sum(place.alive_seconds(begin, end) for place in cluster.places.values()),
        changes=[(part.since + at, what) for at, what in cluster.changes if begin <= at < end],
        starts=[(part.since + at, path, took) for at, path, took in cluster.starts if begin <= at < end],
    )


def joined_accounts(parts: Sequence[Account]) -> Account:
    """Of all slices of a simulation, in order."""
    return Account(
        outcomes=joined([part.outcomes for part in parts]),
        end=parts[-1].end,
        seconds=sum(part.seconds for part in parts),
        events=sum(part.events for part in parts),
        samples=[sample for part in parts for sample in part.samples],
        instances={
            name: Use(*map(sum, zip(*(part.instances[name] for part in parts), strict=True)))
            for name in parts[0].instances
        },
        instance_seconds=sum(part.instance_seconds for part in parts),
        changes=[change for part in parts for change in part.changes],
        starts=[start for part in parts for start in part.starts],
    )


def summarise(account: Account) -> dict[str, Any]:
    """Times in ms where the name says so, else in seconds. null where nothing was measured.

    `attainment`: share of requests that kept both targets; what failed did not. `duration`: from the start to the end.
    `loaded_tokens`: of those that were reused, what came from the memory of hosts, also for requests that failed.
    Percentiles are of requests that did not fail. `instance_seconds` is what it all costs. `starts`: by path, how many
    instances were ordered and how long one took on average.
    """
    these, end = account.outcomes, account.end
    online = these.online
    good = online & these.good
    received = int(these.received[online].sum())
    return {
        "failed": int((online & ~these.good).sum()),
        "errors": dict(Counter(these.error[these.over & ~these.good].tolist())),
        **_service(these, online),
        "ttft_attainment": _share(these.in_time[online] & these.good[online]),
        "tpot_attainment": _share(these.at_pace[online] & these.good[online]),
        "tasks": {task: _service(these, online & (these.task == task)) for task in _tasks(these)},
        **offline_work(these, end),
        "duration": end,
        "request_throughput": int(good.sum()) / end if end else None,
        "output_tokens": received,
        "output_tokens_per_s": received / end if end else None,
        "prompt_tokens": int(these.prompt[these.over].sum()),
        "reused_tokens": int(these.cached[these.over].sum()),
        "loaded_tokens": sum(use.loaded for use in account.instances.values()),
        "handed_over": int(these.handed_over[good].sum()),
        "recovered": int(these.recovered[good].sum()),
        "recovered_by": dict(Counter(these.recovered_by[good & (these.recovered_by != "")].tolist())),
        "regret": _regret(these),
        "instance_seconds": account.instance_seconds,
        "starts": _starts(account.starts),
        "changes": [
            {"at": at, "what": type(change).__name__.lower(), "instance": change.name}
            | {"role": None if isinstance(change, Stop | Restart) else change.role, "reason": change.reason}
            for at, change in account.changes
        ],
        "instances": {
            name: {
                "steps": use.steps,
                "busy_share": use.busy / account.seconds if account.seconds else None,
                "lives": use.lives,
            }
            for name, use in account.instances.items()
        },
        "events": account.events,
        "timeline": _timeline(account.samples, these),
        "series": by_second(these),
        "tasks_over_time": tasks_over_time(these),
    }


def _starts(starts: Sequence[tuple[float, str, float]]) -> dict[str, dict[str, float]]:
    by_path: dict[str, list[float]] = {}
    for _, path, seconds in starts:
        by_path.setdefault(path, []).append(seconds)
    return {path: {"count": len(took), "mean_s": sum(took) / len(took)} for path, took in sorted(by_path.items())}


def offline_work(these: Outcomes, end: float) -> dict[str, Any]:
    """What offline requests came to while there were online ones, all null when there were no offline ones.

    `offline_tokens_per_s` counts what was generated and what was prefilled of prompts, of requests that were over by
    the last online one's end; the other two are its parts. What was found in a cache was not prefilled.
    """
    came = int(these.offline.sum())
    names = ("offline_tokens_per_s", "offline_generated_tokens_per_s", "offline_prefill_tokens_per_s")
    if not came:
        return dict.fromkeys(("offline_requests", "offline_left", *names))
    until = max(these.ended[these.online].tolist(), default=end)
    done = these.offline & these.over & these.good & (these.ended <= until)
    generated = int(these.received[done].sum())
    prefilled = int((these.prompt[done] - these.cached[done]).sum())
    rates = [tokens / until if until else None for tokens in (generated + prefilled, generated, prefilled)]
    return {
        "offline_requests": int(done.sum()),
        "offline_left": came - int(done.sum()),
        **dict(zip(names, rates, strict=True)),
    }


def by_second(these: Outcomes) -> dict[str, list[int]]:
    """Of the online requests that came in each second, from the first on: how many there were, and how many kept their
    targets."""
    seconds = these.arrival[these.online].astype(np.int64)
    count = int(seconds.max()) + 1 if len(seconds) else 0
    return {
        "arrivals": np.bincount(seconds, minlength=count).tolist(),
        "attained": np.bincount(seconds[these.kept[these.online]], minlength=count).tolist(),
    }


def tasks_over_time(these: Outcomes) -> dict[str, Any] | None:
    """By task, the share of those requests that kept their targets which came in each of `BINS` equal spans, null where
    none came; `seconds` is such a span's length. None unless there are several tasks."""
    names = _tasks(these)
    if len(names) < 2:
        return None
    width = float(these.arrival[these.online].max()) / BINS or 1.0 / BINS
    span = np.minimum((these.arrival / width).astype(np.int64), BINS - 1)
    return {
        "seconds": width,
        "tasks": {
            name: [_share(these.kept[of & (span == number)]) for number in range(BINS)]
            for name, of in ((name, these.online & (these.task == name)) for name in names)
        },
    }


def request_rows(records: Sequence[SimRecord]) -> list[dict[str, Any]]:
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


def _tasks(these: Outcomes) -> list[str]:
    """Of online requests that are over, those that have one."""
    return sorted(set(these.task[these.online].tolist()) - {""})


def _service(these: Outcomes, of: Column) -> dict[str, Any]:
    """How well requests that are over were served. Of: which; [requests]."""
    good = of & these.good
    return {
        "requests": int(of.sum()),
        "attainment": _share(these.kept[of]),
        **_distribution("ttft", "ms", these.ttft[good]),
        **_distribution("tpot", "ms", these.tpot[good]),
        **_distribution("latency", "s", these.latency[good]),
    }


def _share(flags: Column) -> float | None:
    return int(flags.sum()) / len(flags) if len(flags) else None


def _distribution(name: str, unit: str, seconds: Column) -> dict[str, float | None]:
    values = seconds[~np.isnan(seconds)] * (1e3 if unit == "ms" else 1)
    found: dict[str, float | None] = {f"{name}_mean_{unit}": float(values.mean()) if len(values) else None}
    for p in PERCENTILES:
        found[f"{name}_p{p}_{unit}"] = float(np.percentile(values, p)) if len(values) else None
    return found


def _regret(these: Outcomes) -> dict[str, float]:
    """By stage, how much worse the choice was than the best candidate, in the policy's own costs, on average."""
    known = {stage: column[these.over & ~np.isnan(column)] for stage, column in these.regret.items()}
    return {stage: float(np.mean(column)) for stage, column in known.items() if len(column)}


def _timeline(samples: Sequence[tuple[float, dict[str, Sample]]], these: Outcomes) -> dict[str, Any]:
    """Seconds; over them how many online and offline requests were without a place, how many instances each role had,
    and for each instance the columns role, running, waiting, used_blocks."""
    at = [moment for moment, _ in samples]
    names = list(samples[0][1]) if samples else []
    columns = ("role", "running", "waiting", "used_blocks")
    roles = sorted({state.role for _, states in samples for state in states.values() if state.role is not None})
    return {
        "at": at,
        "queued": without_place(these, ~these.offline, at),
        "offline_queued": without_place(these, these.offline, at),
        "roles": {
            role: [sum(state.role == role for state in states.values()) for _, states in samples] for role in roles
        },
        "instances": {
            name: {column: [getattr(states[name], column) for _, states in samples] for column in columns}
            for name in names
        },
    }


def without_place(these: Outcomes, of: Column, at: Sequence[float]) -> list[int]:
    """How many of some requests had come and were neither sent to an instance nor over, at each of these moments."""
    came, went = np.sort(these.arrival[of]), np.sort(these.placed[of & ~np.isnan(these.placed)])
    return (np.searchsorted(came, at, side="right") - np.searchsorted(went, at, side="right")).tolist()
