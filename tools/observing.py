"""What observing costs: metrics, the request's line, and its spans, against the throughput of a server.

    python tools/observing.py calls               # each call, alone: microseconds, and per request
    python tools/observing.py serve [--pairs N]   # a real server: all of it on, against none of it

`calls` needs no quiet machine; with the tokens per second of a run (--tokens-per-second) it says the share of one core.
`serve` answers the question itself: a server under load, in which all of it is switched on and off in turn, twice a
second, so that whatever else the machine does meets both. Of every pair of such slices it takes the ratio of the
throughputs, and of the CPU time that the server's processes used per token, which others disturb less; and of all pairs
the medians. Spans are not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import EngineStats
from penstock.obs.logs import RequestRecord, log_ended, log_request, setup_logging
from penstock.obs.metrics import Metrics
from tests.helpers.servers import QUICK, Server, serving

RECORD = RequestRecord(
    request_id="f" * 32, model="demo", instance="engine-0", prompt_tokens=128, completion_tokens=64, max_tokens=64,
    longest_completion=64, finish_reason="length", ttft=0.1, tpot=0.01, e2e=0.8, queue=0.01, prefill=0.09, decode=0.7,
    seed=1,
)  # fmt: skip
ROOT = Path(__file__).parent.parent
SCRAPE_SECONDS = 15.0
SLICE = 0.5  # seconds
LEAST = 500  # tokens of a slice
# Python runs it at the start of every process of the server. All is switched within one server: two of them differ by
# more than what is to be measured, for as long as they live.
SWITCH = """
import signal

def switch(number, frame):
    from penstock.obs.metrics import Metrics
    from penstock.service import generation
    places = [(Metrics, name) for name in vars(Metrics) if name.startswith("observe_")] + [(generation, "log_request")]
    for place, name in places:
        real = kept.setdefault((place, name), getattr(place, name))
        setattr(place, name, real if number == signal.SIGUSR1 else nothing)

def nothing(*args, **named):
    pass

kept = {}
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, switch)
"""
ON, OFF = signal.SIGUSR1, signal.SIGUSR2


def microseconds(call: Callable[[], object], seconds: float = 0.5) -> float:
    """The least of several rounds: what disturbs only adds. Each is long enough that what is only noted is counted."""
    count, best, until = 2000, float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        begun = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - begun) / count)
    return best * 1e6


def calls(options: argparse.Namespace) -> None:
    metrics = Metrics("demo", ["engine-0"], "vllm")
    stats = EngineStats(
        running=1, waiting=0, used_blocks=1, num_blocks=9, preemptions=0, prefix_queries=9, prefix_hits=3, steps=1
    )
    setup_logging("info", "json")
    logging.getLogger().handlers[0].setStream(io.StringIO())  # type: ignore[attr-defined]

    def lines() -> None:
        for _ in range(10):
            log_request(RECORD, "json")
        log_ended()

    token = microseconds(lambda: metrics.observe_inter_token(0.01, 1))
    step = microseconds(lambda: metrics.observe_stats("engine-0", stats, 16))
    request = {
        "metrics": microseconds(lambda: metrics.observe_request(RECORD))
        + microseconds(lambda: metrics.observe_first_token(0.1)),
        "http": microseconds(lambda: metrics.observe_http("/v1/completions", 200)),
        "line": microseconds(lines) / 10,
        "spans": microseconds(spans()),
    }
    scrape = microseconds(metrics.render)
    print(f"a token {token:.2f} us, a step {step:.2f} us, a scrape {scrape:.0f} us")
    print("a request: " + ", ".join(f"{name} {us:.1f} us" for name, us in request.items()))
    tokens = options.tokens_per_second
    with_spans = tokens * token + tokens / options.batch * step + tokens / 64 * sum(request.values()) + scrape / 15
    without = with_spans - tokens / 64 * request["spans"]
    print(
        f"at {tokens:g} tokens/s, {options.batch} a step, 64 a request, a scrape each 15 s: "
        f"{without / 1e4:.2f} % of one core, with spans {with_spans / 1e4:.2f} %"
    )


def spans() -> Callable[[], None]:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    from penstock.obs.tracing import Tracing

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    tracing, params = Tracing(BatchSpanProcessor(Nowhere())), SamplingParams()

    def one() -> None:
        trace = tracing.begin("POST", "/v1/completions", {})
        trace.prompt_ended(RECORD, params)
        trace.end("/v1/completions", 200)

    return one


@contextmanager
def switchable() -> Iterator[Server]:
    """A server of which `ON` and `OFF` switch everything on and off that observes."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(SWITCH)
        # ours, whatever is installed: the file above is read before the working directory counts
        with (
            mock.patch.dict(os.environ, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}"),
            serving("demo", *QUICK, "--log-format", "json") as server,
        ):
            yield server


def cpu_seconds(server: Server) -> float:
    """That all threads of the server and its engine have used so far."""
    tasks = (task for pid in (server.process.pid, server.engine_pid()) for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class Load:
    """Requests without an end, so many at once.

    Attributes:
        tokens: that have come so far.
    """

    def __init__(self, url: str, at_once: int) -> None:
        self.tokens = 0
        self._url, self._at_once = url, at_once
        self._rng = random.Random(0)

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as client:
            await asyncio.gather(*(self._ask(client) for _ in range(self._at_once)))

    async def _ask(self, client: httpx.AsyncClient) -> None:
        while True:
            prompt = self._rng.choices(range(300, 4000), k=128)
            length = self._rng.randint(32, 96)  # not all alike, or prompts would come in waves
            body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for piece in answer.aiter_bytes():
                    self.tokens += piece.count(b'"text":')  # an event for each token, or a few that came together


async def slices(server: Server, options: argparse.Namespace) -> list[tuple[float, float]]:
    """(throughput, CPU time per token) with all of it on, over the same with all off, for each pair of slices."""
    load = Load(server.url, options.batch)
    running = asyncio.create_task(load.run())
    scraped = time.perf_counter()

    async def measure(how: int) -> tuple[float, float]:
        nonlocal scraped
        server.process.send_signal(how)
        used, tokens, began = cpu_seconds(server), load.tokens, time.perf_counter()
        if how == ON and began > scraped + SCRAPE_SECONDS / 2:  # half of the time is off
            scraped = began
            await asyncio.to_thread(server.get, "/metrics")
        while time.perf_counter() < began + SLICE or load.tokens < tokens + LEAST:
            if running.done():
                await running  # raises what ended it
            await asyncio.sleep(0.01)
        seconds, tokens = time.perf_counter() - began, load.tokens - tokens
        return tokens / seconds, (cpu_seconds(server) - used) / tokens

    await measure(ON)  # what is first has other costs
    found = []
    for number in range(options.pairs):
        order = (ON, OFF) if number % 2 else (OFF, ON)  # what comes second is not always the same
        got = {how: await measure(how) for how in order}
        found.append((got[ON][0] / got[OFF][0], got[ON][1] / got[OFF][1]))
    running.cancel()
    server.process.send_signal(ON)
    counted = await asyncio.to_thread(server.metric, "generation_tokens_total")
    assert 0.3 < counted / load.tokens < 0.7, f"{counted} of {load.tokens} tokens were counted, half of them are right"
    return found


def serve(options: argparse.Namespace) -> None:
    with switchable() as server:
        found = asyncio.run(slices(server, options))
    speeds, costs = zip(*found, strict=True)
    print(f"throughput on / off: {shown(speeds)} (0.99 or more is wanted)")
    print(f"CPU per token on / off: {shown(costs)}")


def shown(ratios: Sequence[float]) -> str:
    """The median, and an interval that holds the true one in 95 of 100 measurements: between two of the ratios in
    their order, whatever their distribution."""
    ordered, count = sorted(ratios), len(ratios)
    below = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))  # binomial, as a normal distribution
    low, high = ordered[below], ordered[-1 - below]
    return f"median {statistics.median(ordered):.4f}, 95 % {low:.4f} to {high:.4f}, {count} pairs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["calls", "serve"])
    parser.add_argument("--pairs", type=int, default=240, help="of slices, a second each")
    parser.add_argument("--batch", type=int, default=16, help="sequences at once")
    parser.add_argument("--tokens-per-second", type=float, default=3500, help="of the server, for `calls`")
    options = parser.parse_args()
    calls(options) if options.what == "calls" else serve(options)


if __name__ == "__main__":
    main()
