"""The frame format of messages between engines.

A frame is a header of 36 bytes, a body (one msgpack message) and, when a block's bytes travel with it, a payload:

    magic 4 | body length 4 | payload length 4 | sender's incarnation 8 | receiver's incarnation 8 | checksum 8

The checksum (xxh3) covers the header before it and the body. A payload is verified by `Push.checksum`, made when the
block became full: so it also detects corruption before sending.

The first frame on every connection, each way, is a `Greet`, or what `handshake.py` makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

import msgspec
from xxhash import xxh3_64_intdigest

from penstock.core.layout import KVLayout
from penstock.core.wire import PROTOCOL
from penstock.core.wire.codec import decoder, encode
from penstock.core.wire.handoff import PeerMessage

MAGIC = b"pnst"
MAX_BODY = 64 << 20  # bytes; a Reserve with a prompt of a million tokens is about 5 MB
MAX_GREETING = 64 << 10  # bytes of body before authentication
_FIELDS = Struct("<4sIIQQ")
_CHECKSUM = Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class Greet(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The sender's identity and KV layout.

    Attributes:
        transport: kind of it, a key of `TRANSPORTS`.
        pool: which memory the block numbers of a Push refer to; empty when blocks are copied.
        address: where the speaker can be reached.
        link, socket, sockets: a link has `sockets` connections; `link` is a number that its maker chose.
    """

    name: str
    incarnation: int
    address: str
    transport: str
    layout: KVLayout
    pool: str = ""
    link: int = 0
    socket: int = 0
    sockets: int = 1
    protocol: int = PROTOCOL

    def difference(self, other: Greet) -> str:
        """Why blocks cannot be exchanged with `other`, both values of each thing; "" when they can."""
        found = [
            f"{field}: {mine} here, {theirs} there"
            for field in ("transport", "pool")
            if (mine := getattr(self, field)) != (theirs := getattr(other, field))
        ]
        return "; ".join(filter(None, [*found, self.layout.difference(other.layout)]))


class _AnyGreet(msgspec.Struct, tag="Greet", frozen=True):
    """The part of a Greet that every version of the protocol has."""

    name: str
    incarnation: int
    address: str
    protocol: int


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """See `handshake.py`."""

    nonce: bytes


class Signed(msgspec.Struct, tag=True, frozen=True):
    """An encoded Greet and the proof that who sends it knows the deployment's secret."""

    greet: bytes
    nonce: bytes
    proof: bytes


Greeting = Greet | Challenge | Signed


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame to send. `payload` is not read before it goes to the socket; `message` is what `body` was made of."""

    message: Greeting | PeerMessage
    sender: int
    to: int
    body: bytes
    payload: memoryview | None
    header: bytes

    @property
    def own_bytes(self) -> int:
        """Without the payload."""
        return len(self.header) + len(self.body)


@dataclass(frozen=True, slots=True)
class Header:
    body: int  # bytes
    payload: int  # bytes
    sender: int
    to: int
    checksum: int

    def intact(self, body: bytes | bytearray) -> bool:
        return self.checksum == _checksum(_FIELDS.pack(MAGIC, self.body, self.payload, self.sender, self.to), body)


def make_frame(message: Greeting | PeerMessage, sender: int, to: int, payload: memoryview | None = None) -> Frame:
    """A message and, maybe, the bytes (uint8) that travel with it."""
    body = encode(message)
    fields = _FIELDS.pack(MAGIC, len(body), len(payload) if payload is not None else 0, sender, to)
    return Frame(message, sender, to, body, payload, fields + _CHECKSUM.pack(_checksum(fields, body)))


def read_header(data: bytes | bytearray | memoryview) -> Header:
    """`data` has HEADER_BYTES bytes. ValueError when no frame begins here."""
    magic, body, payload, sender, to = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"bytes that are no frame: {bytes(magic)!r}")
    return Header(body, payload, sender, to, *_CHECKSUM.unpack_from(data, _FIELDS.size))


def read_greet(body: bytes | bytearray) -> Greet | _AnyGreet:
    """The greeting, or its common part when it speaks another protocol. msgspec.DecodeError when it is none."""
    common = _decode_any_greet(body)
    return _decode_greet(body) if common.protocol == PROTOCOL else common


def _checksum(fields: bytes, body: bytes | bytearray) -> int:
    return xxh3_64_intdigest(fields + body)


_decode_greet = decoder(Greet).decode
_decode_any_greet = decoder(_AnyGreet).decode
