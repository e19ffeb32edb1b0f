"""Handles an engine's commands: admits and cancels requests, and knows their owners.

Pure: a server or the simulator passes the messages in and sends the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from math import inf
from typing import Protocol

from penstock.core.errors import UserError
from penstock.core.plan import Encode as PlannedEncode
from penstock.core.request import ImagesSeen, Request, TokenOutput
from penstock.core.wire.engine import (
    Cancel,
    Drain,
    Encode,
    Enqueue,
    Fetched,
    Lacking,
    Migrate,
    Peer,
    Pixels,
    Refused,
    Role,
    SetRole,
    Snapshot,
    Stayed,
)
from penstock.core.wire.handoff import MOST_PIXELS
from penstock.kv.embeddings import Embedding, EmbeddingCache
from penstock.sched.local.awaited_images import AwaitedImages
from penstock.sched.local.handoff import Handoffs, HandoffTransport, Orphans
from penstock.sched.local.scheduler import Scheduler


@dataclass(slots=True)
class RequestOwner:
    """The frontend that owns a request, and the attempt.

    Attributes:
        told: tokens of the output that were reported to it; kept by servers that do not report every step. None before
            the first report.
        migrates: the frontend expects that it goes on elsewhere, and has not been told otherwise.
    """

    frontend: str
    generation: int
    told: int | None = None
    migrates: bool = False


class Adds(Protocol):
    def __call__(self, request: Request, *, migrates: bool, awaits: bool, now: float) -> None: ...


class Intake:
    """The requests of one incarnation of an engine. It is the host of its hand-offs (`sched.local.handoff.Host`).

    Args:
        peer: this incarnation; commands for others are refused.
        add: takes a request in; the engine's, where there is one around the scheduler.
        vocab_size: token ids are below it; None does not look.

    Attributes:
        role: which work the master means it for.
        asleep: the level at which the engine sleeps, or is about to; 0 while it takes requests.
        frontends: the connected ones' names; None to accept all.
        handoffs: None where it takes no part in any.
        images: requests that wait for what others make of their images; None likewise.
        news: request id -> the position of its next token to report; kept by servers that do not report every step.
    """

    def __init__(
        self, peer: Peer, role: Role, scheduler: Scheduler, add: Adds | None = None, vocab_size: int | None = None
    ) -> None:
        self.peer, self.role = peer, role
        self.role_generation = 0
        self.draining = False
        self.asleep = 0
        self.scheduler = scheduler
        self._add: Adds = add or scheduler.add
        self.frontends: Set[str] | None = None
        self.handoffs: Handoffs | None = None
        self.news: dict[str, int] = {}
        self._failed: list[TokenOutput] = []
        self._stayed: list[tuple[str, Stayed]] = []
        self._fetched: list[tuple[str, Fetched]] = []
        self.images: AwaitedImages | None = None
        self._vocab_size = vocab_size
        self._owner: dict[str, RequestOwner] = {}

    def __len__(self) -> int:
        """Requests that have an owner."""
        return len(self._owner)

    def owner(self, request_id: str) -> RequestOwner:
        """Of a request that is here."""
        return self._owner[request_id]

    def owners(self) -> Iterable[tuple[str, RequestOwner]]:
        """All requests, with their owners."""
        return self._owner.items()

    def hand_off(
        self,
        transport: HandoffTransport,
        lease: float,
        orphans: Orphans | None = None,
        embeddings: EmbeddingCache | None = None,
    ) -> Handoffs:
        """Take part in hand-offs from now on."""
        embeddings = EmbeddingCache(0) if embeddings is None else embeddings
        self.images = AwaitedImages(self.peer.incarnation, embeddings)
        self.handoffs = Handoffs(self.scheduler, transport, self, lease, orphans, embeddings)
        self.images.side = self.handoffs.take_side
        return self.handoffs

    # --- commands

    def enqueue(self, now: float, frontend: str, command: Enqueue) -> Refused | None:
        """Admit a request, or say why not."""
        request, generation, incarnation = command.request, command.generation, self.peer.incarnation
        if command.to != incarnation:
            message = f"meant for incarnation {command.to} of {self.peer.name}, this is {incarnation}"
            return Refused(incarnation, request.id, message, "stale")
        if closed := self._closed:
            return Refused(incarnation, request.id, closed, "draining")
        if unknown := self._unknown_tokens(request):
            return Refused(incarnation, request.id, unknown)
        owner = self._owner.get(request.id)
        if owner is not None and owner.frontend == frontend and owner.generation < generation:
            self._drop(frontend, [request.id])
        if command.images:
            if self.images is None:
                return Refused(incarnation, request.id, "this instance takes no images from others")
            self.images.cancel(request.id, frontend)
            self.images.hold(now, frontend, command)
            return None
        return self._admit(now, frontend, command)

    def _admit(self, now: float, frontend: str, command: Enqueue, seen: ImagesSeen | None = None) -> Refused | None:
        generation, incarnation = command.generation, self.peer.incarnation
        request = command.request if self.images is None else self.images.with_known(command.request)
        follows = command.route[0] if command.route else None
        stays = "" if follows is None else self._stays(request, follows.peer)
        if stays or (follows is not None and follows.peer is None and self.role != "prefill"):
            follows = None
        source = command.source if self.handoffs is not None else None
        try:
            self._add(request, migrates=follows is not None, awaits=source is not None, now=now)
        except UserError as error:
            return Refused(incarnation, request.id, str(error))
        self._owner[request.id] = RequestOwner(frontend, generation, migrates=follows is not None)
        if request.media:
            self._note_images(request, seen)
        if self.handoffs is not None:
            self.handoffs.supersede(request.id)
            if follows is not None and follows.peer is None:
                self.handoffs.hold(request, generation, frontend)
            elif follows is not None and follows.peer is not None:
                self.handoffs.begin(now, request, generation, frontend, follows.peer)
            if source is not None:
                self.handoffs.fetch(now, request.id, generation, source)
        if stays:
            self._stay(frontend, request.id, generation, stays, command.route[0].peer)
        return None

    def _note_images(self, request: Request, brought: ImagesSeen | None) -> None:
        """What is known of its images before it runs: `brought` is what others had to do with it."""
        sequence = self.scheduler.sequence(request.id)
        assert sequence is not None
        assert sequence.images is not None
        embedded = sum(span.embedded for span in request.media[sequence.images.cached :])
        self.scheduler.encodes.found += max(0, embedded - (0 if brought is None else brought.brought))
        if brought is not None:
            brought.cached = sequence.images.cached
            sequence.images = brought

    def admit_seen(self, now: float) -> list[tuple[str, Lacking | Refused]]:
        """Admit requests whose images are there by now. Returns whom to tell what of those that cannot be."""
        if self.images is None or not (self.images.ready or self.images.lacking):
            return []
        told: list[tuple[str, Lacking | Refused]] = [*self.images.lacking]
        ready, self.images.ready, self.images.lacking = self.images.ready, [], []
        for frontend, command, seen, since in ready:
            seen.waited = now - since
            if (refused := self._admit(now, frontend, command, seen)) is not None:
                told.append((frontend, refused))
        return told

    def encode(self, command: Encode) -> None:
        """Look at images that others are about to ask for; those who ask are told where that cannot be."""
        if command.to != self.peer.incarnation or self.handoffs is None or self.images is None:
            return
        for span, pixels in zip(command.media, command.pixels, strict=True):
            digest = span.digest
            if self.images.has(digest) or digest in self.handoffs.give_side.coming:
                continue
            self.handoffs.give_side.expect(digest)
            why = self._closed or self.scheduler.encodes.ask(command.request_id, span, pixels)
            if why:
                self.handoffs.give_side.made(digest, why)

    def seen(self, encodes: Iterable[PlannedEncode]) -> None:
        """A step has looked at these."""
        if self.handoffs is not None:
            for encode in encodes:
                self.handoffs.give_side.made(encode.span.digest)

    def pixels(self, frontend: str, command: Pixels) -> None:
        """Of images that nobody else has looked at."""
        if command.to == self.peer.incarnation and self.images is not None:
            self.images.pixels(frontend, command)

    def migrate(self, now: float, frontend: str, command: Migrate) -> None:
        """Hand over a request that is here, or have its frontend told why not."""
        request_id, generation, peer = command.request_id, command.generation, command.peer
        owner, sequence = self._owner.get(request_id), self.scheduler.sequence(request_id)
        if command.to != self.peer.incarnation:
            return
        if owner is None or sequence is None or (owner.frontend, owner.generation) != (frontend, generation):
            self._stay(frontend, request_id, generation, "it is not here", peer, here=False)
        elif peer.name == self.peer.name and self.handoffs is not None:
            self.handoffs.go_on(request_id)
        elif stays := self._stays(sequence.request, peer):
            self._stay(frontend, request_id, generation, stays, peer)
        elif self.handoffs is not None and not self.handoffs.leaving(request_id):
            if not sequence.generated:
                self.scheduler.leave(request_id)
            owner.migrates = True
            self.news.pop(request_id, None)
            self.handoffs.begin(now, sequence.request, generation, frontend, peer)

    def _stays(self, request: Request, peer: Peer | None) -> str:
        """Why it can never go on at a peer, any by default; "" when it can."""
        if request.params.use_beam_search:
            return "beam searches are not handed over"
        if request.pooling is not None:
            return "nothing is left to do after a prompt to embed"
        if self.handoffs is None:
            return "this instance takes no part in hand-offs"
        if (size := sum(map(len, request.pixels))) > MOST_PIXELS:
            return f"its images have {size} bytes, at most {MOST_PIXELS} are handed over"
        return "it is here" if peer is not None and peer.name == self.peer.name else ""

    def _stay(
        self, frontend: str, request_id: str, generation: int, reason: str, peer: Peer | None, here: bool = True
    ) -> None:
        said = Stayed(self.peer.incarnation, request_id, generation, reason, peer, here)
        self._stayed.append((frontend, said))

    def obey(self, frontend: str, command: Cancel | SetRole | Drain) -> None:
        """Commands for another incarnation and outdated decisions are ignored."""
        if command.to != self.peer.incarnation:
            return
        match command:
            case Cancel(request_ids=request_ids, generation=generation):
                self._drop(frontend, request_ids, inf if generation is None else generation)
            case SetRole(role=role, generation=generation):
                if generation > self.role_generation:
                    self.role, self.role_generation = role, generation
            case Drain():
                self.draining = True

    def drop_client(self, frontend: str) -> None:
        """A client was lost: cancel its requests."""
        if self.handoffs is not None:
            self.handoffs.drop_client(frontend)
        if self.images is not None:
            self.images.drop_client(frontend)
        for request_id in [r for r, owner in self._owner.items() if owner.frontend == frontend]:
            self._let_go(request_id)

    def address(self, outputs: Iterable[TokenOutput]) -> dict[str, list[TokenOutput]]:
        """The outputs of each frontend, with their attempts. Ended requests are removed."""
        theirs: dict[str, list[TokenOutput]] = {}
        for output in outputs:
            owner = self._owner[output.request_id] if output.finish is None else self._forget(output.request_id)
            output.generation = owner.generation
            theirs.setdefault(owner.frontend, []).append(output)
        return theirs

    def take_failed(self) -> list[TokenOutput]:
        """Of requests that ended here with an error since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def take_stayed(self) -> list[tuple[str, Stayed]]:
        """Whom to tell of requests that are not handed over, since the last call."""
        stayed, self._stayed = self._stayed, []
        return stayed

    def take_fetched(self) -> list[tuple[str, Fetched]]:
        """Whom to tell of fetches that are over, since the last call."""
        fetched, self._fetched = self._fetched, []
        return fetched

    def snapshot(self, encode_ms: float | None = None) -> Snapshot:
        """The load, without a sequence number, so that two can be compared."""
        scheduler, measured = self.scheduler, self.scheduler.measurements
        whole = scheduler.kv.as_whole
        waiting, prefill, running = scheduler.tokens_due()
        queue = None if self.handoffs is None else self.handoffs.decode_side.queue
        held = 0 if self.images is None else len(self.images)
        return Snapshot(
            incarnation=self.peer.incarnation,
            sequence=0,
            role=self.role,
            role_generation=self.role_generation,
            draining=self.draining,
            asleep=self.asleep,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + held + len(scheduler.encodes.asked),
            migrating=scheduler.num_migrating,
            waiting_tokens=waiting + (0 if self.images is None else self.images.tokens),
            prefill_tokens=prefill,
            running_tokens=running,
            free_blocks=whole(scheduler.pool.available),
            reserved_blocks=whole(scheduler.num_reserved_blocks),
            num_blocks=whole(scheduler.pool.num_blocks),
            token_budget=scheduler.limits.token_budget,
            migration_queue=0 if queue is None else len(queue),
            migration_wait_ms=0.0 if queue is None else queue.first_waits * 1e3,
            ttft_ms=measured.ttft_ms,
            tpot_ms=measured.tpot_ms,
            interval_ms=measured.interval_ms,
            fetch_ms=None if self.handoffs is None else self.handoffs.fetch_side.block_ms,
            fetch_wait_ms=None if self.handoffs is None else self.handoffs.fetch_side.wait_ms,
            embedding_mb_ms=None if self.handoffs is None else self.handoffs.take_side.mb_ms,
            load_ms=scheduler.kv.load_ms,
            factors=measured.factors,
            speed=measured.speed,
            encode_ms=None if encode_ms is None else round(encode_ms, 4),
            encodes=scheduler.encodes.looked,
        )

    # --- what hand-offs tell

    def refuses(self, request: Request, frontend: str) -> str:
        if closed := self._closed:
            return closed
        if self.frontends is not None and frontend not in self.frontends:
            return f"the frontend {frontend} is not connected"
        return self._unknown_tokens(request)

    def joined(self, request: Request, frontend: str, generation: int) -> None:
        self._owner[request.id] = RequestOwner(frontend, generation)

    def migrated(self, request_id: str) -> None:
        if request_id in self._owner:
            self._forget(request_id)

    def stayed(self, request_id: str, peer: Peer | None, reason: str) -> None:
        owner = self._owner[request_id]
        owner.migrates = False
        self._stay(owner.frontend, request_id, owner.generation, reason, peer)

    def failed(self, output: TokenOutput) -> None:
        self._failed.append(output)

    def fetched(self, request_id: str, tokens: int, ms: float) -> None:
        owner = self._owner[request_id]
        said = Fetched(self.peer.incarnation, request_id, owner.generation, tokens, ms)
        self._fetched.append((owner.frontend, said))

    def embedded(self, digest: bytes, came: Embedding | None, why: str) -> None:
        assert self.images is not None
        self.images.arrived(digest, came, why)

    # --- inside

    @property
    def _closed(self) -> str:
        """Why it takes nothing new; "" while it does."""
        return "this instance takes nothing new" if self.draining else "this instance sleeps" if self.asleep else ""

    def _drop(self, frontend: str, request_ids: Iterable[str], generation: float = inf) -> None:
        """In attempts up to `generation`."""
        for request_id in request_ids:
            if self.handoffs is not None:
                self.handoffs.cancel(request_id, frontend, generation)
            if self.images is not None:
                self.images.cancel(request_id, frontend, generation)
            owner = self._owner.get(request_id)
            if owner is not None and owner.frontend == frontend and owner.generation <= generation:
                self._let_go(request_id)

    def _let_go(self, request_id: str) -> None:
        self._forget(request_id)
        # of this attempt: told later, it would end the next one, which may be here by then
        self._failed = [output for output in self._failed if output.request_id != request_id]
        self.scheduler.cancel(request_id)
        if self.handoffs is not None:
            self.handoffs.fetch_side.cancel(request_id)

    def _forget(self, request_id: str) -> RequestOwner:
        self.news.pop(request_id, None)
        return self._owner.pop(request_id)

    def _unknown_tokens(self, request: Request) -> str:
        """Which token of the prompt the model does not know; "" when it knows all."""
        if self._vocab_size is None:
            return ""
        low = min(min(request.prompt, default=0), min(request.generated, default=0))
        high = max(max(request.prompt, default=0), max(request.generated, default=0))
        if low >= 0 and high < self._vocab_size:
            return ""
        wrong = low if low < 0 else high
        return f"prompt: token id {wrong}, allowed are 0 to {self._vocab_size - 1}"

    def check(self) -> None:
        """Raise AssertionError unless every request has an owner."""
        self.scheduler.check()
        if self.handoffs is not None:
            self.handoffs.check()
        if self.images is not None:
            self.images.check()
        here = self.scheduler.num_running + self.scheduler.num_waiting + self.scheduler.num_migrating
        assert len(self._owner) - len(self._failed) == here, "a request has no owner"
        assert self.news.keys() <= self._owner.keys(), "nobody waits for news of a request"
