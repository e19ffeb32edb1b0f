"""The master: knows every instance, decides where each sequence runs, and carries no token.

A pure controller: what happened goes into `tick`, what is to be done comes out. A pump drives it (`master_pump.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire import PROTOCOL
from penstock.core.wire.engine import (
    LEASE,
    AskCache,
    CacheDelta,
    Command,
    Event,
    Failed,
    Link,
    LinkFailed,
    Peer,
    Pool,
    Ready,
    Snapshot,
    Unlink,
)
from penstock.core.wire.master import Ended, FrontendMessage, Join, Joined, MasterMessage, NoPlace, Place, Placed
from penstock.kv.index import ClusterIndex
from penstock.sched.cluster import Demand, DispatchPolicy, InstanceLoad, Random, dispatch, hands_over
from penstock.service.instances import Endpoint, LinkLost

SUSPECT_AFTER = 2.0  # seconds without a Snapshot after which an instance gets no work
DEAD_AFTER = 60.0  # seconds without one after which it gets none although there is nobody else
UNSEEN = 2  # Snapshots until a request that was placed is certainly in them
RELINK_AFTER = 5.0  # seconds until a failed link is tried again
PROBATION = 1.0  # seconds without a complaint until it is trusted again
ASK_AGAIN = 2.0  # seconds between two AskCache


@dataclass(frozen=True, slots=True)
class FromEngine:
    name: str
    event: Event | LinkLost


@dataclass(frozen=True, slots=True)
class FromFrontend:
    name: str
    message: FrontendMessage


@dataclass(frozen=True, slots=True)
class ToEngine:
    name: str
    command: Command


@dataclass(frozen=True, slots=True)
class ToFrontend:
    name: str
    message: MasterMessage


@dataclass(frozen=True, slots=True)
class Notice:
    """For the log."""

    text: str


Happening = FromEngine | FromFrontend
Action = ToEngine | ToFrontend | Notice


@dataclass(slots=True)
class _Life:
    """One incarnation of an instance, and what was placed on it.

    Attributes:
        heard: when its newest Snapshot came; at first, when it became ready.
        held_tokens, requests: of sequences that stay here after their prompt.
        unseen: sequences whose prompt was sent here -> (prompt tokens, number of the first Snapshot that has them).
        links: to whom it was told to connect.
        asked: when it was asked for its cache.
    """

    ready: Ready
    heard: float
    snapshot: Snapshot | None = None
    held_tokens: int = 0
    requests: int = 0
    unseen: dict[_Key, tuple[int, int]] = field(default_factory=dict)
    links: dict[str, _LinkState] = field(default_factory=dict)
    asked: float = float("-inf")

    @property
    def peer(self) -> Peer:
        return self.ready.peer

    @property
    def pool(self) -> Pool:
        return self.snapshot.pool if self.snapshot is not None else self.ready.pool


@dataclass(slots=True)
class _LinkState:
    """A link from one instance to another.

    Attributes:
        failed: when that was told; None while it is fine.
        message: why.
        retried: whether it was told to connect once more since.
    """

    peer: Peer
    failed: float | None = None
    message: str = ""
    retried: bool = False


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A sequence that was placed, with the lives it counts on."""

    placed: Placed
    prompt_tokens: int
    reader: _Life
    home: _Life


_Key = tuple[str, str]  # frontend, request id


class Master:
    """
    Args:
        instances: all there can be.
        policy: compares them.
        rng: for policies that draw lots.
        incarnation: of this master.
    """

    def __init__(
        self, instances: Sequence[Endpoint], policy: DispatchPolicy, rng: Random, incarnation: int = 0
    ) -> None:
        self.index = ClusterIndex()
        self._endpoints = {endpoint.name: endpoint for endpoint in instances}
        self._lives: dict[str, _Life] = {}
        self._policy = policy
        self._rng = rng
        self._joined = Joined(incarnation)
        self._frontends: dict[str, float] = {}  # name -> when it was heard
        self._frontend_lives: dict[str, int] = {}
        self._in_flight: dict[_Key, _InFlight] = {}

    def tick(self, now: float, happening: Happening | None = None) -> list[Action]:
        """What to do about what happened, or about time going on. Call it now and then, with or without an event.

        Args:
            now: seconds; never goes back.
        """
        match happening:
            case FromEngine(name, event):
                return self._on_engine(now, name, event)
            case FromFrontend(name, message):
                return self._on_frontend(now, name, message)
            case None:
                self._forget_silent_frontends(now)
                return self._retry_links(now)

    # --- instances

    def _on_engine(self, now: float, name: str, event: Event | LinkLost) -> list[Action]:
        life = self._lives.get(name)
        match event:
            case Ready():
                if life is None or life.peer.incarnation != event.peer.incarnation:
                    return self._join(now, name, event)
            case LinkLost(message=message) | Failed(message=message):
                return self._leave(name, message)
            case Snapshot() if life is not None and event.incarnation == life.peer.incarnation:
                life.snapshot, life.heard = event, now
                life.unseen = {k: v for k, v in life.unseen.items() if v[1] > event.sequence}
            case CacheDelta() if life is not None and event.incarnation == life.peer.incarnation:
                if not self.index.apply(name, event) and now - life.asked >= ASK_AGAIN:
                    life.asked = now
                    return [ToEngine(name, AskCache(event.incarnation))]
            case LinkFailed(peer=peer, message=message) if life is not None:
                link = life.links.get(peer.name)
                if event.incarnation == life.peer.incarnation and link is not None and link.peer == peer:
                    link.failed, link.message, link.retried = now, message, False
                    return [Notice(f"{name} cannot hand over to {peer.name}: {message}")]
        return []

    def _join(self, now: float, name: str, ready: Ready) -> list[Action]:
        if name not in self._endpoints:
            return []
        actions = self._leave(name, "another life of it has begun")
        life = self._lives[name] = _Life(ready, heard=now)
        actions.append(Notice(f"{name} is ready: pool {ready.pool}, {ready.num_blocks} blocks on {ready.device}"))
        for other, its in self._lives.items():
            if other != name:
                actions += [*self._connect(life, its), *self._connect(its, life)]
        return actions

    def _connect(self, source: _Life, target: _Life) -> list[Action]:
        if not _may_link(source, target) or _mismatch(source, target):
            return []
        source.links[target.peer.name] = _LinkState(target.peer)
        return [ToEngine(source.peer.name, Link(source.peer.incarnation, target.peer))]

    def _leave(self, name: str, why: str) -> list[Action]:
        gone = self._lives.pop(name, None)
        self.index.forget(name)
        if gone is None:
            return []
        actions: list[Action] = [Notice(f"{name} has gone: {why}")]
        for other, life in self._lives.items():
            if life.links.pop(name, None) is not None:
                actions.append(ToEngine(other, Unlink(life.peer.incarnation, gone.peer)))
        return actions

    def _retry_links(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for name, life in self._lives.items():
            for link in life.links.values():
                if link.failed is None or now - link.failed < RELINK_AFTER:
                    continue
                if not link.retried:
                    link.retried = True
                    actions.append(ToEngine(name, Link(life.peer.incarnation, link.peer)))
                elif now - link.failed >= RELINK_AFTER + PROBATION:
                    link.failed = None
        return actions

    # --- frontends

    def _on_frontend(self, now: float, name: str, message: FrontendMessage) -> list[Action]:
        self._frontends[name] = now
        match message:
            case Join(incarnation=incarnation, protocol=protocol):
                if self._frontend_lives.setdefault(name, incarnation) != incarnation:
                    self._frontend_lives[name] = incarnation
                    self._forget({name})
                refused = [Notice(f"{name} speaks protocol {protocol}, the master {PROTOCOL}")] * (protocol != PROTOCOL)
                return [*refused, ToFrontend(name, self._joined)]  # with the protocol: it leaves by itself
            case Place():
                return [ToFrontend(name, self._place(now, name, message))]
            case Ended(request_ids=request_ids):
                for request_id in request_ids:
                    self._end((name, request_id))
        return []

    def _forget_silent_frontends(self, now: float) -> None:
        gone = {name for name, heard in self._frontends.items() if now - heard > LEASE}
        if gone:
            self._forget(gone)
            for name in gone:
                del self._frontends[name]
                self._frontend_lives.pop(name, None)

    def _forget(self, frontends: set[str]) -> None:
        """What they placed is over."""
        for key in [key for key in self._in_flight if key[0] in frontends]:
            self._end(key)

    # --- placement

    def _place(self, now: float, frontend: str, place: Place) -> Placed | NoPlace:
        key = (frontend, place.request_id)
        before = self._in_flight.get(key)
        if before is not None and before.placed.generation == place.generation:
            return before.placed  # asked twice, by a frontend that lost its connection
        self._end(key)
        able = {name: life for name, life in self._able(now).items() if name not in place.exclude}
        demand = Demand(
            prompt_tokens=place.prompt_tokens,
            max_tokens=place.max_tokens,
            priority=place.priority,
            waited=place.waited,
        )
        decision = dispatch(self._policy, demand, [self._load(life, able) for life in able.values()], self._rng)
        if decision is None:
            return NoPlace(place.request_id, place.generation, self._why_nobody(now, place))
        reader = able[decision.prefill]
        home = reader if decision.decode is None else able[decision.decode]
        placed = Placed(
            place.request_id,
            place.generation,
            reader.peer,
            None if decision.decode is None else home.peer,
            decision.policy,
            decision.reason,
        )
        self._in_flight[key] = _InFlight(placed, place.prompt_tokens, reader, home)
        first = (reader.snapshot.sequence if reader.snapshot is not None else 0) + UNSEEN
        reader.unseen[key] = (place.prompt_tokens, first)
        home.held_tokens += place.prompt_tokens
        home.requests += 1
        return placed

    def _end(self, key: _Key) -> None:
        over = self._in_flight.pop(key, None)
        if over is not None:
            over.reader.unseen.pop(key, None)
            over.home.held_tokens -= over.prompt_tokens
            over.home.requests -= 1

    def _able(self, now: float) -> dict[str, _Life]:
        """Instances that may be given work. Silent ones are among them only when all are: a single engine in the middle
        of a long step still takes requests, for there is nobody else who could."""
        taking = {n: life for n, life in self._lives.items() if life.snapshot is None or not life.snapshot.draining}
        fresh = {n: life for n, life in taking.items() if now - life.heard <= SUSPECT_AFTER}
        return fresh or {n: life for n, life in taking.items() if now - life.heard <= DEAD_AFTER}

    def _load(self, life: _Life, able: dict[str, _Life]) -> InstanceLoad:
        """What policies see: the newest Snapshot, and what was placed too lately to be in it."""
        seen = life.snapshot
        unseen = sum(tokens for tokens, _ in life.unseen.values())
        links = {name: life.links.get(name) for name, other in able.items() if _may_link(life, other)}
        return InstanceLoad(
            name=life.peer.name,
            pool=life.pool,
            requests=max(life.requests, 0 if seen is None else seen.running + seen.waiting),
            pending_tokens=unseen + (0 if seen is None else seen.waiting_tokens + seen.prefill_tokens),
            held_tokens=max(
                life.held_tokens, 0 if seen is None else seen.running_tokens + seen.reserved_blocks * BLOCK_TOKENS
            ),
            num_blocks=life.ready.num_blocks,
            max_model_len=life.ready.max_model_len,
            peers=frozenset(name for name, link in links.items() if link is not None and link.failed is None),
            unlinked={
                name: _mismatch(life, able[name]) if link is None else link.message
                for name, link in links.items()
                if link is None or link.failed is not None
            },
        )

    def _why_nobody(self, now: float, place: Place) -> str:
        states = ", ".join(f"{name} {state}" for name, state in self.states(now).items())
        excluded = f", without {', '.join(place.exclude)}" if place.exclude else ""
        return (
            f"no instance can take a request of {place.prompt_tokens} tokens now{excluded}: {states or 'none is known'}"
        )

    def states(self, now: float) -> dict[str, str]:
        """Every instance -> "absent", "ready", "suspect" or "draining"."""
        return {name: self._state(now, self._lives.get(name)) for name in self._endpoints}

    def _state(self, now: float, life: _Life | None) -> str:
        if life is None:
            return "absent"
        if now - life.heard > SUSPECT_AFTER:
            return "suspect"
        return "draining" if life.snapshot is not None and life.snapshot.draining else "ready"

    def check(self) -> None:
        """Raise AssertionError unless every sequence in flight is counted once on each side."""
        for life in self._lives.values():
            homes = [f for f in self._in_flight.values() if f.home is life]
            assert life.requests == len(homes), "requests are miscounted"
            assert life.held_tokens == sum(f.prompt_tokens for f in homes), "tokens are miscounted"
            assert all(self._in_flight[key].reader is life for key in life.unseen), "a request that is over"


def _may_link(source: _Life, target: _Life) -> bool:
    """Whether one should be able to hand over to the other."""
    linkable = bool(source.peer.address and target.peer.address)
    return source is not target and linkable and hands_over(source.pool, target.pool)


def _mismatch(source: _Life, target: _Life) -> str:
    """Why blocks of one mean nothing to the other; "" when they do."""
    mine, theirs = source.ready.layout, target.ready.layout
    if mine is None or theirs is None:
        return "it has no KV layout"
    if source.ready.root_key != target.ready.root_key:
        return f"prefix keys: {source.ready.root_key.hex()} here, {target.ready.root_key.hex()} there"
    return mine.difference(theirs)
