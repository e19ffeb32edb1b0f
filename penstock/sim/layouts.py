"""Over how many devices to spread a model: tensor parallel, and data-parallel groups that share experts.

Every layout of the same devices is judged by the step-time model for as many clients as there are at once, each with a
sequence that decodes or waits for room (RTP-LLM, section 8.3 and table 6, compares four so):

- latency: the least time of a token, as a client sees it: with the wait for room in KV;
- throughput: the most tokens per second of each device, within a limit of a token's time where one is given;
- mixed: prompts and decodes on the same devices, so one layout for both. A burst of prompts is bound by how long one
  takes, a burst of answers by how many sequences there is room for: the most room for each second of a prompt.

Latency and throughput are predicted no better than to CLOSE: of the layouts within that of the best, those with the
smallest instances are left, for what fails alone is small, and the best of these is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.core.device import DeviceModel, ModelShape
from penstock.core.layout import windows_of
from penstock.kv.groups import most_held
from penstock.sched.local.limits import fitting_blocks
from penstock.sched.steptime import StepTime

Objective = Literal["latency", "throughput", "mixed"]

CLOSE = 0.03
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
BUDGET = 8192  # tokens of a prompt in one step


@dataclass(frozen=True, slots=True)
class Spread:
    """Instances that are alike, of `tensor` x `data` devices each."""

    tensor: int
    data: int
    instances: int

    @property
    def title(self) -> str:
        """As in "4TPx4", "2TP8DP"."""
        groups = f"{self.data}DP" if self.data > 1 else ""
        return f"{self.tensor}TP{groups}" + (f"x{self.instances}" if self.instances > 1 else "")

    @property
    def size(self) -> int:
        """Devices of an instance."""
        return self.tensor * self.data

    @property
    def groups(self) -> int:
        """Each with sequences and KV of its own."""
        return self.data * self.instances


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """What is asked of all devices together.

    Attributes:
        clients: sequences at once, that decode or wait for room.
        prompt, output: tokens of each.
        rows: tokens that a step computes of a sequence, with drafts.
        accepted: tokens that it gets of them.
        tpot_ms: limit of a token's time; None is none.
    """

    clients: int
    prompt: int
    output: int
    rows: int = 1
    accepted: float = 1.0
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """
    Attributes:
        room: sequences whose KV fits, of all instances.
        running: that decode at once, of those.
        step_ms: of the group that has most.
        token_ms: as a client sees it, with the wait for room.
        rate: tokens per second of each device.
        prompt_ms: of one prompt while nothing else is computed.
        parts: ms of a step's parts.
    """

    spread: Spread
    room: int
    running: float
    step_ms: float
    token_ms: float
    rate: float
    prompt_ms: float
    parts: dict[str, float]

    @property
    def held(self) -> float:
        """Sequences that there is room for, for each second of a prompt."""
        return self.room / self.prompt_ms * 1e3


def spreads(devices: int, shape: ModelShape) -> list[Spread]:
    """All that use every device; without experts to share, groups would be instances of their own."""
    widths = [n for n in WIDTHS if n <= devices]
    groups = widths if shape.experts is not None else [1]
    return [
        Spread(tensor, data, devices // (tensor * data))
        for tensor in widths
        for data in groups
        if shape.heads % tensor == 0 and devices % (tensor * data) == 0
    ]


def judge(spread: Spread, device: DeviceModel, shape: ModelShape, asked: Decoding) -> Judged | None:
    """None when the KV of not even one sequence fits beside the weights."""
    group = device.parallel(spread.tensor, data=spread.data, experts=spread.data > 1)
    longest = asked.prompt + asked.output
    needed = most_held(windows_of(shape.kv_groups), longest, min(BUDGET, longest))
    room = fitting_blocks(group, shape) // needed
    if not room:
        return None
    mean = min(asked.clients / spread.groups, room)
    most = min(mean + 1, room)  # sequences end and come at any time: some group has one more
    context, times = asked.prompt + asked.output / 2, StepTime(group, shape)
    work = round(asked.rows * most), round(most * context)
    step_ms = times.step_ms((), *work)
    running = mean * spread.groups
    return Judged(
        spread=spread,
        room=room * spread.groups,
        running=running,
        step_ms=step_ms,
        token_ms=step_ms / asked.accepted * asked.clients / running,
        rate=running * asked.accepted / step_ms * 1e3 / (spread.size * spread.instances),
        prompt_ms=StepTime(group, shape, busy=1 / spread.data).prefill_ms(asked.prompt, budget=BUDGET),
        parts={
            "overhead": times.device.overhead_ms,
            **{name: part.ms for name, part in times.parts((), *work).items() if part.ms},
        },
    )


def best(judged: Sequence[Judged], objective: Objective, asked: Decoding) -> Judged:
    """The one to take, of at least one. Where none is within the limit, throughput is sought without it."""
    if objective == "mixed":
        return max(judged, key=lambda j: (j.held, -j.spread.size))
    if objective == "latency":
        close = [j for j in judged if j.token_ms <= (1 + CLOSE) * min(other.token_ms for other in judged)]
        return min(close, key=lambda j: (j.spread.size, j.token_ms))
    within = [j for j in judged if asked.tpot_ms is None or j.token_ms <= asked.tpot_ms] or list(judged)
    close = [j for j in within if j.rate >= (1 - CLOSE) * max(other.rate for other in within)]
    return min(close, key=lambda j: (j.spread.size, -j.rate))
