"""What a model makes of images travels from the engine that has looked at them to the one that prefills their prompt
(xLLM, section 3.3; a KV connector of its own kind, as vLLM's ECConnector is).

    taker                        giver
    AskEmbedding      ->                       from this byte on; answered when the image was looked at
                      <-        EmbeddingPart  ...
                      <-        NoEmbedding    it is not here, and will not be

The taker asks again for what has not come, so messages may be lost, late, doubled or out of order. It takes no longer
than the deadline that it was given, as who prefills can look at the image itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import AskEmbedding, EmbeddingPart, Lease, NoEmbedding
from penstock.kv.embeddings import Embedding, EmbeddingCache
from penstock.sched.local.handoff.ports import HandoffTransport, same_incarnation

PART, WINDOW = 1 << 20, 4 << 20  # bytes of a message, and of what is sent for one question
GRACE = 2.0  # seconds for which a giver waits to be told to look at an image that it is asked about
ASK_AGAIN = 0.25  # seconds without anything new
SMOOTH, REMEMBERED = 0.2, 60.0  # weight of the newest measurement, and seconds for which the latest one counts


@dataclass(slots=True)
class _Question:
    peer: Peer
    ask: AskEmbedding
    until: float


class GiveSide:
    """Everything that others take from this engine.

    Args:
        cache: what it has made.

    Attributes:
        coming: digests of what it is to look at, and how many requests want that.
        given: embeddings whose last byte was sent, since the start.
    """

    def __init__(self, cache: EmbeddingCache, transport: HandoffTransport) -> None:
        self.coming: dict[bytes, int] = {}
        self.given = 0
        self._cache, self._transport = cache, transport
        self._questions: dict[tuple[str, int, bytes], _Question] = {}

    def __len__(self) -> int:
        return len(self._questions)

    def expect(self, digest: bytes) -> None:
        self.coming[digest] = self.coming.get(digest, 0) + 1

    def made(self, digest: bytes, why: str = "") -> None:
        """It was looked at, and is in the cache; or it is not and will not be, as `why` says."""
        self.coming.pop(digest, None)
        for name, question in [(n, q) for n, q in self._questions.items() if n[2] == digest]:
            del self._questions[name]
            self._answer(question.peer, question.ask, why or "it is larger than what is kept")

    def on_ask(self, now: float, peer: Peer, ask: AskEmbedding) -> None:
        if self._cache.get(ask.digest) is not None:
            self._answer(peer, ask, "")
            return
        name = peer.name, peer.incarnation, ask.digest
        before = self._questions.get(name)
        self._questions[name] = _Question(peer, ask, now + GRACE if before is None else before.until)

    def lost(self, peer: Peer) -> None:
        for name in [n for n, q in self._questions.items() if same_incarnation(q.peer, peer)]:
            del self._questions[name]

    def tick(self, now: float) -> None:
        for name, question in list(self._questions.items()):
            if now >= question.until and question.ask.digest not in self.coming:
                del self._questions[name]
                self._answer(question.peer, question.ask, "nobody has it look at that")

    def _answer(self, peer: Peer, ask: AskEmbedding, why: str) -> None:
        found = self._cache.get(ask.digest)
        if found is None:
            self._transport.send(peer, NoEmbedding(ask.lease, ask.digest, why))
            return
        size = len(found.data)
        for start in range(ask.start, min(size, ask.start + WINDOW), PART):
            part = found.data[start : start + PART]
            sent = EmbeddingPart(ask.lease, ask.digest, start, size, found.checksum, part, found.seconds)
            self._transport.send(peer, sent)
            self.given += start + PART >= size


@dataclass(slots=True)
class _Taken:
    """One that comes. What is in `data` is its beginning."""

    lease: Lease
    peer: Peer
    began: float
    deadline: float
    retry_at: float
    data: bytearray = field(default_factory=bytearray)
    asked: int = 0  # up to which byte
    first: tuple[float, int] = (0.0, 0)  # when its first part came, and how long that was


class TakeSide:
    """Everything that this engine takes from others.

    Args:
        arrived: is told of each that has come, or that never will and why.

    Attributes:
        taken, failed: since the start.
        mb_ms: that a million bytes take, a recent mean of those in several parts, from when the first was there; None
            while there is none.
    """

    def __init__(self, transport: HandoffTransport, arrived: Callable[[bytes, Embedding | None, str], None]) -> None:
        self.taken = self.failed = 0
        self.mb_ms: float | None = None
        self._measured = -inf  # when the latest was
        self._transport, self._arrived = transport, arrived
        self._coming: dict[bytes, _Taken] = {}

    def __len__(self) -> int:
        return len(self._coming)

    def take(self, now: float, lease: Lease, digest: bytes, peer: Peer, seconds: float) -> None:
        """Ask for it, for so long; what is under way already may take longer for it."""
        if (known := self._coming.get(digest)) is not None:
            known.deadline = max(known.deadline, now + seconds)
            return
        self._coming[digest] = _Taken(lease, peer, now, now + seconds, now)
        self._ask(now, digest)

    def forget(self, digest: bytes) -> None:
        """Nobody wants it any more."""
        self._coming.pop(digest, None)

    def on_part(self, now: float, peer: Peer, part: EmbeddingPart) -> None:
        taken = self._coming.get(part.digest)
        if taken is None or not same_incarnation(taken.peer, peer) or part.start != len(taken.data):
            return  # what was lost before it is asked for again, and it with that
        if not taken.data:
            taken.first = now, len(part.data)
        taken.data += part.data
        taken.retry_at = now + ASK_AGAIN
        if len(taken.data) < part.size:
            if len(taken.data) >= taken.asked:
                self._ask(now, part.digest)
            return
        came = Embedding(bytes(taken.data), part.checksum, part.seconds)
        if len(taken.data) == part.size and came.whole:
            self._measure(now, taken)
            self._end(part.digest, came, "")
        else:
            self._end(part.digest, None, f"{peer.name} sent something else than what it made")

    def on_none(self, peer: Peer, said: NoEmbedding) -> None:
        taken = self._coming.get(said.digest)
        if taken is not None and same_incarnation(taken.peer, peer):
            self._end(said.digest, None, f"{peer.name}: {said.reason}")

    def lost(self, peer: Peer) -> None:
        for digest in [d for d, taken in self._coming.items() if same_incarnation(taken.peer, peer)]:
            self._end(digest, None, f"the link to {peer.name} was lost")

    def tick(self, now: float) -> None:
        if now > self._measured + REMEMBERED:
            self.mb_ms = None
        for digest, taken in list(self._coming.items()):
            if now >= taken.deadline:
                self._end(digest, None, f"{taken.peer.name} takes longer than {taken.deadline - taken.began:.1f} s")
            elif now >= taken.retry_at:
                self._ask(now, digest)

    def _ask(self, now: float, digest: bytes) -> None:
        taken = self._coming[digest]
        taken.retry_at, taken.asked = now + ASK_AGAIN, len(taken.data) + WINDOW
        self._transport.send(taken.peer, AskEmbedding(taken.lease, digest, len(taken.data)))

    def _measure(self, now: float, taken: _Taken) -> None:
        since, before = taken.first
        if more := len(taken.data) - before:
            each = (now - since) * 1e3 / (more / 1e6)
            self.mb_ms = each if self.mb_ms is None else self.mb_ms + SMOOTH * (each - self.mb_ms)
            self._measured = now

    def _end(self, digest: bytes, came: Embedding | None, why: str) -> None:
        del self._coming[digest]
        self.taken += came is not None
        self.failed += came is None
        self._arrived(digest, came, why)
