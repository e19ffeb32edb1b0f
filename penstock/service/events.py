"""Events and actions of the master."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from penstock.core.wire.engine import Command, Event, Role
from penstock.core.wire.master import FrontendMessage, MasterMessage
from penstock.service.instances import ChannelLost


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
class StartInstance:
    """Start an incarnation of the instance."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class StopInstance:
    """Stop the instance, which has no requests left."""

    name: str


@dataclass(frozen=True, slots=True)
class Notice:
    """For the log."""

    text: str


Happening = FromEngine | FromFrontend
Action = ToEngine | ToFrontend | StartInstance | StopInstance | Notice
