"""Predictions for dispatch policies: an instance's decode steps, and whether one more sequence fits and all TPOT
targets stay met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, nan

import numpy as np
import numpy.typing as npt

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import ClusterView, Demand, InstanceLoad
from penstock.sched.cluster.stages import Candidates

LIGHTEST = 16  # of those that could take over, looked at for one sequence
PROBE = 1024  # tokens: the width over which a step's slope is taken


@dataclass(frozen=True, slots=True)
class DecodePace:
    """How fast an instance decodes; seconds. Steps are piecewise linear in all of these, so one more sequence is a sum.

    Attributes:
        step: of all that is there; 0 when there is nothing.
        sequence: that one more adds.
        token: that each token of its context adds.
        alone: a step of one sequence by itself. A lower target cannot be met, and is ignored.
        prefill: that each token of a prompt takes in a full step with nothing else.
        full: share of the memory or of the sequences that is in use, whichever is more.
    """

    step: float
    sequence: float
    token: float
    alone: float
    prefill: float
    full: float


class Foresight:
    """Remembers an instance's pace for as long as its load is the same object: views share those that did not change.

    `lively` is whether a demand's own TPOT counts: once it has missed its TTFT, it does not count.
    """

    def __init__(self) -> None:
        self._paces: dict[str, tuple[InstanceLoad, DecodePace]] = {}

    def pace(self, load: InstanceLoad) -> DecodePace:
        known = self._paces.get(load.name)
        if known is not None and known[0] is load:
            return known[1]
        pace = _pace(load)
        self._paces[load.name] = load, pace
        return pace

    def candidates(
        self, view: ClusterView, weight: Callable[[DecodePace], float] = lambda pace: pace.step
    ) -> Candidates:
        """Of a new view; what has gone is forgotten.

        Args:
            weight: takers come in the order of it.
        """
        self._forget(view)
        return Candidates(view, lambda load: weight(self.pace(load)))

    def _forget(self, view: ClusterView) -> None:
        if len(self._paces) > 2 * len(view.instances):
            present = {i.name for i in view.instances}
            self._paces = {name: known for name, known in self._paces.items() if name in present}

    def step_with(self, load: InstanceLoad, demand: Demand) -> float:
        """Seconds of a step once this sequence decodes there too."""
        pace = self.pace(load)
        return (pace.step or pace.alone) + pace.sequence * bool(pace.step) + pace.token * demand.prompt_tokens

    def strictest(self, load: InstanceLoad, demand: Demand, lively: bool = True) -> float:
        """TPOT in seconds that is to be kept there with this sequence; inf without any that could be."""
        alone = self.pace(load).alone
        there = load.tpot if load.tpot > alone else inf
        return min(there, demand.tpot) if lively and demand.tpot > alone else there

    def keeps_pace(self, load: InstanceLoad, demand: Demand, lively: bool = True) -> bool:
        """Whether every TPOT target is still met there with this sequence."""
        return not load.requests or self.step_with(load, demand) <= self.strictest(load, demand, lively)

    def admits(
        self,
        loads: Sequence[InstanceLoad],
        places: npt.NDArray[np.intp],
        prompt_tokens: npt.NDArray[np.float64],
        max_tokens: npt.NDArray[np.float64],
        tpot: npt.NDArray[np.float64],
        output: float,
    ) -> npt.NDArray[np.bool_]:
        """`has_room` and `keeps_pace`, of many sequences at once, each on its instance.

        Args:
            places: [sequences] of the instances among `loads`.
            tpot: inf for those that are not lively.
        """
        used, which = np.unique(places, return_inverse=True)
        terms = np.array([self._terms(loads[place], output) for place in used.tolist()]).reshape(len(used), 5)
        there, step, token, alone, strictest = terms[which].T
        strictest = np.where(tpot > alone, np.minimum(strictest, tpot), strictest)
        fits: npt.NDArray[np.bool_] = prompt_tokens + np.minimum(output, max_tokens) <= there
        fits &= step + token * prompt_tokens <= strictest
        return fits

    def _terms(self, load: InstanceLoad, output: float) -> tuple[float, float, float, float, float]:
        """Tokens that there is room for; and of its steps: seconds with one more sequence, for each token of it, and by
        itself; and the TPOT to be kept."""
        pace = self.pace(load)
        step = (pace.step or pace.alone) + pace.sequence * bool(pace.step) if load.requests else -inf
        return most_tokens(load, output), step, pace.token, pace.alone, load.tpot if load.tpot > pace.alone else inf

    def lightest(self, candidates: Candidates, demand: Demand, prefill: InstanceLoad) -> list[InstanceLoad]:
        """Where a sequence may decode, the shortest step first; not all of them."""
        some = list(islice(candidates.homes(demand, prefill), LIGHTEST))
        return sorted(some, key=lambda i: self.pace(i).step)

    def home(
        self,
        candidates: Candidates,
        demand: Demand,
        prefill: InstanceLoad,
        lively: bool = True,
        barred: str | None = None,
    ) -> tuple[InstanceLoad | None, dict[str, float]]:
        """The instance that decodes after `prefill`, itself unless it only prefills: of those with room that keep the
        pace, the one with the shortest step; None without one. With the steps in seconds of those that were looked at.

        Args:
            barred: one that may not be taken.
        """
        output = candidates.view.rates.output_tokens
        costs: dict[str, float] = {}
        for load in self.lightest(candidates, demand, prefill):
            costs[load.name] = self.step_with(load, demand)
            if load.name != barred and has_room(load, demand, output) and self.keeps_pace(load, demand, lively):
                return load, costs
        return None, costs


def _pace(load: InstanceLoad) -> DecodePace:
    def step(sequences: int, tokens: int) -> float:
        return load.times.step_ms(decodes=sequences, kv_tokens=tokens) / 1e3

    now = step(load.requests, load.held_tokens)
    return DecodePace(
        step=now if load.requests else 0.0,
        sequence=step(load.requests + 1, load.held_tokens) - now,
        token=(step(load.requests, load.held_tokens + PROBE) - now) / PROBE,
        alone=step(1, 0),
        prefill=prefill_seconds_alone(load, load.token_budget) / load.token_budget,
        full=fullness(load),
    )


def fullness(load: InstanceLoad) -> float:
    """Share of the memory or of the sequences that is in use, whichever is more."""
    tokens = load.num_blocks * BLOCK_TOKENS
    return max(load.held_tokens / tokens if tokens else 1.0, load.requests / load.max_sequences)


def room(load: InstanceLoad, output: float) -> float:
    """Tokens that an instance can still hold for online sequences, when those that are there come to `output` tokens
    each and are half through. Offline ones make way."""
    online = load.requests - load.offline_requests
    return load.num_blocks * BLOCK_TOKENS - (load.held_tokens - load.offline_tokens) - online * output / 2


def has_room(load: InstanceLoad, demand: Demand, output: float) -> bool:
    """Whether a sequence can run there at once and to its end. An instance that has nothing else to do takes whatever
    it is long enough for.

    Args:
        output: tokens that sequences come to; 0 when that is not known.
    """
    return demand.prompt_tokens + min(output, demand.max_tokens) <= most_tokens(load, output)


def most_tokens(load: InstanceLoad, output: float) -> float:
    """That a sequence may come to which is to run there at once: inf where there is nothing else, -inf where not even
    one has a place."""
    online = load.requests - load.offline_requests
    if not online:
        return inf
    return room(load, output) if online < load.max_sequences else -inf


class Refusals:
    """Sequences without an instance to decode, in one view: those that need as much need not be tried."""

    def __init__(self, view: ClusterView) -> None:
        self._output = int(view.rates.output_tokens)
        self._staged = not any(i.role == "any" for i in view.instances)  # so that all prefillers have the same takers
        self._known: list[tuple[int, float]] = []  # (tokens, TPOT)

    def note(self, demand: Demand, lively: bool, prefill: InstanceLoad) -> None:
        """No instance takes over from this prefiller."""
        if self._staged and prefill.role == "prefill" and not prefill.unlinked and not demand.exclude:
            self._known.append(self._needs(demand, lively))

    def cover(self, demand: Demand, lively: bool) -> bool:
        if not self._known:
            return False
        tokens, tpot = self._needs(demand, lively)
        return any(tokens >= refused and tpot <= slowest for refused, slowest in self._known)

    def _needs(self, demand: Demand, lively: bool) -> tuple[int, float]:
        return demand.prompt_tokens + min(demand.max_tokens, self._output), demand.tpot if lively else inf


class Prompts:
    """Seconds to prefill prompts on one instance that has nothing else to do, each length once."""

    def __init__(self) -> None:
        self._load: InstanceLoad | None = None
        self._seconds: dict[int, float] = {}
        self._table = np.empty(0)  # by length, as far as they are known; NaN where not

    def use(self, load: InstanceLoad) -> None:
        before = self._load
        if before is None or before.times is not load.times or before.token_budget != load.token_budget:
            self._load, self._seconds = load, {}
            self._table.fill(nan)

    def of(self, tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Of many prompts."""
        lengths = tokens.astype(np.intp)
        longest = int(lengths.max(initial=0))
        if longest >= len(self._table):
            self._table = np.pad(self._table, (0, longest + 1 - len(self._table)), constant_values=nan)
        seconds = self._table[lengths]
        for length in set(lengths[np.isnan(seconds)].tolist()):
            self._table[length] = self.seconds(length)
        return self._table[lengths]

    def seconds(self, tokens: int) -> float:
        known = self._seconds.get(tokens)
        if known is None:
            assert self._load is not None
            known = self._seconds[tokens] = prefill_seconds_alone(self._load, tokens)
        return known


def prefill_seconds_alone(load: InstanceLoad, tokens: int) -> float:
    """Seconds to prefill a prompt on an otherwise idle instance."""
    return load.times.prefill_ms(tokens, budget=load.token_budget) / 1e3
