"""What drives a `Master`: the wires to engines, the clock, and for a master of its own process the frontends' wire."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec
import zmq

from penstock.core.clock import Clock
from penstock.core.wire import codec
from penstock.core.wire.engine import Command, Event
from penstock.core.wire.master import decode_from_frontend
from penstock.service.inbox import Inbox
from penstock.service.instances import LinkLost
from penstock.service.master import FromEngine, FromFrontend, Happening, Master, Notice, ToEngine, ToFrontend

log = logging.getLogger("penstock.master")
TICK = 0.25  # seconds


class ToEngineLink(Protocol):
    """A link to an engine."""

    def send(self, message: Command, /) -> None: ...
    async def receive(self) -> Event | LinkLost: ...
    def close(self) -> None: ...


class MasterPump:
    """Carries what happens to the master, and what it wants to the engines.

    Args:
        links: to every instance, by name.
    """

    def __init__(self, master: Master, links: Mapping[str, ToEngineLink], clock: Clock) -> None:
        self.master = master
        self._links = links
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin; call it inside the event loop."""
        self._tasks = [asyncio.create_task(self._listen(name)) for name in self._links]
        self._tasks.append(asyncio.create_task(self._keep_time()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            link.close()

    def handle(self, happening: Happening | None) -> list[ToFrontend]:
        """Act on what happened; returns what frontends are to be told."""
        answers = []
        for action in self.master.tick(self._clock.now(), happening):
            match action:
                case ToEngine(name, command):
                    self._links[name].send(command)
                case ToFrontend():
                    answers.append(action)
                case Notice(text):
                    log.info("%s", text)
        return answers

    async def _listen(self, name: str) -> None:
        while True:
            try:
                event = await self._links[name].receive()
            except msgspec.DecodeError as error:
                event = LinkLost(f"a message from it could not be read: {error}")
            try:
                self.handle(FromEngine(name, event))
            except Exception:  # the other instances go on
                log.exception("the master failed on what %s said", name)

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self.handle(None)


async def serve_frontends(pump: MasterPump, context: zmq.SyncContext, address: str) -> None:
    """Answer frontends until cancelled.

    Args:
        address: a ZMQ endpoint to bind.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a frontend that came back is the same frontend
    socket.bind(address)

    def answer(frames: list[bytes]) -> None:
        sender, *rest = frames
        try:
            message = decode_from_frontend(b"".join(rest))
        except msgspec.DecodeError as error:
            log.warning("a message that is none of a frontend's was dropped: %s", error)
            return
        try:
            for action in pump.handle(FromFrontend(sender.decode(errors="replace"), message)):
                socket.send_multipart([sender, codec.encode(action.message)])
        except Exception:  # the other frontends go on
            log.exception("the master failed on what %s asked", sender.decode(errors="replace"))

    inbox = Inbox(socket, answer)
    inbox.open()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        inbox.close()
        socket.close()
