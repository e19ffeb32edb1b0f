"""The engine's server: commands in, steps, events out. One thread, which owns the engine.

Frontends enqueue requests and get tokens, the master gets snapshots and cache deltas, other engines hand requests over.
Commands for another incarnation are refused.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from penstock.core.clock import PAUSE, Clock
from penstock.core.heartbeat import BlackBox
from penstock.core.host_port import has_ipv6
from penstock.core.request import TokenOutput
from penstock.core.wire import PROTOCOL, codec
from penstock.core.wire.engine import (
    AT_WORK,
    LEASE,
    AskCache,
    CacheDelta,
    Cancel,
    Command,
    Drain,
    Encode,
    EngineStats,
    Enqueue,
    Event,
    Failed,
    Hello,
    Inspect,
    Inspection,
    LinkFailed,
    LinkPeer,
    Migrate,
    Pixels,
    Ready,
    SetRole,
    Shutdown,
    Sleep,
    Slept,
    Snapshot,
    StepReport,
    Stopped,
    TierStats,
    UnlinkPeer,
    WakeUp,
    decode_command,
)
from penstock.engine.executor.base import Memory
from penstock.engine.loop import Engine, Step
from penstock.engine.sleeper import Sleeper
from penstock.kv.cache_log import DeltaPace
from penstock.kv.embeddings import EMBEDDINGS, Below
from penstock.sched.local.handoff import Handoffs
from penstock.sched.local.intake import Intake
from penstock.sched.local.speculation import SpeculationCounters
from penstock.transfer.carrier import LinkDown, ReceivedMessage
from penstock.transfer.orphans import OrphanedBlocks
from penstock.transfer.transports import KVTransport

log = logging.getLogger("penstock.engine")
REPORT_INTERVAL = 0.5  # seconds between reports while idle
SNAPSHOT = 0.05  # seconds between snapshots while the load changes
SOONER = 0.01  # the same when an answer has ended
STALLED = 0.005  # seconds to wait when there is work but no room
GOING = 0.02  # the same while memory is being given back or taken up


@dataclass(slots=True)
class _Client:
    """A registered frontend or master."""

    kind: str
    incarnation: int
    heard: float


class EngineServer:
    """Serves registered clients. Tokens go directly to the frontend that owns the request.

    Args:
        address: a ZMQ endpoint to bind, such as ipc:///run/engine.sock.
        clock: for status reports and leases.
        public: an address for other hosts, and the descriptor of a socket that listens there.
        protect: makes a socket that is about to be bound safe from strangers; what it returns is called at the end.
    """

    def __init__(
        self,
        address: str,
        clock: Clock,
        public: tuple[str, int] | None = None,
        protect: Callable[[zmq.SyncSocket], Callable[[], None]] | None = None,
    ) -> None:
        self._clock = clock
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a router drops what does not fit, and a token must not be dropped
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting client keeps its identity
        self._unprotect = protect(self._socket) if protect is not None else None
        if public is not None:
            self._socket.setsockopt(zmq.IPV6, has_ipv6(public[0]))
            self._socket.setsockopt(zmq.USE_FD, public[1])
            self._socket.bind(public[0])
            self._socket.setsockopt(zmq.USE_FD, -1)
        self._socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._clients: dict[str, _Client] = {}
        self._transport: KVTransport | None = None
        self._handoffs: Handoffs | None = None
        self._stopping = False
        self._box: BlackBox | None = None
        self._taking = ""  # the request that is being taken in
        self._stepping = False  # the engine is at its steps
        self._looks_long = False  # what is beside them; the heartbeat rests
        self._changed = True  # since the last snapshot
        self._snapshots = 0
        self._last_snapshot: Snapshot | None = None
        self._deltas = DeltaPace()
        self._snapshot_at = self._ticked_at = self._told_at = self._looked_at = self._beat = clock.now()

    # --- start and end

    def run(
        self,
        engine: Engine,
        ready: Ready,
        orphaned: Callable[[], bool] = lambda: False,
        transport: KVTransport | None = None,
        orphans: OrphanedBlocks | None = None,
        lease: float = LEASE,
        beat: Callable[[int], None] = lambda tokens: None,
        memory: Memory | None = None,
        box: BlackBox | None = None,
        seen: Below | None = None,
    ) -> None:
        """Serve until `Shutdown`, or until `orphaned` returns True.

        Args:
            transport: the transport to other engines; None without hand-offs.
            orphans: what failed instances have left on this host; None where they leave nothing.
            lease: seconds of silence after which a hand-off is over.
            beat: called in every turn in which nothing is computed beside it, and with the number of tokens that are to
                be computed when a step begins or ends.
            memory: the engine's, where it may be put to sleep.
            box: gets what is computed.
            seen: what engines of this host have made of images; None where nobody keeps that.
        """
        self._engine, self._ready = engine, ready
        self._incarnation = ready.peer.incarnation
        self._box = box
        if box is not None:
            engine.tell = box.begin
        self._intake = Intake(ready.peer, ready.role, engine.scheduler, engine.add, ready.vocab_size)
        self._intake.frontends = self._clients.keys()
        self._sleeper = Sleeper(self._incarnation, engine, memory)
        if times := engine.scheduler.measurements.learn(ready.device_model, ready.shape):
            engine.scheduler.predict_by(times)
        if transport is not None:
            self._transport = transport
            engine.give_embeddings(seen)
            self._handoffs = self._intake.hand_off(transport, lease, orphans, engine.embeddings)
            self._poller.register(transport.fileno(), zmq.POLLIN)
            if orphans is not None:
                self._poller.register(orphans.fileno(), zmq.POLLIN)
        engine.log_cache()
        self._tick_every, self._beat_with = lease / 20, beat
        looks = () if engine.looks is None else (engine.looks.fileno(),)
        for fd in (engine.executor.fileno(), *looks, *(mover.fileno() for mover in engine.movers.values())):
            if fd is not None:
                self._poller.register(fd, zmq.POLLIN)
        try:
            self._serve(orphaned)
        finally:
            self._sleeper.settle()
            engine.settle()  # no writes to its blocks after this

    def _serve(self, orphaned: Callable[[], bool]) -> None:
        engine = self._engine
        looked = self._beat = self._clock.now() - REPORT_INTERVAL
        stalled = False
        while not self._stopping:
            if not engine.tokens_in_flight:  # else a turn of the loop says nothing about the step
                self._beats(0)
            self._receive(self._patience(stalled))
            engine.executor.expect_alive()
            engine.move()
            self._miss_clients(self._clock.now())
            for frontend, said in self._intake.admit_seen(self._clock.now()):
                self._send(frontend, said)
            for frontend, fetched in self._intake.take_fetched():  # before what is computed with it
                self._send(frontend, fetched)
            stalled = engine.has_work and not self._step()
            if seen := engine.take_looked():
                self._intake.seen(seen)
                self._changed = True
            if self._sleeper.orders:
                self._tell_slept(self._sleeper.tick())
            if failed := self._intake.take_failed():
                self._report(failed, 0)
            for frontend, stayed in self._intake.take_stayed():
                self._send(frontend, stayed)
            now = self._clock.now()
            self._on_clock(now)
            if now - looked >= REPORT_INTERVAL:
                looked = now
                if orphaned():
                    log.info("the parent process has ended")
                    return
        for client in self._clients:
            self._send(client, Stopped(self._incarnation))

    def fail(self, message: str, *, broken: bool) -> None:
        """Tell all clients that this engine is about to end.

        Args:
            broken: by what it did; else it may have been ended from outside.
        """
        suspects = [self._taking] if self._taking else [*self._engine.at_work] if self._stepping else []
        if self._box is not None:
            self._box.fail(suspects if broken else ())
        for client in self._clients:
            self._send(client, Failed(message, suspects if broken else []))

    def close(self) -> None:
        self._socket.close()
        if self._unprotect is not None:
            self._unprotect()
        self._context.term()

    def _patience(self, stalled: bool) -> float:
        """Seconds to wait for messages before the next step, or before the clock asks for something."""
        engine = self._engine
        if stalled and not (engine.awaits_moves or engine.awaits_encodes):
            return STALLED
        if self._sleeper.orders and not engine.has_work:
            return GOING
        if not stalled and engine.has_work and (not engine.tokens_in_flight or engine.ended):
            return 0.0
        due = min(self._beat + self._report_every, engine.gives_up_at, engine.look_again_at)
        if self._changed:
            due = min(due, self._snapshot_at + SNAPSHOT)
        due = min(due, max(self._deltas.due(engine.cache_logs.values()), self._snapshot_at + SNAPSHOT))
        if self._handoffs is not None and self._handoffs.busy:
            due = min(due, self._ticked_at + self._tick_every)
        return max(0.0, due - self._clock.now())

    @property
    def _report_every(self) -> float:
        return AT_WORK if self._engine.has_work else REPORT_INTERVAL

    def _step(self) -> bool:
        """Start steps and report ended ones; False when there was no room."""
        self._stepping = True  # and it is when this raises
        self._begin()
        step = self._engine.end()
        if step is not None:
            self._ended(step)
            if self._engine.tokens_in_flight:
                self._begin()
        self._stepping = False
        return step is not None or self._engine.tokens_in_flight > 0

    def _ended(self, step: Step) -> None:
        self._beats(self._engine.tokens_in_flight)
        # one more token for each is no change of the load
        ends = any(output.finish is not None for output in step.outputs)
        news = bool(step.plan.work.prefills) or ends
        self._changed |= news
        self._deltas.hurries |= news
        if ends and self._clock.now() - self._snapshot_at >= SOONER:
            # whoever has the answer may go on with it at once
            self._tell_masters(self._clock.now(), hurry=True)
        self._report(step.outputs, step.tokens and _tokens_of(step))
        if self._handoffs is not None:
            self._handoffs.progress(self._clock.now())

    def _begin(self) -> None:
        while plan := self._engine.begin():
            if self._handoffs is not None:
                self._handoffs.started(self._clock.now(), plan)
            self._beats(max(plan.num_tokens, self._engine.tokens_in_flight))

    def _beats(self, tokens: int) -> None:
        """It gets on; but one beat, of all that is computed, is the last while an image is looked at beside steps for
        long: whoever watches finds out whether that hangs, as of a step."""
        looked = self._engine.looks_long(self._clock.now())
        if not looked or not self._looks_long:
            self._beat_with(tokens + looked)
        self._looks_long = bool(looked)

    def _miss_clients(self, now: float) -> None:
        """Drop clients that were silent for too long; call it when all messages have been read."""
        before = self._looked_at
        if now - before < REPORT_INTERVAL:
            return
        self._looked_at = now
        if now - before > PAUSE:  # this process did not run, and they perhaps did not either: they greet every second
            for state in self._clients.values():
                if before - state.heard < PAUSE:
                    state.heard = max(state.heard, now - LEASE + PAUSE)
        for client in [c for c, state in self._clients.items() if now - state.heard > LEASE]:
            log.info("the %s %s has gone", self._clients[client].kind, client)
            self._drop_client(client)

    def _on_clock(self, now: float) -> None:
        """Periodic work."""
        if self._handoffs is not None and now - self._ticked_at >= self._tick_every:
            self._ticked_at = now
            self._handoffs.tick(now)
        if now - self._beat >= self._report_every:
            self._report([], 0)
        if now - self._snapshot_at >= SNAPSHOT:
            self._tell_masters(now)

    # --- messages

    def _receive(self, patience: float) -> None:
        """Handle everything that has arrived, waiting for the first so many seconds."""
        if patience:
            self._poller.poll(math.ceil(patience * 1000))
        while True:
            try:
                identity, data = self._socket.recv_multipart(zmq.NOBLOCK)
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
            self._changed = True
            self._handle(_name(identity), command)
        if self._transport is not None:
            for arrival in self._transport.receive():
                self._changed = True
                self._on_peer(arrival)
            if self._handoffs is not None:
                self._changed |= self._handoffs.collect(self._clock.now())
            self._engine.write_down()  # what came with requests that were taken over

    def _handle(self, client: str, command: Command) -> None:
        match command:
            case Hello():
                self._greet(client, command)
            case Inspect():
                while self._engine.tokens_in_flight and (step := self._engine.end(wait=True)):
                    self._ended(step)
                self._send(client, self._inspection())
            case Shutdown():
                self._stopping = True
            case Enqueue():
                self._taking = command.request.id
                if refused := self._intake.enqueue(self._clock.now(), client, command):
                    self._send(client, refused)
                self._taking = ""
            case _ if command.to != self._incarnation:
                log.info("%s meant for another incarnation was dropped", type(command).__name__)
            case Encode():
                self._intake.encode(command)
            case Pixels():
                self._intake.pixels(client, command)
            case Cancel() | Drain():
                self._deltas.hurries = True
                self._intake.obey(client, command)
            case SetRole():
                self._intake.obey(client, command)
                self._tell_masters(self._clock.now())  # which so know how long that took
            case Sleep() | WakeUp():
                self._tell_slept(self._sleeper.order(client, command))
            case Migrate():
                self._intake.migrate(self._clock.now(), client, command)
            case LinkPeer(peer=peer):
                if self._transport is not None:
                    self._transport.connect(peer)
            case UnlinkPeer(peer=peer):
                if self._transport is not None and self._handoffs is not None:
                    self._handoffs.lost(peer, for_good=True)
                    self._transport.disconnect(peer)
            case AskCache():
                self._send_cache(client)

    def _tell_slept(self, answers: list[tuple[str, Slept]]) -> None:
        """Tell all whether it sleeps, where that has changed, and then who has asked."""
        if self._intake.asleep != self._sleeper.level:
            self._intake.asleep = self._sleeper.level
            self._report([], 0)
            self._tell_masters(self._clock.now())
        for client, answer in answers:
            self._send(client, answer)

    def _greet(self, client: str, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            self._send(client, Failed(f"protocol {hello.protocol} of {hello.sender}, {PROTOCOL} of the engine"))
            return
        known = self._clients.get(client)
        now = self._clock.now()
        if known is not None and known.incarnation == hello.incarnation:
            known.heard = now
            return
        if known is not None:
            self._drop_client(client)
        self._clients[client] = _Client(hello.kind, hello.incarnation, now)
        self._send(client, self._ready)
        if self._sleeper.level:
            self._report([], 0)
        if hello.kind == "master":
            self._last_snapshot = None
            self._send_cache(client)

    def _drop_client(self, client: str) -> None:
        """Drop a client's requests."""
        del self._clients[client]
        self._intake.drop_client(client)

    def _on_peer(self, arrival: ReceivedMessage | LinkDown) -> None:
        assert self._handoffs is not None
        if isinstance(arrival, LinkDown):
            # the end of a peer is normal, and the master handles it; a refusal needs an operator
            log.log(logging.WARNING if arrival.refused else logging.INFO, "%s", arrival.message)
            self._handoffs.lost(arrival.peer, for_good=arrival.refused)
            for client, state in self._clients.items():
                if state.kind == "master":
                    self._send(client, LinkFailed(self._incarnation, arrival.peer, arrival.message))
        else:
            self._handoffs.on(self._clock.now(), arrival)

    # --- events

    def _report(self, outputs: list[TokenOutput], step_tokens: int) -> None:
        """Send outputs to their frontends, and the load to all."""
        self._beat = self._clock.now()
        theirs = self._intake.address(outputs)
        for client, state in self._clients.items():
            if state.kind != "master":
                theirs.setdefault(client, [])
        stats = stats_of(self._engine, self._handoffs, self._sleeper.level)
        for client, own in theirs.items():
            self._send(client, StepReport(self._incarnation, own, stats, step_tokens))

    def _tell_masters(self, now: float, hurry: bool = False) -> None:
        """Send masters the load when it changed or is due, and the cache's deltas when they are, or at once."""
        self._snapshot_at, self._changed = now, False
        logs, taken = self._engine.cache_logs, []
        if hurry or now >= self._deltas.due(logs.values()):
            self._deltas.told(now)
            each = logs.items()
            taken = [(tier, kept.sequence, changes) for tier, kept in each if (changes := kept.take()) is not None]
        masters = [client for client, state in self._clients.items() if state.kind == "master"]
        if not masters:
            return
        seen, last = self._intake.snapshot(self._engine.encode_ms), self._last_snapshot
        if last is None or now - self._told_at >= REPORT_INTERVAL or seen != last:
            self._last_snapshot, self._told_at = seen, now
            self._snapshots += 1
            for client in masters:
                self._send(client, msgspec.structs.replace(seen, sequence=self._snapshots))
        for tier, number, (added, removed) in taken:
            for client in masters:
                self._send(client, CacheDelta(self._incarnation, number, added, removed, tier=tier))

    def _send_cache(self, client: str) -> None:
        """Send everything that can be found in each tier, numbered like its last delta, so that the next one follows.

        Other listeners miss part of the next delta, and will see the gap.
        """
        scheduler = self._engine.scheduler
        tiers = {} if scheduler.offload is None else {lane.name: lane.tier for lane in scheduler.offload.lanes}
        for tier, kept in self._engine.cache_logs.items():
            kept.take()
            embeddings = self._engine.embeddings if tier == EMBEDDINGS else None
            keys = tiers.get(tier, scheduler.pool).keys() if embeddings is None else embeddings.keys()
            self._send(client, CacheDelta(self._incarnation, kept.sequence, keys, [], tier=tier, whole=True))

    def _inspection(self) -> Inspection:
        """Run every `check`."""
        scheduler, handoffs = self._engine.scheduler, self._handoffs
        counts = {
            "clients": len(self._clients),
            "owners": len(self._intake),
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "migrating": scheduler.num_migrating,
            "open_files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
            **scheduler.pool.counts(),
            **(scheduler.offload.counts() if scheduler.offload is not None else {}),
            **(handoffs.counts() if handoffs is not None else {}),
            **self._engine.executor.counts(),
        }
        try:
            self._engine.check()
            self._intake.check()
        except AssertionError as error:
            return Inspection(self._incarnation, counts, str(error) or "an invariant")
        return Inspection(self._incarnation, counts)

    def _send(self, client: str, event: Event) -> None:
        self._socket.send_multipart([client.encode("latin-1"), codec.encode(event)])


def _tokens_of(step: Step) -> int:
    """Of prompts, with what was found of one when its first token comes, and of outputs, without drafts."""
    firsts = sum([output.cached_tokens + 1 for output in step.outputs if output.tokens and not output.start])
    drafts = {s.request_id: s.sample - 1 for s in step.plan.sequences if s.sample > 1}
    right = sum([len(output.tokens) - 1 for output in step.outputs if output.request_id in drafts]) if drafts else 0
    return step.tokens - sum(drafts.values()) + right + firsts


def stats_of(engine: Engine, handoffs: Handoffs | None = None, asleep: int = 0) -> EngineStats:
    """Of an engine, for those who send it requests."""
    decode_side = None if handoffs is None else handoffs.decode_side
    queue = None if handoffs is None else handoffs.decode_side.queue
    scheduler, counters, speculation = engine.scheduler, engine.scheduler.counters, engine.scheduler.speculation
    drafted = SpeculationCounters() if speculation is None else speculation.counters
    masks, experts = engine.executor.mask_costs, engine.executor.expert_load
    return EngineStats(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        used_blocks=scheduler.pool.used,
        num_blocks=scheduler.pool.num_blocks,
        preemptions=counters.preemptions,
        interruptions=counters.interruptions,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        steps=engine.steps,
        busy=engine.busy,
        idle=engine.idle,
        prefix_loads=counters.prefix_loads,
        prefix_fetches=counters.prefix_fetches,
        drafts=drafted.drafts,
        draft_tokens=drafted.draft_tokens,
        accepted_tokens=drafted.accepted_tokens,
        masked_steps=masks.steps,
        masking=masks.seconds,
        grammars=masks.compiled,
        compiling=masks.compiling,
        pulled_blocks=decode_side.pulled_blocks if decode_side is not None else 0,
        failed_pulls=decode_side.failed_pulls if decode_side is not None else 0,
        migration_queue=0 if queue is None else len(queue),
        migrations=0 if queue is None else queue.granted,
        migration_wait=0.0 if queue is None else queue.waited,
        asleep=asleep,
        encodes=scheduler.encodes.looked,
        encoding=scheduler.encodes.seconds,
        embedding_queries=scheduler.encodes.wanted,
        embedding_hits=scheduler.encodes.found,
        embedding_bytes=engine.media_bytes * scheduler.encodes.used // scheduler.encodes.room,
        embedding_room=engine.media_bytes,
        given_embedding_bytes=0 if engine.embeddings is None else engine.embeddings.used,
        given_embeddings=0 if handoffs is None else handoffs.give_side.given,
        taken_embeddings=0 if handoffs is None else handoffs.take_side.taken,
        tiers=_tiers_of(engine),
        expert_switches=experts.switches,
        expert_imbalance=experts.busiest,
        split_steps=experts.splits,
        helped_pieces=experts.helped,
    )


def _tiers_of(engine: Engine) -> tuple[TierStats, ...]:
    offload = engine.scheduler.offload
    return tuple(
        TierStats(
            name=lane.name,
            used_bytes=lane.tier.used * (block_bytes := engine.movers[lane.name].block_bytes),
            hit_tokens=lane.hit_tokens,
            stored_bytes=lane.stored_blocks * block_bytes,
            loaded_bytes=lane.loaded_blocks * block_bytes,
            loads=lane.loads,
            failed_loads=lane.failed_loads,
            late_loads=lane.late_loads,
            failed_stores=lane.failed_stores,
            expected=lane.expected,
            took=lane.took,
            questions=lane.questions,
            failed_questions=lane.failed_questions,
            late_questions=lane.late_questions,
        )
        for lane in (() if offload is None else offload.lanes)
    )


def _name(identity: bytes) -> str:
    """A client's name: its identity decoded as Latin-1."""
    return identity.decode("latin-1")
