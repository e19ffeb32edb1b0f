"""The master: knows every instance, decides where each sequence runs, and carries no token.

A pure controller: what happened goes into `tick`, what is to be done comes out. A pump drives it (`master_pump.py`).
"""

from __future__ import annotations

from collections import Counter
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
LISTED = 8  # instances that an error names one by one


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
        peers: those of them that it can hand over to.
        unlinked: why it cannot to others that it should be able to.
        asked: when it was asked for its cache.
        load: what policies see of it; None when that has changed.
    """

    ready: Ready
    heard: float
    snapshot: Snapshot | None = None
    held_tokens: int = 0
    requests: int = 0
    unseen: dict[_Key, tuple[int, int]] = field(default_factory=dict)
    links: dict[str, Peer] = field(default_factory=dict)
    peers: set[str] = field(default_factory=set)
    unlinked: dict[str, str] = field(default_factory=dict)
    asked: float = float("-inf")
    load: InstanceLoad | None = None

    @property
    def peer(self) -> Peer:
        return self.ready.peer

    @property
    def pool(self) -> Pool:
        return self.snapshot.pool if self.snapshot is not None else self.ready.pool

    def disconnect(self, name: str) -> None:
        """Forget all about an instance that has gone."""
        self.links.pop(name, None)
        self.peers.discard(name)
        self.unlinked.pop(name, None)


@dataclass(slots=True)
class _Failure:
    """Of a link from one instance to another.

    Attributes:
        since: when it was told.
        retried: whether the instance was told to connect once more since.
    """

    since: float
    retried: bool = False


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A sequence that was placed, with the lives it counts on."""

    placed: Placed
    prompt_tokens: int
    reader: _Life
    home: _Life


_Key = tuple[str, str]  # frontend, request id
_Pair = tuple[str, str]  # instances: from, to


class Master:
    """
    Args:
        instances: all there can be.
        policy: compares them.
        rng: for policies that draw lots.
        incarnation: of this master.

    Attributes:
        joined: what it tells a frontend that makes itself known.
        index: who has which prefix.
    """

    def __init__(
        self, instances: Sequence[Endpoint], policy: DispatchPolicy, rng: Random, incarnation: int = 0
    ) -> None:
        self.index = ClusterIndex()
        self._endpoints = {endpoint.name: endpoint for endpoint in instances}
        self._lives: dict[str, _Life] = {}
        self._policy = policy
        self._rng = rng
        self.joined = Joined(incarnation, wants_keys=policy.wants_keys)
        self._frontends: dict[str, float] = {}  # name -> when it was heard
        self._frontend_lives: dict[str, int] = {}
        self._in_flight: dict[_Key, _InFlight] = {}
        self._failed_links: dict[_Pair, _Failure] = {}

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
                return self._on_snapshot(now, life, event)
            case CacheDelta() if life is not None and event.incarnation == life.peer.incarnation:
                if not self.index.apply(name, event) and now - life.asked >= ASK_AGAIN:
                    life.asked = now
                    return [ToEngine(name, AskCache(event.incarnation))]
            case LinkFailed(peer=peer, message=message) if life is not None:
                if event.incarnation == life.peer.incarnation and life.links.get(peer.name) == peer:
                    self._failed_links[name, peer.name] = _Failure(now)
                    life.peers.discard(peer.name)
                    life.unlinked[peer.name] = message
                    return [Notice(f"{name} cannot hand over to {peer.name}: {message}")]
        return []

    def _on_snapshot(self, now: float, life: _Life, snapshot: Snapshot) -> list[Action]:
        moved = life.pool != snapshot.pool
        life.snapshot, life.heard, life.load = snapshot, now, None
        life.unseen = {k: v for k, v in life.unseen.items() if v[1] > snapshot.sequence}
        return self._connect_with_all(life) if moved else []

    def _join(self, now: float, name: str, ready: Ready) -> list[Action]:
        if name not in self._endpoints:
            return []
        actions = self._leave(name, "another life of it has begun")
        life = self._lives[name] = _Life(ready, heard=now)
        actions.append(Notice(f"{name} is ready: pool {ready.pool}, {ready.num_blocks} blocks on {ready.device}"))
        return actions + self._connect_with_all(life)

    def _connect_with_all(self, life: _Life) -> list[Action]:
        return [
            action
            for other in self._lives.values()
            if other is not life
            for action in (*self._connect(life, other), *self._connect(other, life))
        ]

    def _connect(self, source: _Life, target: _Life) -> list[Action]:
        name = target.peer.name
        if not _may_link(source, target) or name in source.links:
            return []
        if why := _mismatch(source, target):
            source.unlinked[name] = why
            return []
        source.links[name] = target.peer
        source.peers.add(name)
        return [ToEngine(source.peer.name, Link(source.peer.incarnation, target.peer))]

    def _leave(self, name: str, why: str) -> list[Action]:
        gone = self._lives.pop(name, None)
        self.index.forget(name)
        if gone is None:
            return []
        actions: list[Action] = [Notice(f"{name} has gone: {why}")]
        for other, life in self._lives.items():
            if name in life.links:
                actions.append(ToEngine(other, Unlink(life.peer.incarnation, gone.peer)))
            life.disconnect(name)
        for pair in [pair for pair in self._failed_links if name in pair]:
            del self._failed_links[pair]
        return actions

    def _retry_links(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for (name, other), failure in list(self._failed_links.items()):
            source = self._lives[name]
            if now - failure.since < RELINK_AFTER:
                continue
            if not failure.retried:
                failure.retried = True
                actions.append(ToEngine(name, Link(source.peer.incarnation, source.links[other])))
            elif now - failure.since >= RELINK_AFTER + PROBATION:
                del self._failed_links[name, other], source.unlinked[other]
                source.peers.add(other)
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
                return [*refused, ToFrontend(name, self.joined)]  # with the protocol: it leaves by itself
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
        able = self._able(now)
        if place.exclude:
            able = [life for life in able if life.peer.name not in place.exclude]
        demand = Demand(
            prompt_tokens=place.prompt_tokens,
            max_tokens=place.max_tokens,
            priority=place.priority,
            waited=place.waited,
        )
        decision = dispatch(self._policy, demand, [life.load or _refreshed(life) for life in able], self._rng)
        if decision is None:
            return NoPlace(place.request_id, place.generation, self._why_nobody(now, place))
        reader = self._lives[decision.prefill]
        home = reader if decision.decode is None else self._lives[decision.decode]
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
        reader.load = home.load = None
        return placed

    def _end(self, key: _Key) -> None:
        over = self._in_flight.pop(key, None)
        if over is not None:
            over.reader.unseen.pop(key, None)
            over.home.held_tokens -= over.prompt_tokens
            over.home.requests -= 1
            over.reader.load = over.home.load = None

    def _able(self, now: float) -> list[_Life]:
        """Instances that may be given work. Silent ones are among them only when all are: a single engine in the middle
        of a long step still takes requests, for there is nobody else who could."""
        taking = [life for life in self._lives.values() if life.snapshot is None or not life.snapshot.draining]
        fresh = [life for life in taking if now - life.heard <= SUSPECT_AFTER]
        return fresh or [life for life in taking if now - life.heard <= DEAD_AFTER]

    def _why_nobody(self, now: float, place: Place) -> str:
        states = self.states(now)
        if len(states) <= LISTED:
            seen = ", ".join(f"{name} {state}" for name, state in states.items())
        else:
            seen = ", ".join(f"{count} {state}" for state, count in Counter(states.values()).items())
        excluded = f", without {', '.join(place.exclude)}" if place.exclude else ""
        return (
            f"no instance can take a request of {place.prompt_tokens} tokens now{excluded}: {seen or 'none is known'}"
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
            assert life.load in (None, _load(life)), "policies see what is over"
        for name, life in self._lives.items():
            failed = {other for source, other in self._failed_links if source == name}
            assert life.peers == life.links.keys() - failed, "links are miscounted"
            assert life.links.keys() | life.unlinked.keys() <= self._lives.keys(), "a link to nobody"


def _load(life: _Life) -> InstanceLoad:
    """What policies see: the newest Snapshot, and what was placed too lately to be in it."""
    seen = life.snapshot
    unseen = sum(tokens for tokens, _ in life.unseen.values())
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
        peers=life.peers,
        unlinked=life.unlinked,
    )


def _refreshed(life: _Life) -> InstanceLoad:
    life.load = _load(life)
    return life.load


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
    return "" if mine == theirs else mine.difference(theirs)
