"""The master: knows every instance and decides where each sequence runs. No token passes through it.

A pure controller: `tick` takes events and returns actions. `master_pump.py` drives it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from math import inf

import msgspec

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire import PROTOCOL
from penstock.core.wire.engine import (
    LEASE,
    AskCache,
    CacheDelta,
    Drain,
    Event,
    Failed,
    Leg,
    LinkFailed,
    MediaRoute,
    Ready,
    Role,
    SetRole,
    Snapshot,
    Stopped,
)
from penstock.core.wire.master import (
    Begun,
    Ended,
    Endpoint,
    FleetTotals,
    FrontendMessage,
    Join,
    Joined,
    NoPlace,
    Outcome,
    Overview,
    Place,
    Placed,
    PrefixTotals,
    Queued,
    Relocate,
    RestartInstance,
    Settled,
    StartInstance,
    StopInstance,
    Troubles,
)
from penstock.kv.embeddings import EMBEDDINGS
from penstock.kv.ideal import IdealCache
from penstock.kv.index import DEVICE, ClusterIndex
from penstock.sched.cluster import (
    ClusterView,
    Decision,
    Demand,
    Later,
    MediaPolicy,
    Migration,
    Move,
    Random,
    Resident,
    SlowInstances,
    Start,
    Stop,
)
from penstock.sched.cluster.base import Key
from penstock.service.events import (
    Action,
    FromEngine,
    FromFrontend,
    Happening,
    Notice,
    ToEngine,
    ToFrontend,
)
from penstock.service.fleet_account import FleetAccount
from penstock.service.image_places import ImagePlaces
from penstock.service.instances import ChannelLost, InstanceJoined, InstanceLeft
from penstock.service.kv_sources import KVSources, brought_by
from penstock.service.mesh import Mesh
from penstock.service.overview import instance_overview, stage_overview
from penstock.service.policies import Policies
from penstock.service.queue import RateWindow, Tracked, WaitQueue
from penstock.service.recorder import Recorder
from penstock.service.session import FleetLimits, InstanceSession, Roster, Scaler

ASK_AGAIN = 2.0  # seconds between two AskCache
LISTED = 8  # instances that an error names one by one
SETTLES = 10.0  # seconds after which a hand-off counts as over although nothing was said of it
LOOK = 0.5  # seconds between two looks for slow instances
TELL_AGAIN = 6.0  # seconds until a launcher is told again to restart one; it stops within less
SHOWN = 256  # offline sequences that policies see, of however many wait
RENEWED = 64  # waiting sequences of which it is looked at what the caches have by now: the first
RENEWED_KEYS = 1 << 12  # of theirs, at most, at one time


class Master:
    """
    Args:
        instances: of the deployment, at first; others come and go by `InstanceJoined` and `InstanceLeft`.
        rng: for randomised policies.
        incarnation: of this master.
        fleet: what scaling may do; None when nothing is ever started or stopped.
        recorder: gets every decision.
        slow: says which instances are restarted because they are slow; None where none ever is.
        media_route: which stages of requests with images are together, as `ImagePlaces` has it.

    Attributes:
        images: who looks at the images of requests.
        joined: the answer to a frontend that registers.
        index: which instance has which prefix, for policies that use it; empty for others.
        ideal: what a cache without end would have found; None where prompts come without keys.
        wake: when `tick` is to be called without an event; inf for never.
    """

    def __init__(
        self,
        instances: Sequence[Endpoint],
        policies: Policies,
        rng: Random,
        incarnation: int = 0,
        *,
        fleet: FleetLimits | None = None,
        recorder: Recorder | None = None,
        slow: SlowInstances | None = None,
        media_route: MediaRoute | None = None,
    ) -> None:
        self.index = ClusterIndex()
        self.wake = inf
        self._endpoints = {endpoint.name: endpoint for endpoint in instances}
        self._sessions: dict[str, InstanceSession] = {}
        self._touched: set[str] = set()  # sessions that have changed
        self._roster = Roster(self._sessions, self._touched)
        self._sources = KVSources(self.index, self._sessions, self._roster)
        self.images = ImagePlaces(self._sessions, self._roster, media_route)
        dynamic = policies.roles is not None and policies.roles.dynamic
        self._mesh = Mesh(self._sessions, everybody=dynamic or policies.scaling is not None)
        self._policies, self._rng, self._recorder = policies, rng, recorder
        self.joined = Joined(incarnation, wants_keys=policies.dispatch.wants_keys)
        self.ideal = IdealCache() if policies.dispatch.wants_keys else None
        self._frontends: dict[str, float] = {}  # name -> when it was heard
        self._frontend_incarnations: dict[str, int] = {}
        self._queue = WaitQueue()  # online
        self._backlog = WaitQueue(shown=SHOWN)  # offline
        self._unplaceable: dict[Key, Tracked] = {}  # that no instance can take now, of which policies are not told
        self._untold: list[Key] = []  # queued ones, whose frontends have not been sent `Queued`
        self._in_flight: dict[Key, Tracked] = {}
        self._prefilled: dict[Key, Tracked] = {}  # of those, whose prompts have ended and who decodes them is open
        self._rates = RateWindow()
        self._roles: dict[str, Role] = {}  # that it decided on
        self._account = FleetAccount(sum(endpoint.holds_devices for endpoint in instances))
        self._scaler: Scaler | None = None
        if policies.scaling is not None and fleet is not None:
            self._scaler = Scaler(policies.scaling, fleet)
        self._slow, self._look_at = slow, -inf
        self._restarting: dict[str, float] = {}  # instances -> when their launchers were told

    @property
    def waiting(self) -> int:
        """Sequences without a place."""
        return len(self._queue) + len(self._backlog) + len(self._unplaceable)

    def totals(self, now: float) -> FleetTotals:
        """What the instances cost."""
        return self._account.totals(now)

    @property
    def prefixes(self) -> PrefixTotals | None:
        """What came, and what of it an ideal cache would have found."""
        ideal = self.ideal
        return None if ideal is None else PrefixTotals(ideal.prompt_tokens, ideal.found_tokens, ideal.complete)

    def tick(self, now: float, happening: Happening | None = None) -> list[Action]:
        """Handle an event, or the passing of time. Call it periodically, with or without an event.

        Args:
            now: seconds; never goes back.
        """
        match happening:
            case FromEngine():
                actions = self._on_engine(now, happening.name, happening.event)
                self._readmit(now)
            case FromFrontend():
                actions = self._on_frontend(now, happening.name, happening.message)
            case InstanceJoined(endpoint=endpoint):
                actions = self._register(now, endpoint)
            case InstanceLeft(name=name, why=why):
                gone = self._endpoints.pop(name, None)
                self._account.hold(now, -int(gone is not None and gone.holds_devices))
                self._roles.pop(name, None)
                actions = self._stopped(name, why)
                self.index.forget(name)
            case Troubles(troubles=troubles):
                for session in self._sessions.values():
                    session.suspect(session.name in troubles)
                actions = []
                self._readmit(now)
            case None:
                actions = self._by_the_clock(now)
        try:
            self._decide(now, actions)
            if happening is None:
                self._readmit_hedged(now, actions)
            self._decide_homes(now, actions)
        except Exception:
            if not actions:
                raise
            self.wake = now  # actions decided before the error are returned; the next tick raises it
        return actions

    def _by_the_clock(self, now: float) -> list[Action]:
        self._account.begin(now)
        actions = self._forget_silent_frontends(now)
        actions += self._mesh.retry(now)
        self._readmit(now)
        self._renew_first(now)
        actions += self._refuse_hopeless(now)
        if self._policies.media is not None:
            actions += self._route_media(self._policies.media, now)
        if self._policies.roles is not None:
            actions += self._move(now, self._policies.roles.decide(self._view(now)))
        if self._policies.balance is not None and self._in_flight:
            for migration in self._policies.balance.balance(self._view(now), partial(self._residents, now)):
                actions += self._move(now, migration.moves)
                actions.append(self._relocate(now, self._in_flight[migration.key], migration))
        actions += self._evacuate(now)
        if self._scaler is not None and self._scaler.is_due(now):
            actions += self._scale(now, self._scaler)
        if self._slow is not None and now >= self._look_at:
            self._look_at = now + LOOK
            actions += self._restart_slow(now, self._slow)
        return actions + self._retire(now)

    def _route_media(self, policy: MediaPolicy, now: float) -> list[Action]:
        """Requests with images go this way from now on; those that are placed go on as they were."""
        before, self.images.route = self.images.route, policy.choose(self._view(now))
        if self.images.route == before:
            return []
        route, former = self.images.route or "roles have it", before or "roles had it"
        return [Notice(f"requests with images are placed as {route}, before as {former}: {policy.why}")]

    # --- instances

    def _register(self, now: float, endpoint: Endpoint) -> list[Action]:
        name = endpoint.name
        before, self._endpoints[name] = self._endpoints.get(name), endpoint
        self._account.hold(now, endpoint.holds_devices - int(before is not None and before.holds_devices))
        if endpoint.started and (before is None or before.started != endpoint.started):
            self._account.took(name, endpoint.started)
        if endpoint.given_up and self._scaler is not None:
            self._scaler.forget(name)
        session = self._sessions.get(name)
        if not endpoint.runs:
            return self._stopped(name, "it was stopped")
        if before is not None and before.address != endpoint.address:
            return self._leave(name, "it is elsewhere now")
        if session is not None and endpoint.state == "leaving" and not session.drains:
            return self._drain(session, "it is to leave")
        return []

    def _stopped(self, name: str, why: str) -> list[Action]:
        self._account.left(name)
        if self._scaler is not None:
            self._scaler.forget(name)
        return self._leave(name, why)

    def _drain(self, session: InstanceSession, why: str) -> list[Action]:
        session.drain()
        return [
            ToEngine(session.name, Drain(session.peer.incarnation)),
            Notice(f"{session.name} is drained: {why}"),
        ]

    def _on_engine(self, now: float, name: str, event: Event | ChannelLost) -> list[Action]:
        session = self._sessions.get(name)
        match event:
            case Snapshot() if session is not None and event.incarnation == session.peer.incarnation:
                return self._on_snapshot(now, session, event)
            case Ready():
                if session is None or session.peer.incarnation != event.peer.incarnation:
                    return self._join(now, name, event)
            case ChannelLost(message=message) | Failed(message=message):
                return self._leave(name, message)
            case Stopped() if session is not None and event.incarnation == session.peer.incarnation:
                return self._leave(name, "it was stopped")
            case CacheDelta() if session is not None and event.incarnation == session.peer.incarnation:
                embeddings = event.tier == EMBEDDINGS
                if (
                    self.ideal is not None and not embeddings and (event.tier == DEVICE or event.whole)
                ):  # as what a disk has kept
                    self.ideal.learn(event.added)
                index = self.images if embeddings else self.index
                if not index.apply(name, event) and now - session.asked >= ASK_AGAIN:
                    session.asked = now
                    return [ToEngine(name, AskCache(event.incarnation))]
            case LinkFailed(peer=peer, message=message) if session is not None:
                if event.incarnation == session.peer.incarnation:
                    return self._mesh.fail(now, session, peer, message)
        return []

    def _on_snapshot(self, now: float, session: InstanceSession, snapshot: Snapshot) -> list[Action]:
        session.hear(now, snapshot)
        if snapshot.role == session.role:
            session.role_generation = max(
                session.role_generation, snapshot.role_generation
            )  # counted by an earlier master
            return self._has_role(now, session) if snapshot.role_generation == session.role_generation else []
        if snapshot.role_generation < session.role_generation:
            return [self._set_role(session)]  # the command was lost or is late
        session.role, session.role_generation = snapshot.role, snapshot.role_generation  # decided before this master
        return self._mesh.connect(session)

    @staticmethod
    def _has_role(now: float, session: InstanceSession) -> list[Action]:
        """An instance says that it has the role that it should."""
        decided, session.role_decided = session.role_decided, None
        if decided is None:
            return []
        return [Notice(f"{session.name} has role {session.role} {(now - decided) * 1e3:.1f} ms after the decision")]

    def _set_role(self, session: InstanceSession) -> Action:
        return ToEngine(session.name, SetRole(session.peer.incarnation, session.role, session.role_generation))

    def _join(self, now: float, name: str, ready: Ready) -> list[Action]:
        if name not in self._endpoints:
            return []
        actions = self._leave(name, "another incarnation of it has begun")
        if self._scaler is not None:
            self._scaler.forget(name)
        for sequence in self._unplaceable.values():  # this incarnation has failed none of them
            sequence.demand = msgspec.structs.replace(sequence.demand, exclude=sequence.demand.exclude - {name})
        self.index.forget(name)
        self.images.forget(name)
        if ready.store:
            self.index.share(name, ready.store)
            if self.ideal is not None:
                self.ideal.complete = False  # nobody says what was in it before
        session = self._sessions[name] = InstanceSession(ready, heard=now, role=ready.role, touched=self._touched)
        self._account.came(name, ready.weights_from)
        self._roster.sessions_changed()
        actions.append(Notice(f"{name} is ready: role {session.role}, {ready.num_blocks} blocks on {ready.device}"))
        if self._roles.get(name, session.role) != session.role:
            session.role, session.role_generation = self._roles[name], 1
            actions.append(self._set_role(session))
        if self._endpoints[name].state == "leaving":
            actions += self._drain(session, "it is to leave")
        return actions + self._mesh.connect(session)

    def _leave(self, name: str, why: str) -> list[Action]:
        session = self._sessions.pop(name, None)
        if session is None:
            return []
        self._restarting.pop(name, None)
        self.index.leave(name, session.ready.kv_pool)
        self._sources.forget(name)
        self.images.forget(name)
        self._roster.sessions_changed()
        return [Notice(f"{name} has gone: {why}"), *self._mesh.leave(name)]

    # --- frontends

    def _on_frontend(self, now: float, name: str, message: FrontendMessage) -> list[Action]:
        self._frontends[name] = now
        match message:
            case Join(incarnation=incarnation, protocol=protocol):
                if self._frontend_incarnations.setdefault(name, incarnation) != incarnation:
                    self._frontend_incarnations[name] = incarnation
                    self._forget(now, {name})
                refused = [Notice(f"{name} speaks protocol {protocol}, the master {PROTOCOL}")] * (protocol != PROTOCOL)
                joined = msgspec.structs.replace(
                    self.joined, waiting=self.waiting, fleet=self._account.totals(now), prefixes=self.prefixes
                )
                return [*refused, ToFrontend(name, joined)]  # with the protocol, on which it ends itself
            case Place():
                return self._enqueue(now, name, message)
            case Begun(request_ids=request_ids):
                for request_id in request_ids:
                    self._begin(now, (name, request_id))
            case Settled():
                self._settle(now, (name, message.request_id), message)
            case Ended(request_ids=request_ids, outcomes=outcomes, refused=refused):
                told = {outcome.request_id: outcome for outcome in outcomes}
                for request_id in request_ids:
                    self._end(now, (name, request_id), told.get(request_id), refused.get(request_id, ""))
        return []

    def _forget_silent_frontends(self, now: float) -> list[Action]:
        """A frontend that was only slow is told that its queued sequences are refused."""
        gone = {name for name, heard in self._frontends.items() if now - heard > LEASE}
        if not gone:
            return []
        queues: tuple[Mapping[Key, Tracked], ...] = (self._queue, self._backlog, self._unplaceable)
        queued = [(key[0], waiting.place) for queue in queues for key, waiting in queue.items()]
        why = f"the frontend was not heard for {LEASE:g} s"
        told: list[Action] = [
            ToFrontend(name, NoPlace(place.request_id, place.generation, why)) for name, place in queued if name in gone
        ]
        self._forget(now, gone)
        for name in gone:
            del self._frontends[name]
            self._frontend_incarnations.pop(name, None)
        return told

    def _forget(self, now: float, frontends: set[str]) -> None:
        """End their sequences."""
        held = [*self._in_flight, *self._queue, *self._backlog, *self._unplaceable]
        for key in [key for key in held if key[0] in frontends]:
            self._end(now, key)

    # --- placement

    def _enqueue(self, now: float, frontend: str, place: Place) -> list[Action]:
        key = (frontend, place.request_id)
        before = self._in_flight.get(key)
        if before is not None and before.placed is not None and before.place.generation == place.generation:
            return [ToFrontend(frontend, before.placed)]  # asked twice, by a frontend that lost its connection
        waiting = self._waiting(key)
        if waiting is not None and waiting.place.generation == place.generation:
            return [ToFrontend(frontend, Queued(place.request_id, place.generation))]
        known = before or waiting
        if self.ideal is not None and known is None and not place.interrupted:
            self.ideal.ask(place.keys, place.prompt_tokens)
        self._end(now, key)
        demand = self._demand(now, key, place)
        sequence = Tracked(
            demand, place, now + place.patience if place.patience else -inf, known is not None and known.counted
        )
        if self._able_for(sequence, self._roster.able(now)):
            self._admit(now, key, sequence)
        elif place.patience > 0 or place.hedged:
            self._unplaceable[key] = sequence
            return [ToFrontend(frontend, Queued(place.request_id, place.generation))]
        else:
            return [self._no_place(now, frontend, place)]
        return []

    def _admit(self, now: float, key: Key, sequence: Tracked) -> None:
        (self._backlog if sequence.place.offline else self._queue)[key] = sequence
        self._untold.append(key)
        if not (sequence.counted or sequence.place.offline):
            self._rates.arrive(now, sequence.demand)
            if self._policies.media is not None:
                self._policies.media.observe(now, sequence.demand, *self.images.unseen(now, sequence.place.images))
        sequence.counted = True

    def _readmit(self, now: float) -> None:
        """Queue what an instance can take by now."""
        if not self._unplaceable:
            return
        able, waiting = self._roster.able(now), [(k, s) for k, s in self._unplaceable.items() if not s.place.hedged]
        for key in [key for key, sequence in waiting if self._able_for(sequence, able)]:
            self._queue_again(now, key)

    def _readmit_hedged(self, now: float, actions: list[Action]) -> None:
        """The same of what still runs and waits for room: one after the other, as each takes some of it. Not at every
        event: an instance may have had many, and all others be full."""
        waiting = [key for key, s in self._unplaceable.items() if s.place.hedged and s.until < inf]
        roomy = _roomy(self._roster.able(now)) if waiting else []
        for key in waiting:
            if self._able_for(self._unplaceable[key], roomy):
                self._queue_again(now, key)
                self._decide(now, actions)
                if key in self._queue:
                    return  # the policy has it wait

    def _queue_again(self, now: float, key: Key) -> None:
        sequence = self._unplaceable.pop(key)
        sequence.demand = self._with_cached(now, sequence.demand, sequence.place)
        self._admit(now, key, sequence)

    def _demand(self, now: float, key: Key, place: Place) -> Demand:
        ttft, tpot = _target(place.ttft_ms), _target(place.tpot_ms)
        priorities = self._policies.priorities
        if priorities is not None and not place.offline and place.ttft_ms is None and place.tpot_ms is None:
            ttft, tpot = priorities.target(place.priority, self._queue.priorities[place.priority])
        demand = Demand(
            key=key,
            prompt_tokens=place.prompt_tokens,
            max_tokens=place.max_tokens,
            arrived=now - place.waited,
            ttft=ttft,
            tpot=tpot,
            priority=place.priority,
            offline=place.offline,
            chat=place.chat,
            exclude=frozenset(place.exclude),
            interrupted=place.interrupted,
        )
        return self._with_cached(now, demand, place)

    def _with_cached(self, now: float, demand: Demand, place: Place) -> Demand:
        """With what each instance has of the prompt now, and who lends it to others."""
        if place.images:
            demand = self.images.with_images(now, demand, place.images)
        if not place.keys:
            return demand
        found = self.index.match(place.keys)
        hits = {name: min(blocks * BLOCK_TOKENS, place.prompt_tokens) for name, blocks in found.items()}
        loads = {
            name: {tier: min(blocks * BLOCK_TOKENS, hits[name]) for tier, blocks in below.items()}
            for name, below in self.index.loads(place.keys, found).items()
        }
        lenders = self._sources.lenders(now, place.keys) if found else []
        demand = msgspec.structs.replace(demand, hits=hits, loads=loads, lenders=lenders)
        return self._sources.with_brought(now, demand, place.keys)

    def _decide(self, now: float, actions: list[Action]) -> None:
        """Ask the policy for decisions until it returns none, and add their actions."""
        if not (self._queue or self._backlog):
            self.wake = inf
            return
        while self._queue or self._backlog:
            view = self._view(now)
            verdict = self._policies.dispatch.decide(view, self._rng) if view.instances else Later()
            actions += self._move(now, verdict.moves)
            if isinstance(verdict, Later):
                self.wake = verdict.at
                actions += self._hold(now, verdict)
                return
            actions.append(self._take(now, view, verdict))
        self.wake = inf
        self._untold.clear()

    def _take(self, now: float, view: ClusterView, decision: Decision) -> Action:
        key = decision.key
        sequence = self._queue.pop(key) or self._backlog.pop(key)
        assert sequence is not None
        demand, place = sequence.demand, sequence.place
        if not demand.max_tokens and decision.decode is not None:  # nothing is left to do after a prompt to embed
            costs = {stage: own for stage, own in decision.costs.items() if stage != "decode"}
            decision = msgspec.structs.replace(decision, decode=None, costs=costs)
        if place.images and self.images.route == "EPD":
            decision = msgspec.structs.replace(decision, decode=None, open=False)
        if place.images and self._policies.media is not None and (why := self._policies.media.why):
            decision = msgspec.structs.replace(decision, reason=_told(decision.reason, why))
        prefiller = sequence.prefiller = self._sessions[decision.prefill]
        source = None
        if place.keys:
            way = self._sources.way(now, demand, place.keys, prefiller)
            source = self._sources.source(now, demand, way, prefiller)
            decision = msgspec.structs.replace(decision, way=way)
            demand = sequence.demand = brought_by(demand, {prefiller.name: way})
        home = sequence.home = prefiller if decision.decode is None else self._sessions[decision.decode]
        images = self.images.sources(now, key, place.images, prefiller, home) if place.images else []
        if place.images:
            ways = self.images.ways(key, place.images, prefiller, images)
            decision = msgspec.structs.replace(decision, media_route=self.images.named_route(now), images=ways)
        if looking := sorted({image.peer.name for image in images}):
            decision = msgspec.structs.replace(
                decision, reason=_told(decision.reason, f"images at {', '.join(looking)}")
            )
        legs = [Leg("prefill", prefiller.peer)]
        sequence.open = decision.open and demand.max_tokens > 1
        if home is not prefiller or sequence.open:
            legs.append(Leg("decode", None if sequence.open else home.peer))
        predicted = decision.way if demand.interrupted else None
        placed = sequence.placed = Placed(
            place.request_id,
            place.generation,
            legs,
            decision.policy,
            decision.reason,
            _milliseconds(demand.ttft),
            _milliseconds(demand.tpot),
            decision.predicted_ttft,
            source,
            None if predicted is None else predicted.ms,
            None if predicted is None else predicted.recompute_ms,
            images,
        )
        self._in_flight[key] = sequence
        prefiller.add_prompt(now, demand)
        home.house(demand)
        if place.keys:
            self.index.expect(prefiller.name, place.keys)
            self._renew_alike(now, prefiller.name, place.keys)
        if self._recorder is not None:
            self._recorder.decided(now, view, demand, place.request_id, key[0], decision)
        return ToFrontend(key[0], placed)

    def _renew_alike(self, now: float, name: str, keys: Sequence[bytes]) -> None:
        """A prompt was sent to an instance: those of the first in the queue that begin alike will find that there, so
        that a burst of them does not have the same computed by several."""
        for key, waiting in list(islice(self._queue.items(), RENEWED)):
            theirs = waiting.place.keys
            if theirs and theirs[0] == keys[0] and not waiting.place.interrupted:
                known = -(-waiting.demand.hits.get(name, 0) // BLOCK_TOKENS)
                if theirs[known : known + 1] == keys[known : known + 1] != []:
                    self._queue.renew(key, self._with_cached(now, waiting.demand, waiting.place))

    def _renew_first(self, now: float) -> None:
        """Caches change while sequences wait."""
        left = RENEWED_KEYS
        for key, waiting in list(islice(self._queue.items(), RENEWED)):
            left -= len(waiting.place.keys)
            if left < 0:
                return
            if waiting.place.interrupted:
                continue  # of these more is looked at than of others
            if (demand := self._with_cached(now, waiting.demand, waiting.place)) != waiting.demand:
                self._queue.renew(key, demand)

    def _hold(self, now: float, later: Later) -> list[Action]:
        """Send `Queued` for sequences that begin to wait."""
        actions: list[Action] = []
        for key in self._untold:
            queued = self._queue.get(key) or self._backlog.get(key)
            if queued is not None:
                actions.append(ToFrontend(key[0], Queued(key[1], queued.place.generation)))
                if self._recorder is not None:
                    self._recorder.held(now, queued.demand, key[1], key[0], later)
        self._untold.clear()
        return actions

    def _begin(self, now: float, key: Key) -> None:
        flight = self._in_flight.get(key)
        if flight is not None:
            if flight.place.images:
                self.images.seen(key)
            flight.prefiller.prompt_done(now, key)
            flight.home.begin(key)
            flight.since = now
            if self._policies.media is not None and not flight.demand.offline:
                self._policies.media.began(now, key)
            if flight.open:
                self._prefilled[key] = flight

    # --- who decodes, and where what runs goes on

    def _decide_homes(self, now: float, actions: list[Action]) -> None:
        """Ask who decodes what is prefilled, until there is no answer now."""
        policy = self._policies.migration
        while self._prefilled and policy is not None:
            prefilled = [flight.resident for flight in self._prefilled.values() if self._is_there(flight)]
            verdict = policy.migrate(self._view(now), prefilled) if prefilled else Later()
            actions += self._move(now, verdict.moves)
            if isinstance(verdict, Later):
                self.wake = min(self.wake, verdict.at)
                return
            actions.append(self._relocate(now, self._prefilled.pop(verdict.key), verdict))

    def _is_there(self, flight: Tracked) -> bool:
        return self._sessions.get(flight.home.name) is flight.home

    def _residents(self, now: float, name: str) -> Sequence[Resident]:
        """What decodes on an instance and is not being handed over."""
        session = self._sessions[name]
        flights = (self._in_flight[k] for k in session.homes if k in session.begun and k not in self._prefilled)
        return [flight.resident for flight in flights if flight.moving < now]

    def _relocate(self, now: float, flight: Tracked, migration: Migration) -> Action:
        key, session = flight.demand.key, self._sessions[migration.to]
        flight.open = False
        if self._recorder is not None:
            self._recorder.relocated(now, flight.home.name, migration)
        if session is not flight.home:
            flight.moving = now + SETTLES
        self._rehouse(key, flight, session)
        return ToFrontend(key[0], Relocate(key[1], flight.place.generation, session.peer, migration.reason))

    def _evacuate(self, now: float) -> list[Action]:
        """Have others take over what instances that drain still run: those with the most room first."""
        actions: list[Action] = []
        for session in self._sessions.values():
            if not session.leaving or not session.begun:
                continue
            for key in session.begun & self._prefilled.keys():  # the policy sees no instance that drains
                del self._prefilled[key]
            for resident in self._residents(now, session.name):
                able = [s for s in self._roster.able(now) if s.name in session.peers]
                if able := [s for s in able if self._takes(s, resident.demand)]:
                    to = max(able, key=lambda s: (s.view().free_blocks / s.view().num_blocks, s.name)).name
                    why = "is to stop" if session.drains else "is to sleep"
                    migration = Migration(key=resident.demand.key, to=to, reason=f"drain: {session.name} {why}")
                    actions.append(self._relocate(now, self._in_flight[migration.key], migration))
        return actions

    @staticmethod
    def _takes(session: InstanceSession, demand: Demand) -> bool:
        load = session.view()
        fits = demand.tokens <= load.max_model_len and demand.prompt_tokens < load.free_blocks * BLOCK_TOKENS
        return fits and load.requests < load.max_sequences and session.name not in demand.exclude

    def _settle(self, now: float, key: Key, settled: Settled) -> None:
        """It is said where a sequence is."""
        flight, session = self._in_flight.get(key), self._sessions.get(settled.instance)
        known = flight or self._waiting(key)
        if known is None:
            return
        if flight is None or settled.generation < known.place.generation:
            self._take_back(now, key, known, settled.generation, session)
        elif session is not None and flight.place.generation == settled.generation:
            flight.moving = -inf
            self._rehouse(key, flight, session)

    def _take_back(
        self, now: float, key: Key, known: Tracked, generation: int, session: InstanceSession | None
    ) -> None:
        """An earlier attempt goes on at an instance, not the one that was asked for since; or its frontend has found a
        place by itself."""
        self._end(now, key)
        if session is None:
            return
        demand = msgspec.structs.replace(known.demand, exclude=frozenset())
        place = msgspec.structs.replace(known.place, generation=generation, keys=[], hedged=False)
        flight = self._in_flight[key] = Tracked(demand, place, -inf, known.counted)
        flight.prefiller = flight.home = session
        if generation < known.place.generation and session.role == "prefill":
            # one whose decoder was known would not have been left there for another attempt
            flight.open = self._policies.migration is not None and demand.max_tokens > 1
        session.house(demand)

    def _waiting(self, key: Key) -> Tracked | None:
        """One that has no place yet."""
        return self._queue.get(key) or self._backlog.get(key) or self._unplaceable.get(key)

    def _rehouse(self, key: Key, flight: Tracked, session: InstanceSession) -> None:
        """It decodes there from now on."""
        if flight.home is not session:
            began = key in flight.home.begun
            flight.home.leave(key)
            flight.home = session
            session.house(flight.demand)
            if began:
                session.begin(key)

    def _end(self, now: float, key: Key, outcome: Outcome | None = None, refused: str = "") -> None:
        queued = self._queue.pop(key) or self._backlog.pop(key) or self._unplaceable.pop(key, None)
        over = self._in_flight.pop(key, None)
        self._prefilled.pop(key, None)
        if over is not None and over.place.images:
            self.images.seen(key)
        if self._recorder is not None and (over or (queued and queued.counted)):
            self._recorder.ended(now, key[1], key[0], outcome, refused)
        if over is None:
            return
        over.prefiller.prompt_done(now, key)
        over.home.leave(key)
        if over.place.keys:
            self.index.unexpect(over.prefiller.name, over.place.keys)
        if self._policies.media is not None and not over.demand.offline:
            self._policies.media.ended(now, key, None if outcome is None else outcome.tokens)
        if outcome is not None and not over.demand.offline:
            self._rates.end(now, over.demand, outcome)
            if self._policies.priorities is not None:
                tpot = None if outcome.tpot_ms is None else outcome.tpot_ms / 1e3
                self._policies.priorities.observe(
                    over.demand.priority, outcome.ttft_ms / 1e3, tpot, outcome.queue_ms / 1e3
                )

    def _refuse_hopeless(self, now: float) -> list[Action]:
        """Set aside what no instance can take, and refuse it when its patience has ended."""
        able, shortest = self._roster.able(now), self._roster.shortest
        roomy = _roomy(able)
        actions: list[Action] = []
        for queue in (self._queue, self._backlog):
            doubtful = [(key, queue[key]) for key in queue.doubtful(shortest)]
            for key in [key for key, s in doubtful if not self._able_for(s, roomy if s.place.hedged else able)]:
                sequence = queue.pop(key)
                assert sequence is not None
                self._unplaceable[key] = sequence
        for key, sequence in [(key, sequence) for key, sequence in self._unplaceable.items() if sequence.until < now]:
            actions.append(self._no_place(now, key[0], sequence.place))
            if sequence.place.hedged:
                sequence.until = inf  # it goes on where it is, as its frontend is about to say
            else:
                self._end(now, key)
        return actions

    def _able_for(self, sequence: Tracked, able: Sequence[InstanceSession]) -> bool:
        demand = sequence.demand
        if sequence.place.hedged:  # only where it takes no room that others need
            taking = [session.role for session in able if self._takes(session, demand)]
            return any(role != "decode" for role in taking) and any(role != "prefill" for role in taking)
        return any(s.ready.max_model_len >= demand.tokens and s.name not in demand.exclude for s in able)

    def _no_place(self, now: float, frontend: str, place: Place) -> Action:
        return ToFrontend(frontend, NoPlace(place.request_id, place.generation, self._why_none(now, place)))

    def _view(self, now: float) -> ClusterView:
        return ClusterView(
            now=now,
            instances=self._roster.loads(now),
            shortest=self._roster.shortest,
            queue=self._queue.demands,
            offline=self._backlog.demands,
            rates=self._rates.rates(now),
            encoders=[session.view() for session in self._roster.encoders(now)],
        )

    # --- roles and numbers

    def _move(self, now: float, moves: Sequence[Move]) -> list[Action]:
        actions: list[Action] = []
        for move in moves:
            session = self._sessions[move.name]
            if session.role == move.role:
                continue
            self._roles[move.name] = session.role = move.role
            session.role_generation += 1
            session.role_decided = now
            session.changed()
            actions.append(self._set_role(session))
            actions.append(Notice(f"{move.name} changes to role {move.role}: {move.reason}"))
            actions += self._mesh.connect(session)
            if self._recorder is not None:
                self._recorder.moved(now, move)
        return actions

    def _scale(self, now: float, scaler: Scaler) -> list[Action]:
        actions: list[Action] = []
        expected = self._account.expected(scaler.start_seconds)
        scaled = scaler.decide(
            self._view(now), self._endpoints, self._sessions, self._roles, expected, self._rates.take()
        )
        if self._recorder is not None and scaler.has_news(now):
            self._recorder.scaled(now, scaled.verdicts)
        for change in scaled.changes:
            self._account.changed(change)
            if self._recorder is not None and not isinstance(change, Move):
                self._recorder.moved(now, change)
            match change:
                case Move():
                    actions += self._move(now, [change])
                case Start(name=name, role=role, reason=reason):
                    self._roles[name] = role
                    actions += [StartInstance(name, role), Notice(f"{name} is started for role {role}: {reason}")]
                case Stop(name=name, reason=reason):
                    actions += self._drain(self._sessions[name], reason)
        return actions

    def _restart_slow(self, now: float, slow: SlowInstances) -> list[Action]:
        paces = [session.pace for session in self._sessions.values() if not (session.leaving or session.silent(now))]
        restart = slow.look(now, [pace for pace in paces if pace is not None])
        if restart is None:
            return []
        self._restarting[restart.name] = -inf
        self._account.changed(restart)
        if self._recorder is not None:
            self._recorder.moved(now, restart)
        return self._drain(self._sessions[restart.name], restart.reason)

    def recall_restart(self, now: float, name: str, times: int, ago: float) -> None:
        """Its launcher says that it was restarted for slowness, perhaps by an earlier master; see `SlowInstances`."""
        if self._slow is not None:
            self._slow.recall(now, name, times, ago)

    def _retire(self, now: float) -> list[Action]:
        """Stop instances that have drained, or have them start again."""
        actions: list[Action] = []
        for session in self._sessions.values():
            name = session.name
            if not (session.drains and session.drained):
                continue
            if not session.draining:  # an earlier master has told it to, for whatever reason
                self._restarting.setdefault(name, -inf)
            if name not in self._restarting or self._endpoints[name].state == "leaving":
                actions.append(StopInstance(name))
            elif now - self._restarting[name] >= TELL_AGAIN:
                self._restarting[name] = now
                times = 0 if self._slow is None else self._slow.times(name)
                actions.append(RestartInstance(name, times))
        return actions

    def _why_none(self, now: float, place: Place) -> str:
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
        """Every instance -> "absent", "ready", "suspect", "draining" or "sleeping"."""
        return {name: self._state(now, self._sessions.get(name)) for name in self._endpoints}

    def serves(self, now: float, name: str) -> bool:
        """Whether it is heard, and does what it was given."""
        return self._state(now, self._sessions.get(name)) not in ("absent", "suspect")

    def _state(self, now: float, session: InstanceSession | None) -> str:
        if session is None:
            return "absent"
        if session.silent(now):
            return "suspect"
        return "draining" if session.drains else "sleeping" if session.sleeps else "ready"

    def givers(self, now: float) -> dict[str, str]:
        """Every instance that serves and gives its weights to other hosts -> where."""
        ready = (s for s in self._sessions.values() if self._state(now, s) == "ready")
        return {session.name: session.ready.weights_at for session in ready if session.ready.weights_at}

    def overview(self, now: float) -> Overview:
        """How the deployment does; what was decided, the recorder knows."""
        rates = self._rates.rates(now)
        instances = [
            instance_overview(
                endpoint,
                self._sessions.get(name),
                self._state(now, self._sessions.get(name)),
                "" if self._slow is None else self._slow.verdicts.get(name, ""),
            )
            for name, endpoint in self._endpoints.items()
        ]
        return Overview(
            frontends=len(self._frontends),
            waiting=len(self._queue),
            offline_waiting=len(self._backlog),
            unplaceable=len(self._unplaceable),
            placed=len(self._in_flight),
            instances=instances,
            fleet=self._account.totals(now),
            stages=[] if self._scaler is None else [stage_overview(verdict) for verdict in self._scaler.verdicts],
            prefixes=self.prefixes,
            **msgspec.structs.asdict(rates),
        )

    def check(self) -> None:
        """Raise AssertionError unless every placed sequence is counted once on each side."""
        for session in self._sessions.values():
            homes = {key for key, flight in self._in_flight.items() if flight.home is session}
            assert session.homes.keys() == homes, "requests are miscounted"
            assert all(self._in_flight[key].prefiller is session for key in session.prompts), "a request that is over"
            session.check()
        self._roster.check()
        self._queue.check()
        self._backlog.check()
        self._mesh.check()
        self.images.check()
        assert all(self._in_flight.get(key) is flight for key, flight in self._prefilled.items()), "it is over"
        held = [*self._queue, *self._backlog, *self._unplaceable, *self._in_flight]
        assert len(held) == len(set(held)), "a sequence is in two places"


def _roomy(sessions: Iterable[InstanceSession]) -> list[InstanceSession]:
    """Those that have any room now."""
    return [s for s in sessions if (load := s.view()).requests < load.max_sequences and load.free_blocks > 0]


def _told(reason: str, more: str) -> str:
    """A reason with further details."""
    return f"{reason}{', ' if ':' in reason else ': '}{more}"


def _target(milliseconds: float | None) -> float:
    return inf if milliseconds is None else milliseconds / 1e3


def _milliseconds(target: float) -> float | None:
    return None if target == inf else target * 1e3
