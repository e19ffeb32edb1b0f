"""Steps that run one after the other without a decision between them; see `sched.local.repeat`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.plan import StepPlan
from penstock.sched.local import Scheduler
from penstock.sched.local.repeat import repeatable
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
    more = min(KEPT, repeatable(scheduler, plan, lengths)) if stride.end < until else 0
    count = len(plan.sequences)
    kv_tokens = sum(s.start + 1 for s in plan.sequences) if more else 0
    while more and stride.end < until:
        kv_tokens += count
        stride.ends.append(stride.end + pace.decode(count, kv_tokens))
        more -= 1
    return stride
