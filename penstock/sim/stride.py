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
    """Steps that run one after the other without a decision between them, known so far as somebody looks ahead.

    Attributes:
        plan: of the first; the others are its continuation.
        began: when the first that is not recorded began, in seconds.
        ends: when each is over.
        quiet: nothing comes of any of them but one more token for everybody.
        recorded: how many of them the scheduler knows of.
        more: how many can follow.
        kv_tokens: that the last reads.
    """

    plan: StepPlan
    began: float
    ends: list[float]
    quiet: bool = False
    recorded: int = 0
    more: int = 0
    kv_tokens: int = 0

    @property
    def end(self) -> float:
        return self.ends[-1]

    def done(self, now: float) -> int:
        """Steps that are over and not recorded."""
        return bisect_right(self.ends, now) - self.recorded

    def cut(self, now: float) -> int:
        """Something has happened: end with the step that is running. Returns how many steps are not taken."""
        steps = bisect_left(self.ends, now) + 1
        dropped = max(0, len(self.ends) - steps)
        del self.ends[steps:]
        self.more = 0
        return dropped

    def go_on(self, pace: Pace, until: float) -> None:
        """Look ahead, as far as to a step that ends at `until` or later."""
        more = pace.decodes(self.end, until, len(self.plan.sequences), self.kv_tokens, min(KEPT, self.more))
        self.ends += more
        self.more -= len(more)
        self.kv_tokens += len(more) * len(self.plan.sequences)

    def record(self) -> tuple[float, list[float]]:
        """When those that are not recorded began, and when each ended: they are now."""
        began, ends = self.began, self.ends[self.recorded :]
        self.began, self.recorded = self.end, len(self.ends)
        return began, ends


def begin_stride(
    now: float, plan: StepPlan, pace: Pace, scheduler: Scheduler, lengths: Mapping[str, int], until: float
) -> Stride:
    """Run a plan that `scheduler` has just made, and go on as long as nothing changes, until a step ends at `until` or
    later.

    Args:
        lengths: how many tokens each request will generate.
    """
    stride = Stride(plan, now, [now + pace.step(plan)])
    if until > now:
        stride.more = repeatable(scheduler, plan, lengths)
        if stride.more:
            stride.quiet = True
            stride.kv_tokens = plan.work.kv_tokens
            stride.go_on(pace, until)
    return stride
