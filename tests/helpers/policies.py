"""A tiny master for dispatch policies: it applies what they decide to instances that prefill prompts one after another
and then decode, and holds against them what no policy may do."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Role
from penstock.sched.cluster import (
    ClusterView,
    Decision,
    Demand,
    DispatchPolicy,
    InstanceLoad,
    Instances,
    Later,
    Move,
    Rates,
    Resident,
    hands_over,
)
from penstock.sched.cluster.hfx import HFX
from penstock.sched.cluster.unified import Unified
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.service.queue import Tracked, WaitQueue
from penstock.sim.baselines.aladdin import Aladdin
from penstock.sim.baselines.annealing import Annealing
from penstock.sim.baselines.scorpio import Scorpio

TIMES = StepTime(DEVICES["h200"], GEOMETRIES["llama-3.1-8b"])
OUTPUT = 32  # tokens that the policies are told to expect
TOKEN_SECONDS = 0.01  # of decoding


@dataclass(frozen=True)
class Subject:
    """A policy under test.

    Attributes:
        minds_memory: whether it never overfills an instance that has something to do.
        minds_roles: whether it lets nobody read who only decodes, as long as others could.
        patience: seconds after which one that is passed over has its turn, if more come than can be served.
    """

    make: Callable[[], DispatchPolicy]
    minds_memory: bool = True
    minds_roles: bool = True
    patience: float = 5.0


# one line for each policy: `tests/sched/test_policies_*.py` go over all of them
SUBJECTS = {
    "hfx": Subject(HFX),
    "scorpio": Subject(Scorpio),
    "aladdin": Subject(Aladdin),
    "annealing": Subject(Annealing),
    "unified": Subject(Unified, minds_roles=False, patience=25.0),
}


def instance(name: str, role: Role = "any", **values) -> InstanceLoad:
    default: dict[str, Any] = {"times": TIMES, "max_model_len": 65536, "num_blocks": 1024, "free_blocks": 1024}
    return InstanceLoad(name=name, role=role, **(default | values))


def linked(*instances: InstanceLoad) -> list[InstanceLoad]:
    """With links wherever there should be one."""
    peers = {i.name: frozenset(o.name for o in instances if hands_over(i.role, o.role)) for i in instances}
    return [replace(i, peers=peers[i.name]) for i in instances]


def demand(key: str, prompt_tokens: int = 256, max_tokens: int = OUTPUT, **values) -> Demand:
    return Demand(key=("f", key), prompt_tokens=prompt_tokens, max_tokens=max_tokens, **values)


def drain(
    policy: DispatchPolicy, instances: Sequence[InstanceLoad], *queue: Demand, now: float = 0.0
) -> tuple[list[Decision], float]:
    """Every decision of one moment, and when to ask again. Loads stay as they are: what it gave it remembers itself."""
    decisions, left, rng, rates = [], list(queue), random.Random(0), Rates(output_tokens=float(OUTPUT))
    while left:
        verdict = policy.decide(ClusterView(now=now, instances=instances, queue=left, rates=rates), rng)
        if isinstance(verdict, Later):
            return decisions, verdict.at
        decisions.append(verdict)
        left = [d for d in left if d.key != verdict.key]
    return decisions, inf


@dataclass
class Machine:
    """An instance, and what it was given."""

    load: InstanceLoad
    free_at: float = -inf
    prompts: dict = field(default_factory=dict)
    homes: dict = field(default_factory=dict)
    begun: set = field(default_factory=set)
    seen: InstanceLoad | None = None

    def view(self) -> InstanceLoad:
        """The same object for as long as nothing changes."""
        if self.seen is None:
            offline = [d for d in self.homes.values() if d.offline]
            online = [d for d in self.homes.values() if not d.offline]
            held = sum(d.prompt_tokens for d in self.homes.values())
            blocks = sum(-(-d.prompt_tokens // BLOCK_TOKENS) for d in self.homes.values())
            self.seen = replace(
                self.load,
                prefilling=len(self.prompts),
                pending_tokens=sum(d.prompt_tokens for d in self.prompts.values()),
                requests=len(self.homes),
                decoding=len(self.begun),
                held_tokens=held,
                free_blocks=max(0, self.load.num_blocks - blocks),
                free_at=self.free_at if any(not d.offline for d in self.prompts.values()) else -inf,
                idle_at=self.free_at,
                ttft=min((d.ttft for d in online), default=inf),
                tpot=min((d.tpot for d in online), default=inf),
                offline_requests=len(offline),
                offline_tokens=sum(d.prompt_tokens for d in offline),
            )
        return self.seen


class ToyMaster:
    """
    Attributes:
        placed: key -> (when, decision).
        asked: every view that the policy was shown, and its answer.
    """

    def __init__(self, instances: list[InstanceLoad], subject: Subject, seed: int = 0) -> None:
        self.machines = {i.name: Machine(i) for i in instances}
        self.subject, self.policy, self.rng = subject, subject.make(), random.Random(seed)
        self.online, self.offline = WaitQueue(), WaitQueue()
        self._loads: list[InstanceLoad] = []
        self._history: list[int] = []  # of these
        self.placed: dict = {}
        self.asked: list = []
        self._events: list = []
        self._order = count()
        self._wake = inf
        self._prefilled: dict = {}  # key -> who waits to be told where it decodes

    def run(self, demands: list[Demand]) -> dict:
        """Until nothing happens any more; each demand comes at its `arrived`."""
        for one in demands:
            self._at(one.arrived, partial(self._arrive, one))
        happened = 0
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] <= now:
                heappop(self._events)[2]()
            if now >= self._wake:
                self._wake = inf
            self._ask(now)
            self._ask_homes(now)
            happened += 1
            assert happened < 200 * (len(demands) + 10), "the policy asks to be woken again and again"
        left = [*self.online, *self.offline]
        assert not left, f"never placed: {left}"
        return self.placed

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heappush(self._events, (when, next(self._order), action))

    def _arrive(self, one: Demand) -> None:
        (self.offline if one.offline else self.online)[one.key] = Tracked(one, None, 0.0)

    def _ask(self, now: float) -> None:
        while self.online or self.offline:
            view = ClusterView(
                now=now,
                instances=self._instances(),
                queue=self.online.demands,
                offline=self.offline.demands,
                rates=Rates(arrivals=9, completions=9, attained=9, prompt_tokens=256.0, output_tokens=float(OUTPUT)),
            )
            verdict = self.policy.decide(view, self.rng)
            self.asked.append((view, verdict))
            if isinstance(verdict, Later):
                assert verdict.at > now, "it would be asked for ever"
                if verdict.at < self._wake:
                    self._wake = verdict.at
                    self._at(verdict.at, lambda: None)
                return
            self._apply(now, verdict)

    @property
    def _migration(self) -> Any:
        return self.policy

    def _change_roles(self, moves: Sequence[Move]) -> None:
        assert not moves, "roles are fixed"

    def _ask_homes(self, now: float) -> None:
        while self._prefilled:
            rates = Rates(output_tokens=float(OUTPUT))
            view = ClusterView(now=now, instances=self._instances(), rates=rates)
            verdict = self._migration.migrate(view, list(self._prefilled.values()))
            self._change_roles(verdict.moves)
            if isinstance(verdict, Later):
                assert verdict.at > now, "it would be asked for ever"
                if verdict.at < min(self._wake, inf):
                    self._wake = verdict.at
                    self._at(verdict.at, lambda: None)
                return
            resident = self._prefilled.pop(verdict.key)
            source, target, one = self.machines[resident.at], self.machines[verdict.to], resident.demand
            if target is not source:
                assert target.load.name in source.load.peers, "not linked"
                assert hands_over(source.load.role, target.load.role), "the wrong role"
                self._check_room(one, target.view())
                target.homes[one.key] = source.homes.pop(one.key)
                source.begun.discard(one.key)
                target.begun.add(one.key)
                source.seen = target.seen = None

    def _instances(self) -> Instances:
        loads = [m.view() for m in self.machines.values()]
        self._history += [place for place, load in enumerate(self._loads) if load is not loads[place]]
        self._loads = loads
        return Instances(loads, self._history)

    def _apply(self, now: float, decision: Decision) -> None:
        assert decision.key not in self.placed, "placed twice"
        waiting = self.online.pop(decision.key) or self.offline.pop(decision.key)
        assert waiting is not None, "nobody waits for that"
        one = waiting.demand
        prefiller = self.machines[decision.prefill]
        home = self.machines[decision.decode or decision.prefill]
        self._check(one, decision, prefiller.view(), home.view())
        self.placed[one.key] = (now, decision)
        seconds = prefiller.view().prefill_seconds(one.prompt_tokens)
        prefiller.free_at = max(now, prefiller.free_at) + seconds
        prefiller.prompts[one.key] = home.homes[one.key] = one
        prefiller.seen = home.seen = None
        self._at(prefiller.free_at, lambda: self._begin(one, prefiller, home))

    def _check(self, one: Demand, decision: Decision, prefiller: InstanceLoad, home: InstanceLoad) -> None:
        able = [
            m.load
            for m in self.machines.values()
            if one.tokens <= m.load.max_model_len and m.load.name not in one.exclude
        ]
        for load in (prefiller, home):
            assert one.tokens <= load.max_model_len, "too short for it"
            assert load.name not in one.exclude, "it was excluded"
        if self.subject.minds_roles:
            assert prefiller.role != "decode" or all(i.role == "decode" for i in able), "it only decodes"
        if decision.decode is not None:
            assert home.name in prefiller.peers, "not linked"
            assert hands_over(prefiller.role, home.role), "the wrong role"
        assert decision.prefill in decision.costs["prefill"], "what did it cost?"
        assert decision.decode is None or decision.decode in decision.costs["decode"], "what did it cost?"
        self._check_room(one, home)

    def _check_room(self, one: Demand, home: InstanceLoad) -> None:
        online = home.requests - home.offline_requests
        if self.subject.minds_memory and online:
            held = home.held_tokens - home.offline_tokens + one.prompt_tokens
            assert held <= home.num_blocks * BLOCK_TOKENS, "memory"
            assert online < home.max_sequences, "sequences"

    def _begin(self, one: Demand, prefiller: Machine, home: Machine) -> None:
        del prefiller.prompts[one.key]
        home.begun.add(one.key)
        prefiller.seen = home.seen = None
        if self.placed[one.key][1].open:
            since = self._events[0][0] if self._events else prefiller.free_at
            self._prefilled[one.key] = Resident(demand=one, at=prefiller.load.name, since=min(since, prefiller.free_at))
        self._at(prefiller.free_at + one.max_tokens * TOKEN_SECONDS, lambda: self._end(one))

    def _end(self, one: Demand) -> None:
        home = next(m for m in self.machines.values() if one.key in m.homes)
        self._prefilled.pop(one.key, None)
        del home.homes[one.key]
        home.begun.discard(one.key)
        home.seen = None


@st.composite
def clusters(draw) -> list[InstanceLoad]:
    roles = draw(
        st.sampled_from([["any"], ["any"] * 3, ["prefill", "decode"], ["prefill", "prefill", "decode", "decode"]])
        | st.lists(st.sampled_from(["any", "prefill", "decode"]), min_size=1, max_size=5)
    )
    longest = draw(st.integers(0, len(roles) - 1))  # somebody can hold anything
    return linked(
        *(
            instance(
                f"{role[0]}{i}",
                role,
                times=StepTime(draw(st.sampled_from([TIMES.device, TIMES.device.slowed(2)])), TIMES.shape),
                token_budget=draw(st.sampled_from([512, 8192])),
                max_sequences=draw(st.sampled_from([2, 256])),
                max_model_len=65536 if i == longest else draw(st.sampled_from([2048, 65536])),
                num_blocks=draw(st.sampled_from([64, 1024])),
            )
            for i, role in enumerate(roles)
        )
    )


@st.composite
def workloads(draw, names: list[str]) -> list[Demand]:
    """In order of arrival, each within the last fraction of a second or at the very moment of the one before it."""
    at, demands = 0.0, []
    for i in range(draw(st.integers(1, 25))):
        at += draw(st.sampled_from([0.0, 0.0, 0.003, 0.05, 0.4]))
        offline = draw(st.sampled_from([False, False, False, True]))
        excluded = draw(st.sets(st.sampled_from(names), max_size=max(0, len(names) - 2)))
        demands.append(
            demand(
                f"r{i}",
                draw(st.sampled_from([1, 40, 300, 1500, 30000])),
                draw(st.sampled_from([1, 20, 200])),
                arrived=at,
                ttft=inf if offline else draw(st.sampled_from([0.001, 0.1, 1.0, 20.0, inf])),
                tpot=inf if offline else draw(st.sampled_from([0.0001, 0.01, 0.05, inf])),
                offline=offline,
                exclude=frozenset(excluded),
            )
        )
    return demands
