"""Puts an engine to sleep and wakes it up again: its memory is given back meanwhile, its process stays.

What it may be told is `Sleep` and `WakeUp` (core/wire/engine.py). The work is a thread's, so that the engine's server
goes on to answer: weights may take long to be read.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial

from penstock.core.errors import ConfigError
from penstock.core.memory import PARTS
from penstock.core.wire.engine import Sleep, Slept, WakeUp
from penstock.engine.executor.base import Memory
from penstock.engine.executor.inline import Job, StepThread
from penstock.engine.loop import Engine

log = logging.getLogger("penstock.engine")
CANNOT = "this engine has no memory to give back"
GIVEN_UP = "it was woken up before all that ran had ended"


@dataclass(slots=True)
class _Order:
    client: str
    command: Sleep | WakeUp


class Sleeper:
    """One engine's sleep. Orders are carried out one after the other.

    Args:
        incarnation: of the engine.
        memory: None where it has none that could be given back.

    Attributes:
        level: at which it sleeps or is about to; while it is not 0 nothing new may be taken in.
        orders: that are not carried out; `tick` is for when there are any.
    """

    def __init__(self, incarnation: int, engine: Engine, memory: Memory | None) -> None:
        self.level = 0
        self.orders: deque[_Order] = deque()
        self._incarnation, self._engine, self._memory = incarnation, engine, memory
        self._asleep = 0  # the level that is reached
        self._there = set(PARTS)
        self._thread: StepThread[None] | None = None
        self._job: Job[None] | None = None  # of the first order

    def order(self, client: str, command: Sleep | WakeUp) -> list[tuple[str, Slept]]:
        """Returns whom to tell what at once."""
        if self._memory is None:
            return [self._answer(_Order(client, command), CANNOT)]
        given_up: list[tuple[str, Slept]] = []
        if isinstance(command, WakeUp):
            waiting = [order for order in self.orders if isinstance(order.command, Sleep)]
            if self._job is not None and waiting and waiting[0] is self.orders[0]:
                del waiting[0]  # it is under way, and is ended first
            for order in waiting:
                self.orders.remove(order)
            self.level = self._next_level()
            given_up = [self._answer(order, GIVEN_UP) for order in waiting]
        self.orders.append(_Order(client, command))
        self.level = self._next_level()
        return given_up

    def tick(self) -> list[tuple[str, Slept]]:
        """Go on with the orders. Returns whom to tell what. Raises what is the engine's end, such as RankFailed."""
        told: list[tuple[str, Slept]] = []
        while self.orders:
            if self._job is None and not self._begin(self.orders[0].command):
                break
            if self._job is not None and not self._job.done():
                break
            told.append(self._end())
        return told

    def settle(self) -> None:
        """Return when nothing is under way."""
        if self._thread is not None:
            self._thread.settle()

    def _begin(self, command: Sleep | WakeUp) -> bool:
        """False: something runs that is to end first."""
        assert self._memory is not None
        match command:
            case Sleep(level=level):
                if level <= self._asleep and not self._there:
                    return True
                if not self._engine.at_rest:
                    return False
                blocks = self._engine.clear_cache()
                self._give(partial(self._memory.sleep, max(level, self._asleep), blocks))
            case WakeUp(parts=parts):
                if missing := [part for part in PARTS if part in parts and part not in self._there]:
                    self._give(partial(self._memory.wake_up, missing))
        return True

    def _give(self, work: partial[None]) -> None:
        self._thread = self._thread or StepThread()
        self._job = self._thread.give(work)

    def _end(self) -> tuple[str, Slept]:
        """Of the first order, which is done."""
        order, job, error = self.orders.popleft(), self._job, ""
        self._job = None
        try:
            if job is not None:
                job.result()
        except ConfigError as failure:
            error = str(failure)
        else:
            self._done(order.command)
        self.level = self._next_level()
        if error:
            log.error("the engine cannot wake up: %s", error)
        elif job is not None:
            log.info("the engine %s", f"sleeps at level {self._asleep}" if self._asleep else "is awake")
        return self._answer(order, error)

    def _done(self, command: Sleep | WakeUp) -> None:
        if isinstance(command, Sleep):
            self._asleep = max(self._asleep, command.level)
            self._there.clear()
            return
        self._there.update(command.parts)
        if self._asleep and self._there.issuperset(PARTS):
            self._asleep = 0
            self._engine.expect()

    def _next_level(self) -> int:
        """With all orders to sleep carried out."""
        return max([self._asleep, *(o.command.level for o in self.orders if isinstance(o.command, Sleep))])

    def _answer(self, order: _Order, error: str = "") -> tuple[str, Slept]:
        return order.client, Slept(self._incarnation, order.command.number, self.level, error)
