"""What scaling policies share: stages that are sized each by itself, and what their instances hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Role
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


def stages(view: ClusterView) -> dict[Role, list[InstanceLoad]]:
    """Instances by role: "any" alone in a colocated cluster."""
    roles: dict[Role, list[InstanceLoad]] = {}
    for load in view.instances:
        roles.setdefault(load.role, []).append(load)
    return roles


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


def carry_out(roles: Mapping[Role, list[InstanceLoad]], wishes: Mapping[Role, Wish], fleet: Fleet) -> list[Change]:
    """Wishes within what the fleet may do. An instance that one stage can do without goes to one that wants more; only
    then are others started or stopped. A stage keeps at least one instance."""
    changes: list[Change] = []
    given: set[str] = set()
    spare = {role: list(loads) for role, loads in roles.items()}

    def release(role: Role) -> InstanceLoad | None:
        if len(spare[role]) <= 1:
            return None
        load = emptiest(spare[role])
        spare[role].remove(load)
        given.add(load.name)
        return load

    less = {role: -wish.more for role, wish in wishes.items() if wish.more < 0}
    serving = sum(len(loads) for loads in roles.values()) + len(fleet.starting)
    absent = list(fleet.absent)
    for role, wish in wishes.items():
        for _ in range(wish.more):
            donor = next((other for other in less if less[other] > 0 and len(spare[other]) > 1), None)
            if donor is not None and (load := release(donor)) is not None:
                less[donor] -= 1
                changes.append(
                    Move(name=load.name, role=role, reason=f"{wish.reason}; {donor}: {wishes[donor].reason}")
                )
            elif absent and serving < fleet.most:
                serving += 1
                changes.append(Start(name=absent.pop(0), role=role, reason=wish.reason))
    for role, count in less.items():
        for _ in range(count):
            if serving <= fleet.least:
                break
            if (load := release(role)) is not None:
                serving -= 1
                changes.append(Stop(name=load.name, reason=wishes[role].reason))
    return changes


class Cooldowns:
    """How soon a stage may be changed again.

    Args:
        out: seconds from one growth to the next.
        back: from any change to a cut.
    """

    def __init__(self, out: float, back: float) -> None:
        self._out, self._back = out, back
        self._grown: dict[Role, float] = {}
        self._changed: dict[Role, float] = {}

    def settle(self, now: float, wishes: Mapping[Role, Wish]) -> dict[Role, Wish]:
        """Wishes whose time has come."""
        for role in wishes:
            self._changed.setdefault(role, now)  # a cut waits at first too
        return {
            role: wish
            for role, wish in wishes.items()
            if (wish.more > 0 and now >= self._grown.get(role, -inf) + self._out)
            or (wish.more < 0 and now >= self._changed[role] + self._back)
        }

    def note(self, now: float, changes: Sequence[Change], roles: Mapping[Role, list[InstanceLoad]]) -> None:
        """What was done."""
        was = {load.name: role for role, loads in roles.items() for load in loads}
        for change in changes:
            if not isinstance(change, Stop):
                self._grown[change.role] = self._changed[change.role] = now
            if not isinstance(change, Start):
                self._changed[was[change.name]] = now
