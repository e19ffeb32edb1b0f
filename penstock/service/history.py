"""What a recorder's entries tell of one request, as plain values: `penstock explain` prints them, and a running master
answers with them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from typing import Any

from msgspec.structs import asdict

from penstock.core.request import ImagesSeen
from penstock.sched.cluster import ClusterView, Demand, InstanceLoad, Stage
from penstock.service.recorder import (
    DecidedEntry,
    EndedEntry,
    Entry,
    HeldEntry,
    MovedEntry,
    RelocatedEntry,
    ScaledEntry,
)

FOLLOWED = 20  # moves of its instances that are told of a sequence


@dataclass(slots=True)
class History:
    """What was recorded of one sequence.

    Attributes:
        held: with how many decisions there had been.
        decided: the same; several when an instance did not take it, or died.
        moved: of the instances that it was on, while it was.
        relocated: where it went on, and where from.
    """

    id: str
    frontend: str
    held: list[tuple[float, int, HeldEntry]] = field(default_factory=list)
    decided: list[tuple[float, int, DecidedEntry]] = field(default_factory=list)
    moved: list[tuple[float, MovedEntry]] = field(default_factory=list)
    relocated: list[tuple[float, RelocatedEntry]] = field(default_factory=list)
    ended: tuple[float, EndedEntry] | None = None

    @property
    def instances(self) -> set[str]:
        if not self.decided:
            return set()
        decision = self.decided[-1][2].decision
        went = {entry.to for _, entry in self.relocated}
        return {decision.prefill} | ({decision.decode} if decision.decode is not None else set()) | went


def pattern_of(request: str) -> re.Pattern[str]:
    """Matches the ids of a request's sequences. A frontend makes them from the client's id: several prompts in one
    request have "-0", "-1" behind it, then eight hexadecimal digits make it unique, and several outputs have "-0", ...
    """
    bare = re.sub(r"^(chatcmpl|cmpl)-", "", request)
    either = "|".join(re.escape(name) for name in dict.fromkeys((request, bare)))
    return re.compile(rf"(?:{either})((-\d+)?-[0-9a-f]{{8}}(-\d+)?)?")


def collect(
    entries: Iterable[tuple[float, Entry]], wanted: re.Pattern[str], found: dict[tuple[str, str], History]
) -> int:
    """Find what belongs to a request; returns how many decisions there are.

    Args:
        entries: the oldest first, with their times in seconds since 1970, UTC.
        wanted: what `pattern_of` made of the request.
        found: gets its sequences, by frontend and id.
    """
    count = 0
    for wall, entry in entries:
        if isinstance(entry, MovedEntry):
            for sequence in found.values():
                if sequence.ended is None and entry.move.name in sequence.instances:
                    sequence.moved.append((wall, entry))
        elif isinstance(entry, ScaledEntry):
            pass  # of no request
        elif wanted.fullmatch(entry.request_id):
            key = entry.frontend, entry.request_id
            sequence = found.setdefault(key, History(entry.request_id, entry.frontend))
            if isinstance(entry, HeldEntry):
                sequence.held.append((wall, count, entry))
            elif isinstance(entry, RelocatedEntry):
                sequence.relocated.append((wall, entry))
            elif isinstance(entry, DecidedEntry):
                sequence.decided.append((wall, count, entry))
                sequence.ended = None  # it is placed again after a failed placement
            else:
                sequence.ended = wall, entry
        count += isinstance(entry, DecidedEntry)
    return count


def as_values(found: History) -> dict[str, Any]:
    """A sequence's history as plain values; what is infinite is null in JSON."""
    first = (found.decided or found.held or [None])[0]
    outcome = None if found.ended is None else found.ended[1].outcome
    predicted = predicted_ms(found.decided[-1][2]) if found.decided else None
    return {
        "id": found.id,
        "frontend": found.frontend,
        "demand": None if first is None else _demand(first[2].demand),
        "placements": [_placement(found, wall, number, decided) for wall, number, decided in found.decided],
        "held": [_held(wall, held) for wall, _, held in found.held],
        "moves": [_moved(wall, moved) for wall, moved in found.moved[:FOLLOWED]],
        "relocated": [
            {"at": shown_time(wall), "from": entry.at, "to": entry.to, "reason": entry.reason}
            for wall, entry in found.relocated[:FOLLOWED]
        ],
        "ended_at": None if found.ended is None else shown_time(found.ended[0]),
        "refused": "" if found.ended is None else found.ended[1].refused,
        "outcome": None
        if outcome is None
        else {
            "ttft_ms": outcome.ttft_ms,
            "tpot_ms": outcome.tpot_ms,
            "queue_ms": outcome.queue_ms,
            "wait": outcome.wait,
            "tokens": outcome.tokens,
            "recoveries": [asdict(recovery) for recovery in outcome.recoveries],
            "images": None if outcome.images is None else _images(outcome.images),
            "image_fallbacks": list(outcome.image_fallbacks),
            "predicted_ttft_ms": predicted,
            "predicted_minus_actual_ttft_ms": None if predicted is None else predicted - outcome.ttft_ms,
        },
    }


def _demand(demand: Demand) -> dict[str, Any]:
    return {
        "prompt_tokens": demand.prompt_tokens,
        "image_tokens": demand.image_tokens,
        "max_tokens": demand.max_tokens,
        "ttft_ms": demand.ttft * 1e3,
        "tpot_ms": demand.tpot * 1e3,
        "priority": demand.priority,
        "offline": demand.offline,
        "interrupted": demand.interrupted,
        "cached_tokens": dict(demand.hits),
        "loaded_tokens": {name: dict(tiers) for name, tiers in demand.loads.items()},
        "excluded": sorted(demand.exclude),
    }


def _images(seen: ImagesSeen) -> dict[str, Any]:
    return {
        "count": seen.count,
        "cached": seen.cached,
        "found": seen.found,
        "looked": seen.looked,
        "brought": seen.brought,
        "encode_ms": seen.encoding * 1e3,
        "waited_ms": seen.waited * 1e3,
    }


def _held(wall: float, held: HeldEntry) -> dict[str, Any]:
    return {"at": shown_time(wall), "asked_again_after_ms": (held.until - held.now) * 1e3}


def _moved(wall: float, moved: MovedEntry) -> dict[str, Any]:
    return {"at": shown_time(wall), **move_values(moved.move)}


def move_values(move: Any) -> dict[str, Any]:
    kind = type(move).__name__.lower()
    return {"what": kind, "instance": move.name, "role": getattr(move, "role", None), "reason": move.reason}


def _placement(found: History, wall: float, number: int, decided: DecidedEntry) -> dict[str, Any]:
    decision, demand = decided.decision, decided.demand
    before = [(count, held) for _, count, held in found.held if held.now <= decided.now]
    return {
        "at": shown_time(wall),
        "waited_ms": (decided.now - demand.arrived) * 1e3,
        "in_queue_ms": (decided.now - before[-1][1].now) * 1e3 if before else 0.0,
        "placed_meanwhile": number - before[-1][0] if before else 0,
        "waiting": decided.waiting - 1,
        "policy": decision.policy,
        "reason": decision.reason,
        "prefill": decision.prefill,
        "decode": decision.decode,
        "predicted_ttft_ms": predicted_ms(decided),
        "predicted_by": "policy" if decision.predicted_ttft is not None else "step times",
        "moves": [move_values(move) for move in decision.moves],
        "way": None if decision.way is None else asdict(decision.way),
        "media_route": decision.media_route,
        "images": [asdict(way) for way in decision.images],
        "instances": decided.instances,
        "stages": {stage: _candidates(decided, stage) for stage in _stages(decided)},
        "replayed": None,
    }


def predicted_ms(decided: DecidedEntry) -> float | None:
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


def shown_time(wall: float) -> str:
    """Of seconds since 1970, UTC."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def first_token(view: ClusterView, demand: Demand, load: InstanceLoad) -> float:
    """Seconds from the view's time to the first token, as predicted. Room for the KV is not waited for."""
    computed = demand.to_compute(load.name)
    ready = max(load.begins_at(view.now, demand), load.idle_at if demand.offline else view.now)
    return ready - view.now + load.prefill_seconds(computed, demand.prompt_tokens - computed)
