"""Aladdin: pack sequences onto as few instances as keep their targets (arXiv 2405.06856), best fit first.

There: a sequence goes to the fullest instance on which (a) its prompt is prefilled within its TTFT behind what waits,
(b) prefilling all that waits there costs the running sequences no more than they have saved against their average time
per token, (c) the step with it stays within the strictest TPOT, and (d) memory lasts to everyone's end, by the mean
output length of what was completed lately. In disaggregated roles (a) is for instances that prefill and (c) and (d) for
those that decode. Sequences come in order of arrival.

Not there, for want of a lever:
- Its other half, how many instances of how many devices there are, is scaling: pair it with a `ScalingPolicy`.
- What a running sequence has saved is not reported one by one. It is taken as (TPOT - step) for half of the mean
  output: what those in the middle of their answers have.
- Re-balancing after wrong output lengths would move running sequences.
- The paper has one target for all; the strictest of an instance stands for it here.

With the number of instances given, what fits nowhere waits; once it cannot keep its TTFT it goes, after all that can,
where nothing is to be prefilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nextafter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.sched.cluster.base import ClusterView, Decision, Demand, InstanceLoad, Later, Random
from penstock.sched.cluster.columns import Column, QueueColumns
from penstock.sched.cluster.foresight import Foresight, Prompts, fullness, has_room, room
from penstock.sched.cluster.stages import Candidates
from penstock.sched.cluster.turns import Turns, fill_gap
from penstock.sim.baselines.decisions import staged_decision

REFUSED = 4  # sequences that are tried on every instance in vain, until the next question


class _Line(NamedTuple):
    """All queued sequences; [demands] each."""

    deadline: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    tpot: npt.NDArray[np.float64]

    def easier(self, refused: Demand) -> npt.NDArray[np.bool_]:
        """Sequences that may still fit although that one did not."""
        easier: npt.NDArray[np.bool_] = self.prompt_tokens < refused.prompt_tokens
        easier |= self.tokens < refused.tokens
        easier |= self.tpot > refused.tpot
        easier |= self.deadline > refused.deadline
        return easier


class Aladdin:
    name = "aladdin"
    wants_keys = False

    def __init__(self) -> None:
        self._foresight = Foresight()
        self._prompts = Prompts()
        self._turns = Turns()
        self._columns = QueueColumns(
            lambda d: d.deadline, lambda d: d.prompt_tokens, lambda d: d.tokens, lambda d: d.tpot
        )
        self._emptiness = Column(lambda load: -fullness(load))
        self._room = Column(_room)

    def decide(self, view: ClusterView, rng: Random) -> Decision | Later:
        if not view.queue:
            return fill_gap(self._foresight, self._foresight.candidates(view), self.name)
        candidates = self._foresight.candidates(view, lambda pace: -pace.full)
        self._prompts.use(view.instances[0])
        line = _Line(*self._columns.of(view.queue))
        starts = line.deadline - self._prompts.of(line.prompt_tokens)
        due = self._turns.due(candidates)
        hurried, late = np.flatnonzero(view.now <= starts), np.flatnonzero(view.now > starts)
        left = np.concatenate((hurried, late))
        fullest = self._fullest(view, line.prompt_tokens.min())
        barred, refused = None, 0
        if due is not None:
            if (decision := self._place(candidates, fullest, due, barred)) is not None:
                return decision
            barred = self._turns.kept_for(candidates, due)
        while len(left) and refused < REFUSED:
            demand, left = view.queue[left[0]], left[1:]
            if demand is due:
                continue
            if (decision := self._place(candidates, fullest, demand, barred)) is not None:
                return decision
            if not demand.exclude:
                left = left[line.easier(demand)[left]]
                refused += 1
        lateness = nextafter(starts[hurried].min(initial=inf), inf)
        return Later(min([lateness, *(i.free_at for i in view.instances if i.free_at > view.now)]))

    def _latest_start(self, demand: Demand) -> float:
        return demand.deadline - self._prompts.seconds(demand.prompt_tokens)

    def _fullest(self, view: ClusterView, smallest: float) -> list[tuple[float, int]]:
        """(emptiness, place in the view), the fullest first, without those that have no room even for the smallest
        sequence."""
        emptiness, rooms = self._emptiness.of(view.instances), self._room.of(view.instances)
        able = np.flatnonzero(rooms >= smallest)
        able = able[np.argsort(emptiness[able], kind="stable")]
        return list(zip(emptiness[able].tolist(), able.tolist(), strict=True))

    def _is_slow(self, load: InstanceLoad) -> bool:
        """Whether not even the smallest sequence would keep the pace there."""
        if load.role == "prefill" or not load.requests:
            return False
        pace = self._foresight.pace(load)
        return pace.step > load.tpot > pace.alone

    def _place(
        self,
        candidates: Candidates,
        fullest: Sequence[tuple[float, int]],
        demand: Demand,
        barred: str | None,
    ) -> Decision | None:
        view = candidates.view
        start = self._latest_start(demand)
        hurried = view.now <= start
        costs: dict[str, float] = {}
        for emptiness, place in fullest:
            load = view.instances[place]
            if self._is_slow(load):
                continue
            costs[load.name] = emptiness
            # (a); a late sequence has no queue before it, and delays none
            if load.name == barred or load.free_at > (start if hurried else view.now):
                continue
            if not candidates.may_prefill(demand, load):
                continue
            home, steps = self._home(candidates, demand, load, hurried, barred)
            if home is None:
                if load.role == "prefill" and not load.unlinked and candidates.hands_over(demand, load):
                    return None  # no instance takes over from any prefiller
                continue
            self._turns.took(demand)
            return staged_decision(self.name, view, demand, load, home, costs, steps)
        return None

    def _home(
        self, candidates: Candidates, demand: Demand, load: InstanceLoad, hurried: bool, barred: str | None
    ) -> tuple[InstanceLoad | None, dict[str, float]]:
        """The instance that decodes: the fullest under (c) and (d); itself, under (b) too, without a hand-off."""
        view = candidates.view
        if not candidates.hands_over(demand, load):
            fits = self._admits(view, load, demand, hurried) and self._pays(view, load, demand, hurried)
            return load if fits else None, {}
        for home in candidates.homes(demand, load):
            if home.name != barred and self._admits(view, home, demand, hurried):
                return home, {home.name: self._foresight.step_with(home, demand)}
        return None, {}

    def _admits(self, view: ClusterView, load: InstanceLoad, demand: Demand, hurried: bool) -> bool:
        return self._foresight.keeps_pace(load, demand, hurried) and has_room(load, demand, view.rates.output_tokens)

    def _pays(self, view: ClusterView, load: InstanceLoad, demand: Demand, hurried: bool) -> bool:
        """Whether the running sequences have saved what prefilling takes."""
        strictest = self._foresight.strictest(load, demand, hurried)
        if not load.decoding or strictest == inf:
            return True
        saved = (strictest - self._foresight.pace(load).step) * max(1.0, view.rates.output_tokens / 2)
        return max(0.0, load.free_at - view.now) + self._prompts.seconds(demand.prompt_tokens) <= saved


def _room(load: InstanceLoad) -> float:
    """Tokens of the longest prompt for which to look at it more closely."""
    return inf if load.role == "prefill" or not load.requests else room(load, 0.0)
