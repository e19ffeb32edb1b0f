"""What observing costs: metrics, the request's line, and its spans, against the throughput of a server.

    python tools/observing.py calls               # each call, alone: microseconds, and per request
    python tools/observing.py serve [--rounds N]  # two real servers in turn: all of it on, against none of it

`calls` needs no quiet machine; with the tokens per second of a run (--tokens-per-second) it says the share of one core.
`serve` answers the question itself, and needs one: it prints every pair's ratio and the median of them.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import EngineStats
from penstock.obs.logs import RequestRecord, log_request, setup_logging
from penstock.obs.metrics import Metrics
from tests.helpers.servers import QUICK, serving

RECORD = RequestRecord(
    request_id="f" * 32, model="demo", instance="engine-0", prompt_tokens=128, completion_tokens=64, max_tokens=64,
    longest_completion=64, finish_reason="length", ttft=0.1, tpot=0.01, e2e=0.8, queue=0.01, prefill=0.09, decode=0.7,
    seed=1,
)  # fmt: skip
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
        while not over.wait(5.0):
            urllib.request.urlopen(url + "/metrics").read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def throughput(observed: bool, options: argparse.Namespace) -> float:
    """Output tokens per second of one run against a fresh server."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text("" if observed else OFF)
        result = Path(folder) / "result.json"
        bench = [sys.executable, "-m", "penstock.cli.main", "bench", "serve", "--json", str(result)]
        bench += ["--random-input-len", "128", "--random-output-len", "64"]
        bench += ["--num-prompts", str(options.num_prompts), "--max-concurrency", str(options.batch)]
        with mock.patch.dict(os.environ, PYTHONPATH=folder), serving("demo", *QUICK, "--log-format", "json") as server:
            with scraped(server.url):
                subprocess.run([*bench, "--base-url", server.url], check=True, capture_output=True)
            counted = server.metric("generation_tokens_total")
            assert (counted > 0) == observed, "what was to be measured did not happen"
        document = json.loads(result.read_text())
        return float(document["summary"]["output_tokens_per_s"])


def serve(options: argparse.Namespace) -> None:
    ratios = []
    for number in range(options.rounds):
        order = (True, False) if number % 2 else (False, True)  # what comes second is not always the same
        got = {observed: throughput(observed, options) for observed in order}
        ratios.append(got[True] / got[False])
        print(f"on {got[True]:.0f} tokens/s, off {got[False]:.0f} tokens/s: {ratios[-1]:.4f}", flush=True)
    print(f"median of {len(ratios)}: {statistics.median(ratios):.4f} (0.99 or more is wanted)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["calls", "serve"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--num-prompts", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16, help="sequences at once")
    parser.add_argument("--tokens-per-second", type=float, default=1400, help="of the server, for `calls`")
    options = parser.parse_args()
    calls(options) if options.what == "calls" else serve(options)


if __name__ == "__main__":
    main()
