from types import SimpleNamespace

import pytest

from penstock.bench.offline import measure_latency, measure_throughput
from penstock.core.clock import ManualClock
from penstock.core.errors import EngineFailure


class Engine:
    """Takes the next of `seconds` for each call and generates `tokens` per prompt."""

    def __init__(self, clock, seconds, tokens=4, loses=0):
        self.clock, self.seconds, self.tokens, self.loses = clock, iter(seconds), tokens, loses
        self.calls = []

    def generate(self, prompts, params):
        self.calls.append((prompts, params))
        self.clock.advance(next(self.seconds))
        output = SimpleNamespace(token_ids=[1] * self.tokens)
        return [SimpleNamespace(outputs=[output]) for _ in prompts[self.loses :]]


def test_latency_leaves_the_warm_up_out():
    clock = ManualClock()
    engine = Engine(clock, [9.0, 0.1, 0.2, 0.3])
    batches = [[[i], [i + 1]] for i in range(4)]
    ended: list[int] = []
    result = measure_latency(engine, batches, "params", clock, warmups=1, progress=ended.append)
    assert engine.calls == [(batch, "params") for batch in batches]
    assert (result.batch_size, result.iterations, result.output_tokens) == (2, 3, 24)
    assert result.batch_ms.p50 == pytest.approx(200)
    assert result.batch_ms.mean == pytest.approx(200)
    assert result.tokens_per_s == pytest.approx(24 / 0.6)
    assert ended == [8, 8, 8]


def test_throughput():
    clock = ManualClock()
    result = measure_throughput(Engine(clock, [2.0]), [[1, 2, 3], [4]], ["a", "b"], clock)
    assert (result.requests, result.prompt_tokens, result.output_tokens) == (2, 4, 8)
    assert result.requests_per_s == pytest.approx(1.0)
    assert result.output_tokens_per_s == pytest.approx(4.0)
    assert result.total_tokens_per_s == pytest.approx(6.0)


def test_a_lost_result_is_no_throughput():
    clock = ManualClock()
    with pytest.raises(EngineFailure, match="2 prompts were given, 1 results"):
        measure_throughput(Engine(clock, [1.0], loses=1), [[1], [2]], None, clock)
