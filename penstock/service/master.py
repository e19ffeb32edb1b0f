"""The master: knows every instance and decides where each sequence runs. No token passes through it.

A pure controller: `tick` takes events and returns actions. `master_pump.py` drives it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from math import inf

import msgspec

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire import PROTOCOL
from penstock.core.wire.engine import (
    LEASE,
    Leg,
    MediaRoute,
    Ready,
)
from penstock.core.wire.master import (
    Begun,
    Ended,
    Endpoint,
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
    Settled,
    Troubles,
)
from penstock.kv.ideal import IdealCache
from penstock.sched.cluster import (
    ClusterView,
    Decision,
    Demand,
    Later,
    MediaPolicy,
    Random,
    SlowInstances,
)
from penstock.sched.cluster.base import Key
from penstock.service.events import (
    Action,
    FromEngine,
    FromFrontend,
    Happening,
    Notice,
    ToFrontend,
)
from penstock.service.fleet import Fleet
from penstock.service.instances import InstanceJoined, InstanceLeft
from penstock.service.kv_sources import brought_by
from penstock.service.placed import PlacedSequences
from penstock.service.policies import Policies
from penstock.service.queue import MasterQueue, RateWindow, Tracked
from penstock.service.recorder import Recorder
from penstock.service.session import FleetLimits, InstanceSession, Scaler

LISTED = 8  # instances that an error names one by one
RENEWED = 64  # waiting sequences of which it is looked at what the caches have by now: the first
RENEWED_KEYS = 1 << 12  # of theirs, at most, at one time


class Master:
    """
    Args:
        instances: of the deployment, at first; others come and go by `InstanceJoined` and `InstanceLeft`.
        rng: for randomised policies.
        incarnation: of this master.
        limits: what scaling may do; None when nothing is ever started or stopped.
        recorder: gets every decision.
        slow: says which instances are restarted because they are slow; None where none ever is.
        media_route: which stages of requests with images are together, as `ImagePlaces` has it.

    Attributes:
        fleet: its instances.
        joined: the answer to a frontend that registers.
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
        limits: FleetLimits | None = None,
        recorder: Recorder | None = None,
        slow: SlowInstances | None = None,
        media_route: MediaRoute | None = None,
    ) -> None:
        self.wake = inf
        self._policies, self._rng, self._recorder = policies, rng, recorder
        self.joined = Joined(incarnation, wants_keys=policies.dispatch.wants_keys)
        self.ideal = IdealCache() if policies.dispatch.wants_keys else None
        dynamic = policies.roles is not None and policies.roles.dynamic
        self.fleet = Fleet(
            instances,
            everybody=dynamic or policies.scaling is not None,
            scaler=None if policies.scaling is None or limits is None else Scaler(policies.scaling, limits),
            slow=slow,
            recorder=recorder,
            media_route=media_route,
            ideal=self.ideal,
        )
        self._frontends: dict[str, float] = {}  # name -> when it was heard
        self._frontend_incarnations: dict[str, int] = {}
        self._waiting = MasterQueue()
        self._untold: list[Key] = []  # queued ones, whose frontends have not been sent `Queued`
        self._placed = PlacedSequences(self.fleet, recorder)
        self._rates = RateWindow()

    @property
    def waiting(self) -> int:
        """Sequences without a place."""
        return len(self._waiting)

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
                if isinstance(happening.event, Ready) and self.fleet.is_new(happening.name, happening.event):
                    self._readmit_to(happening.name)
                actions = self.fleet.hear(now, happening.name, happening.event)
                self._readmit(now)
            case FromFrontend():
                actions = self._on_frontend(now, happening.name, happening.message)
            case InstanceJoined(endpoint=endpoint):
                actions = self.fleet.register(now, endpoint)
            case InstanceLeft(name=name, why=why):
                actions = self.fleet.remove(now, name, why)
            case Troubles(troubles=troubles):
                self.fleet.suspect(troubles)
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
        actions = self._forget_silent_frontends(now)
        actions += self.fleet.tick(now)
        self._readmit(now)
        self._renew_first(now)
        actions += self._refuse_hopeless(now)
        if self._policies.media is not None:
            actions += self._route_media(self._policies.media, now)
        if self._policies.roles is not None:
            actions += self.fleet.move(now, self._policies.roles.decide(self._view(now)))
        if self._policies.balance is not None and self._placed.sequences:
            for migration in self._policies.balance.balance(self._view(now), partial(self._placed.residents, now)):
                actions += self.fleet.move(now, migration.moves)
                actions.append(self._placed.relocate(now, migration))
        actions += self._placed.evacuate(now)
        if self.fleet.scaler is not None and self.fleet.scaler.is_due(now):
            actions += self.fleet.scale(now, self._view(now), self._rates.take())
        return actions + self.fleet.restart_slow(now) + self.fleet.retire(now)

    def _route_media(self, policy: MediaPolicy, now: float) -> list[Action]:
        """Requests with images go this way from now on; those that are placed go on as they were."""
        before, self.fleet.images.route = self.fleet.images.route, policy.choose(self._view(now))
        if self.fleet.images.route == before:
            return []
        route, former = self.fleet.images.route or "roles have it", before or "roles had it"
        return [Notice(f"requests with images are placed as {route}, before as {former}: {policy.why}")]

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
                    self.joined, waiting=self.waiting, fleet=self.fleet.account.totals(now), prefixes=self.prefixes
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
        queued = [(key[0], waiting.place) for key, waiting in self._waiting.items()]
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
        held = [*self._placed.sequences, *self._waiting]
        for key in [key for key in held if key[0] in frontends]:
            self._end(now, key)

    # --- placement

    def _enqueue(self, now: float, frontend: str, place: Place) -> list[Action]:
        key = (frontend, place.request_id)
        before = self._placed.sequences.get(key)
        if before is not None and before.placed is not None and before.place.generation == place.generation:
            return [ToFrontend(frontend, before.placed)]  # asked twice, by a frontend that lost its connection
        waiting = self._waiting.get(key)
        if waiting is not None and waiting.place.generation == place.generation:
            return [ToFrontend(frontend, Queued(place.request_id, place.generation))]
        known = before or waiting
        if self.ideal is not None and known is None and not place.interrupted:
            self.ideal.ask(place.keys, place.prompt_tokens)
        if known is not None:
            self._end(now, key)
        demand = self._demand(now, key, place)
        sequence = Tracked(
            demand, place, now + place.patience if place.patience else -inf, known is not None and known.counted
        )
        if self._able_for(sequence, self.fleet.roster.able(now)):
            self._admit(now, key, sequence)
        elif place.patience > 0 or place.hedged:
            self._waiting.unplaceable[key] = sequence
            return [ToFrontend(frontend, Queued(place.request_id, place.generation))]
        else:
            return [self._no_place(now, frontend, place)]
        return []

    def _admit(self, now: float, key: Key, sequence: Tracked) -> None:
        self._waiting.queue_for(sequence)[key] = sequence
        self._untold.append(key)
        if not (sequence.counted or sequence.place.offline):
            self._rates.arrive(now, sequence.demand)
            if self._policies.media is not None:
                self._policies.media.observe(
                    now, sequence.demand, *self.fleet.images.unseen(now, sequence.place.images)
                )
        sequence.counted = True

    def _readmit_to(self, name: str) -> None:
        """Another incarnation has begun there, which has failed no sequence."""
        for sequence in self._waiting.unplaceable.values():
            sequence.demand = msgspec.structs.replace(sequence.demand, exclude=sequence.demand.exclude - {name})

    def _readmit(self, now: float) -> None:
        """Queue what an instance can take by now."""
        if not self._waiting.unplaceable:
            return
        able = self.fleet.roster.able(now)
        waiting = [(key, sequence) for key, sequence in self._waiting.unplaceable.items() if not sequence.place.hedged]
        for key in [key for key, sequence in waiting if self._able_for(sequence, able)]:
            self._queue_again(now, key)

    def _readmit_hedged(self, now: float, actions: list[Action]) -> None:
        """The same of what still runs and waits for room: one after the other, as each takes some of it. Not at every
        event: an instance may have had many, and all others be full."""
        waiting = [key for key, s in self._waiting.unplaceable.items() if s.place.hedged and s.until < inf]
        roomy = _roomy(self.fleet.roster.able(now)) if waiting else []
        for key in waiting:
            if self._able_for(self._waiting.unplaceable[key], roomy):
                self._queue_again(now, key)
                self._decide(now, actions)
                if key in self._waiting.online:
                    return  # the policy has it wait

    def _queue_again(self, now: float, key: Key) -> None:
        sequence = self._waiting.unplaceable.pop(key)
        sequence.demand = self._with_cached(now, sequence.demand, sequence.place)
        self._admit(now, key, sequence)

    def _demand(self, now: float, key: Key, place: Place) -> Demand:
        ttft, tpot = _target(place.ttft_ms), _target(place.tpot_ms)
        priorities = self._policies.priorities
        if priorities is not None and not place.offline and place.ttft_ms is None and place.tpot_ms is None:
            ttft, tpot = priorities.target(place.priority, self._waiting.online.priorities[place.priority])
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
            demand = self.fleet.images.with_images(now, demand, place.images)
        if not place.keys:
            return demand
        found = self.fleet.index.match(place.keys)
        hits = {name: min(blocks * BLOCK_TOKENS, place.prompt_tokens) for name, blocks in found.items()}
        loads = {
            name: {tier: min(blocks * BLOCK_TOKENS, hits[name]) for tier, blocks in below.items()}
            for name, below in self.fleet.index.loads(place.keys, found).items()
        }
        lenders = self.fleet.sources.lenders(now, place.keys) if found else []
        demand = msgspec.structs.replace(demand, hits=hits, loads=loads, lenders=lenders)
        return self.fleet.sources.with_brought(now, demand, place.keys)

    def _decide(self, now: float, actions: list[Action]) -> None:
        """Ask the policy for decisions until it returns none, and add their actions."""
        if not (self._waiting.online or self._waiting.offline):
            self.wake = inf
            return
        while self._waiting.online or self._waiting.offline:
            view = self._view(now)
            verdict = self._policies.dispatch.decide(view, self._rng) if view.instances else Later()
            if verdict.moves:
                actions += self.fleet.move(now, verdict.moves)
            if isinstance(verdict, Later):
                self.wake = verdict.at
                actions += self._hold(now, verdict)
                return
            actions.append(self._take(now, view, verdict))
        self.wake = inf
        self._untold.clear()

    def _take(self, now: float, view: ClusterView, decision: Decision) -> Action:
        key = decision.key
        sequence = self._waiting.pop(key)
        assert sequence is not None
        demand, place = sequence.demand, sequence.place
        if not demand.max_tokens and decision.decode is not None:  # nothing is left to do after a prompt to embed
            costs = {stage: own for stage, own in decision.costs.items() if stage != "decode"}
            decision = msgspec.structs.replace(decision, decode=None, costs=costs)
        if place.images and self.fleet.images.route == "EPD":
            decision = msgspec.structs.replace(decision, decode=None, open=False)
        if place.images and self._policies.media is not None and (why := self._policies.media.why):
            decision = msgspec.structs.replace(decision, reason=_told(decision.reason, why))
        prefiller = sequence.prefiller = self.fleet.sessions[decision.prefill]
        source = None
        if place.keys:
            way = self.fleet.sources.way(now, demand, place.keys, prefiller)
            source = self.fleet.sources.source(now, demand, way, prefiller)
            decision = msgspec.structs.replace(decision, way=way)
            demand = sequence.demand = brought_by(demand, {prefiller.name: way})
        home = sequence.home = prefiller if decision.decode is None else self.fleet.sessions[decision.decode]
        images = self.fleet.images.sources(now, key, place.images, prefiller, home) if place.images else []
        if place.images:
            ways = self.fleet.images.ways(key, place.images, prefiller, images)
            decision = msgspec.structs.replace(decision, media_route=self.fleet.images.named_route(now), images=ways)
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
        self._placed.sequences[key] = sequence
        prefiller.add_prompt(now, demand)
        home.house(demand)
        if place.keys:
            self.fleet.index.expect(prefiller.name, place.keys)
            self._renew_alike(now, prefiller.name, place.keys)
        if self._recorder is not None:
            self._recorder.decided(now, view, demand, place.request_id, key[0], decision)
        return ToFrontend(key[0], placed)

    def _renew_alike(self, now: float, name: str, keys: Sequence[bytes]) -> None:
        """A prompt was sent to an instance: those of the first in the queue that begin alike will find that there, so
        that a burst of them does not have the same computed by several."""
        for key, waiting in list(islice(self._waiting.online.items(), RENEWED)):
            theirs = waiting.place.keys
            if theirs and theirs[0] == keys[0] and not waiting.place.interrupted:
                known = -(-waiting.demand.hits.get(name, 0) // BLOCK_TOKENS)
                if theirs[known : known + 1] == keys[known : known + 1] != []:
                    self._waiting.online.renew(key, self._with_cached(now, waiting.demand, waiting.place))

    def _renew_first(self, now: float) -> None:
        """Caches change while sequences wait."""
        left = RENEWED_KEYS
        for key, waiting in list(islice(self._waiting.online.items(), RENEWED)):
            left -= len(waiting.place.keys)
            if left < 0:
                return
            if waiting.place.interrupted:
                continue  # of these more is looked at than of others
            if (demand := self._with_cached(now, waiting.demand, waiting.place)) != waiting.demand:
                self._waiting.online.renew(key, demand)

    def _hold(self, now: float, later: Later) -> list[Action]:
        """Send `Queued` for sequences that begin to wait."""
        actions: list[Action] = []
        for key in self._untold:
            queued = self._waiting.get(key)
            if queued is not None and key not in self._waiting.unplaceable:
                actions.append(ToFrontend(key[0], Queued(key[1], queued.place.generation)))
                if self._recorder is not None:
                    self._recorder.held(now, queued.demand, key[1], key[0], later)
        self._untold.clear()
        return actions

    # --- who decodes, and where what runs goes on

    def _decide_homes(self, now: float, actions: list[Action]) -> None:
        """Ask who decodes what is prefilled, until there is no answer now."""
        policy = self._policies.migration
        while self._placed.prefilled and policy is not None:
            prefilled = self._placed.open
            verdict = policy.migrate(self._view(now), prefilled) if prefilled else Later()
            if verdict.moves:
                actions += self.fleet.move(now, verdict.moves)
            if isinstance(verdict, Later):
                self.wake = min(self.wake, verdict.at)
                return
            actions.append(self._placed.relocate(now, verdict))

    def _settle(self, now: float, key: Key, settled: Settled) -> None:
        """It is said where a sequence is."""
        flight, session = self._placed.sequences.get(key), self.fleet.sessions.get(settled.instance)
        known = flight or self._waiting.get(key)
        if known is None:
            return
        if flight is None or settled.generation < known.place.generation:
            self._take_back(now, key, known, settled.generation, session)
        elif session is not None and flight.place.generation == settled.generation:
            self._placed.settle(key, session)

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
        flight = self._placed.sequences[key] = Tracked(demand, place, -inf, known.counted)
        flight.prefiller = flight.home = session
        if generation < known.place.generation and session.role == "prefill":
            # one whose decoder was known would not have been left there for another attempt
            flight.open = self._policies.migration is not None and demand.max_tokens > 1
        session.house(demand)

    def _begin(self, now: float, key: Key) -> None:
        begun = self._placed.begin(now, key)
        if begun is not None and self._policies.media is not None and not begun.demand.offline:
            self._policies.media.began(now, key)

    def _end(self, now: float, key: Key, outcome: Outcome | None = None, refused: str = "") -> None:
        queued = self._waiting.pop(key)
        over = self._placed.end(now, key)
        if self._recorder is not None and (over or (queued and queued.counted)):
            self._recorder.ended(now, key[1], key[0], outcome, refused)
        if over is None:
            return
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
        able, shortest = self.fleet.roster.able(now), self.fleet.roster.shortest
        roomy = _roomy(able)
        actions: list[Action] = []
        for key, sequence in self._waiting.doubtful(shortest):
            if not self._able_for(sequence, roomy if sequence.place.hedged else able):
                self._waiting.set_aside(key)
        for key, sequence in [(k, s) for k, s in self._waiting.unplaceable.items() if s.until < now]:
            actions.append(self._no_place(now, key[0], sequence.place))
            if sequence.place.hedged:
                sequence.until = inf  # it goes on where it is, as its frontend is about to say
            else:
                self._end(now, key)
        return actions

    def _able_for(self, sequence: Tracked, able: Sequence[InstanceSession]) -> bool:
        demand = sequence.demand
        if sequence.place.hedged:  # only where it takes no room that others need
            taking = [session.role for session in able if session.takes(demand)]
            return any(role != "decode" for role in taking) and any(role != "prefill" for role in taking)
        return any(s.ready.max_model_len >= demand.tokens and s.name not in demand.exclude for s in able)

    def _no_place(self, now: float, frontend: str, place: Place) -> Action:
        return ToFrontend(frontend, NoPlace(place.request_id, place.generation, self._why_none(now, place)))

    def _view(self, now: float) -> ClusterView:
        return ClusterView(
            now=now,
            instances=self.fleet.roster.loads(now),
            shortest=self.fleet.roster.shortest,
            queue=self._waiting.online.demands,
            offline=self._waiting.offline.demands,
            rates=self._rates.rates(now),
            encoders=[session.view() for session in self.fleet.roster.encoders(now)],
        )

    def _why_none(self, now: float, place: Place) -> str:
        states = self.fleet.states(now)
        if len(states) <= LISTED:
            seen = ", ".join(f"{name} {state}" for name, state in states.items())
        else:
            seen = ", ".join(f"{count} {state}" for state, count in Counter(states.values()).items())
        excluded = f", without {', '.join(place.exclude)}" if place.exclude else ""
        return (
            f"no instance can take a request of {place.prompt_tokens} tokens now{excluded}: {seen or 'none is known'}"
        )

    def overview(self, now: float) -> Overview:
        """How the deployment does; what was decided, the recorder knows."""
        rates = self._rates.rates(now)
        return Overview(
            frontends=len(self._frontends),
            waiting=len(self._waiting.online),
            offline_waiting=len(self._waiting.offline),
            unplaceable=len(self._waiting.unplaceable),
            placed=len(self._placed.sequences),
            instances=self.fleet.overviews(now),
            fleet=self.fleet.account.totals(now),
            stages=self.fleet.stages,
            prefixes=self.prefixes,
            **msgspec.structs.asdict(rates),
        )

    def check(self) -> None:
        """Raise AssertionError unless every placed sequence is counted once on each side."""
        self._placed.check()
        self.fleet.check()
        self._waiting.check()
        held = [*self._waiting, *self._placed.sequences]
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
