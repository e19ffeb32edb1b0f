"""A whole cluster on one timeline: clients, a frontend, the real master, instances, the wires, and what breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.core.layout import KVLayout
from penstock.core.wire.engine import CacheDelta, Command, Event, Peer, Pool, Ready, Refused, Snapshot
from penstock.core.wire.handoff import PeerMessage
from penstock.core.wire.master import FrontendMessage, Join, MasterMessage, Placed
from penstock.kv.depot import Depot, DepotSource
from penstock.kv.keys import root_key
from penstock.kv.pool import BlockPool
from penstock.sched.cluster import Demand, DispatchPolicy, InstanceLoad, Random, Stage
from penstock.sched.local import Limits, Scheduler
from penstock.service.instances import Endpoint, LinkLost
from penstock.service.master import FromEngine, FromFrontend, Happening, Master, ToEngine, ToFrontend
from penstock.sim import instance as engine
from penstock.sim.events import Due, Priority, Timeline
from penstock.sim.frontend import Frontend, Record
from penstock.sim.pace import Pace
from penstock.sim.scenario import Failure, Group, Scenario
from penstock.sim.wires import MemoryCarrier, PeerArrival, Wires
from penstock.workload.requests import WorkRequest

FRONTEND = "frontend-0"
JOIN_EVERY = 1.0  # seconds between a frontend's signs of life
MASTER_TICK = 0.25  # seconds between a master's looks at the clock
WATCH = 0.01  # seconds after which a broken connection is noticed


@dataclass(frozen=True, slots=True)
class Sample:
    """An instance at a moment; `pool` is None while it is down."""

    pool: Pool | None
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0


@dataclass(slots=True)
class Place:
    """Where an instance lives, one life after the other.

    Attributes:
        instance: its present life; None while it is down.
        lifetimes: [began, ended) of each, in seconds; None while one lasts.
        steps, busy: of all lives together; `busy` in seconds.
    """

    name: str
    group: Group
    number: int
    instance: engine.Instance | None = None
    lives: int = 0
    lifetimes: list[tuple[float, float | None]] = field(default_factory=list)
    steps: int = 0
    busy: float = 0.0

    def alive_seconds(self, until: float) -> float:
        return sum((until if end is None else end) - begin for begin, end in self.lifetimes)


class Cluster:
    """
    Args:
        policy: of the master.
        requests: that come, in order of arrival.
        rng: for policies that draw lots.
        noises: a numpy Generator of step times for each instance, by number.
        strides: see `Instance`.

    Attributes:
        records: of every request that has come.
        samples: (seconds, every instance's state), at even distances.
    """

    def __init__(
        self,
        scenario: Scenario,
        groups: Sequence[Group],
        policy: DispatchPolicy,
        requests: Sequence[WorkRequest],
        rng: Random,
        noises: Callable[[int], Any],
        *,
        strides: bool = True,
    ) -> None:
        self.timeline = Timeline()
        self.samples: list[tuple[float, dict[str, Sample]]] = []
        self.ended = 0
        self._sample_every = 1.0
        self._scenario, self._requests, self._noises, self._strides = scenario, requests, noises, strides
        self._lengths = {str(work.number): work.output_tokens for work in requests}
        self._notice: Callable[[Record], None] = lambda record: None
        self._root = root_key(groups[0].geometry, "bfloat16")
        self._wires = Wires(scenario.transport)
        self.places = {
            name: Place(name, group, number)
            for number, (name, group) in enumerate((name, group) for group in groups for name in group.instances)
        }
        self._depot: Depot | None = None
        if scenario.transport.kind == "shared":
            self._depot = Depot(sum(place.group.num_blocks for place in self.places.values()))
        endpoints = [Endpoint(place.name, "", place.group.pool) for place in self.places.values()]
        self._policy = _Witness(policy)
        self.master = Master(endpoints, self._policy, rng)
        self.frontend = Frontend(
            self,
            max_tokens=scenario.workload.max_tokens,
            max_model_len=max(group.max_model_len for group in groups),
            root=self._root,
            ended=self._count,
        )

    @property
    def records(self) -> list[Record]:
        return self.frontend.records

    def run(self, *, sample_every: float, notice: Callable[[Record], bool]) -> None:
        """Simulate until every request is over.

        Args:
            sample_every: seconds between two samples.
            notice: told of every request that is over; True ends the simulation.
        """
        stopped = False

        def ended(record: Record) -> None:
            nonlocal stopped
            stopped = notice(record) or stopped

        self._notice, self._sample_every = ended, sample_every
        for place in self.places.values():
            self.timeline.add(self._start(place, 0.0))
        self.timeline.add([self._join(0.0), *self._tick_master(0.0), Due(0.0, Priority.CLOCK, self._sample)])
        if self._requests:
            self.timeline.add([Due(self._requests[0].at, Priority.ARRIVAL, partial(self._arrive, 0))])
        for failure in self._scenario.failures:
            self.timeline.add([Due(failure.at, Priority.FAULT, partial(self._fail, failure))])
        self.timeline.run(lambda: stopped or self.ended == len(self._requests))
        for place in self.places.values():
            self._close_account(place, self.timeline.now)

    def check(self) -> None:
        """Raise AssertionError unless every part's books are right."""
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
        """Let time pass after the last request is over, so that everybody hears of it."""
        until = self.timeline.now + seconds
        self.timeline.run(lambda: self.timeline.now >= until)

    # --- clients

    def _arrive(self, index: int, now: float) -> list[Due]:
        dues = self.frontend.arrive(now, self._requests[index])
        if index + 1 < len(self._requests):
            dues.append(Due(self._requests[index + 1].at, Priority.ARRIVAL, partial(self._arrive, index + 1)))
        return dues

    def _count(self, record: Record) -> None:
        self.ended += 1
        self._notice(record)

    def _join(self, now: float) -> Due:
        return self.frontend_to_master(now, Join(FRONTEND))

    # --- the master

    def _at_master(self, happening: Happening | None, now: float) -> list[Due]:
        dues: list[Due] = []
        for action in self.master.tick(now, happening):
            match action:
                case ToEngine(name, command):
                    dues.append(self._to_engine(now, name, command))
                case ToFrontend(_, message):
                    costs = self._policy.take() if isinstance(message, Placed) else {}
                    dues.append(self._message(now, partial(self._at_frontend, message, costs)))
        return dues

    def _at_frontend(
        self, message: MasterMessage, costs: Mapping[str, tuple[float, float]], now: float
    ) -> Iterable[Due]:
        return self.frontend.on_master(now, message, costs)

    def _tick_master(self, now: float) -> list[Due]:
        dues = self._at_master(None, now)
        dues.append(Due(now + MASTER_TICK, Priority.CLOCK, self._tick_master))
        if int((now + MASTER_TICK) / JOIN_EVERY) > int(now / JOIN_EVERY):
            dues.append(self._join(now))
        return dues

    # --- instances

    def _start(self, place: Place, now: float) -> list[Due]:
        """A life of an instance begins."""
        group = place.group
        place.lives += 1
        peer = Peer(place.name, place.lives, f"sim:{place.name}")
        layout = _layout(group)
        ready = Ready(
            peer=peer,
            pool=group.pool,
            layout=layout,
            root_key=self._root,
            max_model_len=group.max_model_len,
            vocab_size=group.times.shape.vocab,
            num_blocks=group.num_blocks,
            token_budget=group.token_budget,
            device=group.device,
            dtype=layout.dtype,
        )
        source, blocks = self._blocks(place)
        limits = Limits(
            token_budget=group.token_budget, max_sequences=group.max_num_seqs, max_model_len=group.max_model_len
        )
        scheduler = Scheduler(limits, BlockPool(blocks, source), root=self._root, prefix_cache=group.prefix_cache)
        place.instance = engine.Instance(
            ready,
            scheduler,
            MemoryCarrier(source),
            Pace(group.times, group.slowdown, group.noise, self._noises(place.number)),
            self,
            self._lengths,
            heartbeat=self._scenario.heartbeat,
            lease=self._scenario.transport.lease,
            prefix_cache=group.prefix_cache,
            strides=self._strides,
        )
        place.lifetimes.append((now, None))
        self.frontend.greet(ready)
        return place.instance.start(now)

    def _blocks(self, place: Place) -> tuple[DepotSource | None, Iterable[int]]:
        count = place.group.num_blocks
        if self._depot is None:
            return None, range(count)
        self._depot.attach(place.name, place.lives, count)
        return DepotSource(self._depot, place.name), self._depot.lease(place.name, count)

    def _fail(self, failure: Failure, now: float) -> list[Due]:
        place = self.places[failure.instance]
        gone = place.instance
        if gone is None:
            return []
        gone.stop(now)
        self._close_account(place, now)
        place.instance = None
        peer, reason = gone.ready.peer, "the simulated process ended"
        if self._depot is not None:
            self._depot.detach(place.name, keep=())
        noticed = now + WATCH
        dues = [
            Due(noticed, Priority.MESSAGE, partial(self._at_master, FromEngine(place.name, LinkLost(reason)))),
            Due(noticed, Priority.MESSAGE, lambda at: self.frontend.lose(at, peer, reason)),
        ]
        for other in self.places.values():
            if other.instance is not None:
                lost = partial(self._at_instance, other.name, engine.PeerLost(peer, reason))
                dues.append(Due(noticed, Priority.MESSAGE, lost))
        if failure.restart_after is not None:
            start = partial(self._start, place)
            dues.append(Due(max(now + failure.restart_after, noticed), Priority.FAULT, start))
        return dues

    @staticmethod
    def _close_account(place: Place, now: float) -> None:
        if place.instance is not None:
            place.steps += place.instance.steps
            place.busy += place.instance.busy
            place.lifetimes[-1] = (place.lifetimes[-1][0], now)

    def _at_instance(self, name: str, letter: engine.Letter, now: float) -> list[Due]:
        target = self.places[name].instance
        return [] if target is None else target.deliver(now, [letter])

    def _at_peer(self, peer: Peer, arrivals: Sequence[PeerArrival], now: float) -> list[Due]:
        """A life that is over hears nothing, and the next one nothing that was meant for it."""
        target = self.places[peer.name].instance
        if target is None or target.ready.peer.incarnation != peer.incarnation:
            return []
        return target.deliver(now, arrivals)

    def _sample(self, now: float) -> list[Due]:
        states = {name: _state(place.instance) for name, place in self.places.items()}
        self.samples.append((now, states))
        return [Due(now + self._sample_every, Priority.CLOCK, self._sample)]

    # --- the network

    def _message(self, now: float, act: Callable[[float], Iterable[Due]]) -> Due:
        return Due(now + self._scenario.latency, Priority.MESSAGE, act)

    def _to_engine(self, now: float, name: str, letter: engine.Letter) -> Due:
        return self._message(now, partial(self._at_instance, name, letter))

    def to_master(self, now: float, name: str, event: Event) -> Due:
        late = self._scenario.heartbeat_delay if isinstance(event, Snapshot | CacheDelta) else 0.0
        at = now + self._scenario.latency + late
        return Due(at, Priority.MESSAGE, partial(self._at_master, FromEngine(name, event)))

    def to_frontend(self, now: float, frontend: str, name: str, message: engine.Outputs | Refused) -> Due:
        return self._message(now, lambda at: self.frontend.on_engine(at, name, message))

    def to_peer(self, now: float, sender: Peer, peer: Peer, messages: Sequence[PeerMessage]) -> Due:
        block_bytes = self.places[sender.name].group.block_bytes
        at = max(self._wires.arrival(now, sender.name, peer.name, m, block_bytes) for m in messages)
        arrivals = [PeerArrival(sender, message) for message in messages]
        return Due(at, Priority.MESSAGE, partial(self._at_peer, peer, arrivals))

    def frontend_to_master(self, now: float, message: FrontendMessage) -> Due:
        return self._message(now, partial(self._at_master, FromFrontend(FRONTEND, message)))

    def frontend_to_engine(self, now: float, name: str, command: Command) -> Due:
        return self._to_engine(now, name, engine.FromFrontend(FRONTEND, command))


class _Witness:
    """A policy, and what it held against the candidates of its decisions."""

    def __init__(self, policy: DispatchPolicy) -> None:
        self.name, self.wants_keys = policy.name, policy.wants_keys
        self._policy = policy
        self._decisions: list[dict[str, tuple[float, float]]] = []

    def choose(
        self, stage: Stage, demand: Demand, candidates: Sequence[InstanceLoad], rng: Random
    ) -> tuple[str, Mapping[str, float]]:
        name, costs = self._policy.choose(stage, demand, candidates, rng)
        if stage == "prefill":
            self._decisions.append({})
        self._decisions[-1][stage] = (costs[name], min(costs.values()))
        return name, costs

    def take(self) -> dict[str, tuple[float, float]]:
        """By stage, the cost of the choice and the least one, of the oldest decision that was not taken yet."""
        return self._decisions.pop(0) if self._decisions else {}


def _layout(group: Group) -> KVLayout:
    shape = group.times.shape
    return KVLayout(
        model=group.geometry,
        order="block",
        dtype="bfloat16",
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_bytes=group.block_bytes,
    )


def _state(instance: engine.Instance | None) -> Sample:
    if instance is None:
        return Sample(None)
    scheduler = instance.scheduler
    return Sample(instance.pool, scheduler.num_running, scheduler.num_waiting, scheduler.pool.used)
