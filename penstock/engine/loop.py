"""The engine: a scheduler that decides, a runner that computes, and the time that both took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock.core.clock import Clock
from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import Request, Timing, TokenOutput
from penstock.sched.local import Scheduler


class Computes(Protocol):
    """What an engine needs of a runner."""

    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass(slots=True)
class _Milestones:
    """When a request arrived, first ran and first answered, in the clock's seconds."""

    arrival: float
    started: float | None = None
    answered: float | None = None


class Engine:
    """Requests in, tokens out, one step at a time. Not thread-safe: one loop owns it."""

    def __init__(self, scheduler: Scheduler, runner: Computes, clock: Clock) -> None:
        self.scheduler = scheduler
        self.steps = 0
        self._runner = runner
        self._clock = clock
        self._milestones: dict[str, _Milestones] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Raises PromptTooLong or InvalidRequest; then nothing has changed."""
        self.scheduler.add(request)
        self._milestones[request.id] = _Milestones(self._clock.now())

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Let requests go. Ids that are not here are passed over: they may have just finished."""
        for request_id in request_ids:
            self.scheduler.cancel(request_id)
            self._milestones.pop(request_id, None)

    def step(self) -> tuple[list[TokenOutput], int]:
        """Run one step; there must be work. Returns what it brought, and how many tokens it computed."""
        plan = self.scheduler.schedule()
        now = self._clock.now()
        for s in plan.sequences:
            milestones = self._milestones[s.request_id]
            if milestones.started is None:
                milestones.started = now
        outputs = self.scheduler.update(plan, self._runner.run(plan))
        self.steps += 1
        now = self._clock.now()
        for output in outputs:
            self._stamp(output, now)
        return outputs, plan.num_tokens

    def _stamp(self, output: TokenOutput, now: float) -> None:
        milestones = self._milestones[output.request_id]
        if milestones.answered is None:
            milestones.answered = now
        if output.finish is not None:
            del self._milestones[output.request_id]
            assert milestones.started is not None
            output.timing = Timing(
                queue=milestones.started - milestones.arrival,
                prefill=milestones.answered - milestones.started,
                decode=now - milestones.answered,
            )

    def check(self) -> None:
        """Raise AssertionError unless everything that runs is accounted for."""
        self.scheduler.check()
        assert len(self._milestones) == self.scheduler.num_running + self.scheduler.num_waiting
