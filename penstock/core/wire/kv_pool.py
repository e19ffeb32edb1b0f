"""Messages between an engine and the KV pool server of its host: requests, each answered in order, on one Unix
connection.

A message on the socket is a length of four bytes, little-endian, and so many bytes of msgpack.
"""

from __future__ import annotations

import struct

import msgspec

from penstock.core.layout import KVLayout
from penstock.core.wire import PROTOCOL
from penstock.core.wire.codec import decoder, encode

MAX_MESSAGE = 16 << 20  # bytes; lists of a million blocks fit
READ_BYTES = 256 << 10
_LENGTH = struct.Struct("<I")


class Claim(msgspec.Struct, tag=True, frozen=True):
    """A new incarnation of an instance prepares to attach, which may take long. The blocks it inherits are kept for it
    while this connection is open."""

    instance: str
    incarnation: int


class Attach(msgspec.Struct, tag=True, frozen=True):
    """Join the pool of this layout, making it if need be.

    Attributes:
        quota: blocks that this instance may hold at once.
        weights: tells those of the layout's `model` from what the same files had in them at another time: of these
            nothing is found.
    """

    instance: str
    incarnation: int
    layout: KVLayout
    quota: int
    protocol: int = PROTOCOL
    weights: str = ""


class Exchange(msgspec.Struct, tag=True, frozen=True):
    """Give up some blocks, then lease `want` others for writing."""

    give: list[int]
    want: int


class Hold(msgspec.Struct, tag=True, frozen=True):
    """Become another holder of blocks that other instances wrote, and give up as many; all or nothing.

    Attributes:
        blocks: (block, generation); refused unless each is in that generation and held.
    """

    blocks: list[tuple[int, int]]
    give: list[int]


class Find(msgspec.Struct, tag=True, frozen=True):
    """Which of these keys name blocks that failed instances have left?"""

    keys: list[bytes]


class CountPool(msgspec.Struct, tag=True, frozen=True):
    """Check every invariant and count blocks. May be asked without attaching."""


KVPoolRequest = Claim | Attach | Exchange | Hold | Find | CountPool


class Claimed(msgspec.Struct, tag=True, frozen=True):
    """
    Attributes:
        promised: bytes of the previous incarnation's quota, still reserved for this one; 0 without one.
    """

    promised: int


class Attached(msgspec.Struct, tag=True, frozen=True):
    """Two file descriptors come with it: the blocks' memory and the table of records.

    Attributes:
        num_blocks: that the memory has room for; some have no holder.
        inherited: blocks that the instance's previous incarnation had published, still unverified.
    """

    num_blocks: int
    inherited: list[int]


class Exchanged(msgspec.Struct, tag=True, frozen=True):
    blocks: list[int]


class Held(msgspec.Struct, tag=True, frozen=True):
    ok: bool


class Found(msgspec.Struct, tag=True, frozen=True):
    """The (block, generation) of each key, to be held while it is so; None where there is none."""

    blocks: list[tuple[int, int] | None]


class PoolCounts(msgspec.Struct, tag=True, frozen=True):
    """Blocks by state: "free", "orphaned", "held:NAME" per instance; beside them "pools", "clients", "open_files"."""

    counts: dict[str, int]
    broken: str = ""


class KVPoolRefused(msgspec.Struct, tag=True, frozen=True):
    message: str


KVPoolReply = Claimed | Attached | Exchanged | Held | Found | PoolCounts | KVPoolRefused

decode_request = decoder(KVPoolRequest).decode
decode_reply = decoder(KVPoolReply).decode


class BadFrame(ValueError):
    """The received bytes are not a frame."""


def frame(message: msgspec.Struct) -> bytes:
    body = encode(message)
    assert len(body) <= MAX_MESSAGE
    return _LENGTH.pack(len(body)) + body


class MessageBuffer:
    """What has been received: whole messages come out, the rest waits for more."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def take(self) -> bytes | None:
        """The next message's body, if all of it is there. Raises BadFrame when its length is impossible."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if not 0 < length <= MAX_MESSAGE:
            raise BadFrame(f"a message of {length} bytes, 1 to {MAX_MESSAGE} are allowed")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return body
