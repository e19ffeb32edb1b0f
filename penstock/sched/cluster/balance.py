"""Moves what runs, from instances that do badly to ones with room.

Llumnix moves sequences between instances whose loads differ (OSDI 2024). Here one moves only where staying
costs something: where token intervals have passed the strictest target, or blocks are about to run out, so that
sequences would be preempted and prefilled again. It goes where it fits beside what the others will come to, and where
steps stay well within every target. Nothing swings: trouble has to last before anything moves, an instance gives one
sequence at a time and rests, none takes more than one at once, and what has moved stays for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import Balancer, ClusterView, InstanceLoad, Key, Migration, Resident, fitting
from penstock.sched.cluster.headroom import headroom, needed

LASTS = 0.3  # seconds of trouble before anything moves
REST = 0.5  # seconds between two moves from an instance
DWELL = 5.0  # seconds that a sequence stays where it has moved to
HORIZON = 2.0  # seconds for which an instance's free blocks are to last
EASE = 0.8  # share of a target that steps may take where one goes to


class Balance:
    """A `Balancer`."""

    name = "balance"

    def __init__(self) -> None:
        self._troubled: dict[str, float] = {}  # instance -> since when
        self._gave: dict[str, float] = {}  # instance -> when it last gave one
        self._went: dict[Key, float] = {}  # when a sequence moved

    def balance(self, view: ClusterView, residents: Callable[[str], Sequence[Resident]]) -> Sequence[Migration]:
        now = view.now
        troubles = {i.name: why for i in view.instances if i.peers and (why := _trouble(i))}
        self._troubled = {name: self._troubled.get(name, now) for name in troubles}
        self._gave = {name: at for name, at in self._gave.items() if now - at < REST}
        self._went = {key: at for key, at in self._went.items() if now - at < DWELL}
        migrations: list[Migration] = []
        taken = set(troubles)
        for load in view.instances:
            if now - self._troubled.get(load.name, inf) < LASTS or load.name in self._gave:
                continue
            found = self._relieve(view, load, residents(load.name), taken)
            if found is not None:
                resident, taker = found
                taken.add(taker.name)
                self._gave[load.name] = self._went[resident.demand.key] = now
                migrations.append(Migration(key=resident.demand.key, to=taker.name, reason=troubles[load.name]))
        return migrations

    def _relieve(
        self, view: ClusterView, load: InstanceLoad, residents: Sequence[Resident], taken: set[str]
    ) -> tuple[Resident, InstanceLoad] | None:
        """Who leaves, and where to: of those that matter least the longest for which there is a place."""
        movable = [r for r in residents if r.demand.key not in self._went and r.demand.max_tokens > 1]
        movable.sort(key=lambda r: (not r.demand.offline, -r.demand.priority, -r.demand.prompt_tokens))
        for resident in movable:
            demand, output = resident.demand, view.rates.output_tokens
            able = [i for i in fitting(view, demand) if i.name in load.peers and i.name not in taken]
            able = [i for i in able if needed(demand, output) <= headroom(i, output) and _bears(i, resident)]
            taker = min(able, key=lambda i: (_step_with(i, resident), i.name), default=None)
            if taker is not None and _step_with(taker, resident) < load.decode_seconds:
                return resident, taker
        return None


def _trouble(load: InstanceLoad) -> str:
    """Why an instance does badly; "" when it does not."""
    if load.decoding < 2:
        return ""  # one alone is as fast as it can be, and has all the room
    if load.interval is not None and load.interval > load.tpot:
        return "slow: its token intervals pass a target"
    pace = max(load.interval or 0.0, load.decode_seconds)
    growth = load.decoding * HORIZON / pace
    return "short: its blocks run out" if load.free_blocks * BLOCK_TOKENS < growth else ""


def _step_with(load: InstanceLoad, resident: Resident) -> float:
    """Seconds of a decode step with one more."""
    tokens = load.held_tokens + resident.demand.prompt_tokens
    return load.times.step_ms(decodes=load.requests + 1, kv_tokens=tokens) / 1e3


def _bears(load: InstanceLoad, resident: Resident) -> bool:
    """Whether it has the time and the blocks for one more, and then is not in trouble itself."""
    demand, step = resident.demand, _step_with(load, resident)
    if step > EASE * min(load.tpot, demand.tpot) or (load.interval or 0.0) > EASE * min(load.tpot, demand.tpot):
        return False
    growth = (load.requests + 1) * HORIZON / step
    return demand.prompt_tokens + growth < load.free_blocks * BLOCK_TOKENS


class Together:
    """Several balancers; a sequence goes where the first one that moves it says."""

    def __init__(self, *balancers: Balancer) -> None:
        self.name = "+".join(balancer.name for balancer in balancers)
        self._balancers = balancers

    def balance(self, view: ClusterView, residents: Callable[[str], Sequence[Resident]]) -> Sequence[Migration]:
        moved: dict[Key, Migration] = {}
        for balancer in self._balancers:
            for migration in balancer.balance(view, residents):
                moved.setdefault(migration.key, migration)
        return list(moved.values())
