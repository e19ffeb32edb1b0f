"""Steps of ranks that share experts run as two micro-batches where that hides what they exchange: rank 0 decides for
each plan, and learns from what it has run."""

from __future__ import annotations

from dataclasses import replace

from penstock.core.plan import SequenceStep, Split, StepPlan, StepResult
from penstock.core.stop import Stop
from penstock.engine.executor.base import MaskCosts
from penstock.engine.executor.groups import GroupMemory
from penstock.engine.runner import Runner
from penstock.nn.experts import MixtureOfExperts
from penstock.nn.linear import Shard
from penstock.nn.ranks import Ranks
from penstock.nn.streams import Turns
from penstock.sched.parallel.micro_batches import LEAST_ROWS, MicroBatches, Part, cut, units_apart

LATE = 1 / 8  # of what is known of a group's steps, that the last one counts


class SplitSteps:
    """Rank 0's runner. Of groups that compute steps together all have two micro-batches, as far as they have rows for
    that, when it pays for the one that computes longest: for others an exchange is mostly waiting for that one.

    Args:
        groups: what these have in common; None where this one is alone.

    Attributes:
        splits: steps that were two micro-batches.
    """

    def __init__(self, runner: Runner, groups: GroupMemory | None = None) -> None:
        self.splits = 0
        self._runner, self._groups = runner, groups
        layers = runner.model.model.layers.modules()
        self._chooser = MicroBatches(sum(isinstance(part, MixtureOfExperts) for part in layers))

    @property
    def _spread(self) -> Shard:
        experts = self._runner.model.shard.experts
        assert experts is not None
        return experts

    @property
    def _ranks(self) -> Ranks:
        ranks = self._spread.ranks
        assert ranks is not None
        return ranks

    @property
    def _turns(self) -> Turns:
        turns = self._spread.turns
        assert turns is not None
        return turns

    def next(self, plan: StepPlan) -> StepPlan:
        """What ranks are to run for a plan."""
        if not plan.sequences or any(step.branches is not None for step in plan.sequences):
            return plan
        parts = [_part(step) for step in plan.sequences]
        rows = self._chooser.choose(parts)
        if (groups := self._groups) is not None:
            if groups.computed[groups.group] >= max(groups.computed):
                groups.two = rows > 0
            elif groups.two and sum([part.rows for part in parts]) >= LEAST_ROWS:
                rows = rows or cut(parts, self._chooser.costs, 0.5)
            else:
                rows = 0
        if not rows:
            return plan
        whole = Part(*map(sum, zip(*map(_part, plan.sequences), strict=True)))
        units = self._ranks.units
        computing = units * self._chooser.costs.computing(whole)
        return replace(plan, split=Split(rows, units_apart(units, computing, self._chooser.worked, self._ranks.sizes)))

    # --- as the runner

    @property
    def mask_costs(self) -> MaskCosts:
        return self._runner.mask_costs

    def prepare(self, plan: StepPlan) -> None:
        self._runner.prepare(plan)

    def run(self, plan: StepPlan, stop: Stop | None = None) -> StepResult:
        result = self._runner.run(plan, stop)
        took, waited, busy, worked = self._spread.stream.last()
        if (groups := self._groups) is not None:
            computed = 1e9 * (took - waited) if plan.sequences else 0.0
            groups.computed[groups.group] += round(LATE * (computed - groups.computed[groups.group]))
            if plan.split is None and self._turns.two:
                return result  # it says nothing of steps that are whole
        if plan.sequences and not result.interrupted and not any(step.branches is not None for step in plan.sequences):
            rows = 0 if plan.split is None else plan.split.rows
            self.splits += rows > 0
            worked *= self._spread.stream.apart or self._ranks.sizes[-1]
            self._chooser.ran([_part(step) for step in plan.sequences], rows, took, waited, busy, worked)
        return result

    def counts(self) -> dict[str, int]:
        return self._runner.counts()

    def check(self) -> None:
        self._runner.check()


def _part(step: SequenceStep) -> Part:
    rows = len(step.tokens)
    return Part(rows, rows * step.start + rows * (rows + 1) // 2)
