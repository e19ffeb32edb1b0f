"""What observing costs: metrics, the request's line, and its spans, against the throughput of a server.

    python tools/observing.py calls               # each call, alone: microseconds, and per request
    python tools/observing.py serve [--rounds N]  # two real servers in turn: all of it on, against none of it

`calls` needs no quiet machine; with the tokens per second of a run (--tokens-per-second) it says the share of one core.
`serve` answers the question itself: short rounds of the same requests against one server and the other, turn by turn,
so that whatever else the machine does meets both. Of every pair it takes the ratio of the throughputs, and of the CPU
time that the server's processes used per token, which others disturb less; and of all pairs the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))

from penstock.bench.client import Call, Client
from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import EngineStats
from penstock.obs.logs import RequestRecord, log_request, setup_logging
from penstock.obs.metrics import Metrics
from tests.helpers.servers import QUICK, Server, serving

RECORD = RequestRecord(
    request_id="f" * 32, model="demo", instance="engine-0", prompt_tokens=128, completion_tokens=64, max_tokens=64,
    longest_completion=64, finish_reason="length", ttft=0.1, tpot=0.01, e2e=0.8, queue=0.01, prefill=0.09, decode=0.7,
    seed=1,
)  # fmt: skip
ROOT = Path(__file__).parent.parent
SCRAPE_SECONDS = 5.0
# Python runs it at the start of every process of the server
OFF = """
from penstock.obs import logs, metrics
logs.log_request = lambda *args: None
for name in [name for name in vars(metrics.Metrics) if name.startswith("observe_")]:
    setattr(metrics.Metrics, name, lambda *args, **named: None)
"""


def microseconds(call: Callable[[], object], seconds: float = 0.5) -> float:
    """The least of several rounds: what disturbs only adds."""
    count, best, until = 100, float("inf"), time.perf_counter() + seconds
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
    token = microseconds(lambda: metrics.observe_inter_token(0.01, 1))
    step = microseconds(lambda: metrics.observe_stats("engine-0", stats, 16))
    request = {
        "metrics": microseconds(lambda: metrics.observe_request(RECORD))
        + microseconds(lambda: metrics.observe_first_token(0.1)),
        "http": microseconds(lambda: metrics.observe_http("/v1/completions", 200)),
        "line": microseconds(lambda: log_request(RECORD, "json")),
        "spans": microseconds(spans()),
    }
    scrape = microseconds(metrics.render)
    print(f"a token {token:.2f} us, a step {step:.2f} us, a scrape {scrape:.0f} us")
    print("a request: " + ", ".join(f"{name} {us:.1f} us" for name, us in request.items()))
    tokens = options.tokens_per_second
    per_second = tokens * token + tokens / options.batch * step + tokens / 64 * sum(request.values()) + scrape / 15
    print(
        f"at {tokens} tokens/s, {options.batch} a step, 64 a request, a scrape each 15 s: "
        f"{per_second / 1e4:.2f} % of one core"
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
def scraped(url: str) -> Iterator[None]:
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(SCRAPE_SECONDS):
            urllib.request.urlopen(url + "/metrics").read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def observed_or_not(observed: bool, traces: bool) -> Iterator[Server]:
    """A server with all of it, or with none."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        (Path(folder) / "sitecustomize.py").write_text("" if observed else OFF)
        flags = ["--log-format", "json"]
        if observed and traces:
            from tests.helpers.traces import receiving

            flags += ["--otlp-traces-endpoint", stack.enter_context(receiving())[0] + "/v1/traces"]
        # ours, whatever is installed: the file above is read before the working directory counts
        with mock.patch.dict(os.environ, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}"):
            server = stack.enter_context(serving("demo", *QUICK, *flags))
        yield server


def cpu_seconds(server: Server) -> float:
    """That the server and its engine have used so far."""
    total = 0
    for pid in (server.process.pid, server.engine_pid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])  # in user mode, and in the kernel
    return total / os.sysconf("SC_CLK_TCK")


async def load(url: str, seed: int, options: argparse.Namespace) -> int:
    """Requests of one kind, so many at once; returns the tokens that came."""
    rng = random.Random(seed)
    waiting = iter(range(options.num_prompts))
    tokens = 0

    async def work(client: Client) -> None:
        nonlocal tokens
        for number in waiting:
            body = {"prompt": rng.choices(range(300, 4000), k=128), "max_tokens": 64, "temperature": 0}
            body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
            record = await client.send(Call(number, 0.0, msgspec.json.encode(body), 128, 64), time.monotonic())
            assert not record.error, record.detail
            tokens += sum(count for _, count in record.events)

    async with Client(url) as client:
        await asyncio.gather(*(work(client) for _ in range(options.batch)))
    return tokens


def measure(server: Server, seed: int, options: argparse.Namespace) -> tuple[float, float]:
    """(output tokens per second, CPU microseconds per output token) of one round."""
    used, began = cpu_seconds(server), time.perf_counter()
    tokens = asyncio.run(load(server.url, seed, options))
    seconds = time.perf_counter() - began
    return tokens / seconds, 1e6 * (cpu_seconds(server) - used) / tokens


def serve(options: argparse.Namespace) -> None:
    with observed_or_not(True, options.traces) as on, observed_or_not(False, False) as off, scraped(on.url):
        for server in (on, off):
            measure(server, 0, options)  # what is first has other costs
        speeds, costs = [], []
        for number in range(1, options.rounds + 1):
            order = (on, off) if number % 2 else (off, on)  # what comes second is not always the same
            got = {server: measure(server, number, options) for server in order}
            speeds.append(got[on][0] / got[off][0])
            costs.append(got[on][1] / got[off][1])
            print(
                f"{number:3}: on {got[on][0]:5.0f} tokens/s {got[on][1]:5.0f} us each, off {got[off][0]:5.0f} tokens/s "
                f"{got[off][1]:5.0f} us each: {speeds[-1]:.4f} {costs[-1]:.4f}",
                flush=True,
            )
        assert on.metric("generation_tokens_total") > 0 == off.metric("generation_tokens_total"), "it was not measured"
    print(f"throughput on / off: {shown(speeds)} (0.99 or more is wanted)")
    print(f"CPU per token on / off: {shown(costs)}")


def shown(ratios: list[float]) -> str:
    """The median, and an interval that holds the true one in 95 of 100 measurements: between two of the ratios in
    their order, whatever their distribution."""
    ordered, count = sorted(ratios), len(ratios)
    below = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))  # binomial, as a normal distribution
    low, high = ordered[below], ordered[-1 - below]
    return f"median {statistics.median(ordered):.4f}, 95 % {low:.4f} to {high:.4f}, {count} pairs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["calls", "serve"])
    parser.add_argument("--rounds", type=int, default=40, help="of `serve`: pairs")
    parser.add_argument("--num-prompts", type=int, default=48, help="requests in a round")
    parser.add_argument("--traces", action="store_true", help="with spans, sent to a receiver in this process")
    parser.add_argument("--batch", type=int, default=16, help="sequences at once")
    parser.add_argument("--tokens-per-second", type=float, default=1400, help="of the server, for `calls`")
    options = parser.parse_args()
    calls(options) if options.what == "calls" else serve(options)


if __name__ == "__main__":
    main()
