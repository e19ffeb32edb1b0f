"""The requests of other instances that wait for room, first come, first served (xLLM, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import Lease, Reserve


@dataclass(slots=True, eq=False)
class Waiter:
    """
    Attributes:
        message: what its sender asked.
        since: when it came.
        deadline: when it is given up, unless it is asked for again.
    """

    sender: Peer
    message: Reserve
    since: float
    deadline: float

    @property
    def lease(self) -> Lease:
        return self.message.lease

    @property
    def id(self) -> str:
        return self.message.lease.request_id

    @property
    def frontend(self) -> str:
        return self.message.frontend


class MigrationQueue:
    """One for an instance: online requests before offline ones, each in order of arrival. Nobody overtakes, so that
    what needs much room gets it in the end.

    Attributes:
        granted: requests that left it for blocks; `waited`: seconds that these were in it together.
        first_waits: seconds that the first has waited, when it was last looked at.
    """

    def __init__(self) -> None:
        self.granted = 0
        self.waited = self.first_waits = 0.0
        self._line: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, lease: Lease) -> bool:
        return any(waiter.lease == lease for waiter in self._line)

    def ids(self) -> list[str]:
        return [waiter.id for waiter in self._line]

    @property
    def first(self) -> Waiter | None:
        return self._line[0] if self._line else None

    def add(self, now: float, sender: Peer, message: Reserve, deadline: float) -> None:
        place = len(self._line)
        if not message.request.offline:
            place = next((i for i, other in enumerate(self._line) if other.message.request.offline), place)
        self._line.insert(place, Waiter(sender, message, now, deadline))

    def renew(self, lease: Lease, deadline: float) -> bool:
        """It is still wanted. False when it does not wait."""
        for waiter in self._line:
            if waiter.lease == lease:
                waiter.deadline = deadline
                return True
        return False

    def look(self, now: float) -> None:
        self.first_waits = now - self._line[0].since if self._line else 0.0

    def take(self, now: float) -> None:
        """The first has its blocks."""
        self.granted += 1
        self.waited += now - self._line.pop(0).since
        self.look(now)

    def refuse(self) -> None:
        """The first can never have any."""
        del self._line[0]

    def drop(self, gone: Callable[[Waiter], bool]) -> list[Waiter]:
        """Those that wait no longer."""
        if not self._line:
            return []
        dropped = [waiter for waiter in self._line if gone(waiter)]
        if dropped:
            self._line = [waiter for waiter in self._line if waiter not in dropped]
        return dropped
