"""Steps of ranks that share experts run as two micro-batches where that hides what they exchange: rank 0 decides for
each plan, and learns from what it has run."""

from __future__ import annotations

from dataclasses import replace

from penstock.core.plan import SequenceStep, Split, StepPlan, StepResult
from penstock.core.stop import Stop
from penstock.engine.executor.base import MaskCosts
from penstock.engine.runner import Runner
from penstock.nn import native
from penstock.nn.experts import MixtureOfExperts
from penstock.nn.streams import Stream
from penstock.sched.parallel.micro_batches import MicroBatches, Part, computing_threads


class SplitSteps:
    """Rank 0's runner.

    Attributes:
        splits: steps that were two micro-batches.
    """

    def __init__(self, runner: Runner) -> None:
        self.splits = 0
        self._runner = runner
        layers = runner.model.model.layers.modules()
        self._chooser = MicroBatches(sum(isinstance(part, MixtureOfExperts) for part in layers))
        self._threads = native.threads()

    @property
    def _stream(self) -> Stream:
        experts = self._runner.model.shard.experts
        assert experts is not None
        return experts.stream

    def next(self, plan: StepPlan) -> StepPlan:
        """What ranks are to run for a plan."""
        if not plan.sequences or any(step.branches is not None for step in plan.sequences):
            return plan
        rows = self._chooser.choose([_part(step) for step in plan.sequences])
        if not rows:
            return plan
        whole = Part(*map(sum, zip(*map(_part, plan.sequences), strict=True)))
        computing = self._threads * self._chooser.costs.computing(whole)
        return replace(plan, split=Split(rows, computing_threads(self._threads, computing, self._chooser.worked)))

    # --- as the runner

    @property
    def mask_costs(self) -> MaskCosts:
        return self._runner.mask_costs

    def prepare(self, plan: StepPlan) -> None:
        self._runner.prepare(plan)

    def run(self, plan: StepPlan, stop: Stop | None = None) -> StepResult:
        stream = self._stream
        waited, busy, worked = stream.waited, stream.busy, stream.worked
        result = self._runner.run(plan, stop)
        if plan.sequences and not result.interrupted and not any(step.branches is not None for step in plan.sequences):
            rows = 0 if plan.split is None else plan.split.rows
            self.splits += rows > 0
            times = self._runner.took, stream.waited - waited, stream.busy - busy, stream.worked - worked
            self._chooser.ran([_part(step) for step in plan.sequences], rows, *times)
        return result

    def counts(self) -> dict[str, int]:
        return self._runner.counts()

    def check(self) -> None:
        self._runner.check()


def _part(step: SequenceStep) -> Part:
    rows = len(step.tokens)
    return Part(rows, rows * step.start + rows * (rows + 1) // 2)
