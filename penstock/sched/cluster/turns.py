"""Starvation freedom and offline work, for every policy that lets sequences wait."""

from __future__ import annotations

from heapq import nsmallest
from math import inf

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import Decision, Demand, InstanceLoad, Key, Later
from penstock.sched.cluster.foresight import Foresight, has_room, room
from penstock.sched.cluster.stages import Candidates, why

PATIENCE = 16  # decisions that may pass over the sequence that has waited longest
SHOWN = 4  # offline sequences, and instances to prefill them, that are tried for a gap


class Turns:
    """After PATIENCE decisions for others the sequence that has waited longest is due, whatever its rank: it is tried
    first, and if it finds no room, its policy reserves an instance for it until it does. Under overload, when those are
    late already, this costs one decision in PATIENCE + 1."""

    def __init__(self) -> None:
        self._oldest: Key | None = None
        self._passed = 0

    def due(self, candidates: Candidates) -> Demand | None:
        """The sequence to try first; None when none is due."""
        oldest = next((d for d in candidates.view.queue if candidates.prefillers(d)), None)
        if oldest is None:
            return None
        if oldest.key != self._oldest:
            self._oldest, self._passed = oldest.key, 0
        return oldest if self._passed >= PATIENCE else None

    def kept_for(self, candidates: Candidates, demand: Demand) -> str:
        """The instance reserved for a sequence that is due: the one with the most room."""
        able = candidates.prefillers(demand)
        homes = list(candidates.takers(demand, able[0])) or able
        output = candidates.view.rates.output_tokens
        return max(homes, key=lambda i: (room(i, output), -i.requests)).name

    def took(self, demand: Demand) -> None:
        """It was placed."""
        if demand.key != self._oldest:
            self._passed += 1


def fill_gap(foresight: Foresight, candidates: Candidates, policy: str) -> Decision | Later:
    """Offline work goes where no prompt is to be prefilled, one at a time, and only beside online sequences that it
    does not slow down too much: to the least loaded instance."""
    view = candidates.view
    at = inf
    for demand in view.offline[:SHOWN]:
        idle: list[InstanceLoad] = []
        for load in candidates.prefillers(demand):
            if load.idle_at <= view.now:
                idle.append(load)
            else:
                at = min(at, load.idle_at)
        for load in nsmallest(SHOWN, idle, key=lambda i: i.requests):
            home, costs = _offline_home(foresight, candidates, demand, load)
            if home is None:
                continue
            decode = home.name if home is not load else None
            return Decision(
                key=demand.key,
                prefill=load.name,
                decode=decode,
                policy=policy,
                reason=why(load, decode),
                costs={"prefill": {i.name: float(i.requests) for i in idle}, "decode": costs},
            )
    return Later(at)


def _offline_home(
    foresight: Foresight, candidates: Candidates, demand: Demand, load: InstanceLoad
) -> tuple[InstanceLoad | None, dict[str, float]]:
    """Where it may decode, as in `Foresight.home`; but without preempting others."""
    output = candidates.view.rates.output_tokens
    costs: dict[str, float] = {}
    for home in foresight.lightest(candidates, demand, load):
        costs[home.name] = foresight.step_with(home, demand)
        fits = has_room(home, demand, output) and demand.prompt_tokens <= home.free_blocks * BLOCK_TOKENS
        if not home.requests or (fits and home.requests < home.max_sequences and foresight.keeps_pace(home, demand)):
            return home, costs
    return None, costs
