"""The greatest number of tokens whose step stays within a time limit, measured at start-up (xLLM, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.clock import Clock
from penstock.core.plan import BLOCK_TOKENS, SequenceStep, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.engine.runner import Runner
from penstock.sched.local.sequence import blocks_for

GRAIN = 64  # tokens: the budget is a multiple of it


def largest_within(measure: Callable[[int], float], limit: float, low: int, high: int) -> int:
    """The largest multiple of GRAIN in [low, high] whose time is within the limit; at least low. Time grows with size.

    Args:
        measure: tokens -> seconds.
        limit: seconds.
    """
    good, bad = low // GRAIN, high // GRAIN + 1
    size = max(good, 1)
    while size < bad and measure(size * GRAIN) <= limit:  # doubling first, so that a slow machine is not asked for high
        good, size = size, size * 2
    bad = min(bad, size)
    while bad - good > max(1, good // 8):  # a step's time is not known to better than that
        middle = (good + bad) // 2
        if measure(middle * GRAIN) <= limit:
            good = middle
        else:
            bad = middle
    return max(low, good * GRAIN)


def measure_prompt_step(runner: Runner, clock: Clock, tokens: int) -> float:
    """Seconds of a step that reads a prompt of so many tokens; the better of two, since noise only adds."""
    blocks = tuple(range(blocks_for(tokens)))
    params = SamplingParams(temperature=0.0)
    plan = StepPlan((SequenceStep("measure", 0, [0] * tokens, blocks, True, params, 0),), blocks)
    times = []
    for _ in range(2):
        start = clock.now()
        runner.run(plan)
        times.append(clock.now() - start)
    return min(times)


def find_token_budget(runner: Runner, clock: Clock, *, limit: float, low: int, high: int) -> int:
    """Tokens per step. `limit` in seconds; the runner's cache must hold `high` tokens."""
    assert blocks_for(high) <= len(runner.cache.blocks)
    measure_prompt_step(runner, clock, min(high, BLOCK_TOKENS))  # the first step also pays for one-time work
    return largest_within(lambda tokens: measure_prompt_step(runner, clock, tokens), limit, low, high)
