"""An engine that records its steps' times."""

from __future__ import annotations

from penstock.core.clock import Clock
from penstock.core.plan import StepPlan, StepWork
from penstock.engine.loop import Engine, Step


class WatchedEngine(Engine):
    """Another one in its place, which schedules when nothing runs; so must its executor.

    Attributes:
        taken: of each step what was in it, and the ms until the next one could begin. One after which there was nothing
            to do is left out: its end is unknown.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        super().__init__(engine.scheduler, engine.executor, clock)
        self.taken: list[tuple[StepWork, float]] = []
        self._now = clock.now
        self._last: tuple[StepWork, float] | None = None

    def begin(self) -> StepPlan | None:
        now = self._now()
        plan = super().begin()
        if plan is not None:
            if self._last is not None:
                work, began = self._last
                self.taken.append((work, (now - began) * 1e3))
            self._last = plan.work, now
        return plan

    def end(self, *, wait: bool = False) -> Step | None:
        step = super().end(wait=wait)
        if not self.has_work:
            self._last = None
        return step
