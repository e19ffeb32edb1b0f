"""HFX: an instance takes new prompts once it has paid for the last ones (Algorithm 1; arXiv 2508.15919, section 3.3).

Each iteration of an instance's decodes takes d, and the strictest TPOT S on it leaves S - d of it as slack. Prompts
that take p are paid for by that slack after p * S / (S - d): then the instance is *mature* and may be given more. How
much, its budget, follows from the strictest TTFT target T: one that arrives right after a dispatch waits until maturity
and is prefilled as long itself. Our engines prefill prompts in chunks beside the decodes, so p S / (S - d) is all there
is:

    2 p(n) S / (S - d) <= T

Faithful: the instance that matured first is filled up with the most urgent sequences that fit (deadline less predicted
prefill); disaggregated, an instance that prefills is mature when its batch ends, and its budget is what the strictest
waiting target leaves. When a prompt has ended the migrator takes the decoder that matured first, which it does with
every iteration, and gives it the most urgent of those whose prompts have ended that keep its strictest TPOT. Saved
slack is not counted.

Not in the paper, or not as it is there:
- p is the step model's, as of one prompt of so many tokens, and not linear in n: that overstates attention between
  prompts a little, and does not understate long ones.
- An iteration is not split, so a batch takes at least one: max(p S / (S - d), p beside the decodes).
- T is the strictest among what waits and can still be kept and what is in flight. Without any a batch is what one step
  prefills.
- A prompt that is larger than the budget of an idle instance goes to the mature instance that ends it first, alone.
- No sequence is dropped: one that can no longer meet its target, or has none, goes after all that can, in order of
  arrival; its own TPOT is then ignored. `Turns` prevents starvation.
- A TPOT under a step of one sequence is out of reach and not counted.
- Memory: a sequence goes where it has room beside what the others will come to (`has_room`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from math import inf, nextafter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.sched.cluster.base import (
    ClusterView,
    Decision,
    Demand,
    InstanceLoad,
    Later,
    Migration,
    Random,
    Resident,
    Stage,
)
from penstock.sched.cluster.columns import QueueColumns
from penstock.sched.cluster.foresight import Foresight, Prompts, Refusals, has_room, most_tokens, prefill_seconds_alone
from penstock.sched.cluster.stages import Candidates, hands_over, why
from penstock.sched.cluster.turns import Turns, fill_gap

SHORTEST = 1e-3  # seconds that an iteration takes at least
TRIED = 4  # instances, for a sequence that goes by itself

_Values = npt.NDArray[np.float64]
_Places = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """What an instance was given at one moment.

    Attributes:
        opened: that moment; it is open for more until time goes on.
        since: when the instance had become mature for it.
        tokens: of prompts.
        mature_at: when the instance has paid for them.
    """

    opened: float
    since: float
    tokens: int
    mature_at: float


@dataclass(frozen=True, slots=True)
class DecodeIteration:
    """Of a decoder that was given sequences.

    Attributes:
        opened: when; it is open for more until time goes on.
        mature_at: when the iteration that takes them in has ended.
    """

    opened: float
    mature_at: float


@dataclass(slots=True)
class Prefiller:
    """A mature instance at one moment.

    Attributes:
        since: when it became mature.
        tokens: of prompts that it was given at this very moment.
        hands_over: whether others decode what it prefills.
        rest: seconds that prompts may still take on it.
    """

    load: InstanceLoad
    since: float
    tokens: int
    hands_over: bool
    rest: float = 0.0


class HFX:
    name = "hfx"
    wants_keys = False

    def __init__(self) -> None:
        self.batches: dict[str, PromptBatch] = {}  # the newest of each instance
        self.foresight = Foresight()
        self.prompts = Prompts()
        self._iterations: dict[str, DecodeIteration] = {}  # the newest of each decoder that was given something
        self._turns = Turns()
        self._columns = QueueColumns(
            lambda d: d.deadline,
            lambda d: d.ttft,
            lambda d: d.prompt_tokens,
            lambda d: d.max_tokens,
            lambda d: len(d.exclude),
        )

    def decide(self, view: ClusterView, rng: Random) -> Decision | Later:
        candidates = self.foresight.candidates(view)
        if not view.queue:
            return fill_gap(self.foresight, candidates, self.name)
        if len(self.batches) > 2 * len(view.instances):
            present = {i.name for i in view.instances}
            self.batches = {name: batch for name, batch in self.batches.items() if name in present}
        mature, soonest = self._mature(view)
        if not mature:
            return Later(soonest)
        self.prompts.use(view.instances[0])
        line = _Line(*self._columns.of(view.queue))
        starts = line.deadline - self.prompts.of(line.prompt_tokens)
        in_time, others = _rank(view.now, starts)
        if _prefillers_do(view, line):
            mature = [(since, place) for since, place in mature if view.instances[place].role != "decode"]
        moment = _Moment(self, candidates, mature, line, in_time)
        due = self._turns.due(candidates)
        if due is not None:
            lively = view.now <= self._latest_start(due) < inf
            if (decision := moment.place(due, lively, owed=True)) is not None:
                return self._given(due, decision)
        barred = None if due is None else self._kept_for(candidates, due)
        for places, lively in ((in_time, True), (others, False)):
            for demand in moment.able(places, barred):
                if demand is not due and (decision := moment.place(demand, lively, barred=barred)) is not None:
                    return self._given(demand, decision)
        # what becomes late no longer asks for its TPOT
        return Later(min(soonest, nextafter(starts[in_time].min(initial=inf), inf)))

    def migrate(self, view: ClusterView, prefilled: Sequence[Resident]) -> Migration | Later:
        """The D-stage migrator. What no decoder can take waits for the end of an iteration, or of a sequence."""
        candidates, loads = self.foresight.candidates(view), {i.name: i for i in view.instances}
        self._iterations = {name: last for name, last in self._iterations.items() if last.mature_at > view.now}
        mature: list[tuple[float, float, str]] = []
        soonest = inf
        for load in view.instances:
            last = self._iterations.get(load.name)
            if last is None or last.opened == view.now:
                mature.append((-inf if last is None else last.opened, self.foresight.pace(load).step, load.name))
            else:
                soonest = min(soonest, last.mature_at)
        line = sorted((r for r in prefilled if r.at in loads), key=lambda r: (r.demand.offline, r.due))
        for _, step, name in sorted(mature):
            for resident in line:
                if self._may_take(candidates, resident, loads[resident.at], loads[name]):
                    self._iterations[name] = DecodeIteration(view.now, view.now + max(step, SHORTEST))
                    return Migration(key=resident.demand.key, to=name, reason="migrator")
        return Later(soonest)

    def _may_take(self, candidates: Candidates, resident: Resident, source: InstanceLoad, load: InstanceLoad) -> bool:
        demand = resident.demand
        if load.name not in source.peers or not hands_over(source.role, load.role):
            return False
        if demand.tokens > load.max_model_len or load.name in demand.exclude:
            return False
        if not has_room(load, demand, candidates.view.rates.output_tokens):
            return False
        return self.foresight.keeps_pace(load, demand, resident.since <= demand.deadline)

    def _latest_start(self, demand: Demand) -> float:
        """Of an instance that has nothing else to do, for the TTFT to be kept."""
        return demand.arrived + demand.ttft - self.prompts.seconds(demand.prompt_tokens)

    def _kept_for(self, candidates: Candidates, due: Demand) -> str:
        """The instance that is reserved for one that is due: where others decode, one that prefills."""
        able = candidates.prefillers(due)
        if able[0].role == "prefill" and candidates.hands_over(due, able[0]):
            return max(able, key=lambda i: (most_tokens(i, 0.0), -i.requests)).name
        return self._turns.kept_for(candidates, due)

    def _given(self, demand: Demand, decision: Decision) -> Decision:
        self._turns.took(demand)
        return decision

    def _mature(self, view: ClusterView) -> tuple[list[tuple[float, int]], float]:
        """(since when, place in the view) of the mature instances, the last first; and when the next one will be."""
        mature = []
        now, soonest, batches = view.now, inf, self.batches
        for place, load in enumerate(view.instances):
            batch = batches.get(load.name)
            if batch is None:  # as free as it is of what it had before
                since = at = load.free_at
            elif batch.opened == now:
                since, at = batch.since, now
                soonest = min(soonest, batch.mature_at)
            else:
                since = at = batch.mature_at
            if at <= now:
                mature.append((since, place))
            elif at < soonest:
                soonest = at
        mature.sort(reverse=True)
        return mature, soonest


class _Line(NamedTuple):
    """All queued sequences; [demands] each."""

    deadline: _Values
    ttft: _Values
    prompt_tokens: _Values
    max_tokens: _Values
    excluded: _Values  # instances


def _prefillers_do(view: ClusterView, line: _Line) -> bool:
    """Whether for everyone who waits there is an instance that is not for decodes alone, so that those prefill
    none."""
    longest = max((i.max_model_len for i in view.instances if i.role != "decode"), default=0)
    return not line.excluded.any() and bool((line.prompt_tokens + line.max_tokens).max() <= longest)


def _rank(now: float, starts: _Values) -> tuple[_Places, _Places]:
    """Places of those that can keep their TTFT target, most urgent first, and of the others as they came.

    Args:
        starts: the latest for that.
    """
    urgent = (now <= starts) & (starts < inf)
    in_time = np.flatnonzero(urgent)
    return in_time[np.argsort(starts[in_time], kind="stable")], np.flatnonzero(~urgent)


class _Moment:
    """One question to the policy. Mature instances are looked at one by one, and each once for all demands."""

    def __init__(
        self, policy: HFX, candidates: Candidates, mature: list[tuple[float, int]], line: _Line, in_time: _Places
    ) -> None:
        self._policy = policy
        self._candidates = candidates
        self._view = view = candidates.view
        self._line = line
        self._mature = mature
        self._prefillers: list[Prefiller] = []  # of the mature instances, those that could take something
        self._widest = 0.0  # the largest `rest` among them
        waiting = line.ttft[in_time] if len(in_time) else line.ttft
        self._ttft = min(float(waiting.min()), *(i.ttft for i in view.instances))
        self._left = float(line.deadline[in_time].min()) - view.now if len(in_time) else self._ttft
        self._smallest = line.prompt_tokens.min()
        self._fixed = policy.prompts.seconds(1)
        self._refusals = Refusals(view)

    def able(self, places: _Places, barred: str | None) -> Iterator[Demand]:
        """Those of them, in this order, for whom `place` may find something. Once all mature instances have been looked
        at, that is soon said of a whole queue."""
        queue = self._view.queue
        for number, place in enumerate(places.tolist()):
            if not self._mature:
                rest = places[number:]
                yield from (queue[other] for other in rest[self._may_fit(rest, barred)].tolist())
                return
            yield queue[place]

    def _may_fit(self, places: _Places, barred: str | None) -> npt.NDArray[np.bool_]:
        """Whether an instance has the time and the room for them, or they have to go alone."""
        tokens = self._line.prompt_tokens[places]
        more = self._policy.prompts.of(tokens) - self._fixed
        output = self._view.rates.output_tokens
        needed = tokens + np.minimum(output, self._line.max_tokens[places])
        fits = np.zeros(len(places), bool)
        most = -inf
        open_ones = ((r.rest, self._room(r.load)) for r in self._prefillers if r.load.name != barred)
        for rest, there in sorted(open_ones, reverse=True):
            if there > most:  # otherwise one with as much time has as much room
                fits |= (more <= rest) & (needed <= there)
                most = there
        lengths = range(int(tokens.max(initial=0)) + 1)
        for prefiller in self._prefillers:
            fits |= tokens >= bisect_left(lengths, True, key=partial(self._exceeds, prefiller.load))
        return fits

    def place(self, demand: Demand, lively: bool, owed: bool = False, barred: str | None = None) -> Decision | None:
        """Into the batch of the instance that matured first of those with the budget; None when there is no such.

        Args:
            lively: whether it can keep its target.
            owed: whether it may go without a budget, if need be.
            barred: an instance that is kept for another.
        """
        more = self._more(demand.prompt_tokens)
        if self._mature or more <= self._widest:
            for prefiller in self._each():
                if self._refusals.cover(demand, lively):
                    return None
                if (
                    more <= prefiller.rest
                    and prefiller.load.name != barred
                    and self._candidates.may_prefill(demand, prefiller.load)
                ):
                    decision = self._join(prefiller, demand, lively, barred)
                    if decision is not None:
                        return decision
        return self._alone(demand, lively, barred) if owed or self._is_too_large(demand) else None

    def _each(self) -> Iterator[Prefiller]:
        yield from self._prefillers
        while self._mature:
            since, place = self._mature.pop()
            load = self._view.instances[place]
            share = self._own_share(load)
            if share > 0 and self._smallest <= self._room(load):
                prefiller = self._prefiller(since, load, share)
                self._prefillers.append(prefiller)
                self._widest = max(self._widest, prefiller.rest)
                yield prefiller

    def _own_share(self, load: InstanceLoad) -> float:
        """What its decodes leave to prompts before any demand is added."""
        if load.tpot == inf or (load.role == "prefill" and load.peers):
            return 1.0
        pace = self._policy.foresight.pace(load)
        return 1 - pace.step / load.tpot if pace.alone < load.tpot else 1.0

    def _prefiller(self, since: float, load: InstanceLoad, share: float) -> Prefiller:
        batch = self._policy.batches.get(load.name)
        tokens = batch.tokens if batch is not None and batch.opened == self._view.now else 0
        prefiller = Prefiller(load, since, tokens, hands_over=load.role == "prefill" and bool(load.peers))
        prefiller.rest = self._limit(prefiller) * share - (prefill_seconds_alone(load, tokens) if tokens else 0.0)
        return prefiller

    def _limit(self, prefiller: Prefiller) -> float:
        """Seconds until a batch has to be prefilled and paid for."""
        if prefiller.hands_over and self._ttft < inf:
            return self._left
        return self._most(prefiller.load)

    def _most(self, load: InstanceLoad) -> float:
        """The same when nothing urgent waits."""
        if self._ttft == inf:
            return prefill_seconds_alone(load, load.token_budget)
        return self._ttft if load.role == "prefill" and load.peers else self._ttft / 2

    def _is_too_large(self, demand: Demand) -> bool:
        """For any batch of the first idle instance that it may go to, or else of the first that it may."""
        able = [r.load for r in self._prefillers if self._candidates.may_prefill(demand, r.load)]
        load = next((i for i in able if not i.requests), able[0] if able else None)
        return load is not None and self._exceeds(load, demand.prompt_tokens)

    def _exceeds(self, load: InstanceLoad, tokens: int) -> bool:
        """Whether such a prompt is larger than any batch there: by what it takes there, or by `_more`, which no batch
        takes it without, and which is longer where the first instance is slower."""
        most = self._most(load)
        return self._more(tokens) > most or prefill_seconds_alone(load, tokens) > most

    def _more(self, tokens: int) -> float:
        """Seconds that a prompt adds to a batch at least, as a step's time is convex in its tokens; as on the view's
        first instance, whichever it goes to."""
        return self._policy.prompts.seconds(tokens) - self._fixed

    def _room(self, load: InstanceLoad) -> float:
        """Tokens that a sequence may need; where others take over, it is their room that matters."""
        staged = load.role == "prefill" and load.peers
        return inf if staged else most_tokens(load, self._view.rates.output_tokens)

    def _share(self, prefiller: Prefiller, demand: Demand, lively: bool) -> float:
        """Of the instance's time that decodes leave to prompts, once this demand's TPOT counts too."""
        if prefiller.hands_over or not prefiller.load.requests:
            return 1.0
        foresight = self._policy.foresight
        strictest = foresight.strictest(prefiller.load, demand, lively)
        return 1.0 if strictest == inf else 1 - foresight.pace(prefiller.load).step / strictest

    def _join(self, prefiller: Prefiller, demand: Demand, lively: bool, barred: str | None) -> Decision | None:
        share = self._share(prefiller, demand, lively)
        if share <= 0:
            return None
        seconds = self._paid(prefiller, prefiller.tokens + demand.prompt_tokens, share)
        if seconds > self._limit(prefiller):
            return None
        return self._give(prefiller, demand, lively, seconds, barred)

    def _paid(self, prefiller: Prefiller, tokens: int, share: float) -> float:
        """Seconds until prompts are prefilled and paid for. An iteration is not split: with less than its slack to
        prefill it takes no less than all of its decodes and the prompts."""
        load = prefiller.load
        slack = prefill_seconds_alone(load, tokens) / share
        if prefiller.hands_over or not load.requests:
            return slack
        beside = load.times.prefill_ms(
            tokens, budget=load.token_budget, decodes=load.requests, kv_tokens=load.held_tokens
        )
        return max(slack, beside / 1e3)

    def _alone(self, demand: Demand, lively: bool, barred: str | None) -> Decision | None:
        """To the mature instance that ends it first, unless that was given something just now."""
        able: list[tuple[float, int]] = []
        prefillers = list(self._each())
        for place, prefiller in enumerate(prefillers):
            if (
                not prefiller.tokens
                and prefiller.load.name != barred
                and self._candidates.may_prefill(demand, prefiller.load)
            ):
                share = self._share(prefiller, demand, lively)
                if share > 0:
                    able.append((self._policy.foresight.pace(prefiller.load).prefill / share, place))
        for _, place in nsmallest(TRIED, able):
            prefiller = prefillers[place]
            seconds = self._paid(prefiller, demand.prompt_tokens, self._share(prefiller, demand, lively))
            if (decision := self._give(prefiller, demand, lively, seconds, barred)) is not None:
                return decision
        return None

    def _give(
        self, prefiller: Prefiller, demand: Demand, lively: bool, seconds: float, barred: str | None
    ) -> Decision | None:
        """If it has a place to decode.

        Args:
            seconds: until all that the instance is given at this moment is prefilled and paid for.
        """
        load, now = prefiller.load, self._view.now
        staged = self._candidates.hands_over(demand, load) and load.role == "prefill"
        home, steps = (load, {}) if staged else self._home(load, demand, lively, barred)
        if home is None or (staged and demand.prompt_tokens > most_tokens(load, 0.0)):
            return None
        self._policy.batches[load.name] = PromptBatch(
            now, prefiller.since, prefiller.tokens + demand.prompt_tokens, now + seconds
        )
        decode = home.name if home is not load else None
        costs: dict[Stage, Mapping[str, float]] = {"prefill": {r.load.name: -r.rest for r in self._prefillers}}
        if steps:
            costs["decode"] = steps
        return Decision(
            key=demand.key,
            prefill=load.name,
            decode=decode,
            policy=self._policy.name,
            reason="open" if staged else why(load, decode),
            costs=costs,
            predicted_ttft=now + seconds - demand.arrived,
            open=staged,
        )

    def _home(
        self, load: InstanceLoad, demand: Demand, lively: bool, barred: str | None
    ) -> tuple[InstanceLoad | None, dict[str, float]]:
        """The instance that decodes, and the predicted steps of the candidates; none if it may not be placed."""
        if not self._candidates.hands_over(demand, load):
            return load if has_room(load, demand, self._view.rates.output_tokens) else None, {}
        home, steps = self._policy.foresight.home(self._candidates, demand, load, lively, barred)
        if home is None:
            self._refusals.note(demand, lively, load)
        return home, steps
