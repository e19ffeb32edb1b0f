"""A recording's summary, or that of a request, as plain values, which `penstock explain` prints."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from penstock.core.errors import ConfigError
from penstock.service.history import History, as_values, collect, move_values, pattern_of, predicted_ms, shown_time
from penstock.service.policies import Circumstances
from penstock.service.recorder import DecidedEntry, EndedEntry, MovedEntry, ScaledEntry
from penstock.service.recorder_file import read
from penstock.sim.baselines import POLICIES
from penstock.sim.replay import Redecided, replay, spread, summary

LATEST = 10  # requests that are shown of a whole recording


# --- one request


def explain(path: Path, request: str, policy: str | None = None, seed: int = 0) -> dict[str, Any]:
    """A request's history. Raises ConfigError when there is none."""
    found: dict[tuple[str, str], History] = {}
    entries, again = read(path), {}
    if policy is not None:
        recorded = list(entries)
        entries = iter(recorded)
        wanted = pattern_of(request)
        decisions = [entry for _, entry in recorded if isinstance(entry, DecidedEntry)]
        # a policy with state must see all earlier views
        again = {
            n: r for n, r in enumerate(_replay(decisions, policy, seed)) if wanted.fullmatch(decisions[n].request_id)
        }
    count = collect(entries, pattern_of(request), found)
    if not found:
        raise ConfigError(f"REQUEST: {request!r} is not among the {count} decisions in {path}", "request")
    sequences = [as_values(sequence) for sequence in found.values()]
    for sequence, values in zip(found.values(), sequences, strict=True):
        for (_, number, _), placement in zip(sequence.decided, values["placements"], strict=True):
            if number in again:
                placement["replayed"] = _replayed(again[number])
    return {"request": request, "policy": policy, "sequences": sequences}


def _replay(decisions: Sequence[DecidedEntry], policy: str, seed: int) -> Iterable[Redecided]:
    return replay(decisions, lambda: POLICIES[policy].make(Circumstances()).dispatch, random.Random(seed))


def _replayed(again: Redecided) -> dict[str, Any]:
    decision = again.decision
    return {
        "agrees": again.agrees,
        "same_request": decision is not None and decision.key == again.recorded.decision.key,
        "prefill": None if decision is None else decision.prefill,
        "decode": None if decision is None else decision.decode,
        "reason": None if decision is None else decision.reason,
        "waits_ms": again.waited * 1e3 if decision is not None else None,
        "regret_ms": None if again.other_regret is None else again.other_regret * 1e3,
        "recorded_regret_ms": again.regret * 1e3,
    }


# --- the whole recording


def replay_all(path: Path, policy: str, seed: int) -> dict[str, Any]:
    """Every decision again by another policy."""
    decisions = [entry for _, entry in read(path) if isinstance(entry, DecidedEntry)]
    if not decisions:
        raise ConfigError(f"--file: {path} has no decisions", "file")
    by = Counter(decided.decision.policy for decided in decisions)
    return {"policy": policy, "recorded": dict(by), **summary(list(_replay(decisions, policy, seed)))}


def summarise(path: Path) -> dict[str, Any]:
    """Counts of decisions and reasons, the accuracy of predictions, the newest requests, and changes of instances, or
    why there were none."""
    reasons: Counter[tuple[str, str]] = Counter()
    predicted: dict[tuple[str, str], float | None] = {}
    gaps: list[float] = []
    latest: deque[dict[str, Any]] = deque(maxlen=LATEST)
    moved: deque[dict[str, Any]] = deque(maxlen=LATEST)
    scaled: deque[dict[str, Any]] = deque(maxlen=LATEST)
    begins = ends = None
    for wall, entry in read(path):
        begins, ends = begins or wall, wall
        if isinstance(entry, DecidedEntry):
            decision = entry.decision
            reasons[decision.policy, decision.reason.partition(":")[0]] += 1
            predicted[entry.frontend, entry.request_id] = predicted_ms(entry)
            where = {"prefill": decision.prefill, "decode": decision.decode}
            latest.append({"at": shown_time(wall), "id": entry.request_id, **where, "reason": decision.reason})
        elif isinstance(entry, MovedEntry):
            moved.append({"at": shown_time(wall), **move_values(entry.move)})
        elif isinstance(entry, ScaledEntry):
            scaled.append({"at": shown_time(wall), "stages": [structs.asdict(verdict) for verdict in entry.verdicts]})
        elif isinstance(entry, EndedEntry):
            guess = predicted.pop((entry.frontend, entry.request_id), None)
            if guess is not None and entry.outcome is not None:
                gaps.append(guess - entry.outcome.ttft_ms)
    return {
        "begins": None if begins is None else shown_time(begins),
        "ends": None if ends is None else shown_time(ends),
        "decisions": sum(reasons.values()),
        "reasons": [{"policy": p, "reason": r, "decisions": n} for (p, r), n in reasons.most_common()],
        "predicted_minus_actual_ttft_ms": {"requests": len(gaps), **spread(gaps)},
        "latest": list(latest),
        "moves": list(moved),
        "scaling": list(scaled),
    }
