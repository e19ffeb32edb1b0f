"""Messages to bytes and back."""

from __future__ import annotations

from typing import Any

import msgspec

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decoder(messages: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of one union of messages. Its `decode` raises `msgspec.DecodeError` on anything else."""
    return msgspec.msgpack.Decoder(messages)
