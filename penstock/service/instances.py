"""The instances that a frontend or a master speaks with."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.heartbeat import step_limit
from penstock.core.wire.engine import Ready, Role

SILENT_AFTER = 2.0  # seconds without a word after which an instance is said to be silent


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
    """A connection has ended. Whatever was under way on it may be lost; everything that came was received before."""

    message: str


@dataclass(slots=True)
class Instance:
    """An instance as a frontend knows it.

    Attributes:
        ready: what its engine said of itself; None while nobody serves there.
        said: the same, of the life before when nobody serves there now.
        heard: when its newest word came, in the clock's seconds.
        lost: why its last life is over; "" before the first has begun, and while one lasts.
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
        """Whether it has been silent for longer than its longest step can take. Whoever started it knows earlier, and
        ends it; then it is lost."""
        ready = self.ready
        if ready is None or now - self.heard <= SILENT_AFTER:
            return False
        return now - self.heard > step_limit(ready.token_budget + ready.max_sequences, ready.device)

    def trouble(self, now: float) -> str:
        """Why it does not serve although it did, or should; "" otherwise."""
        return f"no sign of life from the engine for {now - self.heard:.0f} s" if self.stuck(now) else self.lost

    def is_current(self, incarnation: int) -> bool:
        """Whether that life is the present one."""
        return self.ready is not None and self.ready.peer.incarnation == incarnation
