"""SCORPIO: heterogeneous targets on one instance (arXiv 2505.23022), with a round-robin over instances before it as
the HFX paper extends it.

There: each sequence belongs to an instance from its arrival on. The TTFT guard orders what waits for an instance by
deadline; the TPOT guard admits a sequence only while the predicted step with it stays within the strictest TPOT.

Not there, for want of a lever:
- Rejection: a policy cannot refuse, so what can no longer keep its TTFT is served after all that can.
- Credit-based batching, in which a sequence with a loose TPOT sits out iterations, is a thing of the engine. Ours steps
  every sequence, so the virtual batch size is the batch size, and admission counts that. Counting virtual ones would
  admit what the engine then cannot keep.
- The predictor of output lengths is the mean of what was completed lately, and matters for memory only.

What waits is held back until its instance has less than a step of prompts to read: an order by deadline is worth
something only before the engine's queue. In disaggregated pools the round goes over instances that read, and a second
one over those that decode; where the next in turn may not take a sequence, the lightest that may does.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, nextafter

from penstock.sched.cluster.base import ClusterView, Decision, Demand, InstanceLoad, Key, Later, Random
from penstock.sched.cluster.foresight import Foresight, Prompts, Refusals, has_room
from penstock.sched.cluster.stages import Candidates, read_and_home
from penstock.sched.cluster.turns import Turns, fill_gap


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

    def decide(self, view: ClusterView, rng: Random) -> Decision | Later:
        candidates = self._foresight.candidates(view)
        if not view.queue:
            return fill_gap(self._foresight, candidates, self.name)
        self._prompts.use(view.instances[0])
        present = {i.name: i for i in view.instances}
        self._assign(candidates, present)
        ranked, at = self._rank(view, present)
        due = self._turns.due(candidates)
        if due is not None:
            ranked = [entry for entry in ranked if entry[1] is due] + [e for e in ranked if e[1] is not due]
        barred: str | None = None  # an instance that is kept for whom is due
        refusals = Refusals(view)
        for in_time, demand, load in ranked:
            if load.name == barred or refusals.cover(demand, in_time):
                continue
            if not self._wants_more(view, load, demand):
                at = min(at, load.free_at)
            elif (decision := self._place(candidates, demand, load, in_time, barred)) is not None:
                self._turns.took(demand)
                del self._assigned[demand.key]
                return decision
            else:
                refusals.note(demand, in_time, load)
            if demand is due:
                handed = candidates.hands_over(demand, load)
                barred = self._turns.kept_for(candidates, demand) if handed else load.name
        return Later(at)

    def _assign(self, candidates: Candidates, present: Mapping[str, InstanceLoad]) -> None:
        """Everyone new gets the next instance in turn, and everyone whose instance has gone another one."""
        queue = candidates.view.queue
        if len(self._assigned) > 2 * len(queue) + 64:
            waiting = {d.key for d in queue}
            self._assigned = {key: name for key, name in self._assigned.items() if key in waiting}
        for demand in queue:
            name = self._assigned.get(demand.key)
            if name in present and name not in demand.exclude:
                continue
            able = candidates.readers(demand)
            if able:
                self._assigned[demand.key] = able[self._turn % len(able)].name
                self._turn += 1

    def _next_taker(self, candidates: Candidates, demand: Demand, prefill: InstanceLoad) -> InstanceLoad:
        """In the order of names. There is somebody."""
        names = [i.name for i in candidates.takers(demand, prefill)]
        following = [name for name in names if name > self._last_taker]
        self._last_taker = min(following or names)
        return next(i for i in candidates.takers(demand, prefill) if i.name == self._last_taker)

    def _rank(
        self, view: ClusterView, present: Mapping[str, InstanceLoad]
    ) -> tuple[list[tuple[bool, Demand, InstanceLoad]], float]:
        """(whether it can keep its TTFT, demand, its instance): by deadline, and then the late ones as they came; and
        when the next one is late."""
        ranked: list[tuple[bool, float, int, InstanceLoad]] = []
        late_at = inf
        for place, demand in enumerate(view.queue):
            name = self._assigned.get(demand.key)
            if name is None:
                continue
            load = present[name]
            start = demand.deadline - self._prompts.seconds(demand.prompt_tokens)
            late = max(view.now, load.free_at) > start
            if not late:
                late_at = min(late_at, nextafter(start, inf))
            ranked.append((late, float(place) if late else demand.deadline, place, load))
        ranked.sort(key=lambda entry: entry[:3])
        return [(not late, view.queue[place], load) for late, _, place, load in ranked], late_at

    @staticmethod
    def _wants_more(view: ClusterView, load: InstanceLoad, demand: Demand) -> bool:
        return load.free_at <= view.now or load.pending_tokens + demand.prompt_tokens <= load.token_budget

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
        return read_and_home(self.name, view, demand, load, home, costs, steps)

    def _admits(self, view: ClusterView, load: InstanceLoad, demand: Demand, in_time: bool) -> bool:
        return has_room(load, demand, view.rates.output_tokens) and self._foresight.keeps_pace(load, demand, in_time)
