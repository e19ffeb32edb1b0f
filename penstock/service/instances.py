"""Instances as a frontend or a master knows them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.heartbeat import step_limit
from penstock.core.wire.engine import Ready, Role

SILENT_AFTER = 2.0  # seconds without a message after which an instance counts as silent


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an instance's engine listens.

    Attributes:
        address: a ZMQ endpoint, such as ipc:///run/d0 or tcp://10.0.0.7:6000.
        role: what it is configured for.
    """

    name: str
    address: str
    role: Role = "any"


@dataclass(frozen=True, slots=True)
class ChannelLost:
    """A connection has ended. Messages in flight may be lost; all that arrived were handled before."""

    message: str


@dataclass(slots=True)
class Instance:
    """An instance as a frontend knows it.

    Attributes:
        ready: what its engine reported; None while none serves.
        said: the same, or of the previous incarnation while none serves.
        heard: when its newest message came, in the clock's seconds.
        lost: why its last incarnation ended; "" before the first, and while one runs.
    """

    name: str
    role: Role
    ready: Ready | None = None
    said: Ready | None = None
    heard: float = 0.0
    lost: str = ""

    def state(self, now: float) -> str:
        """ "starting", "ready", "silent", "stuck" or "lost"."""
        if self.lost:
            return "lost"
        if self.ready is None:
            return "starting"
        return "stuck" if self.stuck(now) else "silent" if now - self.heard > SILENT_AFTER else "ready"

    def serves(self, now: float) -> bool:
        return self.ready is not None and not self.stuck(now)

    def stuck(self, now: float) -> bool:
        """Whether it has been silent for longer than its longest step can take. Usually the launcher notices earlier
        and kills it."""
        ready = self.ready
        if ready is None or now - self.heard <= SILENT_AFTER:
            return False
        return now - self.heard > step_limit(ready.token_budget + ready.max_sequences, ready.device)

    def trouble(self, now: float) -> str:
        """Why it does not serve although it should; "" otherwise."""
        return f"no sign of life from the engine for {now - self.heard:.0f} s" if self.stuck(now) else self.lost

    def is_current(self, incarnation: int) -> bool:
        """Whether this incarnation is the current one."""
        return self.ready is not None and self.ready.peer.incarnation == incarnation
