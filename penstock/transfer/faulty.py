"""A carrier that loses, delays, duplicates, reorders and corrupts frames, for tests.

It sits between frames and sockets, so it serves every transport. Faults are drawn for what this side sends; a partition
also drops received frames. Greetings are only subject to a partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from random import Random
from time import monotonic
from typing import Any, get_args

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.wire.handoff import PeerMessage, Renew
from penstock.transfer.carrier import Carrier
from penstock.transfer.frames import Frame, Greet, Greeting
from penstock.transfer.peer_link import PeerConnection, ReceivedFrame
from penstock.transfer.tls import TLS

log = logging.getLogger(__name__)

MESSAGES = tuple(kind.__name__ for kind in get_args(PeerMessage))
REORDER_SECONDS = 0.02  # a frame waits that long for another one to overtake it


class Partition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """After `after` frames, sent or received, all are dropped for `for_s` seconds; None: for ever."""

    after: int = 0
    for_s: float | None = None


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Attributes:
        delay_ms: of every frame.
        drop, duplicate, reorder, corrupt: probability for each frame; corrupt flips one bit of body or payload.
        only: names of the messages that these five are for; empty: all.
        stall: names of messages; the first of each for each request never leaves, and the log says so. Tests wait for
            that line to know the phase of a request's hand-off.
    """

    seed: int = 0
    delay_ms: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    partition: Partition | None = None
    only: list[str] = []
    stall: list[str] = []

    @classmethod
    def parse(cls, faults: dict[str, Any]) -> Faults:
        """ConfigError naming what is wrong."""
        try:
            parsed = msgspec.convert(faults, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"faults: {error}", "faults") from error
        for name in ("drop", "duplicate", "reorder", "corrupt"):
            if not 0 <= (value := getattr(parsed, name)) <= 1:
                raise ConfigError(f"faults.{name}: {value}, allowed: a probability from 0 to 1", f"faults.{name}")
        if parsed.delay_ms < 0:
            raise ConfigError(f"faults.delay_ms: {parsed.delay_ms}, allowed: 0 or more", "faults.delay_ms")
        for field, names in (("only", parsed.only), ("stall", parsed.stall)):
            for name in names:
                if name not in MESSAGES:
                    raise ConfigError(f"faults.{field}: {name!r}, allowed: {', '.join(MESSAGES)}", f"faults.{field}")
        return parsed


class FaultyCarrier(Carrier):
    """Draws from (seed, own name): a run is reproducible as far as the order of frames is."""

    def __init__(
        self,
        me: Greet,
        sockets: int,
        payload_bytes: int,
        faults: Faults,
        secret: str | None = None,
        tls: TLS | None = None,
    ) -> None:
        self._faults = faults
        self._random = Random(f"{faults.seed}:{me.name}")
        self._passed = 0  # frames, sent or received
        self._cut: float | None = None  # when the partition began
        self._stalled: set[tuple[str, str]] = set()  # message name, request id
        self._held: list[Callable[[], None]] = []  # frames that wait to be overtaken
        super().__init__(me, sockets, payload_bytes, secret, tls)

    def _transmit(self, connection: PeerConnection, frame: Frame) -> None:
        if self._partitioned():
            self.counters.dropped["partition"] += 1
            return
        name = type(frame.message).__name__
        if isinstance(frame.message, Greeting):
            super()._transmit(connection, frame)
            return
        self._passed += 1
        if name in self._faults.stall and (first := (name, _request_id(frame.message))) not in self._stalled:
            self._stalled.add(first)
            self.counters.dropped["stall"] += 1
            log.warning("stalled %s of %s", *first)
        elif self._faults.only and name not in self._faults.only:
            super()._transmit(connection, frame)
        else:
            self._spoil(connection, frame)

    def _spoil(self, connection: PeerConnection, frame: Frame) -> None:
        faults, chance = self._faults, self._random.random
        if chance() < faults.drop:
            self.counters.dropped["fault"] += 1
            return
        if chance() < faults.corrupt:
            frame = self._flip(frame)
        copies = 2 if chance() < faults.duplicate else 1
        overtaken = chance() < faults.reorder
        for _ in range(copies):
            go = partial(super()._transmit, connection, frame)
            if faults.delay_ms:
                go = partial(self._io.later, faults.delay_ms / 1000, go)
            if overtaken:
                self._held.append(go)
            else:
                go()
        if overtaken:
            self._io.later(REORDER_SECONDS, self._let_go)
        else:
            self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for go in held:
            go()

    def _flip(self, frame: Frame) -> Frame:
        spoil_payload = frame.payload is not None and self._random.random() < 0.5
        data = bytearray(frame.payload if spoil_payload and frame.payload is not None else frame.body)
        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        body = frame.body if spoil_payload else bytes(data)
        payload = memoryview(data) if spoil_payload else frame.payload
        return Frame(frame.message, frame.sender, frame.to, body, payload, frame.header)

    def _hear(self, connection: PeerConnection, received: ReceivedFrame) -> None:
        if self._partitioned():
            self.counters.dropped["partition"] += 1
            return
        if connection.ready:
            self._passed += 1
        super()._hear(connection, received)

    def _partitioned(self) -> bool:
        partition = self._faults.partition
        if partition is None or self._passed < partition.after:
            return False
        if self._cut is None:
            self._cut = monotonic()
            log.warning("partitioned for %s s", partition.for_s if partition.for_s is not None else "all further")
        return partition.for_s is None or monotonic() < self._cut + partition.for_s


def _request_id(message: PeerMessage | Greeting) -> str:
    if isinstance(message, Greeting):
        return ""
    if isinstance(message, Renew):
        return ", ".join(lease.request_id for lease in message.leases)
    return message.lease.request_id
