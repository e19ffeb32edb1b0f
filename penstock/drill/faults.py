"""What is broken, when and for how long. Pure: a function of its arguments."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["kill", "freeze", "slow", "partition", "disk-full", "unmount"]
KINDS: tuple[Kind, ...] = get_args(Kind)
OF_DISKS: tuple[Kind, ...] = ("disk-full", "unmount")
HOST, DISK = "host-", "disk"  # begin the names of targets that are no processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """
    Attributes:
        kinds: of which one is drawn each time.
        every: seconds; it strikes once in each span of so many, at a moment that is drawn.
        targets: names, of which one is drawn: of processes, of cables ("host-1", or "host-1/host-2" for what is between
            those two alone), of disks.
        lasts: seconds; a kill takes no time.
        speed: share of the time in which a slow process runs.
    """

    kinds: tuple[Kind, ...]
    every: float
    targets: tuple[str, ...]
    lasts: float = 3.0
    speed: float = 0.3


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault.

    Attributes:
        at: seconds from the start of the load.
        lasts: seconds; 0 for a kill.
    """

    at: float
    kind: Kind
    target: str
    lasts: float
    speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Safety:
    """How much may be broken at once.

    Attributes:
        at_once: targets.
        healthy: instances of each group that are left.
        settle: seconds from the end of a fault in which its target counts as broken still.
        groups: name -> its instances.
        breaks: target -> instances that cannot serve while it is broken.
    """

    at_once: int
    healthy: int
    settle: float
    groups: Mapping[str, frozenset[str]]
    breaks: Mapping[str, frozenset[str]]

    def allows(self, target: str, broken: Collection[str], down: Collection[str] = ()) -> bool:
        """Whether one more may be broken.

        Args:
            broken: targets that are.
            down: instances that do not serve, for whatever reason.
        """
        if target in broken or len(broken) >= self.at_once:
            return False
        lost = frozenset(down).union(self.breaks[target], *(self.breaks[name] for name in broken))
        return all(
            len(members - lost) >= self.healthy for members in self.groups.values() if members & self.breaks[target]
        )


def schedule(faults: Sequence[Fault], safety: Safety, duration: float, seed: int) -> tuple[Strike, ...]:
    """Strikes in order of time. One that would break too much at its moment comes as soon as it does not; all are over,
    and their targets have settled, before the load ends, and those that cannot be are left out.

    Args:
        duration: seconds of load.
    """
    wanted: list[tuple[float, int, Fault, random.Random]] = []
    for number, fault in enumerate(faults):
        rng = random.Random(f"{seed}.{number}")  # of its own: another fault in the file changes nothing about it
        for turn in range(math.ceil(duration / fault.every)):
            wanted.append(((turn + rng.random()) * fault.every, number, fault, random.Random(rng.random())))
    strikes: list[Strike] = []
    for at, _, fault, rng in sorted(wanted, key=lambda each: each[:2]):
        if (strike := _fitted(fault, at, rng, strikes, safety, duration)) is not None:
            strikes.append(strike)
    return tuple(sorted(strikes, key=lambda strike: strike.at))


def _fitted(
    fault: Fault, at: float, rng: random.Random, earlier: Sequence[Strike], safety: Safety, duration: float
) -> Strike | None:
    """The fault at the first moment from `at` on at which it is allowed."""
    kind = rng.choice(fault.kinds)
    lasts = 0.0 if kind == "kill" else fault.lasts
    order = rng.sample(fault.targets, len(fault.targets))
    free = sorted(end for strike in earlier if (end := over(strike, safety)) > at)
    for begin in (at, *free):
        if begin + lasts + safety.settle > duration:
            break
        meanwhile = {s.target for s in earlier if s.at < begin + lasts + safety.settle and over(s, safety) > begin}
        target = next((name for name in order if safety.allows(name, meanwhile)), None)
        if target is not None:
            return Strike(begin, kind, target, lasts, fault.speed)
    return None


def suits(kind: str, target: str, engines: Collection[str]) -> bool:
    """Whether such a fault can strike there."""
    if kind == "partition":
        return target.startswith(HOST)
    if kind == "disk-full":
        return is_disk(target)
    return target in engines if kind == "unmount" else is_process(target)


def is_process(target: str) -> bool:
    return not (target.startswith(HOST) or is_disk(target))


def is_disk(target: str) -> bool:
    return target.partition("@")[0] == DISK


def on_host(name: str, host: int) -> str:
    """What each host has one of, by its name in the whole."""
    return f"{name}@{HOST}{host}" if host else name


def cut_by(target: str) -> tuple[int, int | None]:
    """The hosts between which nothing arrives; None stands for all others."""
    one, _, other = target.partition("/")
    return int(one.removeprefix(HOST)), int(other.removeprefix(HOST)) if other else None


def over(strike: Strike, safety: Safety) -> float:
    """When its target has settled, as is planned."""
    return strike.at + strike.lasts + safety.settle
