"""A recording's summary, or that of a request, as plain values, which `penstock explain` prints."""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.sched.cluster import ClusterView, Demand, InstanceLoad, Stage
from penstock.service.policies import Circumstances
from penstock.service.recorder import DecidedEntry, EndedEntry, Entry, HeldEntry, MovedEntry
from penstock.service.recorder_file import read
from penstock.sim.baselines import POLICIES
from penstock.sim.replay import Redecided, first_token, replay, spread, summary

LATEST = 10  # requests that are shown of a whole recording
FOLLOWED = 20  # moves of its instances that are shown of a sequence


# --- one request


@dataclass(slots=True)
class History:
    """What was recorded of one sequence.

    Attributes:
        held: with how many decisions there had been.
        decided: the same; several when an instance did not take it, or died.
        moved: of the instances that it was on, while it was.
    """

    id: str
    frontend: str
    held: list[tuple[float, int, HeldEntry]] = field(default_factory=list)
    decided: list[tuple[float, int, DecidedEntry]] = field(default_factory=list)
    moved: list[tuple[float, MovedEntry]] = field(default_factory=list)
    ended: tuple[float, EndedEntry] | None = None
    again: dict[int, Redecided] = field(default_factory=dict)  # by number of the decision

    @property
    def instances(self) -> set[str]:
        if not self.decided:
            return set()
        decision = self.decided[-1][2].decision
        return {decision.prefill} | ({decision.decode} if decision.decode is not None else set())


def pattern_of(request: str) -> re.Pattern[str]:
    """Matches the ids of a request's sequences. A frontend makes them from the client's id: several prompts in one
    request have "-0", "-1" behind it, then eight hexadecimal digits make it unique, and several outputs have "-0", ...
    """
    bare = re.sub(r"^(chatcmpl|cmpl)-", "", request)
    either = "|".join(re.escape(name) for name in dict.fromkeys((request, bare)))
    return re.compile(rf"(?:{either})((-\d+)?-[0-9a-f]{{8}}(-\d+)?)?")


def explain(path: Path, request: str, policy: str | None = None, seed: int = 0) -> dict[str, Any]:
    """A request's history. Raises ConfigError when there is none."""
    sequences: dict[tuple[str, str], History] = {}
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
    count = _collect(entries, pattern_of(request), sequences)
    if not sequences:
        raise ConfigError(f"REQUEST: {request!r} is not among the {count} decisions in {path}", "request")
    for sequence in sequences.values():
        sequence.again = {number: again[number] for _, number, _ in sequence.decided if number in again}
    return {"request": request, "policy": policy, "sequences": [_sequence(s) for s in sequences.values()]}


def _collect(
    entries: Iterable[tuple[float, Entry]], wanted: re.Pattern[str], found: dict[tuple[str, str], History]
) -> int:
    """Find what belongs to a request; returns how many decisions there are."""
    count = 0
    for wall, entry in entries:
        if isinstance(entry, MovedEntry):
            for sequence in found.values():
                if sequence.ended is None and entry.move.name in sequence.instances:
                    sequence.moved.append((wall, entry))
        elif wanted.fullmatch(entry.request_id):
            key = entry.frontend, entry.request_id
            sequence = found.setdefault(key, History(entry.request_id, entry.frontend))
            if isinstance(entry, HeldEntry):
                sequence.held.append((wall, count, entry))
            elif isinstance(entry, DecidedEntry):
                sequence.decided.append((wall, count, entry))
                sequence.ended = None  # it is placed again after a failed placement
            else:
                sequence.ended = wall, entry
        count += isinstance(entry, DecidedEntry)
    return count


def _replay(decisions: Sequence[DecidedEntry], policy: str, seed: int) -> Iterable[Redecided]:
    return replay(decisions, lambda: POLICIES[policy].make(Circumstances()).dispatch, random.Random(seed))


def _sequence(found: History) -> dict[str, Any]:
    first = (found.decided or found.held or [None])[0]
    outcome = None if found.ended is None else found.ended[1].outcome
    predicted = _predicted(found.decided[-1][2]) if found.decided else None
    return {
        "id": found.id,
        "frontend": found.frontend,
        "demand": None if first is None else _demand(first[2].demand),
        "placements": [_placement(found, wall, number, decided) for wall, number, decided in found.decided],
        "held": [_held(wall, held) for wall, _, held in found.held],
        "moves": [_moved(wall, moved) for wall, moved in found.moved[:FOLLOWED]],
        "ended_at": None if found.ended is None else _time(found.ended[0]),
        "outcome": None
        if outcome is None
        else {
            "ttft_ms": outcome.ttft_ms,
            "tpot_ms": outcome.tpot_ms,
            "queue_ms": outcome.queue_ms,
            "wait": outcome.wait,
            "tokens": outcome.tokens,
            "predicted_ttft_ms": predicted,
            "predicted_minus_actual_ttft_ms": None if predicted is None else predicted - outcome.ttft_ms,
        },
    }


def _demand(demand: Demand) -> dict[str, Any]:
    return {
        "prompt_tokens": demand.prompt_tokens,
        "max_tokens": demand.max_tokens,
        "ttft_ms": demand.ttft * 1e3,
        "tpot_ms": demand.tpot * 1e3,
        "priority": demand.priority,
        "offline": demand.offline,
        "cached_tokens": dict(demand.hits),
        "loaded_tokens": dict(demand.loads),
        "excluded": sorted(demand.exclude),
    }


def _held(wall: float, held: HeldEntry) -> dict[str, Any]:
    return {"at": _time(wall), "asked_again_after_ms": (held.until - held.now) * 1e3}


def _moved(wall: float, moved: MovedEntry) -> dict[str, Any]:
    return {"at": _time(wall), **_move(moved.move)}


def _move(move: Any) -> dict[str, Any]:
    kind = type(move).__name__.lower()
    return {"what": kind, "instance": move.name, "role": getattr(move, "role", None), "reason": move.reason}


def _placement(found: History, wall: float, number: int, decided: DecidedEntry) -> dict[str, Any]:
    decision, demand = decided.decision, decided.demand
    before = [(count, held) for _, count, held in found.held if held.now <= decided.now]
    again = found.again.get(number)
    return {
        "at": _time(wall),
        "waited_ms": (decided.now - demand.arrived) * 1e3,
        "in_queue_ms": (decided.now - before[-1][1].now) * 1e3 if before else 0.0,
        "placed_meanwhile": number - before[-1][0] if before else 0,
        "waiting": decided.waiting - 1,
        "policy": decision.policy,
        "reason": decision.reason,
        "prefill": decision.prefill,
        "decode": decision.decode,
        "predicted_ttft_ms": _predicted(decided),
        "predicted_by": "policy" if decision.predicted_ttft is not None else "step times",
        "moves": [_move(move) for move in decision.moves],
        "instances": decided.instances,
        "stages": {stage: _candidates(decided, stage) for stage in _stages(decided)},
        "replayed": None if again is None else _replayed(again),
    }


def _predicted(decided: DecidedEntry) -> float | None:
    """TTFT in ms from the client's request on; by the instance's step times when the policy predicts none."""
    if decided.decision.predicted_ttft is not None:
        return decided.decision.predicted_ttft * 1e3
    load = next((load for load in decided.view.instances if load.name == decided.decision.prefill), None)
    if load is None:
        return None
    return (decided.now - decided.demand.arrived + first_token(decided.view, decided.demand, load)) * 1e3


def _stages(decided: DecidedEntry) -> tuple[Stage, ...]:
    return (
        ("prefill", "decode")
        if decided.decision.decode is not None or "decode" in decided.decision.costs
        else ("prefill",)
    )


def _candidates(decided: DecidedEntry, stage: Stage) -> list[dict[str, Any]]:
    """The chosen one first, then by cost. `ms` is the same of all policies: what the first token takes from here, or a
    step in which this sequence decodes with the others."""
    view, decision = decided.view, decided.decision
    chosen = decision.prefill if stage == "prefill" else decision.decode or decision.prefill
    costs = decision.costs.get(stage, {})
    named = [load for load in view.instances if not costs or load.name in costs or load.name == chosen]
    times = {load.name: _milliseconds(view, decided.demand, load, stage) for load in named}
    base = times.get(chosen)
    rows = [
        {
            "instance": load.name,
            "chosen": load.name == chosen,
            "cost": costs.get(load.name),
            "ms": times[load.name],
            "margin_ms": None if base is None else times[load.name] - base,
            "role": load.role,
            "requests": load.requests,
            "decoding": load.decoding,
            "prefilling": load.prefilling,
            "pending_tokens": load.pending_tokens,
            "held_tokens": load.held_tokens,
            "free_blocks": load.free_blocks,
            "free_in_ms": max(0.0, load.free_at - view.now) * 1e3,
            "cached_tokens": decided.demand.hits.get(load.name, 0),
            "loaded_tokens": decided.demand.to_load(load.name),
        }
        for load in named
    ]
    return sorted(rows, key=lambda row: (not row["chosen"], inf if row["cost"] is None else row["cost"], row["ms"]))


def _milliseconds(view: ClusterView, demand: Demand, load: InstanceLoad, stage: Stage) -> float:
    if stage == "prefill":
        return first_token(view, demand, load) * 1e3
    return load.times.step_ms(decodes=load.requests + 1, kv_tokens=load.held_tokens + demand.prompt_tokens)


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
    """Counts of decisions and reasons, the accuracy of predictions, and the newest requests."""
    reasons: Counter[tuple[str, str]] = Counter()
    predicted: dict[tuple[str, str], float | None] = {}
    gaps: list[float] = []
    latest: deque[dict[str, Any]] = deque(maxlen=LATEST)
    begins = ends = None
    for wall, entry in read(path):
        begins, ends = begins or wall, wall
        if isinstance(entry, DecidedEntry):
            decision = entry.decision
            reasons[decision.policy, decision.reason.partition(":")[0]] += 1
            predicted[entry.frontend, entry.request_id] = _predicted(entry)
            where = {"prefill": decision.prefill, "decode": decision.decode}
            latest.append({"at": _time(wall), "id": entry.request_id, **where, "reason": decision.reason})
        elif isinstance(entry, EndedEntry):
            guess = predicted.pop((entry.frontend, entry.request_id), None)
            if guess is not None and entry.outcome is not None:
                gaps.append(guess - entry.outcome.ttft_ms)
    return {
        "begins": None if begins is None else _time(begins),
        "ends": None if ends is None else _time(ends),
        "decisions": sum(reasons.values()),
        "reasons": [{"policy": p, "reason": r, "decisions": n} for (p, r), n in reasons.most_common()],
        "predicted_minus_actual_ttft_ms": {"requests": len(gaps), **spread(gaps)},
        "latest": list(latest),
    }


def _time(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
