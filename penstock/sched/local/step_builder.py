"""A step while it is being filled."""

from __future__ import annotations

from penstock.core.plan import StepPlan
from penstock.sched.local.sequence import Sequence


class StepBuilder:
    """
    Attributes:
        budget: tokens that are left.
        grants: positions that each sequence goes on by.
        fresh: blocks that each was given.
        short: a running sequence had to give up its blocks.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.grants: dict[Sequence, int] = {}
        self.fresh: dict[Sequence, list[int]] = {}
        self.short = False

    def forget(self, sequence: Sequence) -> None:
        """It does not run in this step after all; to be said before it is preempted."""
        if count := self.grants.pop(sequence, 0):
            self.budget += sequence.cost(count)
        self.fresh.pop(sequence, None)

    def plan(self, released: list[str]) -> StepPlan:
        """
        Args:
            released: see `StepPlan`.
        """
        return StepPlan(
            tuple([s.step(count) for s, count in self.grants.items()]),
            tuple([block for blocks in self.fresh.values() for block in blocks]),
            tuple(released),
        )
