"""Shortcuts for equal steps: the simulator knows output lengths, and need not schedule each decode step.

While every running sequence only decodes, nothing waits and nothing ends, a scheduler would plan the same step again
and again. Then it is asked once, and its steps are recorded together, with the same outcome. And beside prefills,
sequences that only decode are recorded without outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.core.plan import BLOCK_TOKENS, StepPlan, StepResult
from penstock.core.request import TokenOutput
from penstock.sched.local.scheduler import Scheduler


def repeatable(scheduler: Scheduler, plan: StepPlan, lengths: Mapping[str, int]) -> tuple[int, bool]:
    """Steps after that of `plan`, which was just made, that would be planned alike, up to the first in which a sequence
    ends; and whether they come to that one.

    Args:
        lengths: how many tokens each request will generate.
    """
    alike = scheduler.num_running == len(plan.sequences) and not plan.copies
    if scheduler.num_waiting or not alike or not scheduler.steady:
        return 0, False
    most, longest = 1 << 30, scheduler.limits.max_model_len
    for step in plan.sequences:
        sequence = scheduler.sequence(step.request_id)
        assert sequence is not None
        # a first token must be reported, and a sequence that migrates stops after it
        if len(step.tokens) != 1 or sequence.migrates or not sequence.generated:
            return 0, False
        request = sequence.request
        end = min(lengths[request.id], request.max_tokens, longest - len(request.prompt))
        most = min(most, end - sequence.generated - 1)  # without this one
        if most <= 0:
            return 0, False
    room = scheduler.kv.kept_blocks(scheduler.pool.available) * BLOCK_TOKENS // len(plan.sequences) - BLOCK_TOKENS
    return max(0, min(most, room)), most <= room


def again(scheduler: Scheduler, plan: StepPlan) -> StepPlan:
    """The next step like that of `plan`, as it would be planned now that those before it are recorded."""
    set_aside(scheduler, plan)
    steps = []
    for step in plan.sequences:
        sequence = scheduler.sequence(step.request_id)
        assert sequence is not None
        steps.append(sequence.step(1))
    return StepPlan(tuple(steps))


def set_aside(scheduler: Scheduler, plan: StepPlan) -> None:
    """What would be by planning one more step like that of `plan`, which was recorded."""
    for step in plan.sequences:
        sequence = scheduler.sequence(step.request_id)
        assert sequence is not None
        if sequence.computed + 2 > sequence.room:
            scheduler.set_aside(sequence, 1)


def repeat(scheduler: Scheduler, plan: StepPlan, steps: int) -> None:
    """Record so many steps like that of `plan`, or more of them; each sequence draws what it drew last."""
    for step in plan.sequences:
        sequence = scheduler.sequence(step.request_id)
        assert sequence is not None
        sequence.tokens += sequence.tokens[-1:] * steps
        sequence.computed += steps
        missing = sequence.blocks_until(sequence.computed) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += scheduler.pool.allocate(missing)
        scheduler.kv.publish(sequence)


def update(
    scheduler: Scheduler,
    plan: StepPlan,
    news: Mapping[str, int],
    draw: Callable[[StepPlan], StepResult],
    began: float,
    ended: float,
) -> list[TokenOutput]:
    """`Scheduler.update`, without the outputs that are no news; each sequence without any draws what it drew last.

    Args:
        news: request id -> the position of its next token that is; of those that are not there every token is.
        draw: for the others.
    """
    outputs: list[TokenOutput] = []
    scheduler.kv.landed(plan.copies)
    for step in plan.sequences:
        drawn = step.start + 1  # its position, if this is a decode
        if step.sample and len(step.tokens) == 1 and drawn < news.get(step.request_id, 0):
            sequence = scheduler.sequence(step.request_id)
            assert sequence is not None
            sequence.tokens.append(sequence.tokens[-1])
            sequence.computed = drawn
            if drawn // BLOCK_TOKENS != sequence.published:
                scheduler.kv.publish(sequence)
        else:
            alone = StepPlan((step,))
            outputs += scheduler.update(alone, draw(alone), began, ended)
    return outputs
