"""An engine that writes down what its steps take."""

from __future__ import annotations

from penstock.core.clock import Clock
from penstock.core.plan import StepPlan, StepWork
from penstock.core.request import TokenOutput
from penstock.engine.loop import Engine


class WatchedEngine(Engine):
    """Another one in its place.

    Attributes:
        taken: of each step what was in it, and the ms until the next one could begin. One after which there was nothing
            to do is left out: nobody knows when the next one could have begun.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        super().__init__(engine.scheduler, engine.runner, clock)
        self.taken: list[tuple[StepWork, float]] = []
        self._now = clock.now
        self._last: tuple[StepWork, float] | None = None

    def plan(self) -> StepPlan:
        now = self._now()
        if self._last is not None:
            work, began = self._last
            self.taken.append((work, (now - began) * 1e3))
        plan = super().plan()
        self._last = (plan.work, now) if plan.sequences else None
        return plan

    def run(self, plan: StepPlan) -> list[TokenOutput]:
        outputs = super().run(plan)
        if not self.has_work:
            self._last = None
        return outputs
