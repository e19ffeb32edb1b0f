"""Messages on the KV pool server's socket: a length of four bytes, little-endian, and so many bytes."""

from __future__ import annotations

import struct

import msgspec

from penstock.core.wire.codec import encode

MAX_MESSAGE = 16 << 20  # bytes; lists of a million blocks fit
READ_BYTES = 256 << 10
_LENGTH = struct.Struct("<I")


class BadFrame(ValueError):
    """The received bytes are not a frame."""


def frame(message: msgspec.Struct) -> bytes:
    body = encode(message)
    assert len(body) <= MAX_MESSAGE
    return _LENGTH.pack(len(body)) + body


class Inbox:
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
