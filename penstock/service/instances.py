"""What happens to instances: they join the deployment and leave it, and the channel to one ends."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.wire.master import Endpoint


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    """It is part of the deployment from now on, or has another address, role or state than before."""

    endpoint: Endpoint

    @property
    def name(self) -> str:
        return self.endpoint.name


@dataclass(frozen=True, slots=True)
class InstanceLeft:
    name: str
    why: str


Change = InstanceJoined | InstanceLeft


@dataclass(frozen=True, slots=True)
class ChannelLost:
    """A connection has ended. Messages in flight may be lost; all that arrived were handled before."""

    message: str
