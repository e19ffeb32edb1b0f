"""Requests whose images other engines look at: they wait here until what came of that has arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

import msgspec

from penstock.core.request import ImagesSeen, MediaSpan, Request
from penstock.core.wire.engine import Enqueue, Lacking, Pixels
from penstock.core.wire.handoff import IMAGE, Lease
from penstock.kv.embeddings import Embedding, EmbeddingCache
from penstock.sched.local.handoff.embeddings import TakeSide


@dataclass(slots=True)
class _Held:
    """
    Attributes:
        needs: digests of which nothing has come yet.
        came: digest -> its embeddings.
        lacks: digests of which nothing will come.
        since: when it came.
        brought: how many images others brought; `seconds`: that looking at them took.
    """

    frontend: str
    command: Enqueue
    needs: set[bytes]
    since: float
    came: dict[bytes, bytes] = field(default_factory=dict)
    lacks: list[bytes] = field(default_factory=list)
    why: str = ""
    brought: int = 0
    seconds: float = 0.0


class AwaitedImages:
    """
    Args:
        incarnation: of this engine.
        cache: what it has made of images; what comes from others is kept there too.

    Attributes:
        side: brings what others have; set by the owner.
        ready: frontends and their requests that wait for no more, with what became of their images and since when they
            waited; taken by the owner, as are the next.
        lacking: which frontends are to be asked for pixels.
    """

    side: TakeSide

    def __init__(self, incarnation: int, cache: EmbeddingCache) -> None:
        self.ready: list[tuple[str, Enqueue, ImagesSeen, float]] = []
        self.lacking: list[tuple[str, Lacking]] = []
        self._incarnation, self._cache = incarnation, cache
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held) + len(self.ready)

    @property
    def tokens(self) -> int:
        """Of the prompts that wait."""
        commands = [*(held.command for held in self._held.values()), *(command for _, command, _, _ in self.ready)]
        return sum(len(command.request.prompt) for command in commands)

    def has(self, digest: bytes) -> bool:
        """Whether this engine has what was made of an image."""
        return self._cache.get(digest) is not None

    def with_known(self, request: Request) -> Request:
        """The request with what this engine has of its images, in place of their pixels."""
        own = [span.digest for span in request.media if not span.embedded]
        came = {digest: kept.data for digest in own if (kept := self._cache.get(digest)) is not None}
        return with_images(request, came, {}) if came else request

    def hold(self, now: float, frontend: str, command: Enqueue) -> None:
        """A request that is to be admitted as soon as its images are there."""
        request_id = command.request.id
        held = self._held[request_id] = _Held(frontend, command, {source.digest for source in command.images}, now)
        lease = Lease(request_id, command.generation, IMAGE)
        for source in command.images:
            if (kept := self._cache.get(source.digest)) is not None:
                held.needs.discard(source.digest)
                held.came[source.digest] = kept.data
            else:
                self.side.take(now, lease, source.digest, source.peer, source.patience_ms / 1e3)
        self._look(request_id, held)

    def arrived(self, digest: bytes, came: Embedding | None, why: str) -> None:
        """It has come, or will not."""
        if came is not None:
            self._cache.put(digest, came)
        for request_id, held in [(r, h) for r, h in self._held.items() if digest in h.needs]:
            held.needs.remove(digest)
            if came is not None:
                held.came[digest] = came.data
                held.brought += sum(span.digest == digest for span in held.command.request.media)
                held.seconds += came.seconds
            else:
                held.lacks.append(digest)
                held.why = why
            self._look(request_id, held)

    def pixels(self, frontend: str, said: Pixels) -> None:
        """What was lacking; a later attempt, or none, is not meant."""
        held = self._held.get(said.request_id)
        if held is None or held.frontend != frontend or held.command.generation != said.generation:
            return
        given = dict(said.images)
        if held.needs or given.keys() != set(held.lacks):
            return
        del self._held[said.request_id]
        self._let_in(held, given)

    def cancel(self, request_id: str, frontend: str, generation: float = inf) -> None:
        """Attempts up to this one."""
        held = self._held.get(request_id)
        if held is not None and held.frontend == frontend and held.command.generation <= generation:
            self._forget(request_id)
        self.ready = [
            each
            for each in self.ready
            if (each[0], each[1].request.id) != (frontend, request_id) or each[1].generation > generation
        ]

    def drop_client(self, frontend: str) -> None:
        for request_id in [r for r, held in self._held.items() if held.frontend == frontend]:
            self._forget(request_id)
        self.ready = [each for each in self.ready if each[0] != frontend]

    def _forget(self, request_id: str) -> None:
        held = self._held.pop(request_id)
        wanted = {digest for other in self._held.values() for digest in other.needs}
        for digest in held.needs - wanted:
            self.side.forget(digest)

    def _look(self, request_id: str, held: _Held) -> None:
        if held.needs:
            return
        if held.lacks:
            said = Lacking(self._incarnation, request_id, held.command.generation, held.lacks, held.why)
            self.lacking.append((held.frontend, said))
            return
        del self._held[request_id]
        self._let_in(held, {})

    def _let_in(self, held: _Held, pixels: Mapping[bytes, bytes]) -> None:
        request = with_images(held.command.request, held.came, pixels)
        command = msgspec.structs.replace(held.command, request=request, images=[])
        seen = ImagesSeen(len(request.media), brought=held.brought, encoding=held.seconds)
        self.ready.append((held.frontend, command, seen, held.since))

    def check(self) -> None:
        """Raise AssertionError unless every request waits for something."""
        assert all(held.needs or held.lacks for held in self._held.values()), "a request waits for nothing"


def without_images(request: Request, digests: set[bytes]) -> Request:
    """The request as it is sent to who does not look at these."""
    kept = [b"" if s.digest in digests else p for s, p in zip(request.media, request.pixels, strict=True)]
    return replace(request, pixels=tuple(kept))


def with_images(request: Request, came: Mapping[bytes, bytes], pixels: Mapping[bytes, bytes]) -> Request:
    """With what was made of images elsewhere, and the pixels of those of which nothing was."""
    media: list[MediaSpan] = []
    carried: list[bytes] = []
    for span, own in zip(request.media, request.pixels, strict=True):
        media.append(replace(span, embedded=True) if span.digest in came else span)
        carried.append(came.get(span.digest) or pixels.get(span.digest) or own)
    return replace(request, media=tuple(media), pixels=tuple(carried))
