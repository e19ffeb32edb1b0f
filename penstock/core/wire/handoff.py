"""Between two engines: a request whose prompt was read in one place goes on in another.

    prefiller                    decoder
    Reserve            ->                       room is set aside, under a lease
                       <-        Reserved | Rejected
    Push, Push, ...    ->                       each block as it fills, while the next ones are computed
    Renew              ->                       now and then, so that the lease does not end meanwhile
    Commit             ->                       everything is there; repeated until it is answered
                       <-        Committed | Missing | Rejected
    Release            <->                      the lease is over, whoever says it

Every message may be lost, late, doubled or out of order. Whoever hears nothing ends the lease at its deadline.
"""

from __future__ import annotations

import msgspec

from penstock.core.request import Request
from penstock.core.wire.codec import decoder


class Lease(msgspec.Struct, frozen=True):
    """Names one hand-off.

    Attributes:
        generation: which attempt to run the request.
        attempt: which attempt, within that, to find room at a decoder.
    """

    request_id: str
    generation: int
    attempt: int = 0


class Reserve(msgspec.Struct, tag=True, frozen=True):
    lease: Lease
    request: Request
    frontend: str  # who owns the request: tokens go there


class Reserved(msgspec.Struct, tag=True, frozen=True):
    """There is room. The first `have` blocks need not be pushed: they are in the decoder's cache."""

    lease: Lease
    have: int


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """The decoder holds nothing for this lease and never will."""

    lease: Lease
    reason: str


class Push(msgspec.Struct, tag=True, frozen=True):
    """One block of a sequence.

    Attributes:
        index: the block holds positions [64 * index, 64 * index + 64).
        key: its prefix key; empty when it is not full.
        block, generation: where it lies in the sender's pool, and which use of that block this is.
        checksum: of its bytes.
    """

    lease: Lease
    index: int
    key: bytes
    block: int
    generation: int
    checksum: int


class Renew(msgspec.Struct, tag=True, frozen=True):
    leases: list[Lease]


class Commit(msgspec.Struct, tag=True, frozen=True):
    """All `blocks` blocks were pushed; `tokens` were sampled by the sender, and the KV of the last one is not computed.

    Attributes:
        cached_tokens: prompt tokens that came from the prefiller's cache.
        queue, prefill: seconds, of the request's timing so far.
    """

    lease: Lease
    blocks: int
    tokens: list[int]
    cached_tokens: int
    queue: float
    prefill: float


class Missing(msgspec.Struct, tag=True, frozen=True):
    """These blocks have not arrived whole."""

    lease: Lease
    indices: list[int]


class Committed(msgspec.Struct, tag=True, frozen=True):
    """The decoder owns the request from here on."""

    lease: Lease


class Release(msgspec.Struct, tag=True, frozen=True):
    """The sender holds nothing under this lease any longer."""

    lease: Lease
    reason: str


PeerMessage = Reserve | Reserved | Rejected | Push | Renew | Commit | Missing | Committed | Release

decode_peer = decoder(PeerMessage).decode
