"""Events and actions of the master."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from penstock.core.wire.engine import Command, Event
from penstock.core.wire.master import (
    FrontendMessage,
    MasterMessage,
    RestartInstance,
    StartInstance,
    StopInstance,
    Troubles,
)
from penstock.service.instances import ChannelLost, InstanceJoined, InstanceLeft


class FromEngine(Struct, frozen=True):
    name: str
    event: Event | ChannelLost


class FromFrontend(Struct, frozen=True):
    name: str
    message: FrontendMessage


class ToEngine(Struct, frozen=True):
    name: str
    command: Command


class ToFrontend(Struct, frozen=True):
    name: str
    message: MasterMessage


@dataclass(frozen=True, slots=True)
class Notice:
    """For the log."""

    text: str


Happening = FromEngine | FromFrontend | InstanceJoined | InstanceLeft | Troubles
Action = ToEngine | ToFrontend | StartInstance | StopInstance | RestartInstance | Notice
