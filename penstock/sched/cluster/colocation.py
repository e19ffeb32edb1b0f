"""Online and offline work on the same instances (xLLM, section 3.1): which offline sequences run now, and where.

The master holds a backlog of offline sequences; engines run online ones first and preempt offline ones. So an instance
gets offline work for `AHEAD` seconds only: more would delay online work.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from math import inf
from typing import Protocol

from msgspec.structs import replace

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import (
    ClusterView,
    Decision,
    Demand,
    DispatchPolicy,
    InstanceLoad,
    Later,
    Move,
    Random,
    RolePolicy,
    Stage,
    fitting,
)
from penstock.sched.cluster.stages import hands_over, prefillers

AHEAD = 0.5  # seconds of prompts that an instance has ahead of it at most, to be given an offline one
AGAIN = 0.1  # seconds until asked again when nothing has room
ROOM = 0.9  # share of an instance's blocks and sequences that offline work may fill
SHARE = 0.8  # of the strictest online TPOT that steps may take with offline work; online sequences may fill up more
OUTPUT = 256  # tokens that a sequence is expected to generate, where that is not known
CHOSEN_FROM = 64  # of the oldest offline sequences
PASSED = 16  # times that the oldest is passed over at most
COMPARED = 16  # instances that are looked at closely
REMEMBERED = 60.0  # seconds that a target counts after it was last seen


class Colocation(Protocol):
    """Shares the instances between online and offline work."""

    name: str

    def online(self, view: ClusterView) -> Sequence[InstanceLoad]:
        """Where online work may go; at least one."""

    def decide(self, view: ClusterView) -> Decision | Later:
        """Where the next offline sequence runs; `Later` when none should run now."""


class LatencyRoles:
    """xLLM's: "prefill" and "any" are relaxed, "decode" is strict.

    Offline prompts are prefilled by relaxed instances while these have no online one. A strict instance with room
    pulls: offline sequences that are prefilled now decode there, while its predicted step keeps the strictest online
    TPOT, and of the oldest in the queue the one is taken that brings that step toward the balance of arithmetic and
    memory: short contexts where memory is the bound, long ones where arithmetic is. Otherwise they decode where they
    were prefilled.

    What runs already moves by `pull`.
    """

    name = "xllm"

    def __init__(self) -> None:
        self._target = inf  # the strictest TPOT that was seen lately
        self._seen = -inf  # when
        self._oldest: object = None  # key of the oldest offline sequence
        self._passed = 0  # how often it was passed over

    def online(self, view: ClusterView) -> Sequence[InstanceLoad]:
        return view.instances

    def target(self, view: ClusterView) -> float:
        """The strictest TPOT, in seconds: the next online sequence will likely have it."""
        target = min((*(i.tpot for i in view.instances), *(d.tpot for d in view.queue)), default=inf)
        if target <= self._target or view.now - self._seen > REMEMBERED:
            self._target, self._seen = target, view.now
        return self._target

    def decide(self, view: ClusterView) -> Decision | Later:
        self._watch(view)
        if view.queue or not view.offline:
            return Later()
        decoders = (i for i in view.instances if i.role == "decode")
        strict = nsmallest(COMPARED, decoders, key=lambda i: (i.held_tokens, i.name))
        for demand in self._ranked(view, strict):
            gaps = [i for i in prefillers(view, demand) if i.free_at <= view.now and seconds_ahead(view, i) <= AHEAD]
            gaps = nsmallest(COMPARED, gaps, key=lambda i: (seconds_ahead(view, i), i.held_tokens, i.name))
            pulling = [i for i in strict if self._takes(i, demand)]
            for prefiller in gaps:
                linked = (i for i in pulling if i.name in prefiller.peers and hands_over(prefiller.role, i.role))
                home = next(linked, None)
                if home is None and not self._takes(prefiller, demand):
                    continue
                self._passed = 0 if demand.key == self._oldest else self._passed + 1
                costs: dict[Stage, dict[str, float]] = {"prefill": {i.name: 1e3 * seconds_ahead(view, i) for i in gaps}}
                if home is not None:
                    costs["decode"] = {i.name: 1e3 * step_with(i, demand) for i in (home, prefiller)}
                return Decision(
                    key=demand.key,
                    prefill=prefiller.name,
                    decode=None if home is None else home.name,
                    policy=self.name,
                    reason="offline-relaxed" if home is None else "offline-pulled",
                    costs=costs,
                )
        return Later(view.now + AGAIN)

    def _watch(self, view: ClusterView) -> None:
        """Track the strictest target, and which sequence is the oldest."""
        self.target(view)
        if view.offline and view.offline[0].key != self._oldest:
            self._oldest, self._passed = view.offline[0].key, 0

    def _ranked(self, view: ClusterView, strict: Sequence[InstanceLoad]) -> Sequence[Demand]:
        """The candidates, best first; the oldest first when it was passed over too often."""
        oldest = view.offline[:CHOSEN_FROM]
        if not strict or self._passed >= PASSED:
            return oldest[:1]
        next_home = strict[0]
        compute, memory = next_home.times.utilisation((), next_home.requests + 1, next_home.held_tokens)
        sign = 1 if memory >= compute else -1
        return sorted(oldest, key=lambda d: sign * d.prompt_tokens)[:2] + list(oldest[:1])

    def _takes(self, instance: InstanceLoad, demand: Demand) -> bool:
        """Whether it may decode there. A target that no sequence could keep, even alone, holds up nothing but what
        would run beside others."""
        if not may_hold(instance, demand) or not has_room(instance, demand):
            return False
        grown = OUTPUT * (instance.requests + 1)
        return not instance.requests or step_with(instance, demand, grown) <= SHARE * self._target


class Colocated:
    """A `DispatchPolicy` of two: one for online work, where the other lets it, and then offline work."""

    def __init__(self, dispatch: DispatchPolicy, colocation: Colocation) -> None:
        self.name = f"{dispatch.name}+{colocation.name}"
        self.wants_keys = dispatch.wants_keys
        self._dispatch, self._colocation = dispatch, colocation

    def decide(self, view: ClusterView, rng: Random) -> Decision | Later:
        waits = Later()
        if view.queue:
            online = self._dispatch.decide(replace(view, instances=self._granted(view), offline=()), rng)
            if isinstance(online, Decision):
                return online
            waits = online
        if not view.offline or waits.moves:
            return waits
        offline = self._colocation.decide(view)
        return offline if isinstance(offline, Decision) else Later(min(waits.at, offline.at), offline.moves)

    def _granted(self, view: ClusterView) -> Sequence[InstanceLoad]:
        """All when those that it may have cannot hold what waits."""
        granted = self._colocation.online(view)
        part = replace(view, instances=granted)
        return granted if all(fitting(part, demand) for demand in view.queue) else view.instances


class ColocatedRoles:
    """A `RolePolicy` over the instances that online work may have."""

    def __init__(self, roles: RolePolicy, colocation: Colocation) -> None:
        self.name, self.dynamic = roles.name, roles.dynamic
        self._roles, self._colocation = roles, colocation

    def decide(self, view: ClusterView) -> Sequence[Move]:
        return self._roles.decide(replace(view, instances=self._colocation.online(view)))


def seconds_ahead(view: ClusterView, instance: InstanceLoad) -> float:
    """Seconds until its prompts are prefilled, online and offline."""
    return max(0.0, instance.idle_at - view.now)


def may_hold(instance: InstanceLoad, demand: Demand) -> bool:
    return demand.tokens <= instance.max_model_len and instance.name not in demand.exclude


def has_room(instance: InstanceLoad, demand: Demand) -> bool:
    """Whether its memory bears one more beside what its sequences will come to; an empty one bears any."""
    if not instance.requests and not instance.prefilling:
        return True
    if instance.requests + instance.prefilling + 1 > ROOM * instance.max_sequences:
        return False
    output = min(demand.max_tokens, OUTPUT)
    coming = demand.prompt_tokens + output * (instance.requests + 1)
    held = max(instance.held_tokens, (instance.num_blocks - instance.free_blocks) * BLOCK_TOKENS)
    return held + coming <= ROOM * instance.num_blocks * BLOCK_TOKENS


def step_with(instance: InstanceLoad, demand: Demand, grown: int = 0) -> float:
    """Seconds of its decode step with one more.

    Args:
        grown: tokens by which contexts are longer by then.
    """
    held = instance.held_tokens + demand.prompt_tokens + grown
    return instance.times.step_ms((), instance.requests + 1, held) / 1e3
