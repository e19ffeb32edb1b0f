"""A step's time by op, with bytes moved and floating-point operations, and the time outside of ops."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from torch import Tensor, nn

from penstock.core.clock import Clock
from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.build import Built
from penstock.nn.batch import Batch
from penstock.nn.ops import OPS, Op

GROUPS = {
    "packed_linear": "products",
    "packed_quantised_linear": "products",
    "quantised_linear": "products",
    "linear": "products",
    "head_linear": "products",
    "choose": "products",
    "expert_rows": "experts",
    "route": "experts",
    "group_experts": "experts",
    "combine_experts": "experts",
    "add_shared": "experts",
    "attention": "attention",
    "qkv_to_cache": "rotation and cache",
    "rotary": "rotation and cache",
    "store_kv": "rotation and cache",
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "gate_mul": "gate",
    "packed_rows": "embedding",
    "packed_quantised_rows": "embedding",
    "quantised_rows": "embedding",
    "argmax": "drawing",
    "sample": "drawing",
    "gumbel_noise": "drawing",
}


@dataclass(slots=True)
class OpTime:
    """Of all calls of one op in a step.

    Attributes:
        bytes: that it had to read and write, each once.
        flops: additions and multiplications of its products.
    """

    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class StepShape:
    """A kind of step.

    Attributes:
        sequences: that are in it.
        context: tokens that each has before it.
        tokens: that each computes.
    """

    name: str
    sequences: int
    context: int
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Medians over steps of one shape, in seconds.

    Attributes:
        step: of the whole step as an engine runs it, in one call where there is such a graph.
        apart: of the same step op by op, each timed.
        scheduling: of that, outside of the runner.
        ops: of that, each op.
    """

    shape: StepShape
    step: float
    apart: float
    scheduling: float
    ops: dict[str, OpTime]

    def groups(self) -> dict[str, float]:
        """Seconds by kind of work; "around them" is what the runner does besides."""
        found = dict.fromkeys([*GROUPS.values(), "other ops"], 0.0)
        for name, time in self.ops.items():
            found[GROUPS.get(name, "other ops")] += time.seconds
        found["scheduling"] = self.scheduling
        found["around them"] = max(0.0, self.apart - sum(found.values()))
        return {name: seconds for name, seconds in found.items() if seconds}


@dataclass(slots=True)
class _Watch:
    """What was measured of one step."""

    ops: dict[str, OpTime] = field(default_factory=dict)
    runner: float = 0.0

    def op(self, op: Op[Any], clock: Clock, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = clock.now()
            result = function(*arguments)
            time = self.ops.setdefault(op.name, OpTime())
            time.seconds += clock.now() - began
            moved, flops = work_of(op.name, arguments, result)
            time.calls, time.bytes, time.flops = time.calls + 1, time.bytes + moved, time.flops + flops
            return result

        return timed

    def run(self, run: Callable[[StepPlan], StepResult], clock: Clock, plan: StepPlan) -> StepResult:
        began = clock.now()
        try:
            return run(plan)
        finally:
            self.runner += clock.now() - began


def work_of(name: str, arguments: tuple[Any, ...], result: Any) -> tuple[int, int]:
    """(bytes, floating-point operations) that a call of an op cannot do without."""
    if name.endswith("linear") or name == "choose":
        x, weight = arguments[:2]
        flops = 2 * len(x) * weight.shape.numel()
        if name == "choose":
            return _bytes((x, arguments[2].codes.memory, arguments[2].bounds)), flops
        return _bytes((x, arguments[2] if name == "head_linear" else result, *_held(weight))), flops
    if name == "expert_rows":
        x, pairs, bounds = arguments[:3]
        moved, flops = _bytes((x, pairs, result)), 0
        for stacked in arguments[4:6]:
            chosen = [weight for weight, rows in zip(stacked.weights, bounds.diff().tolist(), strict=True) if rows]
            moved += _bytes(part for weight in chosen for part in _held(weight))
            flops += 2 * len(pairs) * stacked.weights[0].shape.numel()
        return moved, flops
    if name.endswith("_rows"):
        return 2 * result.nbytes, 0
    batch = next((a for a in arguments if isinstance(a, Batch)), None)
    if name == "attention":
        q, cache, window = arguments[0], arguments[1], arguments[4]
        assert batch is not None
        token = cache.bytes_per_token
        read = sum(span.length if window is None else min(span.length, window + span.rows) for span in batch.spans)
        pairs = sum(_seen(span.start, span.rows, window) for span in batch.spans)
        return 2 * q.nbytes + read * token, 4 * pairs * q.shape[1] * q.shape[2]
    if batch is not None:  # of the cache it touches the step's own rows, which it is also given
        return 2 * _bytes([a for a in arguments[:2] if isinstance(a, Tensor)]), 0
    return _bytes(arguments) + _bytes(result if isinstance(result, tuple) else (result,)), 0


def _seen(start: int, rows: int, window: int | None) -> int:
    """Pairs of a row and a position that it sees."""
    ends = range(start + 1, start + rows + 1)
    return sum(ends) if window is None else sum(min(end, window) for end in ends)


def _held(weight: Any) -> Iterable[Tensor]:
    """What a linear's weight is made of."""
    return weight.parameters() if isinstance(weight, nn.Module) else (weight,)


def _bytes(values: Any) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


@contextmanager
def watching(built: Built, clock: Clock) -> Iterator[_Watch]:
    """Times every op, and the runner. Ops that are watched are called one by one."""
    watch = _Watch()
    runner: Any = built.runner
    with ExitStack() as stack:
        for op in OPS.values():
            stack.enter_context(op.wrapped(built.runner.device.type, partial(watch.op, op, clock)))
        runner.run = partial(watch.run, runner.run, clock)
        try:
            yield watch
        finally:
            del runner.run


def break_down(built: Built, shape: StepShape, clock: Clock, *, steps: int, seed: int = 0) -> Breakdown:
    """Have an engine that schedules in turn run steps of a shape; half of them are watched, in turns."""
    whole: list[float] = []
    watched: list[tuple[float, _Watch]] = []
    rng = random.Random(seed)
    for number in range(2 * steps + 2):  # the first two warm up
        if number == 0 or shape.tokens > 1:
            _refill(built, shape, rng)
        if number % 2 == 0:
            began = clock.now()
            built.engine.step()
            whole.append(clock.now() - began)
        else:
            with watching(built, clock) as watch:
                began = clock.now()
                built.engine.step()
                watched.append((clock.now() - began, watch))
    _empty(built)
    whole, watched = whole[1:], watched[1:]
    apart, middle = sorted(watched, key=lambda pair: pair[0])[len(watched) // 2]
    return Breakdown(shape, median(whole), apart, apart - middle.runner, middle.ops)


def _refill(built: Built, shape: StepShape, rng: random.Random) -> None:
    """The engine's next step is of this shape."""
    _empty(built)
    engine = built.engine
    for number in range(shape.sequences):
        tokens = shape.context + (shape.tokens if shape.tokens > 1 else 0)
        prompt = [rng.randrange(built.runner.vocab_size) for _ in range(tokens)]
        left = engine.scheduler.limits.max_model_len - tokens
        greedy = SamplingParams(temperature=0.0)
        engine.add(
            Request(id=f"r{number}", prompt=prompt, params=greedy, seed=0, stop_ids=frozenset(), max_tokens=left)
        )
    if shape.tokens > 1:
        assert not shape.context, "a prompt is read from its beginning"
        return
    while any(s is None or s.pending > 1 for s in map(engine.scheduler.sequence, _ids(shape))):
        engine.step()


def _ids(shape: StepShape) -> list[str]:
    return [f"r{number}" for number in range(shape.sequences)]


def _empty(built: Built) -> None:
    scheduler = built.engine.scheduler
    built.engine.cancel([f"r{number}" for number in range(scheduler.limits.max_sequences)])
    assert not scheduler.has_work
