"""What the master shows of itself: its instances, and the latest decisions of its recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from penstock.core.wire.master import (
    DecisionOverview,
    Endpoint,
    History,
    InstanceOverview,
    MoveOverview,
    Overview,
    RelocationOverview,
    StageOverview,
)
from penstock.sched.cluster import Verdict
from penstock.service.history import History as Found
from penstock.service.history import as_values, collect, move_values, pattern_of, shown_time
from penstock.service.recorder import DecidedEntry, Entry, FlightRecorder, MovedEntry, RelocatedEntry
from penstock.service.session import InstanceSession

DECISIONS, MOVES = 20, 10  # the latest, that are shown; moves of instances, and as many of sequences


def instance_overview(
    endpoint: Endpoint, session: InstanceSession | None, state: str, slow: str = ""
) -> InstanceOverview:
    """
    Args:
        session: None where no engine serves.
        state: of that, as the master sees it.
        slow: see `InstanceOverview`.
    """
    if session is None:
        state = state if endpoint.runs else "stopped"
        return InstanceOverview(name=endpoint.name, role=endpoint.role, state=state, slow=slow)
    load, seen = session.view(), session.snapshot
    known = InstanceOverview(
        name=endpoint.name,
        role=session.role,
        state=state,
        device=session.ready.device,
        running=len(session.begun),
        waiting=len(session.prompts),
        pending_tokens=load.pending_tokens,
        held_tokens=load.held_tokens,
        used_blocks=load.num_blocks - load.free_blocks,
        num_blocks=load.num_blocks,
        slow=slow,
        image_tokens=session.encoding_tokens,
    )
    if seen is None:
        return known
    return msgspec.structs.replace(
        known,
        running=seen.running,
        waiting=seen.waiting,
        migrating=seen.migrating,
        migration_queue=seen.migration_queue,
        ttft_ms=seen.ttft_ms,
        tpot_ms=seen.tpot_ms,
        interval_ms=seen.interval_ms,
        speed=seen.speed,
        encodes=seen.encodes,
        encode_ms=seen.encode_ms,
    )


def stage_overview(verdict: Verdict) -> StageOverview:
    return StageOverview(verdict.role, verdict.serving, verdict.starting, verdict.more, verdict.reason, verdict.outcome)


def with_decisions(overview: Overview, recorder: FlightRecorder, wall: Callable[[float], float]) -> Overview:
    """
    Args:
        wall: the master's clock -> seconds since 1970, UTC.
    """
    decisions: list[DecisionOverview] = []
    moves: list[MoveOverview] = []
    relocations: list[RelocationOverview] = []
    for entry in reversed(recorder.entries):
        if isinstance(entry, DecidedEntry) and len(decisions) < DECISIONS:
            decisions.append(_decision(entry, shown_time(wall(entry.now))))
        elif isinstance(entry, MovedEntry) and len(moves) < MOVES:
            moves.append(MoveOverview(shown_time(wall(entry.now)), **move_values(entry.move)))
        elif isinstance(entry, RelocatedEntry) and entry.at != entry.to and len(relocations) < MOVES:
            at = shown_time(wall(entry.now))
            relocations.append(RelocationOverview(at, entry.request_id, entry.at, entry.to, entry.reason))
        elif len(decisions) == DECISIONS and len(moves) == len(relocations) == MOVES:
            break
    return msgspec.structs.replace(overview, decisions=decisions, moves=moves, relocations=relocations)


def _decision(entry: DecidedEntry, at: str) -> DecisionOverview:
    made = entry.decision
    waited = (entry.now - entry.demand.arrived) * 1e3
    return DecisionOverview(at, entry.request_id, made.prefill, made.decode, made.policy, made.reason, waited)


def history_of(recorder: FlightRecorder, number: int, request: str, wall: Callable[[float], float]) -> History:
    """The answer to `AskHistory`; `wall` as above."""
    found: dict[tuple[str, str], Found] = {}
    decisions = collect(_timed(recorder, wall), pattern_of(request), found)
    sequences = [as_values(sequence) for sequence in found.values()]
    return History(number, decisions, msgspec.json.encode(sequences) if sequences else b"")


def _timed(recorder: FlightRecorder, wall: Callable[[float], float]) -> Iterator[tuple[float, Entry]]:
    for entry in recorder.entries:
        yield wall(entry.now), entry
