"""What scaling policies share: stages that are sized each by itself, and how wishes become changes.

A `Sizing` says for each stage how many instances more or fewer it should have. `Bounded` carries that out within floor,
ceiling, budget and cooldowns, the same for all of them, and says of each stage what follows and why nothing does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Role
from penstock.sched.cluster.base import ClusterView, Fleet, InstanceLoad, Move, Scaled, Start, Stop, Verdict

Change = Start | Stop | Move
PATIENCE = 10.0  # seconds; the TTFT target that a request without one is taken to have


@dataclass(frozen=True, slots=True)
class Wish:
    """Of one stage.

    Attributes:
        more: instances; below 0 those that it can do without.
        reason: for both.
    """

    more: int
    reason: str


class Sizing(Protocol):
    """How many instances each stage should have.

    Attributes:
        interval: seconds between two questions.
        out, back: cooldowns in seconds; see `Bounded`.
    """

    name: str
    interval: float
    out: float
    back: float

    def wishes(self, view: ClusterView, fleet: Fleet) -> Mapping[Role, Wish]:
        """Of every stage in the view."""
        ...


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
    targets = (PATIENCE if d.ttft == inf else d.ttft for d in view.queue)
    return sum((view.now - d.arrived) / ttft for d, ttft in zip(view.queue, targets, strict=True)) / len(view.queue)


def starting(fleet: Fleet, role: Role) -> int:
    """Instances that start for a stage."""
    return sum(other == role for other in fleet.starting.values())


@dataclass
class _Plan:
    """Changes so far, and what is left to change.

    Attributes:
        spare: instances that stay where they are, by role.
        serving: instances, with those that start.
        holding: names of those that hold devices.
    """

    fleet: Fleet
    spare: dict[Role, list[InstanceLoad]]
    serving: int = 0
    holding: set[str] = field(default_factory=set)
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        fleet, there = self.fleet, {load.name for loads in self.spare.values() for load in loads}
        self.holding = there | fleet.starting.keys() | fleet.draining | fleet.silent
        self.serving = len(there) + len(fleet.starting)
        self._absent = [name for name in fleet.absent if name not in self.holding]

    def start(self, role: Role, reason: str) -> str:
        """One more; returns why not, or ""."""
        fleet = self.fleet
        drain = f", {len(fleet.draining)} of them drain" if fleet.draining else ""
        if len(self.holding) >= fleet.most:
            return f"ceiling: {len(self.holding)} of {fleet.most} instances are there{drain}"
        if not self._absent:
            return "ceiling: there is no other instance"
        taken = sum(fleet.devices.get(name, 1) for name in self.holding)
        fits = (name for name in self._absent if taken + fleet.devices.get(name, 1) <= fleet.budget)
        name = next(fits, None)
        if name is None:
            return f"budget: {taken} of {fleet.budget:g} devices are taken{drain}"
        self._absent.remove(name)
        self.holding.add(name)
        self.serving += 1
        self.changes.append(Start(name=name, role=role, reason=reason))
        return ""

    def switch(self, role: Role, donor: Role, reason: str) -> None:
        """An instance of one stage goes over to another."""
        self.changes.append(Move(name=self._release(donor), role=role, reason=reason))

    def stop(self, role: Role, reason: str) -> str:
        """One fewer; returns why not, or ""."""
        if self.serving <= self.fleet.least:
            return f"floor: {self.fleet.least} serve at least"
        if not self.can_release(role):
            return "floor: it is the last of its stage"
        self.serving -= 1
        self.changes.append(Stop(name=self._release(role), reason=reason))
        return ""

    def can_release(self, role: Role) -> bool:
        """Whether a stage keeps an instance without one."""
        return len(self.spare[role]) > 1

    def _release(self, role: Role) -> str:
        load = emptiest(self.spare[role])
        self.spare[role].remove(load)
        return load.name


class Bounded:
    """A `ScalingPolicy`: carries out what a `Sizing` wishes for.

    - *Floor and ceiling.* Where fewer than `least` serve, or none of a role that is needed, instances are started
      whatever is wished. No more than `most` hold devices, and they take no more than the budget, those that start or
      drain included. A stage keeps at least one instance.
    - *Roles.* An instance that one stage can do without goes over to one that wants more; only then are others started
      or stopped.
    - *Cooldowns.* A stage grows `out` seconds after it has grown. It shrinks `back` seconds after any change of it,
      later where it would take longer to start an instance again, and not while one starts for it. So in `back` seconds
      it turns round once at most, from a cut to growth; that is never held up.

    Args:
        interval, out, back: instead of the sizing's own.
    """

    def __init__(
        self, sizing: Sizing, *, interval: float | None = None, out: float | None = None, back: float | None = None
    ) -> None:
        self.name = sizing.name
        self.interval = sizing.interval if interval is None else interval
        self._out = sizing.out if out is None else out
        self._back = sizing.back if back is None else back
        self._sizing = sizing
        self._grown: dict[Role, float] = {}
        self._changed: dict[Role, float] = {}

    def decide(self, view: ClusterView, fleet: Fleet) -> Scaled:
        roles, wishes = stages(view), self._sizing.wishes(view, fleet)
        for role in roles:
            self._changed.setdefault(role, view.now)  # a cut waits at first too
        plan = _Plan(fleet, {role: list(loads) for role, loads in roles.items()})
        outcomes = self._complete(plan, roles)
        early = {role: self._cooldown(view.now, role, wish, fleet) for role, wish in wishes.items()}
        ripe = {role: wish for role, wish in wishes.items() if not early[role]}
        outcomes |= {role: why for role, why in early.items() if why and role not in outcomes}
        outcomes |= _carry_out(plan, {role: wish for role, wish in ripe.items() if role not in outcomes})
        self._note(view.now, plan.changes, roles)
        return Scaled(plan.changes, _verdicts(roles, wishes, fleet, plan.changes, outcomes))

    def _complete(self, plan: _Plan, roles: Mapping[Role, Sequence[InstanceLoad]]) -> dict[Role, str]:
        """Start what has to be there. Returns, by role, why that cannot be."""
        outcomes: dict[Role, str] = {}
        if not plan.fleet.complete:
            return outcomes
        for role in plan.fleet.lacking:
            outcomes[role] = plan.start(role, f"floor: no instance for role {role} is there")
        while (there := plan.serving + len(plan.fleet.silent)) < plan.fleet.least and roles:
            role = min(roles, key=lambda role: len(roles[role]) + _coming(plan, role))
            if why := plan.start(role, f"floor: {there} of {plan.fleet.least} serve"):
                outcomes[role] = why
                break
        return {role: why for role, why in outcomes.items() if why}

    def _cooldown(self, now: float, role: Role, wish: Wish, fleet: Fleet) -> str:
        """Why a wish has to wait; "" when it has not."""
        if wish.more > 0:
            since = now - self._grown.get(role, -inf)
            return f"cooldown: it has grown {since:.1f} s ago" if since < self._out else ""
        if wish.more < 0:
            since = now - self._changed[role]
            if since < max(self._back, fleet.start_seconds):
                return f"cooldown: it has been so for {since:.1f} s"
            if starting(fleet, role):
                return "cooldown: an instance starts for it"
        return ""

    def _note(self, now: float, changes: Sequence[Change], roles: Mapping[Role, Sequence[InstanceLoad]]) -> None:
        was = {load.name: role for role, loads in roles.items() for load in loads}
        for change in changes:
            if not isinstance(change, Stop):
                self._grown[change.role] = self._changed[change.role] = now
            if not isinstance(change, Start):
                self._changed[was[change.name]] = now


def _coming(plan: _Plan, role: Role) -> int:
    """Instances that start for a stage, those that have just been decided on included."""
    return starting(plan.fleet, role) + sum(isinstance(c, Start) and c.role == role for c in plan.changes)


def _carry_out(plan: _Plan, wishes: Mapping[Role, Wish]) -> dict[Role, str]:
    """Change the stages as they wish. Returns, by role, why nothing more of it follows."""
    outcomes: dict[Role, str] = {}
    less = {role: -wish.more for role, wish in wishes.items() if wish.more < 0}
    for role, wish in wishes.items():
        for _ in range(wish.more):
            donor = next((other for other in less if less[other] > 0 and plan.can_release(other)), None)
            if donor is not None:
                less[donor] -= 1
                plan.switch(role, donor, f"{wish.reason}; {donor}: {wishes[donor].reason}")
            elif why := plan.start(role, wish.reason):
                outcomes[role] = why
                break
    for role, count in less.items():
        for _ in range(count):
            if why := plan.stop(role, wishes[role].reason):
                outcomes[role] = why
                break
    return outcomes


def _verdicts(
    roles: Mapping[Role, Sequence[InstanceLoad]],
    wishes: Mapping[Role, Wish],
    fleet: Fleet,
    changes: Sequence[Change],
    outcomes: Mapping[Role, str],
) -> list[Verdict]:
    """Of every stage. What is changed stands before why nothing more is."""
    was = {load.name: role for role, loads in roles.items() for load in loads}
    verdicts = []
    for role in [*roles, *(role for role in dict.fromkeys(fleet.lacking) if role not in roles)]:
        started = [c.name for c in changes if isinstance(c, Start) and c.role == role]
        taken = [f"{c.name} from {was[c.name]}" for c in changes if isinstance(c, Move) and c.role == role]
        given = [f"{c.name} to {c.role}" for c in changes if isinstance(c, Move) and was[c.name] == role]
        stopped = [c.name for c in changes if isinstance(c, Stop) and was[c.name] == role]
        told = {"starts": started, "takes over": taken, "hands over": given, "stops": stopped}
        done = "; ".join(f"{what}: {', '.join(names)}" for what, names in told.items() if names)
        wish = wishes.get(role, Wish(0, "no instance"))
        verdicts.append(
            Verdict(
                role=role,
                serving=len(roles.get(role, ())),
                starting=starting(fleet, role),
                more=wish.more,
                reason=wish.reason,
                outcome=done or outcomes.get(role, "steady"),
            )
        )
    return verdicts
