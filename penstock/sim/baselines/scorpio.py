"""SCORPIO: heterogeneous targets on one instance (arXiv 2505.23022), behind a round robin over instances, as extended
by the HFX paper.

There: each sequence belongs to an instance from its arrival on. The TTFT guard orders what waits for an instance by
deadline; the TPOT guard admits a sequence only while the predicted step with it stays within the strictest TPOT.

Not there, for want of a lever:
- Rejection: a policy cannot refuse, so what can no longer keep its TTFT is served after all that can.
- Credit-based batching, in which a sequence with a loose TPOT sits out iterations, is a thing of the engine. Ours steps
  every sequence, so the virtual batch size is the batch size, and admission counts that. Counting virtual ones would
  admit what the engine then cannot keep.
- The predictor of output lengths is the mean of what was completed lately, and matters for memory only.

What waits is held back until its instance has less than a step of prompts to prefill: an order by deadline is worth
something only before the engine's queue. In a disaggregated cluster the round goes over instances that prefill, and a
second one over those that decode; where the next in turn may not take a sequence, the lightest that may does.
"""

from __future__ import annotations

from math import inf, nextafter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.sched.cluster.base import ClusterView, Decision, Demand, InstanceLoad, Key, Later, Random
from penstock.sched.cluster.columns import Column, Places, QueueColumns
from penstock.sched.cluster.foresight import Foresight, Prompts, Refusals, has_room
from penstock.sched.cluster.stages import Candidates
from penstock.sched.cluster.turns import Turns, fill_gap
from penstock.sim.baselines.decisions import staged_decision

_Values = npt.NDArray[np.float64]
_Places = npt.NDArray[np.intp]


class _Line(NamedTuple):
    """All queued sequences; [demands] each. `own` is the place of its instance, -1 without one."""

    deadline: _Values
    prompt_tokens: _Values
    max_tokens: _Values
    tpot: _Values
    own: _Places


class _Ranked(NamedTuple):
    """
    Attributes:
        in_time: [demands]: whether it can keep its TTFT.
        order: places of who has an instance: by deadline, and then the late ones as they came.
        late_from: when the next one is late.
    """

    line: _Line
    in_time: npt.NDArray[np.bool_]
    order: _Places
    late_from: float


class Scorpio:
    name = "scorpio"
    wants_keys = False

    def __init__(self) -> None:
        self._assigned: dict[Key, str] = {}
        self._turn = 0
        self._last_taker = ""
        self._foresight = Foresight()
        self._prompts = Prompts()
        self._turns = Turns()
        self._columns = QueueColumns(
            lambda d: d.deadline, lambda d: d.prompt_tokens, lambda d: d.max_tokens, lambda d: d.tpot
        )
        self._free_at = Column(lambda load: load.free_at)
        self._spare = Column(lambda load: load.token_budget - load.pending_tokens)
        self._has_peers = Column(lambda load: bool(load.peers), bool)
        self._by_name, self._places = Places(), dict[str, int]()
        self._own = QueueColumns(self._own_place)

    def decide(self, view: ClusterView, rng: Random) -> Decision | Later:
        candidates = self._foresight.candidates(view)
        if not view.queue:
            return fill_gap(self._foresight, candidates, self.name)
        self._prompts.use(view.instances[0])
        ranked = self._rank(view, self._line(candidates))
        refusals, order, at, barred = Refusals(view), ranked.order, ranked.late_from, None
        due = self._turns.due(candidates)
        if due is not None:
            place = next(place for place, demand in enumerate(view.queue) if demand is due)
            decision, soonest = self._serve(candidates, refusals, ranked, np.array([place]), None)
            if decision is not None:
                return decision
            load = view.instances[ranked.line.own[place]]
            barred = self._turns.kept_for(candidates, due) if candidates.hands_over(due, load) else load.name
            at = min(at, soonest)
            order = order[(order != place) & (ranked.line.own[order] != self._places[barred])]
        decision, soonest = self._serve(candidates, refusals, ranked, order, barred)
        return Later(min(at, soonest)) if decision is None else decision

    def _line(self, candidates: Candidates) -> _Line:
        deadline, prompt_tokens, max_tokens, tpot = self._columns.of(candidates.view.queue)
        return _Line(deadline, prompt_tokens, max_tokens, tpot, self._assign(candidates))

    def _assign(self, candidates: Candidates) -> _Places:
        """The place of everyone's instance; -1 without any. Everyone new gets the next one in turn, and everyone whose
        instance has gone another one."""
        view = candidates.view
        if len(self._assigned) > 2 * len(view.queue) + 64:
            waiting = {d.key for d in view.queue}
            self._assigned = {key: name for key, name in self._assigned.items() if key in waiting}
        places = self._by_name.of(view.instances)
        if places is not self._places:
            self._places, self._own = places, QueueColumns(self._own_place)
        own = self._own.of(view.queue)[0]
        for place in np.flatnonzero(own < 0).tolist():
            demand = view.queue[place]
            if able := candidates.prefillers(demand):
                name = self._assigned[demand.key] = able[self._turn % len(able)].name
                own[place] = self._places[name]
                self._turn += 1
        found: _Places = own.astype(np.intp)
        return found

    def _own_place(self, demand: Demand) -> int:
        name = self._assigned.get(demand.key)
        return -1 if name is None or name in demand.exclude else self._places.get(name, -1)

    def _next_taker(self, candidates: Candidates, demand: Demand, prefill: InstanceLoad) -> InstanceLoad:
        """The next in the order of names; at least one exists."""
        names = [i.name for i in candidates.takers(demand, prefill)]
        following = [name for name in names if name > self._last_taker]
        self._last_taker = min(following or names)
        return next(i for i in candidates.takers(demand, prefill) if i.name == self._last_taker)

    def _rank(self, view: ClusterView, line: _Line) -> _Ranked:
        start = line.deadline - self._prompts.of(line.prompt_tokens)
        in_time = np.maximum(view.now, self._free_at.of(view.instances)[line.own]) <= start
        has_own = line.own >= 0
        first, then = np.flatnonzero(in_time & has_own), np.flatnonzero(~in_time & has_own)
        first = first[np.argsort(line.deadline[first], kind="stable")]
        late_from = nextafter(start[first].min(initial=inf), inf)
        return _Ranked(line, in_time, np.concatenate((first, then)), late_from)

    def _serve(
        self, candidates: Candidates, refusals: Refusals, ranked: _Ranked, order: _Places, barred: str | None
    ) -> tuple[Decision | None, float]:
        """Place the first that is admitted; or say when the next instance wants more.

        Args:
            order: their places in the queue.
            barred: an instance reserved for the sequence that is due.
        """
        view, line = candidates.view, ranked.line
        free_at = self._free_at.of(view.instances)[line.own[order]]
        spare = self._spare.of(view.instances)[line.own[order]]
        wants = (free_at <= view.now) | (line.prompt_tokens[order] <= spare)
        order = order[wants]
        for place in order[self._may_admit(view, ranked, order)].tolist():
            demand, in_time = view.queue[place], bool(ranked.in_time[place])
            load = view.instances[line.own[place]]
            if refusals.cover(demand, in_time):
                continue
            if (decision := self._place(candidates, demand, load, in_time, barred)) is not None:
                self._turns.took(demand)
                self._assigned.pop(demand.key, None)
                return decision, inf
            refusals.note(demand, in_time, load)
        return None, float(free_at[~wants].min(initial=inf))

    def _may_admit(self, view: ClusterView, ranked: _Ranked, order: _Places) -> npt.NDArray[np.bool_]:
        """Whether each one's instance admits it, as `_admits` has it; or others could take over."""
        line, may = ranked.line, self._has_peers.of(view.instances)[ranked.line.own[order]]
        alone = order[~may]
        tpot = np.where(ranked.in_time[alone], line.tpot[alone], inf)
        numbers = line.own[alone], line.prompt_tokens[alone], line.max_tokens[alone], tpot
        may[~may] = self._foresight.admits(view.instances, *numbers, view.rates.output_tokens)
        return may

    def _place(
        self, candidates: Candidates, demand: Demand, load: InstanceLoad, in_time: bool, barred: str | None
    ) -> Decision | None:
        """If its instance, or another that decodes for it, admits it."""
        view = candidates.view
        steps: dict[str, float] = {}
        home: InstanceLoad | None = load
        if candidates.hands_over(demand, load):
            home = self._next_taker(candidates, demand, load)
            steps[home.name] = self._foresight.step_with(home, demand)
            if home.name == barred or not self._admits(view, home, demand, in_time):
                home, steps = self._foresight.home(candidates, demand, load, in_time, barred)
        elif not self._admits(view, load, demand, in_time):
            home = None
        if home is None:
            return None
        costs = {load.name: max(0.0, load.free_at - view.now)}
        return staged_decision(self.name, view, demand, load, home, costs, steps)

    def _admits(self, view: ClusterView, load: InstanceLoad, demand: Demand, in_time: bool) -> bool:
        return has_room(load, demand, view.rates.output_tokens) and self._foresight.keeps_pace(load, demand, in_time)
