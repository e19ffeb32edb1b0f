"""A step while it is being filled."""

from __future__ import annotations

from penstock.core.plan import SequenceStep, StepPlan
from penstock.sched.local.sequence import Sequence, blocks_for


class Draft:
    """
    Attributes:
        budget: tokens that are left.
        grants: tokens of each sequence.
        fresh: blocks that each was given.
        short: a running sequence had to give up its blocks.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.grants: dict[Sequence, int] = {}
        self.fresh: dict[Sequence, list[int]] = {}
        self.short = False

    def forget(self, sequence: Sequence) -> None:
        """It does not run in this step after all."""
        self.budget += self.grants.pop(sequence, 0)
        self.fresh.pop(sequence, None)

    def plan(self, released: list[str]) -> StepPlan:
        """
        Args:
            released: see `StepPlan`.
        """
        return StepPlan(
            tuple([_sequence_step(s, count) for s, count in self.grants.items()]),
            tuple([block for blocks in self.fresh.values() for block in blocks]),
            tuple(released),
        )


def _sequence_step(sequence: Sequence, count: int) -> SequenceStep:
    tokens, request, start = sequence.tokens, sequence.request, sequence.computed
    blocks = tuple(sequence.blocks)
    end = start + count
    sample = end == len(tokens)
    used = blocks_for(end)
    step = SequenceStep(
        request.id,
        start,
        tokens[start:end],
        blocks if used == len(blocks) else blocks[:used],
        sample,
        request.params,
        request.seed,
        None,
        len(request.prompt),
        blocks[used:],
    )
    if sequence.special:
        if sample:
            step.history = tokens[:] if request.params.penalised else None
            step.banned = sequence.banned()
        step.targets = sequence.targets(count)
    return step
