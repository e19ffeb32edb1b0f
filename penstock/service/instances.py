"""Where instances are, and the end of a channel to one."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.wire.engine import Role


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
