"""Where the wire ends: commands in, steps, events out. One thread; the engine is its only owner.

Frontends enqueue and get tokens, the master gets snapshots of the load and of the cache, other engines hand requests
over. What is meant for an earlier life of this engine is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from penstock.core.clock import Clock
from penstock.core.errors import UserError
from penstock.core.request import Request, TokenOutput
from penstock.core.wire import PROTOCOL, codec
from penstock.core.wire.engine import (
    LEASE,
    AskCache,
    CacheDelta,
    Cancel,
    Command,
    Drain,
    Enqueue,
    Event,
    Failed,
    Hello,
    Inspect,
    Link,
    LinkFailed,
    Ready,
    Refused,
    SetPool,
    Shutdown,
    Snapshot,
    StepReport,
    Unlink,
    decode_command,
)
from penstock.engine import load
from penstock.engine.cache_log import CacheLog
from penstock.engine.loop import Engine
from penstock.sched.local.handoff import Handoffs
from penstock.transfer.carrier import Arrival, LinkDown
from penstock.transfer.transports import Transport

log = logging.getLogger("penstock.engine")
HEARTBEAT = 0.5  # seconds between signs of life while idle
SNAPSHOT = 0.05  # seconds between snapshots while the load changes
STALLED = 0.005  # seconds to wait when there is work and no room for it


@dataclass(slots=True)
class _Client:
    """Somebody who said Hello."""

    kind: str
    incarnation: int
    heard: float


@dataclass(frozen=True, slots=True)
class _Owner:
    """Who gets a request's tokens, and which attempt they belong to."""

    client: bytes
    generation: int


class EngineServer:
    """Serves whoever said hello. Tokens go straight to the frontend that owns the request.

    Args:
        address: a ZMQ endpoint to bind, such as ipc:///run/engine.sock.
        clock: for heartbeats and leases.
    """

    def __init__(self, address: str, clock: Clock) -> None:
        self._clock = clock
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a router drops what does not fit, and a token must not be dropped
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that came back is the same client
        self._socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._clients: dict[bytes, _Client] = {}
        self._owner: dict[str, _Owner] = {}
        self._transport: Transport | None = None
        self._handoffs: Handoffs | None = None
        self._stopping = self._draining = False
        self._pool_generation = 0
        self._snapshots = 0
        self._last_snapshot: Snapshot | None = None
        self._snapshot_at = self._ticked_at = self._told_at = self._looked_at = clock.now()

    # --- life

    def run(
        self,
        engine: Engine,
        ready: Ready,
        orphaned: Callable[[], bool] = lambda: False,
        transport: Transport | None = None,
        lease: float = LEASE,
    ) -> None:
        """Serve until told to shut down, or until `orphaned` says that nobody is left to serve.

        Args:
            transport: the way to other engines; without one this engine neither hands over nor takes over.
            lease: seconds of silence after which a hand-off is over.
        """
        self._engine, self._ready, self._pool = engine, ready, ready.pool
        self._incarnation = ready.peer.incarnation
        engine.cache_log = CacheLog()
        if transport is not None:
            self._transport = transport
            self._handoffs = Handoffs(engine.scheduler, transport, self, lease)
            self._poller.register(transport.fileno(), zmq.POLLIN)
        self._tick_every = lease / 20
        looked = self._beat = self._clock.now() - HEARTBEAT
        stalled = False
        while not self._stopping:
            self._receive(self._patience(stalled))
            self._miss_clients(self._clock.now())
            stalled = engine.has_work and not self._step()
            now = self._clock.now()
            self._pulse(now)
            if now - looked >= HEARTBEAT:
                looked = now
                if orphaned():
                    log.info("nobody is left to serve")
                    return

    def fail(self, message: str) -> None:
        """Tell everybody that this engine is about to end."""
        for client in self._clients:
            self._send(client, Failed(message))

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _patience(self, stalled: bool) -> float:
        """Seconds to wait for messages before the next step."""
        if stalled:
            return STALLED
        if self._engine.has_work:
            return 0.0
        return min(HEARTBEAT, self._tick_every) if self._handoffs and self._handoffs.busy else HEARTBEAT

    def _step(self) -> bool:
        """One step; False when there was no room to work."""
        plan = self._engine.plan()
        if not plan.sequences:
            return False
        if self._handoffs is not None:
            self._handoffs.started(self._clock.now(), plan)
        self._report(self._engine.run(plan), plan.num_tokens)
        if self._handoffs is not None:
            self._handoffs.progress(self._clock.now())
        return True

    def _miss_clients(self, now: float) -> None:
        """Give up whoever has been silent for too long; to be called when everything that has arrived was read."""
        if now - self._looked_at < HEARTBEAT:
            return
        self._looked_at = now
        for client in [c for c, state in self._clients.items() if now - state.heard > LEASE]:
            log.info("the %s %s has gone", self._clients[client].kind, _name(client))
            self._forsake(client)

    def _pulse(self, now: float) -> None:
        """What is done by the clock."""
        if self._handoffs is not None and now - self._ticked_at >= self._tick_every:
            self._ticked_at = now
            self._handoffs.tick(now)
        if now - self._beat >= HEARTBEAT:
            self._report([], 0)
        if now - self._snapshot_at >= SNAPSHOT:
            self._tell_masters(now)

    # --- messages

    def _receive(self, patience: float) -> None:
        """Handle everything that has arrived, waiting for the first so many seconds."""
        if patience:
            self._poller.poll(int(patience * 1000))
        while True:
            try:
                client, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            except ValueError:
                log.warning("a message that is not one frame was dropped")
                continue
            try:
                command = decode_command(data)
            except msgspec.DecodeError as error:
                log.warning("a message that is no command was dropped: %s", error)
                continue
            self._handle(client, command)
        if self._transport is not None:
            for arrival in self._transport.receive():
                self._on_peer(arrival)

    def _handle(self, client: bytes, command: Command) -> None:
        match command:
            case Hello():
                self._greet(client, command)
            case Inspect():
                counts = {"owners": len(self._owner), "clients": len(self._clients)}
                self._send(client, load.inspection(self._engine, self._incarnation, self._handoffs, counts))
            case Shutdown():
                self._stopping = True
            case Enqueue() if command.to != self._incarnation:
                message = f"meant for incarnation {command.to} of {self._ready.peer.name}, this is {self._incarnation}"
                self._send(client, Refused(self._incarnation, command.request.id, message, "stale"))
            case Enqueue():
                self._enqueue(client, command)
            case _ if command.to != self._incarnation:
                log.info("%s meant for an earlier life was dropped", type(command).__name__)
            case Cancel(request_ids=request_ids):
                self._cancel(client, request_ids)
            case Link(peer=peer):
                if self._transport is not None:
                    self._transport.connect(peer)
            case Unlink(peer=peer):
                if self._transport is not None and self._handoffs is not None:
                    self._handoffs.lost(peer, for_good=True)
                    self._transport.disconnect(peer)
            case SetPool(pool=pool, generation=generation):
                if generation > self._pool_generation:
                    self._pool, self._pool_generation = pool, generation
            case Drain():
                self._draining = True
            case AskCache():
                self._send_cache(client)

    def _greet(self, client: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            self._send(client, Failed(f"protocol {hello.protocol} of {hello.sender}, {PROTOCOL} of the engine"))
            return
        known = self._clients.get(client)
        now = self._clock.now()
        if known is not None and known.incarnation == hello.incarnation:
            known.heard = now
            return
        if known is not None:
            self._forsake(client)
        self._clients[client] = _Client(hello.kind, hello.incarnation, now)
        self._send(client, self._ready)
        if hello.kind == "master":
            self._last_snapshot = None
            self._send_cache(client)

    def _enqueue(self, client: bytes, command: Enqueue) -> None:
        request, generation = command.request, command.generation
        if self._draining:
            self._send(client, Refused(self._incarnation, request.id, "this instance takes nothing new", "draining"))
            return
        if unknown := self._unknown_tokens(request):
            self._send(client, Refused(self._incarnation, request.id, unknown))
            return
        owner = self._owner.get(request.id)
        if owner is not None and owner.client == client and owner.generation < generation:
            self._cancel(client, [request.id])
        away = command.decode is not None and command.decode.name != self._ready.peer.name
        try:
            self._engine.add(request, departs=away and self._handoffs is not None)
        except UserError as error:
            self._send(client, Refused(self._incarnation, request.id, str(error)))
            return
        self._owner[request.id] = _Owner(client, generation)
        if self._handoffs is not None:
            self._handoffs.supersede(request.id)
            if command.decode is not None and away:
                self._handoffs.begin(request, generation, _name(client), command.decode)

    def _unknown_tokens(self, request: Request) -> str:
        """Which token of a prompt the model does not know; "" when it knows all."""
        low, high = min(request.prompt, default=0), max(request.prompt, default=0)
        if low >= 0 and high < self._ready.vocab_size:
            return ""
        wrong = low if low < 0 else high
        return f"prompt: token id {wrong}, allowed are 0 to {self._ready.vocab_size - 1}"

    def _cancel(self, client: bytes, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self._handoffs is not None:
                self._handoffs.cancel(request_id, _name(client))
            owner = self._owner.get(request_id)
            if owner is not None and owner.client == client:
                del self._owner[request_id]
                self._engine.cancel([request_id])

    def _forsake(self, client: bytes) -> None:
        """Its requests have nobody who wants them."""
        del self._clients[client]
        if self._handoffs is not None:
            self._handoffs.forsake(_name(client))
        mine = [request_id for request_id, owner in self._owner.items() if owner.client == client]
        for request_id in mine:
            del self._owner[request_id]
        self._engine.cancel(mine)

    def _on_peer(self, arrival: Arrival | LinkDown) -> None:
        assert self._handoffs is not None
        if isinstance(arrival, LinkDown):
            # a peer that ends is everyday life, and the master says what it means; a refusal needs somebody to act
            log.log(logging.WARNING if arrival.refused else logging.INFO, "%s", arrival.message)
            self._handoffs.lost(arrival.peer, for_good=arrival.refused)
            for client, state in self._clients.items():
                if state.kind == "master":
                    self._send(client, LinkFailed(self._incarnation, arrival.peer, arrival.message))
        else:
            self._handoffs.on(self._clock.now(), arrival)

    # --- what hand-offs tell

    def refuses(self, request: Request, frontend: str) -> str:
        if self._draining:
            return "this instance takes nothing new"
        if frontend.encode() not in self._clients:
            return f"the frontend {frontend} is not connected"
        return self._unknown_tokens(request)

    def spent(self, request_id: str) -> tuple[float, float]:
        return self._engine.spent(request_id)

    def joined(self, request: Request, frontend: str, generation: int, queue: float, prefill: float) -> None:
        self._owner[request.id] = _Owner(frontend.encode(), generation)
        self._engine.adopt(request.id, queue, prefill)
        self._engine.write_down()

    def departed(self, request_id: str) -> None:
        self._owner.pop(request_id, None)
        self._engine.forget(request_id)

    def failed(self, output: TokenOutput) -> None:
        self._engine.forget(output.request_id)
        self._report([output], 0)

    # --- events

    def _report(self, outputs: list[TokenOutput], step_tokens: int) -> None:
        """Send every frontend its outputs, and the load to all."""
        self._beat = self._clock.now()
        theirs: dict[bytes, list[TokenOutput]] = {c: [] for c, state in self._clients.items() if state.kind != "master"}
        for output in outputs:
            owner = self._owner[output.request_id] if output.finish is None else self._owner.pop(output.request_id)
            output.generation = owner.generation
            theirs.setdefault(owner.client, []).append(output)
        stats = load.stats(self._engine)
        for client, own in theirs.items():
            self._send(client, StepReport(self._incarnation, own, stats, step_tokens))

    def _tell_masters(self, now: float) -> None:
        """The load when it has changed or a while has passed, and what came and went in the cache."""
        self._snapshot_at = now
        changes = self._engine.cache_log.take() if self._engine.cache_log is not None else None
        masters = [client for client, state in self._clients.items() if state.kind == "master"]
        if not masters:
            return
        snapshot = load.snapshot(self._engine, self._incarnation, self._pool, self._pool_generation, self._draining)
        last = self._last_snapshot
        if last is None or now - self._told_at >= HEARTBEAT or snapshot != last:
            self._last_snapshot, self._told_at = snapshot, now
            self._snapshots += 1
            for client in masters:
                self._send(client, msgspec.structs.replace(snapshot, sequence=self._snapshots))
        if changes is not None:
            assert self._engine.cache_log is not None
            delta = CacheDelta(self._incarnation, self._engine.cache_log.sequence, *changes)
            for client in masters:
                self._send(client, delta)

    def _send_cache(self, client: bytes) -> None:
        """Everything that can be found, numbered like the last delta, so that the next one follows it."""
        assert self._engine.cache_log is not None
        keys = self._engine.scheduler.pool.keys()
        self._engine.cache_log.take()
        # whoever else listens has missed what was just taken, and will see the gap
        self._send(client, CacheDelta(self._incarnation, self._engine.cache_log.sequence, keys, [], whole=True))

    def _send(self, client: bytes, event: Event) -> None:
        self._socket.send_multipart([client, codec.encode(event)])


def _name(client: bytes) -> str:
    return client.decode(errors="replace")
