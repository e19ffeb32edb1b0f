"""Scaling by prediction: as many instances as targets need, by what the latest traffic would have come to on others.

For N instances two things are asked. Of the prompts of the last `memory` seconds, how many would have kept their TTFT:
`hindsight.py`. And from the rates, the mean prompt and output, and the step model, what each instance would see:

    f     share of its time that prefilling prompts takes, in the mean over that time
    B     sequences that decode at once; each stays for its output times a step, and a step is longer the more there
          are and the more of it goes to prompts:  B = r * output * D,  D = d(B) / (1 - f)

and from these its *strain*: the largest of f, D over the strictest TPOT, KV over the memory, and B over the sequences
that it takes; over 1 a target or the memory is predicted to be missed.

The smallest N is wanted whose strain is under `target` and that would have kept a TTFT in `kept` of all cases. The
stage grows at once by as many as are missing, and shrinks to as many as are enough for everything that came in the last
`memory` seconds, with a strain under `relaxed` at the heaviest of it. So a burst is worth instances for as long as it
is remembered, one that comes again finds them, and what it takes is never extrapolated from a single second. Where the
prediction is wrong, targets that are missed (under `attained` of what was completed since the stage has its size) or a
queue that has used up `waited` of its time for `persists` seconds ask for one more. The stages of a disaggregated
cluster are sized by themselves, and exchange instances first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Role
from penstock.sched.cluster.base import ClusterView, Fleet, InstanceLoad
from penstock.sched.cluster.hindsight import Hindsight, Lot, in_time
from penstock.sched.cluster.scaling import PATIENCE, Wish, stages, starting, urgency

ROUNDS = 12  # of the fixed point of B
STARTS = 4  # a cut is dearer the longer it takes to undo it
LEAST_SHARE = 0.1  # of an instance's time that prompts get, however much decodes there
LEAST_COMPLETED = 20  # sequences, of fewer nothing is concluded


@dataclass(frozen=True, slots=True)
class OnlineTraffic:
    """
    Attributes:
        rate: sequences per second.
        prompt, output: tokens, the means.
        tpot: the strictest target in seconds.
        prefilling: seconds of one instance that prompts take, per second.
    """

    rate: float
    prompt: float
    output: float
    tpot: float
    prefilling: float = 0.0


@dataclass(frozen=True, slots=True)
class _Stage:
    """What is held against numbers of instances of a stage.

    Attributes:
        now, peak: traffic, and the heaviest of what is remembered.
        lots: prompts that came; none where they are not prefilled.
        ttft: the strictest target in seconds.
    """

    role: Role
    load: InstanceLoad
    now: OnlineTraffic
    peak: OnlineTraffic
    lots: Sequence[Lot]
    ttft: float

    def strain(self, traffic: OnlineTraffic, count: int) -> float:
        return strain(self.role, self.load, traffic, count)

    def kept(self, count: int) -> float:
        """Share of the prompts that `count` instances would have prefilled in time."""
        if not self.lots:
            return 1.0
        share = 1.0
        if self.role == "any":
            _, decoding = _decoding(self.load, self.now, self.now.rate / count, 0.0)
            share = max(LEAST_SHARE, 1 - decoding / self.now.tpot)
        return in_time(self.lots, count, share, self.ttft)


class UnifiedScaling:
    """A `Sizing`.

    Args:
        target: strain to stay under.
        relaxed: that fewer instances have to stay under.
        kept: share of prompts that are to keep their TTFT, in hindsight.
        attained: share of targets to keep.
        waited, persists: share of its TTFT that the queue may wait, the mean; for so many seconds it may wait longer.
        memory: seconds of traffic that are held against a number of instances; at least as long as `STARTS` starts
            take.
        out, back: cooldowns in seconds.
    """

    name = "unified"

    def __init__(
        self,
        *,
        interval: float = 1.0,
        target: float = 0.8,
        relaxed: float = 0.6,
        kept: float = 0.99,
        attained: float = 0.95,
        waited: float = 0.5,
        persists: float = 5.0,
        memory: float = 45.0,
        out: float = 2.0,
        back: float = 15.0,
    ) -> None:
        self.interval, self.out, self.back = interval, out, back
        self._target, self._relaxed, self._kept = target, relaxed, kept
        self._attained, self._waited, self._persists, self._memory = attained, waited, persists, memory
        self._hindsight = Hindsight()
        self._past: deque[tuple[float, float, OnlineTraffic]] = deque()  # when, the strictest TTFT, of ten seconds
        self._sizes: dict[Role, tuple[int, float]] = {}  # instances, and since when
        self._calm: float | None = None  # when the queue had last not waited too long

    def wishes(self, view: ClusterView, fleet: Fleet) -> Mapping[Role, Wish]:
        memory = max(self._memory, STARTS * fleet.start_seconds)
        self._hindsight.hear(view.now, fleet.lately, memory)
        self._remember(view, memory)
        if urgency(view) <= self._waited or self._calm is None:
            self._calm = view.now
        span = self._hindsight.span(view.now)
        return {
            role: self._wish(
                view, self._stage(role, loads[0], max(span, view.rates.window)), len(loads), fleet, span >= memory
            )
            for role, loads in stages(view).items()
        }

    def _remember(self, view: ClusterView, memory: float) -> None:
        rates, loads = view.rates, view.instances
        tpots = [*(d.tpot for d in view.queue), *(i.tpot for i in loads)]
        ttfts = [*(d.ttft for d in view.queue), *(i.ttft for i in loads)]
        now = OnlineTraffic(
            rate=rates.arrivals / rates.window,
            prompt=rates.prompt_tokens,
            output=rates.output_tokens,
            tpot=min(tpots, default=inf),
        )
        self._past.append((view.now, min(ttfts, default=inf), now))
        while self._past[0][0] < view.now - memory:
            self._past.popleft()

    def _stage(self, role: Role, load: InstanceLoad, span: float) -> _Stage:
        """Of instances like this one. `span`: seconds that what is remembered is of."""
        seen = [traffic for _, _, traffic in self._past]
        strictest = min(ttft for _, ttft, _ in self._past)
        lots: Sequence[Lot] = () if role == "decode" else self._hindsight.lots(load)
        tpot = min(traffic.tpot for traffic in seen)
        prefilling = sum(lot.seconds for lot in lots) / span
        now = OnlineTraffic(seen[-1].rate, seen[-1].prompt, seen[-1].output, tpot, prefilling)
        peak = OnlineTraffic(
            rate=max(traffic.rate for traffic in seen),
            prompt=max(traffic.prompt for traffic in seen),
            output=max(traffic.output for traffic in seen),
            tpot=tpot,
            prefilling=prefilling,
        )
        return _Stage(role, load, now, peak, lots, PATIENCE if strictest == inf else strictest)

    def _wish(self, view: ClusterView, stage: _Stage, count: int, fleet: Fleet, whole: bool) -> Wish:
        """Of a stage of `count` instances. `whole`: whether as much is remembered as a cut is judged by."""
        coming = starting(fleet, stage.role)
        most = max(count + coming, fleet.most)
        expected, kept = stage.strain(stage.now, count), stage.kept(count)
        if expected > self._target or kept < self._kept:
            wanted = _smallest(partial(self._suffices, stage, stage.now, self._target), count + 1, most)
            reason = f"{kept:.1%} of prompts in time" if kept < self._kept else f"strain {expected:.2f}"
            return Wish(max(0, wanted - count - coming), f"{reason} on {count}")
        completed, attained = self._hindsight.outcomes(self._sized(view.now, stage.role, count))
        missed = completed >= LEAST_COMPLETED and attained < self._attained * completed
        if missed and (expected > self._target / 2 or kept < 1.0):
            return Wish(max(0, 1 - coming), f"{attained} of {completed} kept their targets")
        if stage.role != "decode" and self._calm is not None and view.now - self._calm >= self._persists:
            return Wish(max(0, 1 - coming), f"the queue has waited {urgency(view):.0%} of its TTFT")
        reason = f"strain {expected:.2f} on {count}"
        if coming or missed or not whole or urgency(view) > self._waited:
            return Wish(0, reason)
        plenty = partial(self._suffices, stage, stage.peak, self._relaxed)
        if count > 1 and plenty(count - 1):
            wanted = _smallest(plenty, 1, count - 1)
            reason = f"strain {stage.strain(stage.peak, wanted):.2f} on {wanted}"
            return Wish(wanted - count, f"{reason}, {stage.kept(wanted):.1%} of prompts in time")
        return Wish(0, reason)

    def _suffices(self, stage: _Stage, traffic: OnlineTraffic, strain: float, count: int) -> bool:
        return stage.strain(traffic, count) <= strain and stage.kept(count) >= self._kept

    def _sized(self, now: float, role: Role, count: int) -> float:
        """Since when a stage has its size."""
        if self._sizes.get(role, (0, now))[0] != count:
            self._sizes[role] = count, now
        return self._sizes[role][1]


def _smallest(suffices: Callable[[int], bool], least: int, most: int) -> int:
    """The smallest number of instances that suffices, `most` where none does. More of them are never worse."""
    return bisect_left(range(least, most), True, key=suffices) + least if least < most else most


def strain(role: Role, load: InstanceLoad, traffic: OnlineTraffic, count: int) -> float:
    """Of the worst-off resource on `count` instances like this one, and inf when they cannot keep up; 1 is a target
    that is just kept."""
    busy = traffic.prefilling / count if role != "decode" else 0.0
    if busy >= 1:
        return inf
    most = busy
    if role != "prefill":
        batch, step = _decoding(load, traffic, traffic.rate / count, busy)
        context = traffic.prompt + traffic.output / 2
        memory = batch * context / max(1, load.num_blocks * BLOCK_TOKENS)
        most = max(most, step / traffic.tpot, memory, batch / load.max_sequences)
    return most


def _decoding(load: InstanceLoad, traffic: OnlineTraffic, rate: float, busy: float) -> tuple[float, float]:
    """Sequences that decode at once, and seconds of an iteration with its share of prompts: the fixed point of both.
    Where there is none the batch grows until it is far over every limit."""
    batch, step = 0.0, 0.0
    context = traffic.prompt + traffic.output / 2
    for _ in range(ROUNDS):
        sequences = max(1, round(batch))
        step = load.times.step_ms(decodes=sequences, kv_tokens=round(sequences * context)) / 1e3 / (1 - busy)
        grown = rate * traffic.output * step
        if abs(grown - batch) < 0.5:
            break
        batch = min(grown, 64.0 * load.max_sequences)
    return batch, step
