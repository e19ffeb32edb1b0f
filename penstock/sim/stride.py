"""Steps that run one after the other without a decision between them; see `sched.local.repeat`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.plan import StepPlan
from penstock.sched.local import Scheduler
from penstock.sim.pace import KEPT, Pace
from penstock.sim.repeat import again, repeatable


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
        ending: somebody ends in the last of those that can follow; only that one is not quiet.
        kv_tokens: that the last reads.
    """

    plan: StepPlan
    began: float
    ends: list[float]
    quiet: bool = False
    recorded: int = 0
    more: int = 0
    ending: bool = False
    kv_tokens: int = 0

    @property
    def end(self) -> float:
        return self.ends[-1]

    @property
    def ends_somebody(self) -> bool:
        """Whether somebody ends in the last step."""
        return self.ending and not self.more

    def done(self, now: float) -> int:
        """Steps that are over and not recorded."""
        return bisect_right(self.ends, now) - self.recorded

    def cut(self, now: float) -> int:
        """Something has happened: end with the step that is running. Returns how many steps are not taken."""
        steps = bisect_left(self.ends, now) + 1
        dropped = max(0, len(self.ends) - steps)
        del self.ends[steps:]
        self.ending = self.ends_somebody and not dropped
        self.more = 0
        return dropped

    def split(self, scheduler: Scheduler) -> Stride:
        """The last step, in which somebody ends, by itself, now that those before it are recorded."""
        return Stride(again(scheduler, self.plan), self.began, self.ends[-1:])

    def go_on(self, pace: Pace, until: float) -> None:
        """Look ahead, as far as to a step that ends at `until` or later."""
        more = pace.decodes(self.end, until, len(self.plan.sequences), self.kv_tokens, min(KEPT, self.more))
        self.ends += more
        self.more -= len(more)
        self.kv_tokens += len(more) * len(self.plan.sequences)

    def record(self) -> tuple[float, list[float]]:
        """When those that are not recorded began, and when each ended: they are now. Not the one in which somebody
        ends; see `split`."""
        began, over = self.began, len(self.ends) - self.ends_somebody
        ends = self.ends[self.recorded : over]
        self.began, self.recorded = self.ends[over - 1], over
        return began, ends


def begin_stride(
    now: float,
    plan: StepPlan,
    pace: Pace,
    scheduler: Scheduler,
    lengths: Mapping[str, int],
    until: float,
    *,
    to_end: bool,
) -> Stride:
    """Run a plan that `scheduler` has just made, and go on as long as nothing changes, until a step ends at `until` or
    later.

    Args:
        lengths: how many tokens each request will generate.
        to_end: the step in which somebody ends may be among them.
    """
    stride = Stride(plan, now, [now + pace.step(plan)])
    if until > now:
        stride.more, stride.ending = repeatable(scheduler, plan, lengths)
        if stride.ending and not to_end:
            stride.more, stride.ending = stride.more - 1, False
        if stride.more:
            stride.quiet = True
            stride.kv_tokens = plan.work.kv_tokens
            stride.go_on(pace, until)
    return stride
