"""Instances by name, over all their incarnations, with samples and use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.core.wire.engine import Role
from penstock.sim import instance as engine
from penstock.sim.scenario import InstanceGroup, Scaling


class Sample(NamedTuple):
    """An instance at a moment; `role` is None while it is down."""

    role: Role | None
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0


class Use(NamedTuple):
    """Of an instance over some time: incarnations that began to serve, steps, seconds in which it was busy, and prompt
    tokens that it loaded from its host's memory."""

    lives: int = 0
    steps: int = 0
    busy: float = 0.0
    loaded: int = 0

    def less(self, other: Use) -> Use:
        return Use(
            self.lives - other.lives, self.steps - other.steps, self.busy - other.busy, self.loaded - other.loaded
        )


@dataclass(slots=True)
class InstanceSlot:
    """An instance, over all its incarnations.

    Attributes:
        instance: its current incarnation; None while it is down.
        lifetimes: [began, ended) of each, in seconds; None while one lasts.
        past: of all ended incarnations.
        serves_first: whether it serves from the start.
    """

    name: str
    group: InstanceGroup
    number: int
    instance: engine.SimInstance | None = None
    lives: int = 0
    lifetimes: list[tuple[float, float | None]] = field(default_factory=list)
    past: Use = field(default_factory=Use)
    serves_first: bool = True

    def begin(self, now: float) -> None:
        """Begin a lifetime; it counts also while the instance starts."""
        self.lifetimes.append((now, None))

    def end(self, now: float) -> None:
        """End the lifetime."""
        assert self.instance is not None
        self.past = self.used
        self.lifetimes[-1] = (self.lifetimes[-1][0], now)
        self.instance = None

    def alive_seconds(self, since: float, until: float) -> float:
        times = ((max(begin, since), until if end is None else min(end, until)) for begin, end in self.lifetimes)
        return sum(max(0.0, end - begin) for begin, end in times)

    @property
    def used(self) -> Use:
        """Since the start."""
        _, steps, busy, loaded = self.past
        if (now := self.instance) is not None:
            steps, busy = steps + now.steps, busy + now.busy
            loaded += now.scheduler.counters.prefix_loads
        return Use(self.lives, steps, busy, loaded)


def make_slots(groups: Sequence[InstanceGroup], scaling: Scaling | None) -> dict[str, InstanceSlot]:
    """Those that serve from the start, and as many more like the first as may be started."""
    found = [InstanceSlot(name, group, number) for number, (name, group) in enumerate(_named(groups))]
    first = groups[0]
    for extra in range(0 if scaling is None else max(0, scaling.most - len(found))):
        name = f"{first.name}-{first.count + extra}"
        found.append(InstanceSlot(name, first, len(found), serves_first=False))
    return {place.name: place for place in found}


def _named(groups: Sequence[InstanceGroup]) -> Iterator[tuple[str, InstanceGroup]]:
    for group in groups:
        for name in group.instances:
            yield name, group


def sample_of(instance: engine.SimInstance | None) -> Sample:
    if instance is None:
        return Sample(None)
    scheduler = instance.scheduler
    return Sample(instance.role, scheduler.num_running, scheduler.num_waiting, scheduler.pool.used)
