"""The engine's side of an adopted server: commands in, requests to the server, tokens out. An event loop owns it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from penstock.core.clock import Clock
from penstock.core.errors import PenstockError, Unavailable
from penstock.core.host_port import has_ipv6
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import FinishReason, Request, Timing, TokenOutput
from penstock.core.wire import PROTOCOL, codec
from penstock.core.wire.engine import (
    AT_WORK,
    LEASE,
    AskCache,
    CacheDelta,
    Cancel,
    Command,
    Drain,
    EngineStats,
    Enqueue,
    Event,
    Failed,
    Hello,
    Inspect,
    Inspection,
    Migrate,
    Peer,
    Ready,
    Refused,
    SetRole,
    Shutdown,
    Sleep,
    Slept,
    Snapshot,
    Stayed,
    StepReport,
    Stopped,
    WakeUp,
    decode_command,
)
from penstock.kv.keys import extend_keys, salted
from penstock.service.adopted import http
from penstock.service.adopted.beliefs import BelievedCache, Pace, blocks_of
from penstock.service.adopted.http import Silent, VllmServer
from penstock.service.adopted.vllm import Dropped, Piece, Rejected, ServerLoad, body_of, refusal
from penstock.service.channel import Inbox

log = logging.getLogger("penstock.engine")
REPORT_INTERVAL = 0.5  # seconds between reports while idle, and between two looks at the server's load
SNAPSHOT = 0.05  # seconds between snapshots while the load changes
PAUSED = 0.8  # of the time that an answer may take: less of it by the clock, and this process did not run
STUCK = 120.0  # seconds without a token of any request, its other clients' included, after which it counts as hung


@dataclass(slots=True)
class _Client:
    """A registered frontend or master."""

    kind: str
    incarnation: int
    heard: float


@dataclass(slots=True, eq=False)
class _Run:
    """A request that the server has.

    Attributes:
        context: tokens of its prompt.
        to_compute: those of them that are not believed to be in its cache.
        keys: of the context's full blocks.
        tokens: that came.
        first: when those began.
        alone: whether no other prompt is computed beside its own.
    """

    client: str
    generation: int
    request: Request
    arrived: float
    context: int
    to_compute: int
    keys: list[bytes]
    tokens: list[int] = field(default_factory=list)
    first: float | None = None
    alone: bool = True
    over: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def held(self) -> int:
        """Tokens whose KV it has."""
        return self.context + len(self.tokens) if self.first is not None else 0


class AdoptedServer:
    """Serves frontends and masters as an engine does.

    Args:
        address: a ZMQ endpoint to bind.
        server: what computes.
        model: as the server calls it.
        priorities: whether it schedules by them.
        load: of the server at first.
        clock: best one that leaves out when this process did not run, so that nobody is thought silent for it.
        public: an address for other hosts, and the descriptor of a socket that listens there.
        protect: makes a socket that is about to be bound safe from strangers; what it returns is called at the end.
    """

    def __init__(
        self,
        address: str,
        ready: Ready,
        server: VllmServer,
        model: str,
        load: ServerLoad,
        clock: Clock,
        *,
        priorities: bool,
        public: tuple[str, int] | None = None,
        protect: Callable[[zmq.SyncSocket], Callable[[], None]] | None = None,
    ) -> None:
        self._ready, self._server, self._model, self._clock = ready, server, model, clock
        self._incarnation, self._priorities, self._load = ready.peer.incarnation, priorities, load
        self._cache = BelievedCache(ready.num_blocks if load.caches else 0)
        self._pace = Pace(ready.device_model, ready.shape)
        self._role, self._role_generation, self._draining = ready.role, 0, False
        self._clients: dict[str, _Client] = {}
        self._runs: dict[str, _Run] = {}
        self._due: dict[str, list[TokenOutput]] = {}  # outputs to be reported, by client
        self._others = 0  # requests of other clients of the server, as seen last
        self._steps = self._snapshots = 0
        self._epoch = 0  # counts changes of what runs
        self._last_snapshot: Snapshot | None = None
        self._told = self._reported = self._moved = clock.now()
        self._stopped, self._look = asyncio.Event(), asyncio.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 500), (zmq.ROUTER_HANDOVER, 1)):
            self._socket.setsockopt(option, value)
        self._unprotect = protect(self._socket) if protect is not None else None
        if public is not None:
            self._socket.setsockopt(zmq.IPV6, has_ipv6(public[0]))
            self._socket.setsockopt(zmq.USE_FD, public[1])
            self._socket.bind(public[0])
            self._socket.setsockopt(zmq.USE_FD, -1)
        self._socket.bind(address)
        self._inbox = Inbox(self._socket, self._receive)

    # --- start and end

    async def run(self) -> None:
        """Serve until `Shutdown`, or `stop`. Raises Unavailable when the server is lost, once clients are told."""
        self._inbox.open()
        working = [asyncio.create_task(work) for work in (self._watch(), self._tell(), self._stopped.wait())]
        try:
            done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            for client in self._clients:
                self._send(client, Stopped(self._incarnation))
        except PenstockError as error:
            for client in self._clients:
                self._send(client, Failed(str(error)))
            raise
        finally:
            running = [run.task for run in self._runs.values() if run.task is not None]
            for task in (*working, *running):
                task.cancel()
            await asyncio.gather(*working, *running, return_exceptions=True)

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self._inbox.close()
        self._socket.close()
        if self._unprotect is not None:
            self._unprotect()
        self._context.term()

    async def _watch(self) -> None:
        """Look at the server's load. Raises Unavailable when it does not answer, or nothing comes of its requests."""
        while True:
            began = self._clock.now()
            try:
                load = await self._server.load()
            except Dropped as error:
                raise Unavailable(f"{self._server.url}: {error}") from None
            except Silent:
                if self._clock.now() - began < PAUSED * http.ANSWERS_WITHIN:  # this process did not run meanwhile
                    continue
                raise
            now = self._clock.now()
            if load.tokens != self._load.tokens:
                self._moved = now
            self._load, self._others = load, max(0, load.running + load.waiting - len(self._runs))
            if self._runs and now - self._moved > STUCK:
                raise Unavailable(f"{self._server.url} has computed nothing for {STUCK:g} s")
            self._look.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_INTERVAL):
                    await self._look.wait()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT)
            now = self._clock.now()
            for client in [name for name, known in self._clients.items() if now - known.heard > LEASE]:
                log.info("the %s %s has gone", self._clients[client].kind, client)
                self._drop_client(client)
            if now - self._reported >= (AT_WORK if self._runs else REPORT_INTERVAL):
                self._flush()
            self._tell_masters(now)

    # --- messages

    def _send(self, client: str, event: Event) -> None:
        self._socket.send_multipart([_identity(client), codec.encode(event)])
        self._inbox.look()

    def _receive(self, frames: list[bytes]) -> None:
        sender, *rest = frames
        try:
            command = decode_command(b"".join(rest))
        except msgspec.DecodeError as error:
            log.warning("a message that is no command was dropped: %s", error)
            return
        self._handle(sender.decode(errors="surrogateescape"), command)

    def _handle(self, client: str, command: Command) -> None:
        match command:
            case Hello():
                self._greet(client, command)
            case Inspect():
                self._send(client, self._inspection())
            case Shutdown():
                self.stop()
            case Enqueue():
                self._enqueue(client, command)
            case _ if command.to != self._incarnation:
                log.info("%s meant for another incarnation was dropped", type(command).__name__)
            case Cancel(request_ids=request_ids, generation=generation):
                for run in [self._runs[name] for name in request_ids if name in self._runs]:
                    if run.client == client and (generation is None or run.generation <= generation):
                        self._end(run)
            case Migrate(request_id=request_id, generation=attempt, peer=peer):
                self._stay(client, request_id, attempt, peer)
            case SetRole(role=role, generation=number):
                if number > self._role_generation:
                    self._role, self._role_generation = role, number
            case Drain():
                self._draining = True
            case Sleep() | WakeUp():
                self._send(client, Slept(self._incarnation, command.number, 0, "ask the adopted server itself"))
            case AskCache():
                self._send_cache(client)
            case _:
                pass  # links to peers, of which it has none

    def _inspection(self) -> Inspection:
        try:
            self.check()
            broken = ""
        except AssertionError as error:
            broken = str(error) or "a check failed"
        return Inspection(self._incarnation, {"requests": len(self._runs)}, broken)

    def _greet(self, client: str, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            self._send(client, Failed(f"protocol {hello.protocol} of {hello.sender}, {PROTOCOL} of the engine"))
            return
        known, now = self._clients.get(client), self._clock.now()
        if known is not None and known.incarnation == hello.incarnation:
            known.heard = now
            return
        if known is not None:
            self._drop_client(client)
        self._clients[client] = _Client(hello.kind, hello.incarnation, now)
        self._send(client, self._ready)
        if hello.kind == "master":
            self._last_snapshot = None
            self._send_cache(client)

    def _drop_client(self, client: str) -> None:
        del self._clients[client]
        self._due.pop(client, None)
        for run in [run for run in self._runs.values() if run.client == client]:
            self._end(run)

    def _stay(self, client: str, request_id: str, generation: int, peer: Peer | None) -> None:
        why = "an adopted server takes no part in hand-offs"
        self._send(client, Stayed(self._incarnation, request_id, generation, why, peer))

    # --- requests

    def _enqueue(self, client: str, command: Enqueue) -> None:
        request = command.request
        if client not in self._clients:
            log.warning("request %s of %s, which is not registered, was dropped", request.id, client)
        elif command.to != self._incarnation:
            message = f"meant for incarnation {command.to} of {self._ready.peer.name}, this is {self._incarnation}"
            self._send(client, Refused(self._incarnation, request.id, message, "stale"))
        elif self._draining:
            self._send(client, Refused(self._incarnation, request.id, "this instance takes nothing new", "draining"))
        elif why := refusal(request):
            self._send(client, Refused(self._incarnation, request.id, why))
        else:
            if (before := self._runs.get(request.id)) is not None:
                self._end(before)
            self._begin(client, command)
            if command.route:
                self._stay(client, request.id, command.generation, command.route[0].peer)

    def _begin(self, client: str, command: Enqueue) -> None:
        request, now = command.request, self._clock.now()
        context, keys = request.context, list[bytes]()
        extend_keys(keys, salted(self._ready.root_key, request.cache_salt), context, len(context) // BLOCK_TOKENS)
        to_compute = max(1, len(context) - self._cache.count(keys) * BLOCK_TOKENS)
        run = _Run(client, command.generation, request, now, len(context), to_compute, keys)
        if not self._runs:
            self._moved = now
        unread = [other for other in self._runs.values() if other.first is None]
        for other in unread:
            other.alone = False
        run.alone = not unread and not self._others
        self._epoch += 1
        self._runs[request.id] = run
        run.task = asyncio.get_running_loop().create_task(self._follow(run))

    async def _follow(self, run: _Run) -> None:
        """A request from its beginning to its end."""
        try:
            last: Piece | None = None
            cached = 0
            body = body_of(run.request, self._model, priorities=self._priorities)
            async for piece in self._server.complete(body):
                cached = piece.cached_tokens or cached
                if piece.finish is not None:
                    last = piece
                elif piece.tokens:
                    self._take(run, piece, cached)
            if last is None:
                raise Dropped("its answer ended in the middle")
            self._take(run, last, cached)
        except Rejected as error:
            if run.first is None:
                self._end(run, cancels=False)
                self._send(run.client, Refused(self._incarnation, run.request.id, str(error)))
            else:
                self._drop(run, str(error))
        except Dropped as error:
            self._drop(run, str(error))
        except Unavailable as error:
            self._drop(run, str(error))
            self._look.set()  # whether it is gone
        except Exception as error:  # the others go on
            log.exception("request %s failed", run.request.id)
            self._drop(run, type(error).__name__)

    def _drop(self, run: _Run, why: str) -> None:
        """It goes on elsewhere, if it can."""
        log.warning("request %s is dropped: %s", run.request.id, why)
        self._put(run, TokenOutput(run.request.id, [], finish=FinishReason.ABORT))
        self._end(run, cancels=False)

    def _take(self, run: _Run, piece: Piece, cached: int) -> None:
        """Tokens have come."""
        if run.over:
            return
        now = self._moved = self._clock.now()
        request = run.request
        start = len(request.generated) + len(run.tokens)
        if piece.tokens:
            self._measure(run, len(piece.tokens), now)
        run.tokens += piece.tokens
        self._steps += 1
        output = TokenOutput(request.id, piece.tokens, piece.logprobs, piece.finish, start=start, cached_tokens=cached)
        if piece.finish is not None:
            ends = piece.tokens[-1:] if piece.finish is FinishReason.STOP else []
            output.stop_token = ends[0] if ends and ends[0] in request.stop_ids else None
            output.timing = self._timing(run, now)
        self._put(run, output)
        if piece.finish is not None:
            self._settle(run, now)
            self._end(run, cancels=False)

    def _measure(self, run: _Run, tokens: int, now: float) -> None:
        """What these tokens tell of the server's pace."""
        others = [other for other in self._runs.values() if other is not run]
        held = sum(other.held for other in others)
        if run.first is None:
            run.first = now
            self._epoch += 1
            self._cache.use(run.keys)
            self._pace.begun(now - run.arrived)
            if run.alone and run.to_compute <= self._ready.token_budget:
                cached = run.context - run.to_compute
                self._pace.prefilled(now - run.arrived, run.to_compute, cached, len(others), held)
        elif not self._others and all(other.first is not None for other in others):
            self._pace.stepped(now, run.request.id, self._epoch, tokens, len(others) + 1, held + run.held)

    def _timing(self, run: _Run, now: float) -> Timing:
        """What went by before its first step is not known from outside, and counts as prefill."""
        first = now if run.first is None else run.first
        wait = "an adopted server does not say what it waited for"
        return Timing(0.0, first - run.arrived, now - first, wait)

    def _settle(self, run: _Run, now: float) -> None:
        """It has ended well: all of it is in the server's cache."""
        if run.first is not None and len(run.tokens) > 1:
            self._pace.ended((now - run.first) / (len(run.tokens) - 1))
        whole = [*run.request.context, *run.tokens[:-1]]  # the KV of the last one was never computed
        root = salted(self._ready.root_key, run.request.cache_salt)
        extend_keys(run.keys, root, whole, len(whole) // BLOCK_TOKENS)
        self._cache.use(run.keys)

    def _end(self, run: _Run, *, cancels: bool = True) -> None:
        """
        Args:
            cancels: it is under way, and the server is to abort it.
        """
        run.over = True
        self._epoch += 1
        if self._runs.get(run.request.id) is run:
            del self._runs[run.request.id]
        if cancels and run.task is not None:
            run.task.cancel()

    # --- reports

    def _put(self, run: _Run, output: TokenOutput) -> None:
        """Report it with what else comes in this turn of the event loop."""
        if run.over or run.client not in self._clients:
            return
        output.generation = run.generation
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.setdefault(run.client, []).append(output)

    def _flush(self) -> None:
        """Outputs to their frontends, and the load to all."""
        self._reported = self._clock.now()
        due, self._due = self._due, {}
        tokens = sum(len(output.tokens) for outputs in due.values() for output in outputs)
        stats = self._stats()
        for client, known in self._clients.items():
            if known.kind != "master":
                self._send(client, StepReport(self._incarnation, due.get(client, []), stats, tokens))

    def _stats(self) -> EngineStats:
        load, begun = self._load, sum(run.first is not None for run in self._runs.values())
        return EngineStats(
            running=begun + self._others,
            waiting=len(self._runs) - begun,
            used_blocks=self._used_blocks(),
            num_blocks=self._ready.num_blocks,
            preemptions=load.preemptions,
            prefix_queries=load.prefix_queries,
            prefix_hits=load.prefix_hits,
            steps=self._steps,
        )

    def _used_blocks(self) -> int:
        """By what the server said last, and by what it has from here since."""
        told = round(self._load.used * self._ready.num_blocks)
        return min(self._ready.num_blocks, max(told, sum(blocks_of(run.held) for run in self._runs.values())))

    def _snapshot(self) -> Snapshot:
        """Without a sequence number, so that two can be compared."""
        begun = [run for run in self._runs.values() if run.first is not None]
        stats, pace = self._stats(), self._pace
        return Snapshot(
            incarnation=self._incarnation,
            sequence=0,
            role=self._role,
            role_generation=self._role_generation,
            draining=self._draining,
            running=stats.running,
            waiting=stats.waiting,
            migrating=0,
            waiting_tokens=sum(run.to_compute for run in self._runs.values() if run.first is None),
            prefill_tokens=0,
            running_tokens=sum(run.held for run in begun),
            free_blocks=stats.num_blocks - stats.used_blocks,
            reserved_blocks=0,
            num_blocks=stats.num_blocks,
            token_budget=self._ready.token_budget,
            ttft_ms=_milliseconds(pace.ttft),
            tpot_ms=_milliseconds(pace.tpot),
            interval_ms=_milliseconds(pace.interval),
            factors=pace.factors,
        )

    def _tell_masters(self, now: float) -> None:
        changes, number = self._cache.take(), self._cache.sequence
        masters = [client for client, known in self._clients.items() if known.kind == "master"]
        if not masters:
            return
        seen, last = self._snapshot(), self._last_snapshot
        if last is None or now - self._told >= REPORT_INTERVAL or seen != last:
            self._last_snapshot, self._told = seen, now
            self._snapshots += 1
            for client in masters:
                self._send(client, msgspec.structs.replace(seen, sequence=self._snapshots))
        if changes is not None:
            for client in masters:
                self._send(client, CacheDelta(self._incarnation, number, *changes))

    def _send_cache(self, client: str) -> None:
        """All that is believed to be cached. Other listeners miss changes by it, and will see the gap."""
        if self._cache.take() is not None:
            log.debug("changes of the cache are told as a whole")
        self._send(client, CacheDelta(self._incarnation, self._cache.sequence, self._cache.keys(), [], whole=True))

    def check(self) -> None:
        """Raise AssertionError unless every request is under way and has an owner."""
        assert all(run.client in self._clients and not run.over for run in self._runs.values())
        self._cache.check()


def _identity(client: str) -> bytes:
    return client.encode(errors="surrogateescape")


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
