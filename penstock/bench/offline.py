"""An engine measured without a server: the latency of one batch, and the throughput of many prompts at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.bench.metrics import Stats
from penstock.core.clock import Clock
from penstock.core.errors import EngineFailure


class Generates(Protocol):
    """The offline API: one result per prompt, each with `outputs`, whose items carry `token_ids`."""

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyResult:
    """`batch_ms` is the time from handing in a batch to having all of its results; `tokens_per_s` is output tokens."""

    batch_size: int
    iterations: int
    output_tokens: int
    batch_ms: Stats
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputResult:
    """`duration_s` is from handing in all prompts to having all results."""

    requests: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


def measure_latency(
    llm: Generates,
    batches: Sequence[list[list[int]]],
    params: Any,
    clock: Clock,
    *,
    warmups: int,
    progress: Callable[[int], None] | None = None,
) -> LatencyResult:
    """Runs the batches one after another; the first `warmups` are not counted. At least one must be left.

    Give every batch tokens of its own: a prefix cache would make a repeated one faster than it is.
    `progress` gets the output tokens of each counted batch.
    """
    seconds, output_tokens = [], 0
    for index, batch in enumerate(batches):
        begin = clock.now()
        results = llm.generate(batch, params)
        elapsed = clock.now() - begin
        if index < warmups:
            continue
        seconds.append(elapsed)
        brought = count_output(results, len(batch))
        output_tokens += brought
        if progress:
            progress(brought)
    stats = Stats.of(seconds)
    assert stats is not None, f"{len(batches)} batches, of which {warmups} to warm up"
    return LatencyResult(
        batch_size=len(batches[0]),
        iterations=len(seconds),
        output_tokens=output_tokens,
        batch_ms=stats,
        tokens_per_s=output_tokens / sum(seconds),
    )


def measure_throughput(llm: Generates, prompts: list[list[int]], params: Any, clock: Clock) -> ThroughputResult:
    """Hands in all prompts at once. `params` may be one for all or a list with one per prompt."""
    begin = clock.now()
    results = llm.generate(prompts, params)
    duration = clock.now() - begin
    prompt, output = sum(map(len, prompts)), count_output(results, len(prompts))
    return ThroughputResult(
        requests=len(prompts),
        duration_s=duration,
        prompt_tokens=prompt,
        output_tokens=output,
        requests_per_s=len(prompts) / duration,
        output_tokens_per_s=output / duration,
        total_tokens_per_s=(prompt + output) / duration,
    )


def count_output(results: Sequence[Any], prompts: int) -> int:
    """Tokens generated over all results. Raises `EngineFailure` when some prompt has no answer."""
    if len(results) != prompts:
        raise EngineFailure(f"{prompts} prompts were given, {len(results)} results came back")
    return sum(len(output.token_ids) for result in results for output in result.outputs)
