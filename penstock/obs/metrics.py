"""Prometheus metrics under vLLM's names, so that its dashboards work when the prefix is exchanged."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from penstock.core.messages import EngineStats
from penstock.core.request import FinishReason
from penstock.obs.logs import RequestRecord

PREFIX = "penstock:"

# Upper bounds of histogram buckets; seconds, but for the last
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
WHOLE_REQUEST = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

NO_STATS = EngineStats(
    running=0, waiting=0, used_blocks=0, num_blocks=0, preemptions=0, prefix_queries=0, prefix_hits=0, steps=0
)


class Metrics:
    """Everything that is counted for one served model, in a registry of its own.

    Labels are looked up once, here, so that what happens per token is an addition.

    Args:
        model_name: value of the label `model_name`.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.registry = CollectorRegistry()
        self._running = self._gauge("num_requests_running", "Sequences in the running batch")
        self._waiting = self._gauge("num_requests_waiting", "Sequences waiting for the engine")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Part of the KV cache in use; 1 is all of it")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._preemptions = self._counter("num_preemptions", "Sequences that lost their KV cache to others")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens computed in one engine step", STEP_TOKENS)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN)
        self._itl = self._histogram("inter_token_latency_seconds", "From one token to the next", PER_TOKEN)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token after its first", PER_TOKEN
        )
        self._phases = {
            "e2e": self._histogram("e2e_request_latency_seconds", "Arrival to last token", WHOLE_REQUEST),
            "queue": self._histogram("request_queue_time_seconds", "Arrival to first step", WHOLE_REQUEST),
            "prefill": self._histogram("request_prefill_time_seconds", "First step to first token", WHOLE_REQUEST),
            "decode": self._histogram("request_decode_time_seconds", "First token to last", WHOLE_REQUEST),
        }
        self._inference = self._histogram("request_inference_time_seconds", "First step to last token", WHOLE_REQUEST)
        success = Counter(
            PREFIX + "request_success",
            "Requests that ended, by how",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._success = {reason.value: success.labels(model_name, reason.value) for reason in FinishReason}
        self._http = Counter(
            PREFIX + "http_requests", "HTTP requests answered", ["route", "status"], registry=self.registry
        )
        self._last = NO_STATS

    def observe_stats(self, stats: EngineStats, step_tokens: int) -> None:
        """Take over an engine's load and totals. A total that went back is an engine that started again."""
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._kv_usage.set(stats.used_blocks / stats.num_blocks if stats.num_blocks else 0.0)
        last = self._last
        if (
            stats.steps < last.steps
            or stats.preemptions < last.preemptions
            or stats.prefix_queries < last.prefix_queries
            or stats.prefix_hits < last.prefix_hits
        ):
            last = NO_STATS
        self._preemptions.inc(stats.preemptions - last.preemptions)
        self._prefix_queries.inc(stats.prefix_queries - last.prefix_queries)
        self._prefix_hits.inc(stats.prefix_hits - last.prefix_hits)
        self._last = stats
        if step_tokens:
            self._step_tokens.observe(step_tokens)

    def observe_first_token(self, seconds: float) -> None:
        """An output's first token came, this long after the request arrived. Counts one generated token."""
        self._ttft.observe(seconds)
        self._generation_tokens.inc()

    def observe_inter_token(self, seconds: float, tokens: int) -> None:
        """`tokens` more came together, this long after the one before them. Counts them as generated."""
        self._generation_tokens.inc(tokens)
        for _ in range(tokens):
            self._itl.observe(seconds / tokens)

    def observe_request(self, record: RequestRecord) -> None:
        """A request is over."""
        self._prompt_tokens.inc(record.prompt_tokens)
        if record.finish_reason is not None:
            self._success[record.finish_reason].inc()
        if record.tpot is not None:
            self._tpot.observe(record.tpot)
        for phase, histogram in self._phases.items():
            seconds = getattr(record, phase)
            if seconds is not None:
                histogram.observe(seconds)
        if record.prefill is not None and record.decode is not None:
            self._inference.observe(record.prefill + record.decode)

    def observe_http(self, route: str, status: int) -> None:
        """A response was sent. `route` is the route's pattern, never the path: labels stay few."""
        self._http.labels(route, str(status)).inc()

    def render(self) -> tuple[bytes, str]:
        """(the exposition, its content type)"""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(PREFIX + name, help, ["model_name"], registry=self.registry).labels(self._model_name)

    def _counter(self, name: str, help: str) -> Counter:
        """`name` without `_total`, which the exposition appends."""
        return Counter(PREFIX + name, help, ["model_name"], registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(PREFIX + name, help, ["model_name"], registry=self.registry, buckets=buckets)
        return metric.labels(self._model_name)
