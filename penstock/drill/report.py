"""The result of a drill as one JSON document, and what it broke of what is promised."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from penstock.bench.metrics import ClientRecord, Stats, summarise
from penstock.drill.outcome import Hit, Struck, longest_waits
from penstock.drill.run import Drill, Result

STEP = 0.1  # seconds between two counts of streams
WAIT = 0.25  # seconds between two tokens from which on the page shows it
MOST_WAITS = 4000  # of them, the longest


def document(drill: Drill, result: Result) -> dict[str, Any]:
    """Numbers; times are seconds from the start of the load, unless the key says ms."""
    outcome, origin = result.outcome, result.began
    recovery = outcome.recovery

    def at(time: float | None) -> float | None:
        return None if time is None else round(time - origin, 4)

    return {
        "name": drill.name,
        "streams": outcome.streams,
        "completed": outcome.completed,
        "identical": outcome.identical,
        "recovery_p50_ms": None if recovery is None else recovery.p50,
        "recovery_p99_ms": None if recovery is None else recovery.p99,
        "recovery_max_ms": None if recovery is None else recovery.max,
        "leaks": len(result.leaks),
        "leaks_found": result.leaks,
        "excused": outcome.excused,
        "lost": outcome.lost,
        "unlike": outcome.unlike,
        "errors": outcome.errors,
        "failed": outcome.failed,
        "wrong_streams": outcome.wrong,
        "wrong": result.wrong,
        "exceptions": dict(Counter(result.raised).most_common()),
        "broken": broken(drill, result),
        "duration_s": drill.duration,
        "seed": drill.seed,
        "requests_per_s": result.rate,
        "capacity_per_s": result.capacity,
        "recovery": {kind: asdict(stats) for kind, stats in _by_kind(outcome.hits, result.struck).items()},
        "faults": [
            _fault(each, outcome.met[number], [hit.gap for hit in outcome.hits if hit.struck == number], at)
            for number, each in enumerate(result.struck)
        ],
        "undisturbed": msgspec.to_builtins(summarise(result.right)),
        "disturbed": msgspec.to_builtins(summarise(result.records)),
        "hits": [[hit.struck, hit.stream, at(hit.at), round(hit.gap, 4)] for hit in outcome.hits],
        "waits": [[at(begin), round(end - begin, 4)] for begin, end in _waits(result.records)],
        "states": {name: [[at(time), state] for time, state in rows] for name, rows in sorted(result.states.items())},
        "memory": {name: [[at(time), size] for time, _, size in rows] for name, rows in sorted(result.memory.items())},
        "tokens_per_s": _tokens_per_second(result.records, origin),
        "running": _running(result.records, origin),
    }


def broken(drill: Drill, result: Result) -> list[str]:
    """One line on each promise that was not kept."""
    outcome, recovery = result.outcome, result.outcome.recovery
    found = []
    if not any(outcome.met):
        found.append("no fault met a stream, so nothing was tried: more load, or a policy that uses every instance")
    if outcome.lost:
        found.append(f"{outcome.lost} of {outcome.streams} streams did not complete")
    if outcome.unlike:
        found.append(f"{outcome.unlike} streams have other tokens than in the undisturbed run")
    limit = drill.most_recovery_ms
    if limit is not None and recovery is not None and recovery.p99 > limit:
        found.append(f"recovery took {recovery.p99:.0f} ms at p99, at most {limit:g} was to be")
    found += [f"leak: {line}" for line in result.leaks]
    for each in result.struck:
        if each.began is not None and each.back is None:
            what = f"the {each.strike.kind} at {each.strike.at:.1f} s"
            found.append(f"{each.strike.target} did not come back after {what}")
    return found + list(result.wrong)


def _by_kind(hits: Sequence[Hit], struck: Sequence[Struck]) -> dict[str, Stats]:
    gaps: dict[str, list[float]] = {}
    for hit in hits:
        gaps.setdefault(struck[hit.struck].strike.kind, []).append(hit.gap)
    return {kind: stats for kind, values in sorted(gaps.items()) if (stats := Stats.of(values)) is not None}


def _fault(struck: Struck, met: int, gaps: Sequence[float], at: Any) -> dict[str, Any]:
    strike = struck.strike
    return {
        "planned_s": round(strike.at, 3),
        "kind": strike.kind,
        "target": strike.target,
        "lasts_s": strike.lasts,
        "began_s": at(struck.began),
        "ended_s": at(struck.ended),
        "back_s": at(struck.back),
        "met": met,
        "longest_gap_ms": max(gaps) * 1e3 if gaps else None,
        "why_not": struck.why,
    }


def _waits(records: Sequence[ClientRecord]) -> list[tuple[float, float]]:
    found = [wait for record in records for wait in longest_waits(record, WAIT)]
    return sorted(sorted(found, key=lambda wait: wait[0] - wait[1])[:MOST_WAITS])


def _running(records: Sequence[ClientRecord], origin: float) -> list[list[float]]:
    """Rows of a time, the streams that run then, and those that have not had a token for `WAIT` seconds or longer and
    will not for a while."""
    changes: dict[int, list[int]] = {}

    def count(what: int, begin: float, end: float) -> None:
        first, last = (math.ceil((time - origin) / STEP) for time in (begin, end))
        for at, more in ((first, 1), (last, -1)):
            changes.setdefault(at, [0, 0])[what] += more

    for record in records:
        count(0, record.sent, record.end)
        for begin, end in longest_waits(record, WAIT, first=True):
            count(1, begin, end)
    rows, running, waiting = [], 0, 0
    for at, (more, less) in sorted(changes.items()):
        running, waiting = running + more, waiting + less
        rows.append([round(at * STEP, 4), running, waiting])
    return rows


def _tokens_per_second(records: Sequence[ClientRecord], origin: float) -> list[int]:
    """Output tokens that came to clients in each second of the run."""
    seconds: Mapping[int, int]
    seconds = Counter()
    for record in records:
        for time, tokens in record.events:
            seconds[int(time - origin)] += tokens
    return [seconds.get(second, 0) for second in range(max(seconds, default=-1) + 1)]
