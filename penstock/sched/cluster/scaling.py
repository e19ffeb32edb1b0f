"""What scaling policies share: stages that are sized each by itself, and what their instances hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Pool
from penstock.sched.cluster.base import ClusterView, Fleet, InstanceLoad, Move, Start, Stop

Change = Start | Stop | Move


@dataclass(frozen=True, slots=True)
class Wish:
    """Of one stage.

    Attributes:
        more: instances; below 0 those that it can do without.
        reason: for both.
    """

    more: int
    reason: str


def stages(view: ClusterView) -> dict[Pool, list[InstanceLoad]]:
    """Instances by pool: "any" alone in a colocated cluster."""
    pools: dict[Pool, list[InstanceLoad]] = {}
    for load in view.instances:
        pools.setdefault(load.pool, []).append(load)
    return pools


def held(load: InstanceLoad) -> float:
    """Share of its blocks that hold online work or are promised to it."""
    return (load.held_tokens - load.offline_tokens) / max(1, load.num_blocks * BLOCK_TOKENS)


def emptiest(loads: Sequence[InstanceLoad]) -> InstanceLoad:
    return min(loads, key=lambda i: (held(i), i.requests, i.pending_tokens))


def fits_elsewhere(load: InstanceLoad, others: Sequence[InstanceLoad]) -> bool:
    """Whether others have the memory for what an instance holds, were all of it to come again there."""
    free = sum(max(0, i.num_blocks * BLOCK_TOKENS - i.held_tokens) for i in others)
    return load.held_tokens <= free


def urgency(view: ClusterView) -> float:
    """How much of its TTFT target what waits has waited, the mean; 0 without a queue."""
    if not view.queue:
        return 0.0
    return sum((view.now - d.arrived) / d.ttft for d in view.queue) / len(view.queue)


def carry_out(pools: Mapping[Pool, list[InstanceLoad]], wishes: Mapping[Pool, Wish], fleet: Fleet) -> list[Change]:
    """Wishes within what the fleet may do. An instance that one stage can do without goes to one that wants more; only
    then are others started or stopped. A stage keeps at least one instance."""
    changes: list[Change] = []
    given: set[str] = set()
    spare = {pool: list(loads) for pool, loads in pools.items()}

    def release(pool: Pool) -> InstanceLoad | None:
        if len(spare[pool]) <= 1:
            return None
        load = emptiest(spare[pool])
        spare[pool].remove(load)
        given.add(load.name)
        return load

    less = {pool: -wish.more for pool, wish in wishes.items() if wish.more < 0}
    serving = sum(len(loads) for loads in pools.values()) + len(fleet.starting)
    absent = list(fleet.absent)
    for pool, wish in wishes.items():
        for _ in range(wish.more):
            donor = next((other for other in less if less[other] > 0 and len(spare[other]) > 1), None)
            if donor is not None and (load := release(donor)) is not None:
                less[donor] -= 1
                changes.append(
                    Move(name=load.name, pool=pool, reason=f"{wish.reason}; {donor}: {wishes[donor].reason}")
                )
            elif absent and serving < fleet.most:
                serving += 1
                changes.append(Start(name=absent.pop(0), pool=pool, reason=wish.reason))
    for pool, count in less.items():
        for _ in range(count):
            if serving <= fleet.least:
                break
            if (load := release(pool)) is not None:
                serving -= 1
                changes.append(Stop(name=load.name, reason=wishes[pool].reason))
    return changes


class Cooldowns:
    """How soon a stage may be changed again.

    Args:
        out: seconds from one growth to the next.
        back: from any change to a cut.
    """

    def __init__(self, out: float, back: float) -> None:
        self._out, self._back = out, back
        self._grown: dict[Pool, float] = {}
        self._changed: dict[Pool, float] = {}

    def settle(self, now: float, wishes: Mapping[Pool, Wish]) -> dict[Pool, Wish]:
        """Wishes whose time has come."""
        for pool in wishes:
            self._changed.setdefault(pool, now)  # a cut waits at first too
        return {
            pool: wish
            for pool, wish in wishes.items()
            if (wish.more > 0 and now >= self._grown.get(pool, -inf) + self._out)
            or (wish.more < 0 and now >= self._changed[pool] + self._back)
        }

    def note(self, now: float, changes: Sequence[Change], pools: Mapping[Pool, list[InstanceLoad]]) -> None:
        """What was done."""
        was = {load.name: pool for pool, loads in pools.items() for load in loads}
        for change in changes:
            if not isinstance(change, Stop):
                self._grown[change.pool] = self._changed[change.pool] = now
            if not isinstance(change, Start):
                self._changed[was[change.name]] = now
