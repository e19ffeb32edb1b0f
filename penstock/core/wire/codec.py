"""Messages to bytes and back."""

from __future__ import annotations

from typing import Any

import msgspec

encode = msgspec.msgpack.Encoder().encode


def decoder(messages: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of one union of messages. Its `decode` raises `msgspec.DecodeError` on anything else."""
    return msgspec.msgpack.Decoder(messages)
