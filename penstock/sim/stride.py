"""Many equal decode steps at once.

While every running sequence only decodes, nothing waits and nothing ends, the scheduler would plan the same step again
and again. Then it is asked once, and the steps after the first are recorded together, with the same outcome.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.plan import BLOCK_TOKENS, StepPlan
from penstock.kv.keys import extend_keys
from penstock.sched.local import Scheduler
from penstock.sched.local.sequence import blocks_for
from penstock.sim.pace import KEPT, Pace


@dataclass(slots=True)
class Stride:
    """Steps that run one after the other without a decision between them.

    Attributes:
        plan: of the first; the others are its continuation.
        ends: when each is over, in seconds.
    """

    plan: StepPlan
    ends: list[float]

    @property
    def end(self) -> float:
        return self.ends[-1]

    def done(self, now: float) -> int:
        """Steps that are over."""
        return bisect_right(self.ends, now)

    def cut(self, now: float) -> int:
        """Something has happened: end with the step that is running. Returns how many steps are not taken."""
        steps = bisect_left(self.ends, now) + 1
        dropped = max(0, len(self.ends) - steps)
        del self.ends[steps:]
        return dropped


def begin_stride(
    now: float, plan: StepPlan, pace: Pace, scheduler: Scheduler, lengths: Mapping[str, int], until: float
) -> Stride:
    """Run a plan that `scheduler` has just made, and go on as long as nothing changes, until a step ends at `until` or
    later.

    Args:
        lengths: how many tokens each request will generate.
    """
    stride = Stride(plan, [now + pace.step(plan)])
    more = _repeatable(plan, scheduler, lengths) if stride.end < until else 0
    count = len(plan.sequences)
    kv_tokens = sum(s.start + 1 for s in plan.sequences) if more else 0
    while more and stride.end < until:
        kv_tokens += count
        stride.ends.append(stride.end + pace.decode(count, kv_tokens))
        more -= 1
    return stride


def _repeatable(plan: StepPlan, scheduler: Scheduler, lengths: Mapping[str, int]) -> int:
    """Steps after this one that the scheduler would plan alike, and in which no sequence ends."""
    if scheduler.num_waiting or scheduler.num_running != len(plan.sequences):
        return 0
    most, longest = 1 << 30, scheduler.limits.max_model_len
    for step in plan.sequences:
        sequence = scheduler.sequence(step.request_id)
        assert sequence is not None
        # a first token is news, and whoever is to leave stops after it
        if len(step.tokens) != 1 or sequence.departs or not sequence.generated:
            return 0
        request = sequence.request
        end = min(lengths[request.id], request.max_tokens, longest - len(request.prompt))
        most = min(most, end - sequence.generated - 2)  # this one, and the last one, which ends it
        if most <= 0:
            return 0
    room = scheduler.pool.available * BLOCK_TOKENS // len(plan.sequences) - BLOCK_TOKENS
    return max(0, min(most, room, KEPT))


def repeat(plan: StepPlan, scheduler: Scheduler, steps: int, root: bytes, prefix_cache: bool) -> None:
    """Record so many steps more like the one of `plan`, which was just recorded."""
    pool = scheduler.pool
    for step in plan.sequences:
        s = scheduler.sequence(step.request_id)
        assert s is not None
        s.tokens += s.tokens[-1:] * steps
        s.computed += steps
        missing = blocks_for(s.computed) - len(s.blocks)
        if missing > 0:
            s.blocks += pool.allocate(missing)
        full = s.computed // BLOCK_TOKENS
        if prefix_cache and full > s.published:
            extend_keys(s.keys, root, s.tokens, full)
            for i in range(s.published, full):
                s.blocks[i] = pool.publish(s.blocks[i], s.keys[i], s.keys[i - 1] if i else root)
            s.published = full
