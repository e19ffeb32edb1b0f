"""The flight recorder: the master's views and decisions, and their outcomes.

In memory it is a bounded ring of references to immutable objects, so recording is cheap.
`recording.py` turns entries into records, `recorder_file.py` writes and reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from penstock.core.wire.master import Outcome
from penstock.sched.cluster import ClusterView, Decision, Demand, FleetChange, Later, Migration, Verdict

DECISIONS = 10_000  # kept at most
LOADS = 200_000  # instances' loads and waiting demands that they refer to, at most
RECENT, RECENT_LOADS = 2_000, 100_000  # the same of a master that writes no file, and is asked about what just happened


@dataclass(frozen=True, slots=True)
class DecidedEntry:
    """A sequence was given a place.

    Attributes:
        view: that it was decided over. One that was read from a file may lack instances and the end of a long queue.
        instances, waiting: how many there were in truth.
    """

    now: float
    request_id: str
    frontend: str
    demand: Demand
    decision: Decision
    view: ClusterView
    instances: int
    waiting: int

    @property
    def weight(self) -> int:
        return 1 + len(self.view.instances) + len(self.view.queue) + len(self.view.offline)


@dataclass(frozen=True, slots=True)
class HeldEntry:
    """A sequence began to wait in the master's queue.

    Attributes:
        until: when the policy is asked again although nothing has happened; inf for never.
    """

    now: float
    request_id: str
    frontend: str
    demand: Demand
    until: float
    weight = 1


@dataclass(frozen=True, slots=True)
class MovedEntry:
    """An instance changes its role, is started, or is stopped."""

    now: float
    move: FleetChange
    weight = 1


@dataclass(frozen=True, slots=True)
class ScaledEntry:
    """What a scaling policy found about each stage, also where nothing follows."""

    now: float
    verdicts: Sequence[Verdict]
    weight = 1


@dataclass(frozen=True, slots=True)
class RelocatedEntry:
    """It was decided where a sequence goes on: after its prompt, or while it decodes.

    Attributes:
        at: the instance that it was at.
        to: the same where it stays.
    """

    now: float
    request_id: str
    frontend: str
    at: str
    to: str
    reason: str
    weight = 1


@dataclass(frozen=True, slots=True)
class EndedEntry:
    """A sequence has ended; without an outcome when its answer is incomplete.

    Attributes:
        refused: what happened, where it was given up because it breaks engines; else "".
    """

    now: float
    request_id: str
    frontend: str
    outcome: Outcome | None
    refused: str = ""
    weight = 1


Entry = DecidedEntry | HeldEntry | MovedEntry | ScaledEntry | RelocatedEntry | EndedEntry


class Recorder(Protocol):
    """Records decisions and their outcomes."""

    def decided(
        self, now: float, view: ClusterView, demand: Demand, request_id: str, frontend: str, decision: Decision
    ) -> None: ...
    def held(self, now: float, demand: Demand, request_id: str, frontend: str, later: Later) -> None: ...
    def moved(self, now: float, move: FleetChange) -> None: ...
    def scaled(self, now: float, verdicts: Sequence[Verdict]) -> None: ...
    def relocated(self, now: float, at: str, migration: Migration) -> None: ...
    def ended(self, now: float, request_id: str, frontend: str, outcome: Outcome | None, refused: str = "") -> None: ...


class FlightRecorder:
    """
    Args:
        decisions: kept at most; the oldest go first.
        loads: that they refer to, at most: with many instances or a long queue there are fewer decisions.

    Attributes:
        entries: the oldest first.
        total: entries there have been.
    """

    def __init__(self, decisions: int = DECISIONS, loads: int = LOADS) -> None:
        self.entries: deque[Entry] = deque()
        self.total = 0
        self._decisions, self._loads = decisions, loads
        self._decided = self._weight = 0

    def decided(
        self, now: float, view: ClusterView, demand: Demand, request_id: str, frontend: str, decision: Decision
    ) -> None:
        waiting = len(view.queue) + len(view.offline)
        self._decided += 1
        self._add(DecidedEntry(now, request_id, frontend, demand, decision, view, len(view.instances), waiting))

    def held(self, now: float, demand: Demand, request_id: str, frontend: str, later: Later) -> None:
        self._add(HeldEntry(now, request_id, frontend, demand, later.at))

    def moved(self, now: float, move: FleetChange) -> None:
        self._add(MovedEntry(now, move))

    def scaled(self, now: float, verdicts: Sequence[Verdict]) -> None:
        self._add(ScaledEntry(now, verdicts))

    def relocated(self, now: float, at: str, migration: Migration) -> None:
        frontend, request_id = migration.key
        self._add(RelocatedEntry(now, request_id, frontend, at, migration.to, migration.reason))

    def ended(self, now: float, request_id: str, frontend: str, outcome: Outcome | None, refused: str = "") -> None:
        self._add(EndedEntry(now, request_id, frontend, outcome, refused))

    def since(self, total: int) -> list[Entry]:
        """The remaining entries after the first `total`."""
        new = min(self.total - total, len(self.entries))
        return list(islice(reversed(self.entries), new))[::-1]

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.total += 1
        self._weight += entry.weight
        while self._decided > self._decisions or (self._weight > self._loads and len(self.entries) > 1):
            oldest = self.entries.popleft()
            self._weight -= oldest.weight
            self._decided -= isinstance(oldest, DecidedEntry)
