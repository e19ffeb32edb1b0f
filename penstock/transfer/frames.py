"""The frame format of messages between engines.

A frame is a header of 36 bytes, a body (one msgpack message) and, when a block's bytes travel with it, a payload:

    magic 4 | body length 4 | payload length 4 | sender's incarnation 8 | receiver's incarnation 8 | checksum 8

The checksum (xxh3) covers the header before it and the body. A payload is verified by `Push.checksum`, made when the
block became full: so it also detects corruption before sending.

The first frame on every connection, each way, is a `Greet`, or what `Handshake` makes of it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from struct import Struct
from typing import TypeVar

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
NONCE_BYTES = 16
_DIALLER, _ACCEPTOR = b"D", b"A"


class Greet(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The sender's identity and KV layout.

    Attributes:
        transport: kind of it, a key of `TRANSPORTS`.
        pool: which memory the block numbers of a Push refer to; empty when blocks are copied.
        memory: where the blocks lie, for peers that read them there; empty when they do not.
        address: where the speaker can be reached.
        link, socket, sockets: a link has `sockets` connections; `link` is a number that its maker chose.
    """

    name: str
    incarnation: int
    address: str
    transport: str
    layout: KVLayout
    pool: str = ""
    memory: str = ""
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
    """See `Handshake`."""

    nonce: bytes


class Signed(msgspec.Struct, tag=True, frozen=True):
    """An encoded Greet and the proof that who sends it knows the deployment's secret."""

    greet: bytes
    nonce: bytes
    proof: bytes


Greeting = Greet | Challenge | Signed
Said = TypeVar("Said", bound=msgspec.Struct)


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
    header = make_header(body, sender, to, len(payload) if payload is not None else 0)
    return Frame(message, sender, to, body, payload, header)


def make_header(body: bytes, sender: int = 0, to: int = 0, payload: int = 0) -> bytes:
    fields = _FIELDS.pack(MAGIC, len(body), payload, sender, to)
    return fields + _CHECKSUM.pack(_checksum(fields, body))


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


# --- who may use a connection


class Stranger(ValueError):
    """The other end is not authenticated."""


def key_of(secret: str | None) -> bytes | None:
    return None if secret is None else blake2b(secret.encode(), person=b"penstock.secret").digest()


class Handshake:
    """Mutual authentication of a connection's two ends, by a shared secret that is never sent.

        dialler                       acceptor
                        <-            Challenge: a number drawn for this connection
        Signed Greet    ->            covers both sides' numbers, and whom it is meant for
                        <-            Signed Greet, likewise

    A peer without the secret receives only a number, and cannot replay signatures of other connections. This excludes
    unauthorised peers that can reach the port; it does not encrypt. Without a secret the greetings are sent
    unsigned, the dialler's first.

    Args:
        key: of the deployment; None when there is no secret.
    """

    def __init__(self, key: bytes | None, dialled: bool) -> None:
        self._key = key
        self._ours, self._theirs = (_DIALLER, _ACCEPTOR) if dialled else (_ACCEPTOR, _DIALLER)
        self._mine = secrets.token_bytes(NONCE_BYTES) if key is not None else b""
        self._other = b""  # the other side's number, once it is known

    def first_word(self) -> Challenge | None:
        """The acceptor's first message."""
        return Challenge(self._mine) if self._key is not None and self._ours == _ACCEPTOR else None

    @property
    def may_greet(self) -> bool:
        """Whether a greeting can be made out. The dialler's may have to wait for a challenge."""
        return self._key is None or bool(self._other)

    def seal(self, greet: Said, to: int) -> Said | Signed:
        """
        Args:
            to: incarnation that it is meant for.
        """
        if self._key is None:
            return greet
        body = encode(greet)
        return Signed(body, self._mine, self._proof(self._ours, to, body))

    def open(self, body: bytes | bytearray, to: int) -> bytes | bytearray | None:
        """The greeting in a frame's body, or None for the challenge. Raises Stranger.

        Args:
            to: incarnation that it says it is meant for.
        """
        try:
            said = _decode_signed(body)
        except msgspec.DecodeError:
            if self._key is None:
                return body
            raise Stranger("it does not show that it belongs to this deployment") from None
        if self._key is None:
            raise Stranger("it asks for a deployment's secret, and there is none here")
        if isinstance(said, Challenge):
            if self._ours == _ACCEPTOR or self._other or len(said.nonce) != NONCE_BYTES:
                raise Stranger("it challenges out of turn")
            self._other = said.nonce
            return None
        if self._ours == _ACCEPTOR:
            self._other = said.nonce
        if len(self._other) != NONCE_BYTES or not compare_digest(said.proof, self._proof(self._theirs, to, said.greet)):
            raise Stranger("it does not know this deployment's secret")
        return said.greet

    def _proof(self, side: bytes, to: int, body: bytes) -> bytes:
        assert self._key is not None
        challenge, answer = (self._mine, self._other) if self._ours == _ACCEPTOR else (self._other, self._mine)
        head = b"".join((side, challenge, answer, to.to_bytes(8, "little")))  # each part has one length only
        return blake2b(head + body, key=self._key, digest_size=32, person=b"penstock.greet").digest()


_decode_greet = decoder(Greet).decode
_decode_any_greet = decoder(_AnyGreet).decode
_decode_signed = decoder(Challenge | Signed).decode
