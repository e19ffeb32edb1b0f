"""Messages between two engines: one hands a request over to the other, after its prefill or while it decodes, or has
blocks of it.

    prefiller                    decoder
    Reserve            ->                       blocks are reserved, under a lease
                       <-        Waiting        once there is room, in the order of asking; repeated until answered
                       <-        Reserved | Rejected
    Push, Push, ...    ->                       each block as it fills, while the next ones are computed
    Sent              ->                       of one that decodes on meanwhile: how much of that is there?
                       <-        Arrived
    Renew              ->                       periodically, to extend the lease
    Commit             ->                       everything is there; repeated until it is answered
                       <-        Committed | Missing | Rejected
    Release            <->                      ends the lease, from either side

One instance fetches blocks of a prompt from another that has them, and no request moves:

    puller                       holder
    Fetch              ->                       these blocks stay as they are for a while; asked again for what lacks
                       <-        Lent           so many of them are there
                       <-        Push, Push, ...
    Release            ->                       it needs no more

And what a model makes of images goes from who has looked at them to who prefills (`sched.local.handoff.embeddings`).

Every message may be lost, late, duplicated or out of order. A side that receives nothing ends the lease at its
deadline.
"""

from __future__ import annotations

import msgspec

from penstock.core.request import ImagesSeen, Request
from penstock.core.wire.codec import decoder

FETCH = -1  # the attempt of a fetch
IMAGE = -2  # the same where what was made of images is taken
MOST_PIXELS = 48 << 20  # bytes of a request's images that are handed over with it: a message of peers is bounded


class Lease(msgspec.Struct, frozen=True):
    """Names one hand-off, or one fetch.

    Attributes:
        generation: which attempt to run the request.
        attempt: which attempt, within that, to reserve blocks at a decode instance; FETCH where blocks are fetched.
    """

    request_id: str
    generation: int
    attempt: int = 0

    @property
    def fetches(self) -> bool:
        return self.attempt == FETCH

    @property
    def order(self) -> tuple[int, int]:
        """Of one request: the later is greater."""
        return self.generation, self.attempt


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """
    Attributes:
        frontend: who owns the request: tokens go there.
        tokens: sampled here so far, after the request's `context`; more may come before the commit.
    """

    lease: Lease
    request: Request
    frontend: str
    tokens: list[int] = []


class Waiting(msgspec.Struct, tag=True, frozen=True):
    """There is no room now: it is in the decode instance's migration queue."""

    lease: Lease


class Reserved(msgspec.Struct, tag=True, frozen=True):
    """Blocks are reserved. The first `have` blocks need not be pushed: they are in the decode instance's cache."""

    lease: Lease
    have: int


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """The decode instance holds nothing for this lease, and will not later."""

    lease: Lease
    reason: str


class Push(msgspec.Struct, tag=True, frozen=True):
    """One block of a sequence.

    Attributes:
        index: its place among the sequence's blocks: with one group of layers it holds positions
            [64 * index, 64 * index + 64); with several it is of group `index % groups`, and its positions begin at
            64 * (index // groups). What has left a group's window is not pushed.
        key: its prefix key; empty when it is not full.
        block, generation: its number in the sender's pool, and the generation of its use.
        checksum: of its bytes.
    """

    lease: Lease
    index: int
    key: bytes
    block: int
    generation: int
    checksum: int


class Sent(msgspec.Struct, tag=True, frozen=True):
    """All full blocks so far were pushed; it does not overtake them."""

    lease: Lease


class Arrived(msgspec.Struct, tag=True, frozen=True):
    """The first `have` blocks are there."""

    lease: Lease
    have: int


class Renew(msgspec.Struct, tag=True, frozen=True):
    leases: list[Lease]


class Commit(msgspec.Struct, tag=True, frozen=True):
    """Of `blocks` blocks all that is still seen was pushed. `tokens` were sampled after the request's `context`, those
    of `Reserve` among them; the KV of the last one is not computed.

    Attributes:
        cached_tokens: prompt tokens that came from the prefiller's cache.
        queue, prefill, wait, decode, images: of the request's `Timing` so far.
    """

    lease: Lease
    blocks: int
    tokens: list[int]
    cached_tokens: int
    queue: float
    prefill: float
    wait: str = ""
    decode: float = 0.0
    images: ImagesSeen | None = None


class Missing(msgspec.Struct, tag=True, frozen=True):
    """These blocks have not arrived completely."""

    lease: Lease
    indices: list[int]


class Committed(msgspec.Struct, tag=True, frozen=True):
    """The decode instance owns the request from here on."""

    lease: Lease


class Fetch(msgspec.Struct, tag=True, frozen=True):
    """Push blocks of a prompt, as far as they are in the cache.

    Attributes:
        keys: of these blocks, in order, of one group of layers each. Each is there only if all before it are.
        wants: places in `keys` of those that are to be pushed, which is then their `index`.
    """

    lease: Lease
    keys: list[bytes]
    wants: list[int]


class Lent(msgspec.Struct, tag=True, frozen=True):
    """The first `have` of the keys are there, and stay until the lease ends."""

    lease: Lease
    have: int


class AskEmbedding(msgspec.Struct, tag=True, frozen=True):
    """Send what the model makes of an image, from byte `start` on, once it is there.

    Attributes:
        lease: of a request that wants it; it holds nothing at the other side.
    """

    lease: Lease
    digest: bytes
    start: int


class EmbeddingPart(msgspec.Struct, tag=True, frozen=True):
    """Bytes of it.

    Attributes:
        size, checksum: of all its bytes, from when it was made.
        seconds: that looking at the image took; 0 where nobody knows.
    """

    lease: Lease
    digest: bytes
    start: int
    size: int
    checksum: int
    data: bytes
    seconds: float = 0.0


class NoEmbedding(msgspec.Struct, tag=True, frozen=True):
    """It is not there, and will not be."""

    lease: Lease
    digest: bytes
    reason: str


class Release(msgspec.Struct, tag=True, frozen=True):
    """The sender holds nothing under this lease any longer."""

    lease: Lease
    reason: str


PeerMessage = (
    Reserve
    | Waiting
    | Reserved
    | Rejected
    | Push
    | Sent
    | Arrived
    | Renew
    | Commit
    | Missing
    | Committed
    | Fetch
    | Lent
    | AskEmbedding
    | EmbeddingPart
    | NoEmbedding
    | Release
)

decode_peer = decoder(PeerMessage).decode
