"""How a frontend finds out where a sequence shall run: by asking a master, here or elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.core.clock import Clock
from penstock.core.errors import Unavailable
from penstock.core.wire import PROTOCOL
from penstock.core.wire.master import Ended, FrontendMessage, Join, Joined, MasterMessage, NoPlace, Place, Placed
from penstock.service.instances import LinkLost
from penstock.service.master import FromFrontend
from penstock.service.master_pump import MasterPump

log = logging.getLogger("penstock.frontend")
PATIENCE = 5.0  # seconds that an answer may take; a master that died is back by then


class Placement(Protocol):
    @property
    def trouble(self) -> str:
        """Why nothing can be placed now; "" when it can."""

    def start(self) -> None:
        """Begin; call it inside the event loop."""

    async def place(self, place: Place) -> Placed:
        """Raises Unavailable when nobody can take it now, or nobody can be asked."""

    def ended(self, request_ids: Sequence[str]) -> None:
        """These sequences are over."""

    async def close(self) -> None: ...


class LocalPlacement:
    """The master is in this process."""

    trouble = ""

    def __init__(self, pump: MasterPump, sender: str) -> None:
        self._pump, self._sender = pump, sender
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._pump.start()
        self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while True:
            self._pump.handle(FromFrontend(self._sender, Join(self._sender)))
            await asyncio.sleep(1.0)

    async def place(self, place: Place) -> Placed:
        (answer,) = self._pump.handle(FromFrontend(self._sender, place))
        return _checked(answer.message)

    def ended(self, request_ids: Sequence[str]) -> None:
        self._pump.handle(FromFrontend(self._sender, Ended(list(request_ids))))

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._pump.close()


class ToMaster(Protocol):
    """A link to the master."""

    connected: bool

    def send(self, message: FrontendMessage, /) -> None: ...
    async def receive(self) -> MasterMessage | LinkLost: ...
    def close(self) -> None: ...


class RemotePlacement:
    """The master is another process. What it was asked when it died, its next life is asked again."""

    def __init__(self, link: ToMaster, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._absent = "it has not answered yet"
        self._absent_since = float("-inf")
        self._asked: dict[tuple[str, int], tuple[Place, asyncio.Future[MasterMessage]]] = {}
        self._listening: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._listening = asyncio.create_task(self._listen())

    @property
    def trouble(self) -> str:
        """A master that is away for less than `PATIENCE` is none: what is asked meanwhile waits."""
        away = self._absent and self._clock.now() - self._absent_since > PATIENCE
        return f"the master cannot be asked: {self._absent}" if away else ""

    async def place(self, place: Place) -> Placed:
        key = (place.request_id, place.generation)
        answer: asyncio.Future[MasterMessage] = asyncio.get_running_loop().create_future()
        self._asked[key] = (place, answer)
        self._link.send(place)
        try:
            async with asyncio.timeout(PATIENCE):
                return _checked(await answer)
        except TimeoutError:
            raise Unavailable(f"the master cannot be asked: {self._absent or 'it does not answer'}") from None
        finally:
            del self._asked[key]

    def ended(self, request_ids: Sequence[str]) -> None:
        self._link.send(Ended(list(request_ids)))

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._link.close()

    async def _listen(self) -> None:
        while True:
            try:
                self._handle(await self._link.receive())
            except msgspec.DecodeError as error:
                log.warning("a message from the master could not be read: %s", error)

    def _handle(self, message: MasterMessage | LinkLost) -> None:
        match message:
            case LinkLost(message=reason):
                log.warning("the master has gone: %s", reason)
                self._absent, self._absent_since = reason, self._clock.now()
            case Joined(protocol=protocol):
                back, self._absent = bool(self._absent), ""
                if protocol != PROTOCOL:
                    self._absent = f"it speaks protocol {protocol}, this frontend {PROTOCOL}"
                elif back:
                    for place, _ in self._asked.values():
                        self._link.send(place)
            case Placed() | NoPlace():
                _, answer = self._asked.get((message.request_id, message.generation), (None, None))
                if answer is not None and not answer.done():
                    answer.set_result(message)


def _checked(answer: MasterMessage) -> Placed:
    if isinstance(answer, NoPlace):
        raise Unavailable(answer.message, answer.retry_after)
    assert isinstance(answer, Placed)
    return answer
