"""Scaling by prediction: as many instances as the targets need, from the predicted load on one fewer and on more.

From the rates, the mean prompt and output, and the step model follows for N instances what each would see:

    f     share of its time that prefilling prompts takes
    B     sequences that decode at once; each stays for its output times a step, and a step is longer the more there
          are and the more of it goes to prompts:  B = r * output * D,  D = d(B) / (1 - f)
    wait  for the prompts before it (an M/D/1 queue on f), and for what waits already, shared out and worked off in what
          arrivals leave of the time

and from these its *strain*: the largest of f, D over the strictest TPOT, KV over the memory, and wait + prefilling over
the strictest TTFT; over 1 a target or the memory is predicted to be missed. It is never sized from execution time
alone: a queue that has built up counts as wait.

The smallest N whose strain is under `target` is wanted. It grows at once by as many as are missing; it shrinks by one
at a time, and only while N - 1 would stay under `relaxed` with the heaviest traffic of the last `memory` seconds and
nothing waits. Where the prediction is wrong, targets that are missed (under `attained` of what was completed) or a
queue that has used up `waited` of its time ask for one more. The stages of a disaggregated cluster are sized
by themselves, and exchange instances first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Role
from penstock.sched.cluster.base import ClusterView, Fleet, InstanceLoad
from penstock.sched.cluster.foresight import prefill_seconds_alone
from penstock.sched.cluster.scaling import Wish, stages, starting, urgency

ROUNDS = 12  # of the fixed point of B
STARTS = 4  # a cut is dearer the longer it takes to undo it


@dataclass(frozen=True, slots=True)
class OnlineTraffic:
    """
    Attributes:
        rate: sequences per second.
        prompt, output: tokens, the means.
        ttft, tpot: the strictest targets in seconds.
        backlog: prompt tokens without a place, or sent and not yet prefilled.
    """

    rate: float
    prompt: float
    output: float
    ttft: float
    tpot: float
    backlog: float = 0.0


class UnifiedScaling:
    """A `Sizing`.

    Args:
        target: strain to stay under.
        relaxed: that one instance less has to stay under.
        attained: share of targets to keep.
        waited: share of its TTFT that the queue may wait, the mean.
        memory: seconds for which past traffic speaks against a cut; at least as long as `STARTS` starts take.
        out, back: cooldowns in seconds.
    """

    name = "unified"

    def __init__(
        self,
        *,
        interval: float = 1.0,
        target: float = 0.8,
        relaxed: float = 0.6,
        attained: float = 0.95,
        waited: float = 0.5,
        memory: float = 30.0,
        out: float = 2.0,
        back: float = 15.0,
    ) -> None:
        self.interval, self.out, self.back = interval, out, back
        self._target, self._relaxed = target, relaxed
        self._attained, self._waited, self._memory = attained, waited, memory
        self._past: deque[tuple[float, OnlineTraffic]] = deque()

    def wishes(self, view: ClusterView, fleet: Fleet) -> Mapping[Role, Wish]:
        traffic, peak = self._traffic(view, max(self._memory, STARTS * fleet.start_seconds))
        return {
            role: self._wish(view, role, loads, traffic, peak, starting(fleet, role))
            for role, loads in stages(view).items()
        }

    def _traffic(self, view: ClusterView, memory: float) -> tuple[OnlineTraffic, OnlineTraffic]:
        """Of now, and the most demanding of everything that was seen in the last `memory` seconds."""
        rates = view.rates
        now = OnlineTraffic(
            rate=rates.arrivals / rates.window,
            prompt=rates.prompt_tokens,
            output=rates.output_tokens,
            ttft=min((d.ttft for d in view.queue), default=inf),
            tpot=min((d.tpot for d in view.queue), default=inf),
            backlog=sum(d.prompt_tokens for d in view.queue) + sum(i.pending_tokens for i in view.instances),
        )
        for load in view.instances:
            if load.ttft < now.ttft or load.tpot < now.tpot:
                now = _stricter(now, load.ttft, load.tpot)
        self._past.append((view.now, now))
        while self._past[0][0] < view.now - memory:
            self._past.popleft()
        seen = [traffic for _, traffic in self._past]
        strict = _stricter(now, min(t.ttft for t in seen), min(t.tpot for t in seen))
        peak = OnlineTraffic(
            rate=max(t.rate for t in seen),
            prompt=max(t.prompt for t in seen),
            output=max(t.output for t in seen),
            ttft=strict.ttft,
            tpot=strict.tpot,
            backlog=now.backlog,
        )
        return strict, peak

    def _wish(
        self,
        view: ClusterView,
        role: Role,
        loads: Sequence[InstanceLoad],
        now: OnlineTraffic,
        peak: OnlineTraffic,
        coming: int,
    ) -> Wish:
        count = len(loads)
        expected = strain(role, loads, now, count)
        reason = f"strain {expected:.2f} on {count}"
        wanted = count
        most = count + coming + 64
        while wanted < most and strain(role, loads, now, wanted) > self._target:
            wanted += 1
        missed = view.rates.attained < self._attained * view.rates.completions
        if wanted == count and missed and expected > self._target / 2:
            wanted, reason = count + 1, f"{view.rates.attained} of {view.rates.completions} kept their targets"
        elif wanted == count and role != "decode" and urgency(view) > self._waited:
            wanted, reason = count + 1, f"the queue has waited {urgency(view):.0%} of its TTFT"
        if wanted > count:
            return Wish(max(0, wanted - count - coming), reason)
        if count > 1 and not view.queue and not coming and not missed:
            less = strain(role, loads, peak, count - 1)
            if less <= self._relaxed:
                return Wish(-1, f"strain {less:.2f} on {count - 1}")
        return Wish(0, reason)


def _stricter(traffic: OnlineTraffic, ttft: float, tpot: float) -> OnlineTraffic:
    return OnlineTraffic(
        traffic.rate,
        traffic.prompt,
        traffic.output,
        min(traffic.ttft, ttft),
        min(traffic.tpot, tpot),
        traffic.backlog,
    )


def strain(role: Role, loads: Sequence[InstanceLoad], traffic: OnlineTraffic, count: int) -> float:
    """Of the worst-off resource on `count` instances like the first of `loads`, and inf when they cannot keep up; 1 is
    a target that is just kept."""
    load = loads[0]
    rate = traffic.rate / count
    prefilling = prefill_seconds_alone(load, max(1, round(traffic.prompt))) if traffic.prompt else 0.0
    busy = rate * _adds(load, traffic.prompt, prefilling) if role != "decode" else 0.0
    if busy >= 1:
        return inf
    most = 0.0
    if role != "decode":
        # what waits now is worked off in the time that arrivals leave
        drain = traffic.backlog * _token_seconds(load) / count
        wait = (busy * prefilling / 2 + drain) / (1 - busy)
        most = max(busy, (wait + prefilling) / traffic.ttft)
    if role != "prefill":
        batch, step = _decoding(load, traffic, rate, busy)
        context = traffic.prompt + traffic.output / 2
        memory = batch * context / max(1, load.num_blocks * BLOCK_TOKENS)
        most = max(most, step / traffic.tpot, memory, batch / load.max_sequences)
    return most


def _token_seconds(load: InstanceLoad) -> float:
    """For each token of a step that is full of prompts."""
    return prefill_seconds_alone(load, load.token_budget) / load.token_budget


def _adds(load: InstanceLoad, prompt: float, prefilling: float) -> float:
    """Seconds that a prompt adds to steps that run anyway: less than prefilling it by itself, when it is short."""
    return max(prompt * _token_seconds(load), prefilling - prefill_seconds_alone(load, 1))


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
