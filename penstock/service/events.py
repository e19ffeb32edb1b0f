"""What happens to a master, and what it wants to be done."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.wire.engine import Command, Event, Pool
from penstock.core.wire.master import FrontendMessage, MasterMessage
from penstock.service.instances import LinkLost


@dataclass(frozen=True, slots=True)
class FromEngine:
    name: str
    event: Event | LinkLost


@dataclass(frozen=True, slots=True)
class FromFrontend:
    name: str
    message: FrontendMessage


@dataclass(frozen=True, slots=True)
class ToEngine:
    name: str
    command: Command


@dataclass(frozen=True, slots=True)
class ToFrontend:
    name: str
    message: MasterMessage


@dataclass(frozen=True, slots=True)
class StartInstance:
    """Somebody is to begin a life of it."""

    name: str
    pool: Pool


@dataclass(frozen=True, slots=True)
class StopInstance:
    """It has nothing left, and is to end."""

    name: str


@dataclass(frozen=True, slots=True)
class Notice:
    """For the log."""

    text: str


Happening = FromEngine | FromFrontend
Action = ToEngine | ToFrontend | StartInstance | StopInstance | Notice
