"""Instances as the master knows them: an incarnation, all that may be given work, and how many there shall be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import LEASE, Peer, Ready, Role, Snapshot
from penstock.core.wire.master import Endpoint
from penstock.sched.cluster import (
    ClusterView,
    Demand,
    Fleet,
    InstanceLoad,
    Instances,
    Pace,
    Scaled,
    ScalingPolicy,
    Start,
    Tally,
    Verdict,
)
from penstock.sched.cluster.base import Key
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime

SUSPECT_AFTER = 2.0  # seconds without a Snapshot after which an instance gets no work
DEAD_AFTER = 60.0  # seconds without a Snapshot after which it gets no work even if no other instance can
REPEATED = 60.0  # seconds after which a scaling policy's verdicts are recorded again although they are the same
REMEMBERED = 8  # length of the history: changes of each instance, on average
UNSEEN = 2  # Snapshots until a request that was placed is certainly in them
MEASURED = "cpu"  # a device whose model engines measure when they start; those of others come from data sheets
UNKNOWN = DEVICES["h100"], GEOMETRIES["qwen3-8b"]  # assumed for engines of unknown devices


@dataclass(slots=True)
class Prompt:
    """One that is to be prefilled here.

    Attributes:
        tokens: to compute.
        seconds: that it takes, as predicted when it was placed.
        sent: when that was.
        first: number of the first Snapshot that certainly has it.
    """

    tokens: int
    seconds: float
    sent: float
    offline: bool
    first: int


@dataclass(slots=True)
class InstanceSession:
    """One incarnation: what it said, and what was placed on it since.

    Attributes:
        heard: when its newest Snapshot came; at first, when it became ready.
        role: which work it is given.
        role_generation: counts the master's decisions about that.
        role_decided: when the last one was made; None once the instance has it.
        links: peers that it was told to connect to.
        peers: those of them that it can hand over to.
        unlinked: reasons for failed links, by peer.
        asked: when it was asked for its cache.
        draining: it takes no new requests and will stop.
        suspected: its launcher says that it may hang.
        prompts: that are to be prefilled here, by key.
        homes: sequences that stay here after their prompt.
        begun: those of them whose first token was sampled.
        encodes: image tokens that it is to look at, also for others, by key.
        load: what policies see of it; None when that has changed.
        touched: gets its name on every change, and when it reports after a silence.
        peer, name: from its `Ready`.
    """

    ready: Ready
    heard: float
    role: Role
    snapshot: Snapshot | None = None
    role_generation: int = 0
    role_decided: float | None = None
    links: dict[str, Peer] = field(default_factory=dict)
    peers: set[str] = field(default_factory=set)
    unlinked: dict[str, str] = field(default_factory=dict)
    asked: float = -inf
    draining: bool = False
    suspected: bool = False
    prompts: dict[Key, Prompt] = field(default_factory=dict)
    homes: dict[Key, Demand] = field(default_factory=dict)
    begun: set[Key] = field(default_factory=set)
    encodes: dict[Key, int] = field(default_factory=dict)
    load: InstanceLoad | None = None
    touched: set[str] = field(default_factory=set)
    peer: Peer = field(init=False)
    name: str = field(init=False)
    _times: StepTime | None = None
    _held_tokens: int = 0
    _offline: int = 0
    _offline_tokens: int = 0
    _pending: int = 0
    _ttfts: Counter[float] = field(default_factory=Counter)  # of its online sequences
    _tpots: Counter[float] = field(default_factory=Counter)
    _free_at: float = -inf
    _idle_at: float = -inf
    _turn: float = -inf  # when the newest of its online prompts that have ended did

    def __post_init__(self) -> None:
        self.peer, self.name = self.ready.peer, self.ready.peer.name

    @property
    def leaving(self) -> bool:
        """Whether it takes nothing new."""
        return self.drains or self.sleeps

    def silent(self, now: float) -> bool:
        """Whether it may have failed: it gets no work while others have not."""
        return self.suspected or now - self.heard > SUSPECT_AFTER

    @property
    def drains(self) -> bool:
        """Whether it is to stop."""
        return self.draining or (self.snapshot is not None and self.snapshot.draining)

    @property
    def sleeps(self) -> bool:
        """Whether it takes nothing new until it is woken up."""
        return self.snapshot is not None and self.snapshot.asleep > 0

    @property
    def drained(self) -> bool:
        """Whether it has no requests left, as far as is known."""
        seen = self.snapshot
        quiet = seen is None or not (seen.running or seen.waiting or seen.migrating or seen.reserved_blocks)
        return quiet and not self.homes and not self.prompts and not self.encodes

    @property
    def times(self) -> StepTime:
        """Predicts its steps."""
        if self._times is None:
            factors = {} if self.snapshot is None else self.snapshot.factors
            device, shape = self.ready.device_model, self.ready.shape
            if device is None or shape is None:
                device, shape = UNKNOWN
            self._times = StepTime(device, shape, factors)
        return self._times

    @property
    def pace(self) -> Pace | None:
        """How fast it is; None before it has said anything."""
        seen, ready = self.snapshot, self.ready
        if seen is None:
            return None
        kind, step_ms = None, 1.0
        if ready.device == MEASURED and ready.device_model is not None and ready.shape is not None:
            kind = ready.device, ready.shape
            step_ms = StepTime(ready.device_model, ready.shape).step_ms([(512, 0)], decodes=8, kv_tokens=8192)
        return Pace(self.name, self.peer.incarnation, self.role, seen.speed, seen.running > 0, kind, step_ms)

    def changed(self) -> None:
        """Invalidate the load that policies see."""
        self.load = None
        self.touched.add(self.name)

    def suspect(self, suspected: bool) -> None:
        """Its launcher says that it may hang, or does not any more."""
        if suspected != self.suspected:
            self.suspected = suspected
            self.changed()

    def drain(self) -> None:
        """It is given nothing new from now on."""
        self.draining = True
        self.changed()

    def disconnect(self, name: str) -> None:
        """Remove a lost instance."""
        self.links.pop(name, None)
        self.peers.discard(name)
        self.unlinked.pop(name, None)

    # --- what is placed here

    def add_prompt(self, now: float, demand: Demand) -> None:
        """Its prompt is sent here."""
        tokens = demand.to_compute(self.name)
        seconds = self.view().queued_seconds(tokens, demand.prompt_tokens - tokens)
        seconds += self.encodes.get(demand.key, 0) * (self.encode_ms or 0.0) / 1e3
        sequence = self.snapshot.sequence if self.snapshot is not None else 0
        self.prompts[demand.key] = Prompt(tokens, seconds, now, demand.offline, sequence + UNSEEN)
        self._pending += tokens
        self._idle_at = max(self._idle_at, now) + seconds
        if not demand.offline:
            self._free_at = max(self._free_at, now) + seconds
        self.changed()

    def encode(self, key: Key, tokens: int) -> None:
        """It is to look at an image of a request."""
        self.encodes[key] = self.encodes.get(key, 0) + tokens
        self.changed()

    def encoded(self, key: Key) -> None:
        """It has, or need not any more."""
        if self.encodes.pop(key, None) is not None:
            self.changed()

    @property
    def encoding_tokens(self) -> int:
        return sum(self.encodes.values())

    @property
    def encode_ms(self) -> float | None:
        """Of an image's token, as it measured lately."""
        return None if self.snapshot is None else self.snapshot.encode_ms

    def takes(self, demand: Demand) -> bool:
        """Whether it has room for a sequence now, beside what others need."""
        load = self.view()
        fits = demand.tokens <= load.max_model_len and demand.prompt_tokens < load.free_blocks * BLOCK_TOKENS
        return fits and load.requests < load.max_sequences and self.name not in demand.exclude

    def prompt_done(self, now: float, key: Key) -> None:
        """Its prompt is prefilled, or no longer wanted."""
        prompt = self.prompts.pop(key, None)
        if prompt is None:
            return
        self._pending -= prompt.tokens
        if not prompt.offline:
            self._turn = now
        if not self.prompts:
            self._idle_at = min(self._idle_at, now)
        if not any(not p.offline for p in self.prompts.values()):
            self._free_at = min(self._free_at, now)
        self.changed()

    def house(self, demand: Demand) -> None:
        """It decodes here after its prompt."""
        self.homes[demand.key] = demand
        self._held_tokens += demand.prompt_tokens
        if demand.offline:
            self._offline += 1
            self._offline_tokens += demand.prompt_tokens
        else:
            self._ttfts[demand.ttft] += 1
            self._tpots[demand.tpot] += 1
        self.changed()

    def begin(self, key: Key) -> None:
        """Its first token was sampled."""
        if key in self.homes:
            self.begun.add(key)
            self.changed()

    def leave(self, key: Key) -> None:
        """It is over."""
        demand = self.homes.pop(key, None)
        if demand is None:
            return
        self.begun.discard(key)
        self._held_tokens -= demand.prompt_tokens
        if demand.offline:
            self._offline -= 1
            self._offline_tokens -= demand.prompt_tokens
        else:
            _take(self._ttfts, demand.ttft)
            _take(self._tpots, demand.tpot)
        self.changed()

    def hear(self, now: float, snapshot: Snapshot) -> None:
        """Take a Snapshot; it corrects the estimate of prompts left to prefill."""
        if now - self.heard > SUSPECT_AFTER:
            self.touched.add(self.name)
        before, self.snapshot, self.heard = self.snapshot, snapshot, now
        early = max(self._free_at, self._idle_at) > now  # it finished its prompts earlier than predicted
        if before is not None and not self.prompts and not early and _alike(before, snapshot):
            return  # nothing that policies see
        self.changed()
        if before is None or snapshot.factors != before.factors:
            self._times = None
        if not self.prompts:
            self._free_at, self._idle_at = min(self._free_at, now), min(self._idle_at, now)
            return
        seen = [p for p in self.prompts.values() if p.first <= snapshot.sequence]
        total = sum(p.tokens for p in seen)
        left = min(1.0, (snapshot.waiting_tokens + snapshot.prefill_tokens) / total) if total else 1.0
        online = all_of_it = 0.0
        for prompt in self.prompts.values():
            seconds = prompt.seconds * (left if prompt.first <= snapshot.sequence else 1.0)
            all_of_it += seconds
            online += 0.0 if prompt.offline else seconds
        self._free_at = now + online if online else min(self._free_at, now)
        self._idle_at = now + all_of_it if all_of_it else min(self._idle_at, now)

    # --- what policies see

    def view(self) -> InstanceLoad:
        if self.load is None:
            self.load = self._make_load()
        return self.load

    def _make_load(self) -> InstanceLoad:
        ready, seen = self.ready, self.snapshot
        unseen, ends = 0, -inf
        for prompt in self.prompts.values():
            if seen is None or prompt.first > seen.sequence:
                unseen += prompt.tokens
            if not prompt.offline:
                ends = max(prompt.sent, self._turn, ends) + prompt.seconds
        return InstanceLoad(
            name=self.name,
            role=self.role,
            times=self.times,
            token_budget=ready.token_budget if seen is None else seen.token_budget,
            max_sequences=ready.max_sequences,
            max_model_len=ready.max_model_len,
            num_blocks=ready.num_blocks,
            free_blocks=self._free_blocks(unseen),
            prefilling=len(self.prompts),
            pending_tokens=unseen + (0 if seen is None else seen.waiting_tokens + seen.prefill_tokens),
            requests=max(len(self.homes), 0 if seen is None else seen.running + seen.waiting),
            decoding=len(self.begun),
            held_tokens=max(
                self._held_tokens, 0 if seen is None else seen.running_tokens + seen.reserved_blocks * BLOCK_TOKENS
            ),
            free_at=self._free_at,
            idle_at=self._idle_at,
            available_at=ends,
            ttft=min(self._ttfts, default=inf),
            tpot=min(self._tpots, default=inf),
            offline_requests=self._offline,
            offline_tokens=self._offline_tokens,
            interval=_seconds(None if seen is None else seen.interval_ms),
            ttft_measured=_seconds(None if seen is None else seen.ttft_ms),
            fetches=bool(self.peer.address),
            fetch_ms=None if seen is None else seen.fetch_ms,
            fetch_wait_ms=None if seen is None else seen.fetch_wait_ms,
            load_ms={} if seen is None else seen.load_ms,
            encoding_tokens=self.encoding_tokens,
            encode_ms=self.encode_ms,
            meets=ready.meets,
            peers=self.peers,
            unlinked=self.unlinked,
        )

    def _free_blocks(self, coming: int) -> int:
        """From the newest report, less blocks of placed requests that it does not include.

        Args:
            coming: tokens of prompts that the report does not know of.
        """
        if self.snapshot is None:
            return self.ready.num_blocks - self._held_tokens // BLOCK_TOKENS
        return max(0, self.snapshot.free_blocks - coming // BLOCK_TOKENS)

    def check(self) -> None:
        """Raise AssertionError unless the sums are those of what is counted."""
        assert self._held_tokens == sum(d.prompt_tokens for d in self.homes.values()), "tokens are miscounted"
        assert self._offline == sum(d.offline for d in self.homes.values()), "offline work is miscounted"
        assert self._pending == sum(p.tokens for p in self.prompts.values()), "prompts are miscounted"
        assert self.begun <= self.homes.keys(), "one begins that is not here"
        assert self._tpots.total() == len(self.homes) - self._offline, "targets are miscounted"
        if self.load is not None:
            assert self.load == self._make_load(), "policies see what is over"


class Roster:
    """The instances that may be given work, as policies see them. Updated incrementally from view to view, as there may
    be a thousand.

    Args:
        sessions: that serve now, by name; kept by the owner, which reports additions and removals.
        touched: names of sessions that have changed, also that they were silent; they are given it, and it
            is emptied here.
    """

    def __init__(self, sessions: Mapping[str, InstanceSession], touched: set[str]) -> None:
        self._sessions, self._touched = sessions, touched
        self._able: list[InstanceSession] = []
        self._encoders: list[InstanceSession] = []
        self._loads: list[InstanceLoad] = []  # of those, in the same order
        self._history: list[int] = []  # places of those that changed; see `Instances`
        self._places: dict[str, int] = {}  # in both
        self._unseen: set[str] = set()  # touched since the last view
        self._oldest = -inf  # no report of these is older; -inf: they are to be found anew
        self._shortest = 0

    def sessions_changed(self) -> None:
        """A session was added or removed."""
        self._oldest = -inf

    def able(self, now: float) -> list[InstanceSession]:
        """Instances that may be given work. Silent ones are included only when all are silent: a single engine in a
        long step still gets requests."""
        if now - self._oldest > SUSPECT_AFTER or any(map(self._is_misplaced, self._touched)):
            self._choose(now)
        self._unseen |= self._touched
        self._touched.clear()
        return self._able

    def loads(self, now: float) -> Instances:
        """What policies see of them, as it is now."""
        self.able(now)
        if len(self._history) > REMEMBERED * len(self._loads):
            self._history = []
        for name in self._unseen:
            place = self._places.get(name)
            if place is not None and (load := self._able[place].view()) is not self._loads[place]:
                self._loads[place] = load
                self._history.append(place)
        self._unseen.clear()
        return Instances(self._loads, self._history)

    def encoders(self, now: float) -> list[InstanceSession]:
        """Instances of the role "encode" that may be given images now."""
        self.able(now)
        return self._encoders

    @property
    def shortest(self) -> int:
        """The least `max_model_len` of them; 0 without any."""
        return self._shortest

    def _choose(self, now: float) -> None:
        taking = [session for session in self._sessions.values() if not session.leaving]
        fresh = [session for session in taking if not session.silent(now)]
        self._oldest = min((session.heard for session in fresh), default=-inf)
        able = fresh or [session for session in taking if now - session.heard <= DEAD_AFTER]
        self._encoders = [session for session in fresh if session.role == "encode"]
        self._able = [session for session in able if session.role != "encode"] or able
        self._loads, self._history = [session.view() for session in self._able], []
        self._places = {session.name: place for place, session in enumerate(self._able)}
        self._shortest = min((session.ready.max_model_len for session in self._able), default=0)

    def _is_misplaced(self, name: str) -> bool:
        """Whether one may be given work that was not, or the other way round."""
        session = self._sessions.get(name)
        if session is None:
            return False
        return self._has_place(session) == (session.leaving or session.suspected)

    def _has_place(self, session: InstanceSession) -> bool:
        encodes = any(encoder is session for encoder in self._encoders)
        return encodes == (session.role == "encode") and (encodes or session.name in self._places)

    def check(self) -> None:
        """Raise AssertionError unless the incremental state equals a recomputed one."""
        for place, session in enumerate(self._able):
            assert self._places[session.name] == place, "an instance is elsewhere"
            assert session.name in self._touched | self._unseen or self._loads[place] is session.load, (
                "policies see what is over"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """
    Attributes:
        least: instances that serve.
        most: instances that hold devices, those that start or drain included.
        devices: that they may take together; None sets no such bound.
        start_seconds: that one takes to start, as long as none was measured.
    """

    least: int
    most: int
    start_seconds: float
    devices: int | None = None


class Scaler:
    """Asks the policy at its interval, and knows which instances are being started.

    Attributes:
        verdicts: of the last question, by stage.
        start_seconds: see `FleetLimits`.
    """

    def __init__(self, policy: ScalingPolicy, limits: FleetLimits) -> None:
        self._policy, self._limits = policy, limits
        self.start_seconds = limits.start_seconds
        self.verdicts: Sequence[Verdict] = ()
        self._starting: dict[str, Role] = {}  # ordered, and not heard of since
        self._begun: float | None = None
        self._next = -inf
        self._recorded: tuple[float, list[tuple[Role, str]]] = -inf, []

    def is_due(self, now: float) -> bool:
        return now >= self._next

    def decide(
        self,
        view: ClusterView,
        endpoints: Mapping[str, Endpoint],
        sessions: Mapping[str, InstanceSession],
        roles: Mapping[str, Role],
        start_seconds: float,
        lately: Sequence[Tally],
    ) -> Scaled:
        """
        Args:
            endpoints: all instances that there can be.
            sessions: of those that serve, or drain.
            roles: that were decided on, where these are not those of the endpoints.
            start_seconds: that a start is expected to take.
            lately: what came and went since the last question.

        Returns:
            No changes while an instance sleeps: whoever put it to sleep wants no other in its place.
        """
        self._begun = view.now if self._begun is None else self._begun
        self._next = view.now + self._policy.interval
        asleep = next((name for name, session in sessions.items() if session.sleeps), None)
        if asleep is None:
            scaled = self._policy.decide(view, self._fleet(view, endpoints, sessions, roles, start_seconds, lately))
        else:
            scaled = Scaled(verdicts=_asleep(view, asleep))
        self._starting |= {change.name: change.role for change in scaled.changes if isinstance(change, Start)}
        self.verdicts = scaled.verdicts
        return scaled

    def _fleet(
        self,
        view: ClusterView,
        endpoints: Mapping[str, Endpoint],
        sessions: Mapping[str, InstanceSession],
        roles: Mapping[str, Role],
        start_seconds: float,
        lately: Sequence[Tally],
    ) -> Fleet:
        assert self._begun is not None
        there = {load.name for load in view.instances}
        starting = dict(self._starting)
        draining = {name for name, session in sessions.items() if session.leaving}
        for name, endpoint in endpoints.items():
            if endpoint.holds_devices and name not in sessions:
                if endpoint.state == "leaving":
                    draining.add(name)
                else:  # for the first time, or again after a failure
                    starting.setdefault(name, roles.get(name, endpoint.role))
        return Fleet(
            absent=[
                n for n, e in endpoints.items() if e.state == "stopped" and n not in sessions and n not in starting
            ],
            starting=starting,
            draining=draining,
            silent=sessions.keys() - draining - there,
            lacking=_lacking(endpoints, sessions, starting),
            devices={name: endpoint.devices for name, endpoint in endpoints.items() if endpoint.devices != 1},
            least=self._limits.least,
            most=self._limits.most,
            budget=inf if self._limits.devices is None else self._limits.devices,
            start_seconds=start_seconds,
            complete=view.now - self._begun >= LEASE,
            lately=lately,
        )

    def forget(self, name: str) -> None:
        """An instance is not being started any more: it serves, or is stopped, or was given up."""
        self._starting.pop(name, None)

    def has_news(self, now: float) -> bool:
        """Whether the verdicts are worth recording: they are of other kinds than those that were, or these are old."""
        at, kinds = self._recorded
        said = [(verdict.role, verdict.kind) for verdict in self.verdicts]
        if said == kinds and now - at < REPEATED:
            return False
        self._recorded = now, said
        return True


def _lacking(
    endpoints: Mapping[str, Endpoint], sessions: Mapping[str, InstanceSession], starting: Mapping[str, Role]
) -> list[Role]:
    """Roles without which no request is served, and of which no instance is there or starts."""
    there = {session.role for session in sessions.values() if not session.leaving} | set(starting.values())
    wanted = {endpoint.role for endpoint in endpoints.values()}
    stages: tuple[Role, ...] = ("prefill", "decode")
    lacking = [stage for stage in stages if not there & {stage, "any"}]
    return list(dict.fromkeys(stage if stage in wanted else "any" for stage in lacking))


def _asleep(view: ClusterView, name: str) -> list[Verdict]:
    serving = Counter(load.role for load in view.instances)
    return [
        Verdict(role=role, serving=count, starting=0, more=0, reason="not looked at", outcome=f"asleep: {name} sleeps")
        for role, count in serving.items()
    ]


def _take(counter: Counter[float], value: float) -> None:
    counter[value] -= 1
    if not counter[value]:
        del counter[value]


def _alike(one: Snapshot, other: Snapshot) -> bool:
    """Whether two Snapshots have the same load."""
    return one == replace(other, sequence=one.sequence)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
