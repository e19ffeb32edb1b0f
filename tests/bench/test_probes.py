import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.bench.dataset import Dataset
from penstock.bench.probes import LoadProbes
from penstock.core.errors import ConfigError
from penstock.workload.requests import offered_rate


class FakeBench:
    """Remembers what it was asked to measure; three quarters keep ttft, half keep everything."""

    def __init__(self):
        self.runs: list[Any] = []

    async def measure(self, requests, shape, limits_ms, progress):
        self.runs.append((requests, shape))
        goodput = SimpleNamespace(attainment=0.5, attainment_by_limit={"ttft": 0.75, "tpot": 0.6})
        return SimpleNamespace(summary=SimpleNamespace(goodput=goodput))


def probe(dataset, *loads, closed_loop=False, each_limit=False, seconds=0.0):
    """(what was measured, attainments)"""
    bench: Any = FakeBench()
    counts: Any = nullcontext(SimpleNamespace(request=None))
    probes = LoadProbes(
        bench,
        dataset,
        {"ttft": 1.0, "tpot": 1.0},
        closed_loop=closed_loop,
        each_limit=each_limit,
        seconds=seconds,
        warmups=2,
        live_counts=lambda total: counts,
    )
    attainments = [asyncio.run(probes.measure(load)) for load in loads]
    assert len(probes.summaries) == len(loads)
    return bench.runs, attainments


def test_rates_share_one_pattern_of_arrivals():
    ((slow, _), (fast, _)), _ = probe(Dataset(count=50, seed=3), 2.0, 10.0)
    assert offered_rate(slow) == pytest.approx(2.0)
    assert offered_rate(fast) == pytest.approx(10.0)
    assert [r.at for r in slow] == pytest.approx([5 * r.at for r in fast])


def test_a_rate_is_held_for_its_seconds():
    runs, _ = probe(Dataset(count=50), 2.0, 10.0, seconds=20.0)
    assert [len(requests) for requests, _ in runs] == [50, 200]


def test_a_trace_keeps_its_pattern(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,5,5\n1,5,5\n4,5,5\n")
    ((requests, _),), _ = probe(Dataset(name="trace", path=str(path)), 1.0)
    assert [r.at for r in requests] == pytest.approx([0.0, 0.5, 2.0])
    path.write_text("arrival_s,input_tokens,output_tokens\n7,5,5\n7,5,5\n")
    with pytest.raises(ConfigError, match="no rate to be scaled"):
        probe(Dataset(name="trace", path=str(path)), 1.0)


def test_a_closed_loop_gives_every_user_several_requests():
    runs, _ = probe(Dataset(count=10), 2, 8, closed_loop=True)
    assert [(len(requests), shape.concurrency, shape.scheduled) for requests, shape in runs] == [
        (10, 2, False),
        (32, 8, False),
    ]


def test_every_probe_has_tokens_of_its_own_and_only_the_first_warms_up():
    runs, _ = probe(Dataset(count=10, seed=5), 1.0, 2.0, 3.0)
    assert [(shape.seed, shape.warmups) for _, shape in runs] == [(5, 2), (6, 0), (7, 0)]


def test_attainment_of_all_limits_or_of_the_worst():
    assert probe(Dataset(count=5), 1.0)[1] == [0.5]
    assert probe(Dataset(count=5), 1.0, each_limit=True)[1] == [0.6]
