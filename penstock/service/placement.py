"""How a frontend finds out where a sequence shall run: it asks a master, in another process here, in its own in
`master_pump.LocalPlacement`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import msgspec

from penstock.core.clock import PAUSE, Clock
from penstock.core.errors import Unavailable
from penstock.core.wire import PROTOCOL
from penstock.core.wire.master import (
    AskHistory,
    AskMembers,
    AskOverview,
    Begun,
    Ended,
    EngineEnded,
    FleetTotals,
    FromMaster,
    History,
    Joined,
    Members,
    NoPlace,
    Outcome,
    Overview,
    Place,
    Placed,
    PrefixTotals,
    Queued,
    Relocate,
    Settled,
    Troubles,
)
from penstock.service.channel import MasterChannel
from penstock.service.flight import peers_of
from penstock.service.instances import ChannelLost
from penstock.service.registry import ToldRegistry

log = logging.getLogger("penstock.frontend")
PATIENCE = 10.0  # seconds that an answer may take; a master that hung or failed is back by then
FALL_BACK_AFTER = 0.5  # seconds without the master after which a frontend decides by itself
QUEUED_AFTER = 3.0  # the same of what it had queued: engines get no whole queue at once because it starts again
SILENT_AFTER = 3.0  # seconds without a message, of which one comes every second, after which the master is away

NOBODY: Mapping[str, str] = {}
Answer = Placed | NoPlace | Queued | Relocate
Answered = Callable[[Answer], None]
Choose = Callable[[Place], Placed | None]


class Placement(Protocol):
    """
    Attributes:
        troubles: instance -> why it cannot serve, or may not be able to, as its launcher says.
    """

    troubles: Mapping[str, str]

    @property
    def prefixes(self) -> PrefixTotals | None:
        """What an ideal cache would have found; None while that is not known."""

    @property
    def fleet(self) -> FleetTotals | None:
        """What the instances cost, as the master said last; None where it did not."""

    @property
    def trouble(self) -> str:
        """Why no sequence can be placed now; "" when one can."""

    @property
    def wants_keys(self) -> bool:
        """Whether a question needs prefix keys."""

    @property
    def waiting(self) -> int:
        """Sequences without a placement: this frontend's, and the others' as last reported by the master."""

    def start(self, answered: Answered, choose: Choose) -> None:
        """Begin; call it inside the event loop. `answered` gets every answer, possibly before `ask` returns. After
        `Queued` there is another one. `Relocate` comes unasked, to sequences that have a place. `choose` finds a place
        without the master, if there is any."""

    def ask(self, place: Place) -> None:
        """Ask for a placement. There is always an answer, unless the sequence ends before."""

    def begun(self, request_ids: Sequence[str]) -> None:
        """The first tokens of these have come."""

    def settled(self, settled: Settled) -> None:
        """A hand-off is over, or an earlier attempt goes on after all. What was asked for later is dropped."""

    def ended(
        self, request_ids: Sequence[str], outcomes: Sequence[Outcome] = (), refused: Mapping[str, str] = NOBODY
    ) -> None:
        """These sequences have ended; their questions are dropped. See `Ended`."""

    async def overview(self) -> Overview:
        """How the deployment does. Raises Unavailable without an answer from the master."""

    async def history(self, request: str) -> History:
        """Why a request ran where it did. Raises Unavailable likewise."""

    def tick(self, now: float) -> None:
        """Handle time-outs; call it a few times a second."""

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Question:
    """
    Attributes:
        since: when it was asked; its patience counts from `patient_since`.
        queued: by a master that is lost.
    """

    place: Place
    since: float
    patient_since: float
    queued: bool = False

    def again(self, now: float) -> Place:
        """As it is to be asked now."""
        return msgspec.structs.replace(self.place, waited=self.place.waited + now - self.since)


class RemotePlacement:
    """The master is another process. Questions that it has not answered when it fails or falls silent are asked again
    of the next incarnation. Until there is one this frontend decides itself, where a master has ever been.

    Attributes:
        wants_keys, troubles: as the master said last.
        registry: of the instances that it told of.
        engine_ended: is told how engines ended.
        troubled: is called when `troubles` has changed.
    """

    def __init__(self, channel: MasterChannel, clock: Clock) -> None:
        self._choose: Choose = _not_started
        self._missed = float("inf")  # since when there is none
        self._channel = channel
        self._clock = clock
        self.registry = ToldRegistry(lambda: channel.send(AskMembers()))
        self._absent = "it has not answered yet"
        self._heard = float("-inf")
        self._ticked = clock.now()
        self._said_waiting = 0
        self.fleet: FleetTotals | None = None
        self.prefixes: PrefixTotals | None = None
        self.wants_keys = False
        self.troubles: Mapping[str, str] = {}
        self._asked: dict[str, _Question] = {}  # by request id
        self._queued: dict[str, _Question] = {}  # the same, of those that the master has queued
        self._learning: dict[int, asyncio.Future[Overview | History]] = {}  # questions of operators, by number
        self._learned = 0  # the last of these numbers
        self._answered: Answered = _not_started
        self.engine_ended: Callable[[EngineEnded], None] = _not_started
        self.troubled: Callable[[], object] = lambda: None

    def start(self, answered: Answered, choose: Choose) -> None:
        self._answered, self._choose = answered, choose
        self._channel.open(self._handle)

    @property
    def trouble(self) -> str:
        """The absence of a master that was there is no trouble."""
        return f"the master cannot be asked: {self._absent}" if self._absent and self._missed == float("inf") else ""

    @property
    def waiting(self) -> int:
        ours = len(self._asked) + len(self._queued)
        return ours if self._absent else max(ours, self._said_waiting)

    def ask(self, place: Place) -> None:
        now = self._clock.now()
        self._drop(place.request_id)
        self._asked[place.request_id] = _Question(place, now, now)
        self._channel.send(place)
        if now - self._missed >= FALL_BACK_AFTER:
            self._decide(place)

    def begun(self, request_ids: Sequence[str]) -> None:
        self._channel.send(Begun(list(request_ids)))

    def settled(self, settled: Settled) -> None:
        self._drop(settled.request_id)
        self._channel.send(settled)

    def ended(
        self, request_ids: Sequence[str], outcomes: Sequence[Outcome] = (), refused: Mapping[str, str] = NOBODY
    ) -> None:
        for request_id in request_ids:
            self._drop(request_id)
        self._channel.send(Ended(list(request_ids), list(outcomes), dict(refused)))

    def _drop(self, request_id: str) -> None:
        self._asked.pop(request_id, None)
        self._queued.pop(request_id, None)

    async def overview(self) -> Overview:
        answer = await self._learn(AskOverview(self._number()))
        assert isinstance(answer, Overview)
        return answer

    async def history(self, request: str) -> History:
        answer = await self._learn(AskHistory(self._number(), request))
        assert isinstance(answer, History)
        return answer

    def _number(self) -> int:
        self._learned += 1
        return self._learned

    async def _learn(self, question: AskOverview | AskHistory) -> Overview | History:
        if self._absent:
            raise Unavailable(f"the master cannot be asked: {self._absent}")
        future = self._learning[question.number] = asyncio.get_running_loop().create_future()
        self._channel.send(question)
        try:
            async with asyncio.timeout(SILENT_AFTER):
                return await future
        except TimeoutError:
            raise Unavailable("the master cannot be asked: it does not answer") from None
        finally:
            del self._learning[question.number]

    def tick(self, now: float) -> None:
        """Refuse questions that have timed out."""
        if now - self._ticked > PAUSE:  # this process did not run, and the master perhaps did not either
            self._heard += now - self._ticked
        self._ticked = now
        if not self._absent and now - self._heard > SILENT_AFTER:
            self._miss(f"nothing was heard of it for {now - self._heard:.0f} s")
        for question in list(self._asked.values()):
            if now - self._missed >= (QUEUED_AFTER if question.queued else FALL_BACK_AFTER):
                self._decide(question.again(now))
        why = f"the master cannot be asked: {self._absent or 'it does not answer'}"
        for request_id, question in list(self._asked.items()):
            if now - question.patient_since > max(PATIENCE, question.place.patience) and request_id in self._asked:
                del self._asked[request_id]
                self._answered(NoPlace(request_id, question.place.generation, why))

    def move(self, address: str) -> None:
        """The master is there now; nowhere with ""."""
        self._channel.move(address)

    async def close(self) -> None:
        self._channel.close()

    def _miss(self, reason: str) -> None:
        """The master is lost."""
        log.warning("the master has gone: %s", reason)
        self._absent = reason
        self._missed = min(self._missed, self._clock.now())
        for question in self._queued.values():
            question.patient_since, question.queued = self._clock.now(), True
        self._asked |= self._queued
        self._queued.clear()

    def _decide(self, place: Place) -> None:
        """In place of the master, if there is a place."""
        placed = self._choose(place)
        if placed is not None and place.request_id in self._asked:
            del self._asked[place.request_id]
            first = peers_of(placed.route)[0].name
            self._channel.send(Settled(place.request_id, place.generation, first))  # the master may only stand still
            self._answered(placed)

    def _handle(self, message: FromMaster | ChannelLost | msgspec.DecodeError) -> None:
        if isinstance(message, msgspec.DecodeError):
            log.warning("a message from the master could not be read: %s", message)
            return
        if isinstance(message, ChannelLost):
            self._miss(message.message)
            return
        now = self._clock.now()
        match message:
            case Joined(protocol=protocol) if protocol != PROTOCOL:
                self._absent, self._heard = f"it speaks protocol {protocol}, this frontend {PROTOCOL}", float("-inf")
                self._missed = float("inf")
            case Joined():
                back, self._absent, self._heard = bool(self._absent), "", now
                self._missed = float("inf")
                self.wants_keys, self._said_waiting = message.wants_keys, message.waiting
                self.troubles, self.fleet, self.prefixes = message.troubles, message.fleet, message.prefixes
                self.registry.expect(message.incarnation, message.members)
                if back:
                    for question in self._asked.values():
                        self._channel.send(question.again(now))
            case Members():
                self.registry.hear(message)
            case Troubles():
                self.troubles = message.troubles
                self.troubled()
            case EngineEnded():
                self.engine_ended(message)
            case Placed() | NoPlace() | Queued():
                self._heard = now
                self._pass_on(message)
            case Relocate():
                self._answered(message)
            case Overview() | History():
                learning = self._learning.get(message.number)
                if learning is not None and not learning.done():
                    learning.set_result(message)

    def _pass_on(self, answer: Answer) -> None:
        """Pass an answer on, unless it is to an earlier question."""
        request_id = answer.request_id
        question = self._asked.get(request_id) or self._queued.get(request_id)
        if question is not None and question.place.generation == answer.generation:
            self._drop(request_id)
            if isinstance(answer, Queued):
                self._queued[request_id] = question
            self._answered(answer)


def _not_started(message: object) -> NoReturn:
    raise AssertionError("asked before the start")
