"""Messages between an engine that has weights and one that wants them."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.device import DeviceModel
from penstock.core.wire import PROTOCOL
from penstock.core.wire.codec import decoder

BLOCK = 8 << 20  # bytes, each with a digest; the last may be shorter


# Mapped, on one host; sent; read by Mooncake from the memory that they are in; sent from one device's memory into
# another's by torch.distributed, on CPUs by gloo, on GPUs by NCCL
PairWay = Literal["gloo", "nccl"]
Way = Literal["map", "tcp", "mooncake"] | PairWay


class AskWeights(msgspec.Struct, tag=True, frozen=True):
    """Who connects asks for weights. `Weights` or `NoWeights` is the answer.

    Attributes:
        key: of what they are made from, and how they are to lie in memory.
        way: by which they are to come. For "map" a file descriptor of them follows the answer. For "tcp" who asks says
            by `SendFrom` what does; so it does for a `PairWay`, where blocks come through the process group that both
            join then. For "mooncake" it reads by itself, and says by any byte that it goes on.
        gpu: that they are to come to, by a name that no other has; "" for none.
    """

    key: str
    way: Way
    gpu: str = ""
    protocol: int = PROTOCOL


class Weights(msgspec.Struct, tag=True, frozen=True):
    """
    Attributes:
        weights: name -> dtype, shape, and where it begins.
        bytes: of all, with what is between them.
        start: where they begin in the file.
        digests: XXH3 of every `BLOCK`, 64 bits each.
        device: what the engine measured of its device.
        threads: with so many threads.
        lent: what Mooncake reads from; or where the two of a process group meet; "" for other ways.
    """

    weights: dict[str, tuple[str, list[int], int]]
    bytes: int
    start: int
    digests: list[int]
    device: DeviceModel | None = None
    threads: int = 0
    lent: str = ""


class NoWeights(msgspec.Struct, tag=True, frozen=True):
    """There are none of those."""

    message: str


class AskThere(msgspec.Struct, tag=True, frozen=True):
    """Another rank of the engine has them, and gives them by itself.

    Attributes:
        addresses: "unix:/path" and "tcp:host:port", as many as it listens at.
    """

    addresses: list[str]


class SendFrom(msgspec.Struct, tag=True, frozen=True):
    """Blocks are to be sent, and nothing after them: the first, and every `step`-th from there on."""

    first: int
    step: int


WeightMessage = AskWeights | Weights | NoWeights | AskThere | SendFrom
decode_weight_message = decoder(WeightMessage).decode
