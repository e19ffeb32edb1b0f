"""A simulated cluster on one timeline: clients, a frontend, the real master, instances, the network, and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any, Literal

from penstock.core.layout import KVLayout
from penstock.core.wire.engine import (
    CacheDelta,
    Command,
    Event,
    Fetched,
    Lacking,
    LinkPeer,
    MediaRoute,
    Peer,
    Ready,
    Refused,
    Role,
    Snapshot,
    Stayed,
)
from penstock.core.wire.handoff import PeerMessage
from penstock.core.wire.master import Endpoint, FrontendMessage, Join, MasterMessage, Outcome
from penstock.kv.depot import Depot, DepotSource
from penstock.kv.keys import root_key
from penstock.kv.pool import BlockPool
from penstock.kv.tier import Tier
from penstock.sched.cluster import (
    ClusterView,
    Decision,
    Demand,
    FleetChange,
    Later,
    Migration,
    Random,
    SlowInstances,
    Verdict,
)
from penstock.sched.cluster.columns import least
from penstock.sched.cluster.startup import Path
from penstock.sched.local import Limits, Scheduler
from penstock.sched.local.encodes import UNBOUNDED
from penstock.sched.local.lane import Lane
from penstock.sched.local.offload import Offload
from penstock.sched.steptime import StepTime
from penstock.service.events import (
    FromEngine,
    FromFrontend,
    Happening,
    RestartInstance,
    StartInstance,
    StopInstance,
    ToEngine,
    ToFrontend,
)
from penstock.service.instances import ChannelLost, InstanceJoined
from penstock.service.master import Master
from penstock.service.policies import Policies
from penstock.service.recorder import Recorder
from penstock.service.session import FleetLimits
from penstock.sim import instance as engine
from penstock.sim.baselines import ENGINE_POLICIES
from penstock.sim.events import Due, Priority, Timeline
from penstock.sim.frontend import SimFrontend, SimRecord
from penstock.sim.hosts import Hosts
from penstock.sim.scenario import Failure, InstanceGroup, Scaling, Scenario
from penstock.sim.slots import InstanceSlot, Sample, Use, make_slots, sample_of
from penstock.sim.steps import StepTimer
from penstock.sim.store import SimStore
from penstock.sim.tower import SimTower, encode_budget, kept_tokens
from penstock.sim.wires import MemoryCarrier, Orphan, PeerArrival, SharedOrphans, TierWay, Wires
from penstock.workload.requests import WorkRequest

FRONTEND = "frontend-0"
JOIN_EVERY = 1.0  # seconds between a frontend's `Join`s
MASTER_TICK = 0.1  # seconds between a master's ticks
MESSAGES = 1  # a lane beside `instance.IDLE`; see `Due`
WATCH = 0.01  # seconds after which a broken connection is noticed
RESTART = 10.0  # seconds that an instance takes to start again
ORPHANS = 60.0  # seconds that what a failed instance has left in a shared pool waits for its next incarnation
POOL = "the pool that all share"


class Cluster:
    """
    Args:
        policies: of the master.
        requests: that come, in order of arrival.
        rng: for randomised policies.
        noises: a numpy Generator of step times for each instance, by number.
        local_policy: of every engine, a name in `baselines.ENGINE_POLICIES`.
        recorder: gets the master's decisions.
        strides: see `SimInstance`.
        judged: numbers of the requests that it is about; all by default.

    Attributes:
        records: of every request that has come.
        samples: (seconds, every instance's state), at even distances.
        changes: (seconds, what was decided) of roles, and of how many instances there are.
        starts: (seconds, path, how long it takes) of instances that were ordered.
    """

    def __init__(
        self,
        scenario: Scenario,
        groups: Sequence[InstanceGroup],
        policies: Policies,
        requests: Sequence[WorkRequest],
        rng: Random,
        noises: Callable[[int], Any],
        *,
        local_policy: str = "fcfs",
        recorder: Recorder | None = None,
        strides: bool = True,
        judged: range | None = None,
    ) -> None:
        self.timeline = Timeline(lanes=2)
        self.samples: list[tuple[float, dict[str, Sample]]] = []
        self.changes: list[tuple[float, FleetChange]] = []
        self.starts: list[tuple[float, Path, float]] = []
        self.judged = range(len(requests)) if judged is None else judged
        self.ended = 0
        mine = requests[self.judged.start : self.judged.stop]
        self._left = sum(not work.offline for work in mine) or len(mine)  # requests that it is over with
        self._offline_alone = all(work.offline for work in mine)
        self._marks: list[tuple[float, dict[str, Use]]] = []
        self._sample_every = 1.0
        self._local_policy = local_policy
        self._scenario, self._requests, self._noises, self._strides = scenario, requests, noises, strides
        self._lengths = {str(work.number): work.output_tokens for work in requests}
        self._notice: Callable[[SimRecord], None] = lambda record: None
        self._root = root_key(groups[0].geometry, "bfloat16")
        self._wires = Wires(scenario.transport)
        self.places = make_slots(groups, scenario.scaling)
        self._hosts = Hosts(scenario.scaling, self.places)
        remote = max(group.remote_blocks for group in groups)
        self._store = SimStore(remote) if remote else None
        self._depot: Depot | None = None
        self._restarts: dict[str, float] = {}  # seconds that one for slowness takes, where it is not RESTART
        self._orphans: dict[str, dict[bytes, Orphan]] = {}  # what failed instances have left there, by key
        if scenario.transport.kind == "shared":
            self._depot = Depot(sum(place.group.num_blocks for place in self.places.values()))
        self.frontend = SimFrontend(
            self,
            max_tokens=None if scenario.workload.exact else scenario.workload.max_tokens,
            max_model_len=max(group.max_model_len for group in groups),
            root=self._root,
            ended=self._count,
        )
        self.master = Master(
            [_endpoint(place, runs=place.serves_first) for place in self.places.values()],
            policies,
            rng,
            limits=_fleet(scenario.scaling),
            recorder=_Costs(self.records, self.changes, recorder),
            slow=_slow(scenario),
            media_route=media_route(groups),
        )
        self._woken = inf  # when the master is to be woken, and only then

    @property
    def over(self) -> bool:
        """Whether all judged requests have ended."""
        return not self._left

    @property
    def records(self) -> list[SimRecord]:
        return self.frontend.records

    def run(
        self, *, sample_every: float, notice: Callable[[SimRecord], bool], since: float = 0.0, until: float = inf
    ) -> None:
        """Simulate until every online request has ended; or all, when there are only offline ones.

        Args:
            sample_every: seconds between two samples.
            notice: called with every request that has ended; True ends the simulation.
            since, until: seconds between which these come: it is sampled from `since` on, and not over before `until`,
                unless that is inf.
        """
        stopped = False
        least = 0.0 if until == inf else until

        def ended(record: SimRecord) -> None:
            nonlocal stopped
            stopped = notice(record) or stopped

        self._notice, self._sample_every = ended, sample_every
        for place in self.places.values():
            if place.serves_first:
                place.begin(0.0)
                self.timeline.add(self._start(place, place.group.role, "disk", 0.0))
        self.timeline.add([self._join(0.0), *self._tick_master(0.0), Due(since, Priority.CLOCK, self._sample)])
        self.timeline.add(Due(at, Priority.FAULT, self._mark) for at in (since, until) if 0 < at < inf)
        if self._requests:
            self.timeline.add([Due(self._requests[0].at, Priority.ARRIVAL, partial(self._arrive, 0))])
        for failure in self._scenario.failures:
            self.timeline.add([Due(failure.at, Priority.FAULT, partial(self._fail, failure))])
        self.timeline.run(lambda: stopped or (not self._left and self.timeline.now >= least))
        self._mark(self.timeline.now)

    def used(self, since: float, until: float) -> dict[str, Use]:
        """What each instance did between two moments, each the beginning, the end or one that `run` was given."""
        before, after = (self._mark_at(moment) for moment in (since, until))
        return {name: after[name].less(before[name]) for name in self.places}

    def check(self) -> None:
        """Raise AssertionError unless every part passes its check."""
        self.master.check()
        if self._depot is not None:
            self._depot.check()
        for place in self.places.values():
            if place.instance is not None:
                place.instance.check()
        open_requests = sum(record.ended is None for record in self.records)
        assert open_requests == self.frontend.open
        assert self.ended == len(self.records) - open_requests

    def settle(self, seconds: float) -> None:
        """Let time pass after the last request's end, until all messages are delivered."""
        until = self.timeline.now + seconds
        self.timeline.run(lambda: self.timeline.now >= until)

    # --- clients

    def _arrive(self, index: int, now: float) -> list[Due]:
        dues = self.frontend.arrive(now, self._requests[index])
        if index + 1 < len(self._requests):
            dues.append(Due(self._requests[index + 1].at, Priority.ARRIVAL, partial(self._arrive, index + 1)))
        return dues

    def _count(self, record: SimRecord) -> None:
        self.ended += 1
        if record.number in self.judged:
            self._left -= self._offline_alone or not record.offline
        self._notice(record)

    def _join(self, now: float) -> Due:
        return self.frontend_to_master(now, Join(FRONTEND))

    # --- the master

    def _at_master(self, happening: Happening | None, now: float) -> list[Due]:
        dues: list[Due] = []
        for action in self.master.tick(now, happening):
            match action:
                case ToEngine(_, LinkPeer()):
                    pass  # every way is there
                case ToEngine(name, command):
                    dues.append(self._to_engine(now, name, command))
                case ToFrontend(_, message):
                    dues.append(self._message(now, partial(self._at_frontend, message)))
                case StartInstance(name, role):
                    dues += self._order(self.places[name], role, now)
                case StopInstance(name):
                    dues += self._end_life(self.places[name], "it was stopped", now)
                    dues.append(self._registered(now + WATCH, _endpoint(self.places[name], runs=False)))
                case RestartInstance(name):
                    dues += self._restart(self.places[name], now)
        if self.master.wake < self._woken:
            self._woken = max(now, self.master.wake)
            dues.append(Due(self._woken, Priority.CLOCK, partial(self._wake_master, self._woken)))
        return dues

    def _wake_master(self, due: float, now: float) -> list[Due]:
        if due != self._woken:
            return []
        self._woken = inf
        return self._at_master(None, now)

    def _at_frontend(self, message: MasterMessage, now: float) -> Iterable[Due]:
        return self.frontend.on_master(now, message)

    def _tick_master(self, now: float) -> list[Due]:
        dues = self._at_master(None, now)
        dues.append(Due(now + MASTER_TICK, Priority.CLOCK, self._tick_master))
        if int((now + MASTER_TICK) / JOIN_EVERY) > int(now / JOIN_EVERY):
            dues.append(self._join(now))
        return dues

    # --- instances

    def _order(self, place: InstanceSlot, role: Role, now: float) -> list[Due]:
        """An instance is to start."""
        assert self._scenario.scaling is not None
        place.begin(now)
        path = self._hosts.path(place)
        seconds = self._scenario.scaling.start.of(path)
        self.starts.append((now, path, seconds))
        dues = [
            self._registered(now, _endpoint(place)),
            Due(now + seconds, Priority.FAULT, partial(self._start, place, role, path)),
            self._registered(now + seconds, _endpoint(place, started=seconds)),
        ]
        if path == "warm":
            self._hosts.take(place)
            again = now + self._scenario.scaling.warm_seconds
            dues.append(Due(again, Priority.CLOCK, partial(self._replace, place)))
        return dues

    def _restart(self, place: InstanceSlot, now: float) -> list[Due]:
        """It has drained, and starts again."""
        dues = self._end_life(place, "it was stopped", now)
        if dues:
            place.begin(now)
            again = partial(self._start, place, place.group.role, "disk")
            dues.append(Due(now + max(self._restarts.get(place.name, RESTART), WATCH), Priority.FAULT, again))
        return dues

    def _replace(self, place: InstanceSlot, now: float) -> list[Due]:
        self._hosts.replace(place)
        return []

    def _registered(self, at: float, endpoint: Endpoint) -> Due:
        """Its launcher reports an instance."""
        return self._message(at, partial(self._at_master, InstanceJoined(endpoint)))

    def _start(self, place: InstanceSlot, role: Role, path: str, now: float) -> list[Due]:
        """An instance begins to serve."""
        group = place.group
        place.lives += 1
        self._hosts.loaded(place)
        peer = Peer(place.name, place.lives, f"sim:{place.name}")
        layout = _layout(group)
        ready = Ready(
            peer=peer,
            role=role,
            layout=layout,
            root_key=self._root,
            max_model_len=group.max_model_len,
            vocab_size=group.times.shape.vocab,
            num_blocks=group.whole_blocks,
            token_budget=group.token_budget,
            device=group.device,
            dtype=layout.dtype,
            device_model=group.believed,
            shape=group.times.shape,
            max_sequences=group.max_num_seqs,
            weights_from=path,
            kv_pool="" if self._depot is None else POOL,
            store="" if self._store is None else self._store.name,
            embedding_size=0 if group.times.shape.vision is None else group.times.shape.vision.width,
        )
        source, pool = self._pool(place)
        scheduler = self._scheduler(group, pool)
        each = group.times.load_blocks_ms(1) / 1e3
        place.instance = engine.SimInstance(
            ready,
            scheduler,
            MemoryCarrier(source),
            StepTimer(group.times, group.noise, self._noises(place.number)),
            self,
            self._lengths,
            report_interval=self._scenario.report_interval,
            lease=self._scenario.transport.lease,
            tells_cache=self.master.joined.wants_keys or bool(self._scenario.failures),
            ways={tier: TierWay(seconds) for tier, seconds in group.tier_seconds.items()},
            orphans=None if source is None else SharedOrphans(self._orphans, source, each),
            strides=self._strides,
            tower=_tower(group),
        )
        self.frontend.greet(ready)
        return place.instance.start(now)

    def _scheduler(self, group: InstanceGroup, pool: BlockPool) -> Scheduler:
        limits = Limits(
            token_budget=group.token_budget,
            max_sequences=group.max_num_seqs,
            max_model_len=group.max_model_len,
            searches=False,
            **_seeing(group),
        )
        believed = StepTime(group.believed, group.times.shape)
        return Scheduler(
            limits,
            pool,
            root=self._root,
            prefix_cache=group.prefix_cache,
            policy=ENGINE_POLICIES[group.scheduling_policy or self._local_policy](believed, group.limit),
            offload=Offload(pool, lanes) if (lanes := self._lanes(group)) else None,
            windows=group.windows,
            media_tokens=UNBOUNDED if group.times.shape.vision is None else kept_tokens(group.times),
        )

    def _lanes(self, group: InstanceGroup) -> list[Lane]:
        """To its tiers below the device."""
        seconds = group.tier_seconds
        lanes = []
        if group.host_blocks:
            lanes.append(Lane(Tier(group.host_blocks), mirrors=True))
        if group.disk_blocks:
            lanes.append(Lane(Tier(group.disk_blocks, "disk"), seconds["disk"]))
        if self._store is not None:
            lanes.append(Lane(self._store, seconds["remote"]))
        return lanes

    def _pool(self, place: InstanceSlot) -> tuple[DepotSource | None, BlockPool]:
        """Its blocks, and where it exchanges them; with what its last incarnation left, if that has failed."""
        count, name = place.group.num_blocks, place.name
        if self._depot is None:
            return None, BlockPool(range(count))
        inherited, left = self._depot.attach(name, place.lives, count), self._orphans.pop(name, {})
        source = DepotSource(self._depot, name)
        pool = BlockPool([*self._depot.lease(name, count - len(inherited)), *inherited], source)
        kept = set(inherited)
        pool.restore(orphan.of for orphan in reversed(left.values()) if orphan.of.block in kept)  # the latest first
        return source, pool

    def _expire(self, place: InstanceSlot, life: int, now: float) -> list[Due]:
        """It has not come back in time."""
        if place.lives == life and self._orphans.pop(place.name, None) is not None:
            assert self._depot is not None
            self._depot.expire(place.name)
        return []

    def _fail(self, failure: Failure, now: float) -> list[Due]:
        place = self.places[failure.instance]
        if failure.slow is not None:
            if failure.restart_after is not None:
                self._restarts[place.name] = failure.restart_after
            return [] if place.instance is None else place.instance.slow_down(now, failure.slow)
        dues = self._end_life(place, "the simulated process ended", now, failed=True)
        if dues and self._depot is not None:
            dues.append(Due(now + ORPHANS, Priority.FAULT, partial(self._expire, place, place.lives)))
        if dues and failure.restart_after is not None:
            start = partial(self._start_again, place)
            dues.append(Due(now + max(failure.restart_after, WATCH), Priority.FAULT, start))
        elif dues:
            dues.append(self._registered(now + WATCH, _endpoint(place, given_up=True)))
        return dues

    def _start_again(self, place: InstanceSlot, now: float) -> list[Due]:
        place.begin(now)
        return self._start(place, place.group.role, "disk", now)

    def _end_life(self, place: InstanceSlot, reason: str, now: float, failed: bool = False) -> list[Due]:
        gone = place.instance
        if gone is None:
            return []
        words = gone.stop(now)
        place.end(now)
        peer = gone.ready.peer
        if self._depot is not None:
            found = gone.scheduler.pool.published() if failed else []
            self._depot.detach(place.name, keep=[published.block for published in found])
            if failed:
                orphans = (Orphan(published, self._depot.generation(published.block)) for published in found)
                self._orphans[place.name] = {orphan.of.key: orphan for orphan in orphans}
        noticed = now + max(WATCH, self._scenario.latency)  # what was sent before has come by then
        dues = [
            *(Due(noticed, Priority.MESSAGE, partial(self._hear, place.name, said)) for said in words.values()),
            Due(noticed, Priority.MESSAGE, partial(self._at_master, FromEngine(place.name, ChannelLost(reason)))),
            Due(noticed, Priority.MESSAGE, lambda at: self.frontend.lose(at, peer, reason)),
        ]
        for other in self.places.values():
            if other.instance is not None:
                lost = partial(self._at_instance, other.name, engine.PeerLost(peer, reason))
                dues.append(Due(noticed, Priority.MESSAGE, lost))
        return dues

    def _hear(self, name: str, outputs: engine.OutputBatch, now: float) -> list[Due]:
        return self.frontend.on_engine(now, name, outputs)

    def _at_instance(self, name: str, letter: engine.Letter, now: float) -> list[Due]:
        target = self.places[name].instance
        return [] if target is None else target.deliver(now, [letter])

    def _at_peer(self, peer: Peer, arrivals: Sequence[PeerArrival], now: float) -> list[Due]:
        """Messages for an ended incarnation are dropped."""
        target = self.places[peer.name].instance
        if target is None or target.ready.peer.incarnation != peer.incarnation:
            return []
        return target.deliver(now, arrivals)

    def _mark(self, now: float) -> list[Due]:
        self._marks.append((now, {name: place.used for name, place in self.places.items()}))
        return []

    def _mark_at(self, moment: float) -> dict[str, Use]:
        if not moment:
            return dict.fromkeys(self.places, Use())
        return next(used for at, used in self._marks if at == moment)

    def _sample(self, now: float) -> list[Due]:
        states = {name: sample_of(place.instance) for name, place in self.places.items()}
        self.samples.append((now, states))
        return [Due(now + self._sample_every, Priority.CLOCK, self._sample)]

    # --- the network

    def _message(self, now: float, act: Callable[[float], Iterable[Due]]) -> Due:
        return Due(now + self._scenario.latency, Priority.MESSAGE, act, MESSAGES)

    def _to_engine(self, now: float, name: str, letter: engine.Letter) -> Due:
        return self._message(now, partial(self._at_instance, name, letter))

    def to_master(self, now: float, name: str, event: Event) -> Due:
        act = partial(self.at_master, name=name, event=event)
        if isinstance(event, Snapshot | CacheDelta) and self._scenario.report_delay:
            return Due(self.report_arrives(now), Priority.MESSAGE, act)
        return self._message(now, act)

    def report_arrives(self, at: float) -> float:
        return at + self._scenario.latency + self._scenario.report_delay

    def at_master(self, now: float, name: str, event: Event) -> list[Due]:
        return self._at_master(FromEngine(name, event), now)

    def to_frontend(
        self, now: float, frontend: str, name: str, message: engine.OutputBatch | Refused | Stayed | Fetched | Lacking
    ) -> Due:
        return self._message(now, lambda at: self.frontend.on_engine(at, name, message))

    def to_peer(self, now: float, sender: Peer, peer: Peer, messages: Sequence[PeerMessage]) -> Due:
        group = self.places[sender.name].group
        at = max(self._wires.arrival(now, sender.name, peer.name, m, group.sent_bytes(m)) for m in messages)
        arrivals = [PeerArrival(sender, message) for message in messages]
        return Due(at, Priority.MESSAGE, partial(self._at_peer, peer, arrivals))

    def frontend_to_master(self, now: float, message: FrontendMessage) -> Due:
        return self._message(now, partial(self._at_master, FromFrontend(FRONTEND, message)))

    def frontend_to_engine(self, now: float, name: str, command: Command) -> Due:
        return self._to_engine(now, name, engine.ClientCommand(FRONTEND, command))


class _Costs:
    """A recorder that keeps each decision's cost and the least cost, and changes of instances, and forwards everything
    to another.

    Args:
        records: of requests, by number.
        changes: gets those of instances.
    """

    def __init__(
        self,
        records: Sequence[SimRecord],
        changes: list[tuple[float, FleetChange]],
        other: Recorder | None,
    ) -> None:
        self._records, self._changes, self._other = records, changes, other

    def decided(
        self, now: float, view: ClusterView, demand: Demand, request_id: str, frontend: str, decision: Decision
    ) -> None:
        chosen = {"prefill": decision.prefill, "decode": decision.decode or decision.prefill}
        self._records[int(request_id)].costs = {
            stage: (costs[chosen[stage]], least(costs)) for stage, costs in decision.costs.items() if costs
        }
        if self._records[int(request_id)].first is None:
            self._records[int(request_id)].predicted_ttft = decision.predicted_ttft
        if self._other is not None:
            self._other.decided(now, view, demand, request_id, frontend, decision)

    def held(self, now: float, demand: Demand, request_id: str, frontend: str, later: Later) -> None:
        if self._other is not None:
            self._other.held(now, demand, request_id, frontend, later)

    def relocated(self, now: float, at: str, migration: Migration) -> None:
        if self._other is not None:
            self._other.relocated(now, at, migration)

    def scaled(self, now: float, verdicts: Sequence[Verdict]) -> None:
        if self._other is not None:
            self._other.scaled(now, verdicts)

    def moved(self, now: float, move: FleetChange) -> None:
        self._changes.append((now, move))
        if self._other is not None:
            self._other.moved(now, move)

    def ended(self, now: float, request_id: str, frontend: str, outcome: Outcome | None, refused: str = "") -> None:
        if self._other is not None:
            self._other.ended(now, request_id, frontend, outcome, refused)


def _tower(group: InstanceGroup) -> SimTower | None:
    """Of one that sees."""
    return None if group.times.shape.vision is None else SimTower(group.times)


def media_route(groups: Sequence[InstanceGroup]) -> MediaRoute | None:
    """Of requests with images, at first."""
    return "ED+P" if any(group.encodes for group in groups) else None


def _seeing(group: InstanceGroup) -> dict[str, int]:
    """How much of images is in a step: what keeps within its limit, or all that there is."""
    if group.times.shape.vision is None:
        return {}
    limited = group.stage_scheduling
    return {"encode_budget": encode_budget(group.times, group.limit.most) if limited else UNBOUNDED}


def _fleet(scaling: Scaling | None) -> FleetLimits | None:
    if scaling is None:
        return None
    return FleetLimits(
        least=scaling.least, most=scaling.most, start_seconds=scaling.start.of("map"), devices=scaling.devices
    )


def _slow(scenario: Scenario) -> SlowInstances | None:
    least = 1 if scenario.scaling is None else scenario.scaling.least
    return SlowInstances(scenario.slow_after, least) if scenario.slow_after else None


def _endpoint(place: InstanceSlot, *, runs: bool = True, started: float = 0.0, given_up: bool = False) -> Endpoint:
    """As its launcher reports it."""
    group = place.group
    state: Literal["running", "stopped"] = "running" if runs else "stopped"
    return Endpoint(place.name, "", group.role, state, group.devices, started, given_up)


def _layout(group: InstanceGroup) -> KVLayout:
    shape = group.times.shape
    return KVLayout(
        model=group.geometry,
        order="block",
        dtype="bfloat16",
        groups=shape.kv_groups,
        block_bytes=group.block_bytes,
    )
