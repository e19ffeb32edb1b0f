"""Between an engine and the KV pool server of its host: requests, each answered in order, on one Unix connection."""

from __future__ import annotations

import msgspec

from penstock.core.layout import KVLayout
from penstock.core.wire import PROTOCOL
from penstock.core.wire.codec import decoder


class Claim(msgspec.Struct, tag=True, frozen=True):
    """A new life of an instance gets ready to attach, which may take long. What the one before left waits for it, as
    long as this connection stands."""

    instance: str
    incarnation: int


class Attach(msgspec.Struct, tag=True, frozen=True):
    """Join the pool of this layout, making it if need be.

    Attributes:
        quota: blocks that this instance may hold at once.
    """

    instance: str
    incarnation: int
    layout: KVLayout
    quota: int
    protocol: int = PROTOCOL


class Exchange(msgspec.Struct, tag=True, frozen=True):
    """Give up some blocks, then lease `want` others for writing."""

    give: list[int]
    want: int


class Hold(msgspec.Struct, tag=True, frozen=True):
    """Become one more holder of blocks that somebody else wrote, and give up as many: all of it or nothing.

    Attributes:
        blocks: (block, generation); refused unless each is in that very use and held by somebody.
    """

    blocks: list[tuple[int, int]]
    give: list[int]


class CountPool(msgspec.Struct, tag=True, frozen=True):
    """Check every invariant and say who holds how much. May be asked without attaching."""


KVPoolRequest = Claim | Attach | Exchange | Hold | CountPool


class Claimed(msgspec.Struct, tag=True, frozen=True):
    """
    Attributes:
        promised: bytes of the quota that the life before had and that nobody else was promised since; 0 without one.
    """

    promised: int


class Attached(msgspec.Struct, tag=True, frozen=True):
    """Two file descriptors come with it: the blocks' memory and the table of records.

    Attributes:
        num_blocks: that the memory has room for; not all of them belong to anybody.
        inherited: blocks that the instance's previous life had published, still unverified.
    """

    num_blocks: int
    inherited: list[int]


class Exchanged(msgspec.Struct, tag=True, frozen=True):
    blocks: list[int]


class Held(msgspec.Struct, tag=True, frozen=True):
    ok: bool


class PoolCounts(msgspec.Struct, tag=True, frozen=True):
    """Blocks by state: "free", "orphaned", "held:NAME" per instance; beside them "pools", "clients", "open_files"."""

    counts: dict[str, int]
    broken: str = ""


class KVPoolRefused(msgspec.Struct, tag=True, frozen=True):
    message: str


KVPoolReply = Claimed | Attached | Exchanged | Held | PoolCounts | KVPoolRefused

decode_request = decoder(KVPoolRequest).decode
decode_reply = decoder(KVPoolReply).decode
