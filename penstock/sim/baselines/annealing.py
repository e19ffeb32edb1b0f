"""SLO-aware scheduling by simulated annealing (Huang et al., arXiv 2504.14966).

There: the order in which waiting sequences run, and which instance each runs on, is searched by annealing: two change
places, or one moves elsewhere; a worse plan is accepted with a probability that falls as the temperature does. A plan
is worth the targets that it is predicted to keep, and among equals its total latency (the paper's quotient of the two
lets a short queue give up a target for latency; here a target always counts more). The search begins with the better of
arrival and deadline order.

Not there:
- The paper deals sequences out to instances by memory first and anneals each queue alone. One search over both is at
  least as good, and costs no more as long as the plan is bounded: the `window` sequences with the nearest deadlines
  that can be kept, over as many instances that are free first.
- It plans batches of a static engine; ours batches continuously, so a plan is an order for each instance, and the next
  one is sent when the instance has less than a step of prompts to prefill.
- The predictor of output lengths is the mean of what was completed lately.

A plan holds until a sequence comes that is not in it, an instance leaves, or `horizon` seconds have passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import islice
from math import exp, inf

from penstock.sched.cluster.base import ClusterView, Decision, Demand, InstanceLoad, Key, Later, Random
from penstock.sched.cluster.foresight import Foresight, Prompts, has_room
from penstock.sched.cluster.stages import Candidates
from penstock.sched.cluster.turns import Turns, fill_gap
from penstock.sim.baselines.decisions import staged_decision

HOT, COLD = 0.5, 0.01  # temperatures at both ends of a search, in missed targets
Plan = list[list[int]]  # for each instance, places in the window in the order in which they run


class Annealing:
    """
    Args:
        window: sequences, and instances, in a plan.
        iterations: of one search.
        horizon: seconds that a plan holds at most.
    """

    name = "annealing"
    wants_keys = False

    def __init__(self, *, window: int = 16, iterations: int = 96, horizon: float = 0.5) -> None:
        self._window, self._iterations, self._horizon = window, iterations, horizon
        self._foresight = Foresight()
        self._prompts = Prompts()
        self._turns = Turns()
        self._plan: dict[str, list[Key]] = {}  # instance -> keys, in order
        self._made = -inf

    def decide(self, view: ClusterView, rng: Random) -> Decision | Later:
        candidates = self._foresight.candidates(view)
        if not view.queue:
            return fill_gap(self._foresight, candidates, self.name)
        self._prompts.use(view.instances[0])
        due = self._turns.due(candidates)
        barred = None
        if due is not None:
            prefillers = sorted(candidates.prefillers(due), key=lambda i: i.free_at)[: self._window]
            for load in prefillers:
                if (decision := self._send(candidates, due, load, None)) is not None:
                    return decision
            barred = self._turns.kept_for(candidates, due)
        return self._follow(candidates, rng, due, barred)

    def _follow(self, candidates: Candidates, rng: Random, due: Demand | None, barred: str | None) -> Decision | Later:
        """What the plan has next."""
        view = candidates.view
        window = self._most_urgent(candidates, due)
        if not window:
            return Later(min((i.free_at for i in view.instances if i.free_at > view.now), default=inf))
        demands = {d.key: d for d in window}
        present = {i.name: i for i in view.instances}
        if not self._holds(view, demands, present):
            self._plan = self._search(candidates, window, rng)
            self._made = view.now
        at = self._made + self._horizon
        for name, keys in self._plan.items():
            keys[:] = [key for key in keys if key in demands]
            load = present[name]
            if keys and name != barred:
                decision = self._send(candidates, demands[keys[0]], load, barred)
                if decision is not None:
                    return decision
                if load.free_at > view.now:
                    at = min(at, load.free_at)
        return Later(at)

    def _most_urgent(self, candidates: Candidates, due: Demand | None) -> list[Demand]:
        """By deadline those that can keep it, then the others as they came; without one that is due."""
        view = candidates.view
        ranked = sorted(
            (not self._is_in_time(view, demand), demand.deadline if self._is_in_time(view, demand) else 0.0, place)
            for place, demand in enumerate(view.queue)
            if demand is not due
        )
        urgent = (view.queue[place] for _, _, place in ranked)
        return list(islice((demand for demand in urgent if candidates.prefillers(demand)), self._window))

    def _holds(self, view: ClusterView, demands: Mapping[Key, Demand], present: Mapping[str, InstanceLoad]) -> bool:
        planned = {key for keys in self._plan.values() for key in keys}
        fresh = self._made <= view.now < self._made + self._horizon
        return fresh and demands.keys() <= planned and self._plan.keys() <= present.keys()

    def _send(self, candidates: Candidates, demand: Demand, load: InstanceLoad, barred: str | None) -> Decision | None:
        """If the instance is about to run out of prompts and there is room."""
        view = candidates.view
        if load.free_at > view.now and load.pending_tokens + demand.prompt_tokens > load.token_budget:
            return None
        steps: dict[str, float] = {}
        home: InstanceLoad | None = load
        output = view.rates.output_tokens
        if candidates.hands_over(demand, load):
            home, steps = self._foresight.home(candidates, demand, load, self._is_in_time(view, demand), barred)
        elif not has_room(load, demand, output):
            home = None
        if home is None:
            return None
        self._turns.took(demand)
        costs = {name: float(len(keys)) for name, keys in self._plan.items()} | {load.name: 0.0}
        return staged_decision(self.name, view, demand, load, home, costs, steps)

    def _is_in_time(self, view: ClusterView, demand: Demand) -> bool:
        return view.now + self._prompts.seconds(demand.prompt_tokens) <= demand.deadline

    def _search(self, candidates: Candidates, window: Sequence[Demand], rng: Random) -> dict[str, list[Key]]:
        """A plan for all of the window."""
        able: dict[str, InstanceLoad] = {}
        searched: list[Sequence[InstanceLoad]] = []
        for demand in window:
            prefillers = candidates.prefillers(demand)
            if not any(prefillers is before for before in searched):
                searched.append(prefillers)
                able |= {i.name: i for i in nsmallest(self._window, prefillers, key=lambda i: (i.free_at, i.requests))}
        problem = _Problem(self._foresight, self._prompts, candidates, window, list(able.values()))
        by_deadline = sorted(range(len(window)), key=lambda place: window[place].deadline)
        plan = min(problem.deal(range(len(window))), problem.deal(by_deadline), key=problem.energy_of)
        plan = problem.anneal(plan, self._iterations, rng)
        return {
            load.name: [window[place].key for place in order]
            for load, order in zip(problem.instances, plan, strict=True)
            if order
        }


class _Problem:
    """Which order of a window of sequences over some instances keeps most targets."""

    def __init__(
        self,
        foresight: Foresight,
        prompts: Prompts,
        candidates: Candidates,
        window: Sequence[Demand],
        instances: Sequence[InstanceLoad],
    ) -> None:
        now = candidates.view.now
        self.instances = instances
        self._free = [max(0.0, i.free_at - now) for i in instances]
        self._read = [prompts.seconds(d.prompt_tokens) for d in window]
        self._left = [d.deadline - now for d in window]
        self._tpots = [d.tpot for d in window]
        # (seconds of a step, what one more adds, the strictest TPOT) where what is prefilled stays
        paces = [foresight.pace(i) for i in instances]
        self._decodes = [
            (0.0, 0.0, inf) if i.role == "prefill" and i.peers else (pace.step, pace.sequence, i.tpot)
            for i, pace in zip(instances, paces, strict=True)
        ]
        self._may = [{i for i, load in enumerate(instances) if candidates.may_prefill(d, load)} for d in window]

    def deal(self, order: Iterable[int]) -> Plan:
        """Each to the instance that is free of the ones before it first."""
        plan: Plan = [[] for _ in self.instances]
        free = list(self._free)
        for place in order:
            chosen = min(self._may[place], key=lambda i: (free[i], i))
            plan[chosen].append(place)
            free[chosen] += self._read[place]
        return plan

    def energy_of(self, plan: Plan) -> float:
        missed, latency = zip(*(self._cost(i, order) for i, order in enumerate(plan)), strict=True)
        return self._energy(sum(missed), sum(latency))

    @staticmethod
    def _energy(missed: int, latency: float) -> float:
        """Latency, in seconds, is worth less than one target however long it is."""
        return missed + latency / (1.0 + latency)

    def _cost(self, instance: int, order: Sequence[int]) -> tuple[int, float]:
        """Targets that are missed on an instance, and the seconds until first tokens together."""
        missed, latency, at = 0, 0.0, self._free[instance]
        step, sequence, tpot = self._decodes[instance]
        for place in order:
            at += self._read[place]
            step += sequence
            tpot = min(tpot, self._tpots[place])
            latency += at
            missed += at > self._left[place] or step > tpot
        return missed, latency

    def anneal(self, plan: Plan, iterations: int, rng: Random) -> Plan:
        """The best plan that was seen."""
        plan = [list(order) for order in plan]
        where = {place: i for i, order in enumerate(plan) for place in order}
        costs = [self._cost(i, order) for i, order in enumerate(plan)]
        missed, latency = sum(c[0] for c in costs), sum(c[1] for c in costs)
        energy = lowest = self._energy(missed, latency)
        best = [list(order) for order in plan]
        cooling = (COLD / HOT) ** (1 / iterations)
        temperature = HOT
        for _ in range(iterations):
            temperature *= cooling
            changed = self._change(plan, where, rng)
            if changed is None:
                continue
            fresh = {i: self._cost(i, order) for i, order in changed.items()}
            other_missed = missed + sum(cost[0] - costs[i][0] for i, cost in fresh.items())
            other_latency = latency + sum(cost[1] - costs[i][1] for i, cost in fresh.items())
            other = self._energy(other_missed, other_latency)
            if other > energy and rng.random() >= exp((energy - other) / temperature):
                continue
            energy, missed, latency = other, other_missed, other_latency
            for i, order in changed.items():
                plan[i], costs[i] = order, fresh[i]
                where.update(dict.fromkeys(order, i))
            if energy < lowest:
                lowest, best = energy, [list(order) for order in plan]
        return best

    def _change(self, plan: Plan, where: Mapping[int, int], rng: Random) -> dict[int, list[int]] | None:
        """Orders that one change makes, by instance: two sequences swap places, or one goes to any place of any
        instance. None when that may not be."""
        one = int(rng.random() * len(where))
        source = where[one]
        if rng.random() < 0.5:
            two = int(rng.random() * len(where))
            target = where[two]
            if one == two or target not in self._may[one] or source not in self._may[two]:
                return None
            swapped = {one: two, two: one}
            return {i: [swapped.get(place, place) for place in plan[i]] for i in (source, target)}
        target = int(rng.random() * len(plan))
        if target not in self._may[one]:
            return None
        changed = {source: [place for place in plan[source] if place != one]}
        order = changed.setdefault(target, list(plan[target]))
        order.insert(int(rng.random() * (len(order) + 1)), one)
        return changed
