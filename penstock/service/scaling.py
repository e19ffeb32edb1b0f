"""How many instances there are: when a scaling policy is asked, and what it sees of those that do not serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from penstock.sched.cluster import ClusterView, Fleet, Move, ScalingPolicy, Start, Stop
from penstock.service.session import InstanceSession


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """How many instances may serve, and how long one takes to start, in seconds."""

    least: int
    most: int
    start_seconds: float


class Scaler:
    """Asks the policy in its interval, and remembers who is being started."""

    def __init__(self, policy: ScalingPolicy, limits: FleetLimits) -> None:
        self._policy, self._limits = policy, limits
        self._starting: dict[str, float] = {}  # instance -> when it will serve
        self._next = -inf

    def is_due(self, now: float) -> bool:
        return now >= self._next

    def decide(
        self, now: float, view: ClusterView, names: Iterable[str], sessions: Mapping[str, InstanceSession]
    ) -> Sequence[Move | Start | Stop]:
        """
        Args:
            names: all instances that there can be.
            sessions: of those that serve, or drain.
        """
        self._next = now + self._policy.interval
        fleet = Fleet(
            absent=[name for name in names if name not in sessions and name not in self._starting],
            starting=dict(self._starting),
            draining={name for name, session in sessions.items() if session.leaving},
            least=self._limits.least,
            most=self._limits.most,
        )
        changes = self._policy.decide(view, fleet)
        for change in changes:
            if isinstance(change, Start):
                self._starting[change.name] = now + self._limits.start_seconds
        return changes

    def serves(self, name: str) -> None:
        """It has started."""
        self._starting.pop(name, None)
