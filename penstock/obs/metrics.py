"""Prometheus metrics. Those that vLLM has too have its names, labels and buckets (and more of these); with
`--metrics-compat vllm` they are exported a second time under vLLM's prefix, for dashboards made for vLLM.

Series with the label `engine` are an engine's, and the same on all frontends: take one (`max by (engine)`), not their
sum. The others count one frontend's requests: add them up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import accumulate
from math import inf, nan
from operator import attrgetter, lt
from typing import Any, Literal, TypeVar, TypeVarTuple, Unpack

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.core.request import FinishReason
from penstock.core.structured_outputs import KINDS
from penstock.core.wire.engine import EngineStats, TierStats
from penstock.obs.fleet_metrics import PREFIX, FleetCollector, IdealCollector
from penstock.obs.logs import SERVICE_CLASSES, RequestRecord

ENGINE_LABELS = ["model_name", "engine"]
CACHE_LABELS = ["block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"]
SAME = "; of the engine, so the same in every frontend"  # in the help of series with these labels

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
PREDICTION = (  # too early, and too late
    *(-10.0, -2.5, -1.0, -0.5, -0.25, -0.1, -0.05, -0.025, -0.01, 0.0),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
OUTPUTS = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, *OUTPUTS)
ATTAINMENT_OVER = 1000  # requests
LATENCY_OVER = 500  # requests that percentiles for people are of
MANY = 1024  # pending observations
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# Metrics that vLLM has as well, without the prefix and a counter's `_total`
VLLM = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"),
    *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "prompt_tokens_cached", "generation_tokens"),
    *("request_success", "iteration_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
    *("engine_sleep_state", "cache_config_info", "request_num_preemptions", "admission_rejections"),
    *("request_params_n", "request_params_max_tokens", "request_prefill_kv_computed_tokens"),
}

DEVICE, PEER = "device", "peer"  # where what is found was: there already, or brought from another instance
HOST = "host"
BELOW = HOST, "disk", "remote"  # tiers below the device
SLEEP_STATES = "awake", "weights_offloaded", "discard_all"  # by level

MASTER = "master"  # label `engine` of sequences in the master's queue
WAITS = "num_requests_waiting"
WAITING = f'Sequences waiting for the engine; with engine="{MASTER}", for a place on any'

NO_STATS = EngineStats(
    running=0, waiting=0, used_blocks=0, num_blocks=0, preemptions=0, prefix_queries=0, prefix_hits=0, steps=0
)
COUNTED = {  # field of the statistics -> metric, and its help
    "masked_steps": ("masked_steps", "Steps in which it was worked out which tokens may be drawn"),
    "masking": ("mask_seconds", "Time that these steps waited for it"),
    "grammars": ("grammars_compiled", "Grammars that were compiled"),
    "compiling": ("grammar_compile_seconds", "Time that this took, beside steps"),
    "pulled_blocks": ("kv_blocks_pulled", "KV blocks that other engines handed over, verified"),
    "failed_pulls": ("kv_pulls_failed", "KV blocks that were handed over and did not come, or not as they should be"),
    "encodes": ("images_encoded", "Images and videos that the model has looked at"),
    "encoding": ("image_encode_seconds", "Time that this took"),
    "embedding_queries": (
        "embedding_cache_queries",
        "Images and videos that prompts needed, beyond what the prefix cache had",
    ),
    "embedding_hits": ("embedding_cache_hits", "Those of them whose embeddings were there"),
    "given_embeddings": ("embeddings_given", "Images whose embeddings another engine has taken"),
    "taken_embeddings": ("embeddings_taken", "Images whose embeddings came from another engine, verified"),
    "interruptions": ("offline_steps_interrupted", "Steps of offline work that ended early for an online request"),
    "split_steps": ("steps_in_micro_batches", "Steps that were computed as two micro-batches"),
    "helped_pieces": ("helped_attention_pieces", "Pieces of contexts that other data-parallel groups have attended to"),
    "expert_switches": ("expert_switches", "Layers whose experts have moved between ranks"),
    "migrations": ("migrations_granted", "Sequences of other instances for which blocks were reserved"),
    "migration_wait": ("migration_wait_seconds", "Time that these waited for it in the migration queue"),
}
TOTALS = (  # since the engine's start
    *("steps", "preemptions", "prefix_queries", "prefix_hits", "busy", "idle"),
    *("prefix_loads", "prefix_fetches", "drafts", "draft_tokens", "accepted_tokens"),
    *COUNTED,
)
totals = attrgetter(*TOTALS)


Compat = Literal["none", "vllm"]
Metric = TypeVar("Metric", Counter, Gauge)
P = TypeVarTuple("P")


def _later(observe: Callable[[Metrics, Unpack[P]], None]) -> Callable[[Metrics, Unpack[P]], None]:
    """Queue an observation, and count it with others when there are `MANY` or the registry is collected. Counting each
    by itself costs several times as much, with cold processor caches."""

    @wraps(observe)
    def note(metrics: Metrics, *args: *P) -> None:
        notes = metrics._notes
        notes.append((observe, args))
        if len(notes) >= MANY:
            metrics._count()

    return note


class _Buckets:
    """One series of a histogram."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last is of what is above all bounds
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def show(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds = map(floatToGoString, (*self._bounds, inf))
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


class _Histogram(Collector):
    """Like prometheus-client's Histogram, without its locks and checks, at a fraction of the cost per observation.

    Args:
        bounds: upper bounds, ascending.
    """

    def __init__(self, name: str, help: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name, self._help, self._labels, self._bounds = name, help, labels, bounds
        self._series: dict[tuple[str, ...], _Buckets] = {}

    def labels(self, *values: str) -> _Buckets:
        return self._series.setdefault(values, _Buckets(self._bounds))

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        """Forget the series that have these."""
        places = {self._labels.index(name): value for name, value in labels.items()}
        for values in [v for v in self._series if all(v[at] == value for at, value in places.items())]:
            del self._series[values]

    def collect(self) -> Iterable[Family]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, buckets in self._series.items():
            buckets.show(family, values)
        yield family


@dataclass(frozen=True, slots=True)
class _Below:
    """One engine's series of a tier below its device."""

    used: Gauge
    totals: dict[str, Counter]  # field of the statistics -> its counter

    def count(self, said: TierStats, before: TierStats) -> None:
        self.used.set(said.used_bytes)
        for total, counter in self.totals.items():
            counter.inc(getattr(said, total) - getattr(before, total))


@dataclass(slots=True)
class _Engine:
    """One engine's series. Its latest statistics are kept, and exported on collection."""

    running: Gauge
    waiting: Gauge
    kv_usage: Gauge
    migrating: Gauge
    queries: Counter
    hits: Counter
    device_hits: Counter
    peer_hits: Counter
    below: dict[str, _Below]  # by the tier's name
    drafts: Counter
    draft_tokens: Counter
    accepted_tokens: Counter
    preemptions: Counter
    busy: Counter
    idle: Counter
    counted: dict[str, Counter]
    imbalance: Gauge
    embeddings: dict[str, Gauge]  # bytes, by where
    sleep_state: dict[int, Gauge]
    up: Gauge
    lost: Counter
    step_tokens: _Buckets
    load: EngineStats = NO_STATS
    said: EngineStats = NO_STATS  # its newest totals
    asked: int = 0  # prompt tokens, in all its lives
    found: dict[str, int] = field(default_factory=dict)  # those of them that were found, by where
    _counted: EngineStats = NO_STATS  # up to these

    def observe(self, stats: EngineStats, step_tokens: int) -> None:
        if any(map(lt, totals(stats), totals(self.said))):
            self.count()
            self._counted = NO_STATS
        self.load = self.said = stats
        if step_tokens:
            self.step_tokens.observe(step_tokens)

    def show(self) -> None:
        load = self.load
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.kv_usage.set(load.used_blocks / load.num_blocks if load.num_blocks else 0.0)
        self.migrating.set(load.migration_queue)
        self.imbalance.set(load.expert_imbalance)
        self.embeddings[DEVICE].set(load.embedding_bytes)
        self.embeddings[HOST].set(load.given_embedding_bytes)
        for level, state in self.sleep_state.items():
            state.set(load.asleep == level)
        self.count()

    def count(self) -> None:
        said, before = self.said, self._counted
        self.preemptions.inc(said.preemptions - before.preemptions)
        self.queries.inc(said.prefix_queries - before.prefix_queries)
        hits, loads = said.prefix_hits - before.prefix_hits, said.prefix_loads - before.prefix_loads
        fetches = said.prefix_fetches - before.prefix_fetches
        self.hits.inc(hits)
        past = {tier.name: tier for tier in before.tiers}
        found = {DEVICE: hits - loads - fetches, PEER: fetches}
        for tier in said.tiers:
            earlier = past.get(tier.name) or TierStats(tier.name)
            self.below[tier.name].count(tier, earlier)
            found[tier.name] = tier.hit_tokens - earlier.hit_tokens
        self.device_hits.inc(max(0, found[DEVICE]))
        self.peer_hits.inc(fetches)
        self.asked += said.prefix_queries - before.prefix_queries
        for where in (where for where, tokens in found.items() if tokens):
            self.found[where] = self.found.get(where, 0) + found[where]
        self.drafts.inc(said.drafts - before.drafts)
        self.draft_tokens.inc(said.draft_tokens - before.draft_tokens)
        self.accepted_tokens.inc(said.accepted_tokens - before.accepted_tokens)
        self.busy.inc(said.busy - before.busy)
        self.idle.inc(said.idle - before.idle)
        for total, counter in self.counted.items():
            counter.inc(getattr(said, total) - getattr(before, total))
        self._counted = said


class _EngineSeries:
    """The metrics that have a series for each engine."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name, self._registry = model_name, registry
        self._metrics: list[Counter | Gauge | _Histogram] = []
        self.running = self._metric(Gauge, "num_requests_running", "Sequences in the running batch")
        self.waiting = self._metric(Gauge, WAITS, WAITING)
        self.kv_usage = self._metric(Gauge, "kv_cache_usage_perc", "Part of the KV cache in use; 1 is all of it")
        self.migrating = self._metric(Gauge, "migration_queue", "Sequences of other instances that wait for blocks")
        self.queries = self._metric(Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.hits = self._metric(Counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.tiers = self._metric(
            Counter,
            "kv_hit_tokens",
            "Prompt tokens found in the prefix cache, by tier: all but the device are below it; peer is what was "
            "brought from another instance",
            ["tier"],
        )
        self.moved = self._metric(Counter, "kv_bytes_moved", "KV that was copied between tiers", ["from", "to"])
        self.stored = self._metric(Gauge, "kv_tier_bytes", "KV that is in a tier below the device", ["tier"])
        self.loads = self._metric(Counter, "kv_loads", "Loads of KV from a tier below the device", ["tier"])
        self.questions = self._metric(
            Counter, "kv_tier_questions", "Questions about what is in a tier that others use too", ["tier"]
        )
        self.load_seconds = self._metric(
            Counter, "kv_load_seconds", "Time that loads took which brought all that they should have", ["tier"]
        )
        self.expected_seconds = self._metric(
            Counter, "kv_load_expected_seconds", "Time that they were predicted to take", ["tier"]
        )
        self.failures = self._metric(
            Counter,
            "kv_tier_failures",
            "Loads that brought less than was stored, or were too late for whoever waited, stores that failed, and "
            "questions about what is there without an answer, or with one that was too late: all is computed instead",
            ["tier", "reason"],
        )
        self.drafts = self._metric(
            Counter, "spec_decode_num_drafts", "Times that drafts were computed behind a sequence's next token"
        )
        self.draft_tokens = self._metric(Counter, "spec_decode_num_draft_tokens", "Drafts that were computed")
        self.accepted = self._metric(Counter, "spec_decode_num_accepted_tokens", "Drafts that were right")
        self.preemptions = self._metric(Counter, "num_preemptions", "Sequences that lost their KV cache to others")
        self.busy = self._metric(Counter, "engine_busy_seconds", "Time that steps took")
        self.idle = self._metric(Counter, "engine_idle_seconds", "Time between steps while there was work")
        self.counted = {total: self._metric(Counter, name, help) for total, (name, help) in COUNTED.items()}
        self.sleep_state = self._metric(
            Gauge, "engine_sleep_state", "1 for the state that the engine is in", ["sleep_state"]
        )
        self.imbalance = self._metric(
            Gauge,
            "expert_imbalance",
            "Rows of experts that the busiest rank has over the mean, in the last window; 0 without --enable-eplb",
        )
        self.embeddings = self._metric(
            Gauge,
            "embedding_bytes",
            "What was made of images and is kept; on the host it is for other engines",
            ["tier"],
        )
        self.weights = self._metric(
            Gauge,
            "weights_load_seconds",
            "Time that weights took at its start, by where they came from",
            ["source"],
        )
        self.up = self._metric(Gauge, "instance_up", "1 while the instance serves, or sleeps")
        self.lost = self._metric(
            Counter, "instance_lost", "Lives of the instance that ended after it was ready, unless it was told to"
        )
        self.step_tokens = _Histogram(
            PREFIX + "iteration_tokens_total",
            "Tokens of prompts, also of those found in a cache, and of outputs in one engine step" + SAME,
            ENGINE_LABELS,
            STEP_TOKENS,
        )
        registry.register(self.step_tokens)
        self._metrics.append(self.step_tokens)
        self.cache = self._metric(Gauge, "cache_config_info", "What the KV cache is like; always 1", CACHE_LABELS)

    def make(self, name: str) -> _Engine:
        """An engine's series, which begin now."""
        return _Engine(
            running=self.running.labels(self._model_name, name),
            waiting=self.waiting.labels(self._model_name, name),
            kv_usage=self.kv_usage.labels(self._model_name, name),
            migrating=self.migrating.labels(self._model_name, name),
            queries=self.queries.labels(self._model_name, name),
            hits=self.hits.labels(self._model_name, name),
            device_hits=self.tiers.labels(self._model_name, name, DEVICE),
            peer_hits=self.tiers.labels(self._model_name, name, PEER),
            below={tier: self._below(name, tier) for tier in BELOW},
            drafts=self.drafts.labels(self._model_name, name),
            draft_tokens=self.draft_tokens.labels(self._model_name, name),
            accepted_tokens=self.accepted.labels(self._model_name, name),
            preemptions=self.preemptions.labels(self._model_name, name),
            busy=self.busy.labels(self._model_name, name),
            idle=self.idle.labels(self._model_name, name),
            counted={total: counter.labels(self._model_name, name) for total, counter in self.counted.items()},
            imbalance=self.imbalance.labels(self._model_name, name),
            embeddings={tier: self.embeddings.labels(self._model_name, name, tier) for tier in (DEVICE, HOST)},
            sleep_state={i: self.sleep_state.labels(self._model_name, name, s) for i, s in enumerate(SLEEP_STATES)},
            up=self.up.labels(self._model_name, name),
            lost=self.lost.labels(self._model_name, name),
            step_tokens=self.step_tokens.labels(self._model_name, name),
        )

    def _below(self, name: str, tier: str) -> _Below:
        engine = self._model_name, name
        totals = {
            "hit_tokens": self.tiers.labels(*engine, tier),
            "stored_bytes": self.moved.labels(*engine, "device", tier),
            "loaded_bytes": self.moved.labels(*engine, tier, "device"),
            "loads": self.loads.labels(*engine, tier),
            "failed_loads": self.failures.labels(*engine, tier, "load"),
            "late_loads": self.failures.labels(*engine, tier, "late"),
            "failed_stores": self.failures.labels(*engine, tier, "store"),
            "questions": self.questions.labels(*engine, tier),
            "failed_questions": self.failures.labels(*engine, tier, "question"),
            "late_questions": self.failures.labels(*engine, tier, "late question"),
            "took": self.load_seconds.labels(*engine, tier),
            "expected": self.expected_seconds.labels(*engine, tier),
        }
        return _Below(self.stored.labels(*engine, tier), totals)

    def end(self, name: str) -> None:
        for metric in self._metrics:
            metric.remove_by_labels({"engine": name})

    def _metric(self, kind: type[Metric], name: str, help: str, labels: Sequence[str] = ()) -> Metric:
        metric = kind(PREFIX + name, help + SAME, [*ENGINE_LABELS, *labels], registry=self._registry)
        self._metrics.append(metric)
        return metric


@dataclass(slots=True)
class _ServiceClass:
    """One service class's series."""

    goodput: Counter
    attainment: Gauge
    kept: int = 0  # of the last `judged`
    _verdicts: deque[bool] = field(default_factory=lambda: deque(maxlen=ATTAINMENT_OVER))
    _ttft: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCY_OVER))
    _tpot: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCY_OVER))

    @property
    def judged(self) -> int:
        """Requests with targets that are remembered."""
        return len(self._verdicts)

    def observe(self, record: RequestRecord) -> None:
        if record.status == 200 and record.slo_met is not False:
            self.goodput.inc()
        if record.slo_met is not None:
            if len(self._verdicts) == ATTAINMENT_OVER:
                self.kept -= self._verdicts[0]
            self._verdicts.append(record.slo_met)
            self.kept += record.slo_met
            self.attainment.set(self.kept / len(self._verdicts))
        if record.ttft is not None:
            self._ttft.append(record.ttft)
        if record.tpot is not None:
            self._tpot.append(record.tpot)

    def latency(self) -> dict[str, Any]:
        return {"requests": len(self._ttft), "ttft_ms": _percentiles(self._ttft), "tpot_ms": _percentiles(self._tpot)}


class _Generated(Collector):
    """The first collector in its registry: collecting it counts all pending observations.

    Attributes:
        tokens: generated so far.
    """

    def __init__(self, model_name: str, count: Callable[[], None]) -> None:
        self.tokens = 0
        self._model_name, self._count = model_name, count

    def collect(self) -> Iterable[Family]:
        self._count()
        family = CounterMetricFamily(PREFIX + "generation_tokens", "Tokens generated", labels=["model_name"])
        family.add_metric([self._model_name], self.tokens)
        yield family


class Metrics:
    """The metrics of one served model, in a registry of their own.

    Labels are looked up once, here, so that the work per token is an addition. Observations are queued, and counted in
    batches or on collection.

    Args:
        model_name: value of the label `model_name`.
        engines: instances, by name; values of the label `engine`.
    """

    def __init__(self, model_name: str, engines: Iterable[str]) -> None:
        self._model_name = model_name
        self._notes: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.registry = CollectorRegistry()
        self._generated = _Generated(model_name, self._count)
        self.registry.register(self._generated)
        self._fleet = FleetCollector(model_name)
        self.registry.register(self._fleet)
        self._ideal = IdealCollector(model_name)
        self.registry.register(self._ideal)
        self._series = _EngineSeries(model_name, self.registry)
        self._queue = self._series.waiting.labels(model_name, MASTER)
        self._engines = {name: self._series.make(name) for name in engines}
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Those of them that were found in a cache")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN)
        self._prediction = self._histogram(
            "predicted_minus_actual_ttft_seconds", "Time to first token: what was predicted, less what came", PREDICTION
        )
        self._intervals = self._histogram("inter_token_latency_seconds", "From one token to the next", PER_TOKEN)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token after its first", PER_TOKEN
        )
        self._phases = {
            "e2e": self._histogram("e2e_request_latency_seconds", "Arrival to last token", WHOLE_REQUEST),
            "queue": self._histogram("request_queue_time_seconds", "Arrival to first step", WHOLE_REQUEST),
            "prefill": self._histogram("request_prefill_time_seconds", "First step to first token", WHOLE_REQUEST),
            "decode": self._histogram("request_decode_time_seconds", "First token to last", WHOLE_REQUEST),
            "encode": self._histogram(
                "request_encode_time_seconds", "Looking at its images, of requests with any to look at", FIRST_TOKEN
            ),
            "image_wait": self._histogram(
                "request_image_wait_seconds",
                "For which its prompt waited for images, of requests with any",
                FIRST_TOKEN,
            ),
        }
        self._inference = self._histogram("request_inference_time_seconds", "First step to last token", WHOLE_REQUEST)
        self._sizes = {
            "prompt_tokens": self._histogram("request_prompt_tokens", "A request's prompt tokens", TOKENS),
            "completion_tokens": self._histogram("request_generation_tokens", "Tokens of all its outputs", TOKENS),
            "longest_completion": self._histogram(
                "request_max_num_generation_tokens", "Tokens of its longest output", TOKENS
            ),
            "preemptions": self._histogram(
                "request_num_preemptions", "How often its sequences lost their KV cache to others", PREEMPTIONS
            ),
            "n": self._histogram("request_params_n", "How many outputs it asked for", OUTPUTS),
            "max_tokens": self._histogram("request_params_max_tokens", "How long each might have become", TOKENS),
        }
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were in no cache", TOKENS
        )
        self._success = self._counters(
            "request_success",
            "Requests that ended, by how",
            "finished_reason",
            [reason.value for reason in FinishReason],
        )
        self._rejections = self._counter("admission_rejections", "Requests refused since too much waits")
        self._classes = self._service_classes()
        self._routing = Counter(
            PREFIX + "routing_decisions",
            "Places given to sequences, by policy and reason",
            ["model_name", "policy", "reason"],
            registry=self.registry,
        )
        self._structured = self._counters(
            "structured_requests", "Prompts whose outputs are to have a form, by what says which", "kind", KINDS
        )
        self._handoffs = self._counter("handoffs", "Sequences that went on in another instance after their prompt")
        self._lacking = self._counter(
            "image_fallbacks", "Images that another instance was to look at, and that were looked at where prefilled"
        )
        self._make_recoveries()
        self._hedged = self._counters(
            "hedged_requests",
            "Sequences that began again elsewhere while their engine stood still; overtaken: they went on there; "
            "returned: the engine went on first",
            "how",
            ("overtaken", "returned"),
        )
        self._isolated = self._counters(
            "isolated_requests",
            "Sequences that were in a step that broke an engine, and went on alone; refused: that broke another one so",
            "verdict",
            ("suspected", "refused"),
        )
        lines = Gauge(
            PREFIX + "batch_lines",
            "Lines that are not answered, of batches that this frontend runs",
            ["model_name", "state"],
            registry=self.registry,
        )
        self._batch_queued, self._batch_running = (lines.labels(model_name, state) for state in ("queued", "running"))
        self._batch_done = self._counters(
            "batch_lines_answered", "Lines of batches that were answered", "outcome", ("completed", "failed")
        )
        self._recorded = self._counters(
            "recorded_requests",
            "Requests that ended while they were to be recorded for a replay; dropped: they are not in the record",
            "outcome",
            ("written", "dropped"),
        )

    def set_batch_lines(self, queued: int, running: int) -> None:
        """Of the batches that this process runs."""
        self._batch_queued.set(queued)
        self._batch_running.set(running)

    def observe_batch_line(self, failed: bool) -> None:
        self._batch_done["failed" if failed else "completed"].inc()

    def _service_classes(self) -> dict[str, _ServiceClass]:
        goodput = self._counters(
            "goodput_requests",
            "Requests that were answered in full, and within their targets where they had any",
            "class",
            SERVICE_CLASSES,
        )
        attainment = Gauge(
            PREFIX + "slo_attainment_ratio",
            f"Share that kept its targets, of the last {ATTAINMENT_OVER} requests with any; NaN without one",
            ["model_name", "class"],
            registry=self.registry,
        )
        classes = {
            name: _ServiceClass(goodput[name], attainment.labels(self._model_name, name)) for name in SERVICE_CLASSES
        }
        for served in classes.values():
            served.attainment.set(nan)
        return classes

    def _make_recoveries(self) -> None:
        """What went on after a loss: how often, how long that took, and what was predicted."""
        how = "recompute", "cache", "fetch", "remap"
        took = _Histogram(
            PREFIX + "recovery_seconds",
            "From an interrupted sequence's new place to its next token",
            ["model_name", "how"],
            FIRST_TOKEN,
        )
        self.registry.register(took)
        counters = [
            self._counters(name, help, "how", how)
            for name, help in (
                (
                    "recoveries",
                    "Sequences that went on elsewhere after a loss; fetch, remap: KV came from a peer, from the "
                    "host's KV pool; cache: some was there",
                ),
                (
                    "recovery_predicted_seconds",
                    "The same as it was predicted, in sum; sequences without a prediction count as predicted right",
                ),
                (
                    "recovery_recompute_seconds",
                    "The same as it was predicted for computing whatever the instance did not have, in sum; what it "
                    "took less is saved",
                ),
            )
        ]
        self._recoveries = {each: [counter[each] for counter in counters] for each in how}
        self._recovery_took = {each: took.labels(self._model_name, each) for each in how}

    @property
    def generated_tokens(self) -> int:
        """So far."""
        self._count()
        return self._generated.tokens

    def attainment(self) -> dict[str, dict[str, int]]:
        """Of each service class: how many of the last requests with targets there are, and that kept them."""
        self._count()
        return {name: {"requests": served.judged, "kept": served.kept} for name, served in self._classes.items()}

    def latency(self) -> dict[str, dict[str, Any]]:
        """Of each service class: percentiles of the last requests, in ms."""
        self._count()
        return {name: served.latency() for name, served in self._classes.items()}

    def prefixes(self) -> dict[str, Any]:
        """Prompt tokens that engines have looked up, and those that were found, by where: a tier, or "peer"."""
        self._count()
        found: dict[str, int] = {}
        for engine in self._engines.values():
            for where, tokens in engine.found.items():
                found[where] = found.get(where, 0) + tokens
        return {"prompt_tokens": sum(engine.asked for engine in self._engines.values()), "found_tokens": found}

    @_later
    def observe_stats(self, engine: str, stats: EngineStats, step_tokens: int) -> None:
        """Set an engine's load and totals. A total that decreased means that the engine was restarted."""
        self._engines[engine].observe(stats, step_tokens)

    @_later
    def add_engine(self, engine: str) -> None:
        """An instance has joined. No effect when it is known."""
        if engine not in self._engines:
            self._engines[engine] = self._series.make(engine)

    @_later
    def forget_engine(self, engine: str) -> None:
        """An instance has left: its series end."""
        if self._engines.pop(engine, None) is not None:
            self._series.end(engine)

    @_later
    def observe_queue(self, waiting: int) -> None:
        """The length of the master's queue."""
        self._queue.set(waiting)

    @_later
    def observe_fleet(
        self, instance_seconds: float, starts: Mapping[str, tuple[int, float]], changes: Mapping[str, int]
    ) -> None:
        """What the instances cost, how they started and how they were changed, as the master counts it.

        Args:
            starts: path -> how many, and seconds together.
            changes: kind -> how many.
        """
        self._fleet.seconds, self._fleet.starts, self._fleet.changes = instance_seconds, starts, changes

    @_later
    def observe_ideal(self, prompt_tokens: int, found_tokens: int, complete: bool) -> None:
        """What an ideal cache would have found; `complete`: whether these are all."""
        self._ideal.said = prompt_tokens, found_tokens, complete

    @_later
    def observe_up(self, engine: str, up: bool) -> None:
        """Whether an engine serves."""
        self._engines[engine].up.set(up)

    def observe_weights(self, engine: str, source: str, seconds: float) -> None:
        """An engine has begun, with weights from there; "" for one without weights."""
        self._series.weights.remove_by_labels({"engine": engine})
        if source:
            self._series.weights.labels(self._model_name, engine, source).set(seconds)

    def observe_cache(self, engine: str, blocks: int, block_tokens: int, max_model_len: int) -> None:
        """An engine has begun, with room for the KV of so many blocks."""
        size = blocks * block_tokens
        self._series.cache.remove_by_labels({"engine": engine})
        said = [str(each) for each in (block_tokens, blocks, size, round(size / max_model_len, 2))]
        self._series.cache.labels(self._model_name, engine, *said).set(1)

    @_later
    def observe_rejection(self) -> None:
        """A request was refused since too much waits."""
        self._rejections.inc()

    @_later
    def observe_loss(self, engine: str) -> None:
        """An engine that had been ready is lost; its load is reset."""
        self._engines[engine].lost.inc()
        self._ended(engine)

    @_later
    def observe_stop(self, engine: str) -> None:
        """The same of one that was told to end."""
        self._ended(engine)

    def _ended(self, engine: str) -> None:
        self._engines[engine].up.set(False)
        self._engines[engine].load = NO_STATS

    @_later
    def observe_routing(self, policy: str, reason: str) -> None:
        """A sequence was placed. `reason` is one of few classes, as it is a label."""
        self._routing.labels(self._model_name, policy, reason).inc()

    @_later
    def observe_structured(self, kind: str) -> None:
        """A prompt whose outputs are to have a form was taken in; `kind` is what says which."""
        self._structured[kind].inc()

    @_later
    def observe_handoff(self) -> None:
        """A sequence was handed over to a decode instance."""
        self._handoffs.inc()

    @_later
    def observe_recovery(self, how: str, took: float, predicted: float | None, recompute: float | None) -> None:
        """An interrupted sequence continues, so many seconds after it got a place; arguments as in `Recovery`."""
        count, foretold, computed = self._recoveries[how]
        count.inc()
        self._recovery_took[how].observe(took)
        foretold.inc(took if predicted is None else predicted)
        computed.inc(took if recompute is None else recompute)

    @_later
    def observe_hedge(self, how: Literal["overtaken", "returned"]) -> None:
        """A sequence was tried elsewhere while its engine stood still, and goes on at one of both."""
        self._hedged[how].inc()

    @_later
    def observe_lacking(self, images: int) -> None:
        """Nothing came of what another instance was to make of so many images."""
        self._lacking.inc(images)

    @_later
    def observe_isolation(self, verdict: Literal["suspected", "refused"]) -> None:
        """A sequence may have broken an engine, or has."""
        self._isolated[verdict].inc()

    def observe_recorded(self, outcome: Literal["written", "dropped"], requests: int) -> None:
        """Requests were recorded, or were to be. From any thread."""
        self._recorded[outcome].inc(requests)

    @_later
    def observe_first_token(self, seconds: float) -> None:
        """An output's first token, `seconds` after the request arrived. Counts one generated token."""
        self._ttft.observe(seconds)
        self._generated.tokens += 1

    @_later
    def observe_prediction(self, predicted: float, actual: float) -> None:
        """The error of a predicted time to first token, in seconds."""
        self._prediction.observe(predicted - actual)

    def observe_inter_token(self, seconds: float, tokens: int) -> None:
        """`tokens` more came together, this long after the one before them. Counts them as generated."""
        if tokens:
            self._generated.tokens += tokens
            self._intervals.observe(seconds / tokens, tokens)

    def observe_together(self, tokens: int) -> None:
        """`tokens` arrived together with the first one; they have no inter-token time."""
        self._generated.tokens += tokens

    @_later
    def observe_request(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._prompt_tokens.inc(record.prompt_tokens)
        self._cached_tokens.inc(record.cached_tokens)
        if record.status == 200:
            for field, histogram in self._sizes.items():
                if field == "prompt_tokens" or record.max_tokens != 0:  # else it was embedded
                    histogram.observe(getattr(record, field) or 0)
            self._computed.observe(record.prompt_tokens - record.cached_tokens)
        self._classes[record.service_class].observe(record)
        if record.finish_reason is not None:
            self._success[record.finish_reason].inc()
        if record.tpot is not None:
            self._tpot.observe(record.tpot)
        for phase, histogram in self._phases.items():
            seconds = getattr(record, phase)
            if seconds is not None:
                histogram.observe(seconds)
        if record.prefill is not None:
            self._inference.observe(record.prefill + (record.decode or 0.0))

    def _count(self) -> None:
        notes, self._notes = self._notes, []
        for observe, args in notes:
            observe(self, *args)
        for engine in self._engines.values():
            engine.show()

    def _counter(self, name: str, help: str) -> Counter:
        """`name` without `_total`, which the exposition appends."""
        return Counter(PREFIX + name, help, ["model_name"], registry=self.registry).labels(self._model_name)

    def _counters(self, name: str, help: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """The same by the value of a further label."""
        counter = Counter(PREFIX + name, help, ["model_name", label], registry=self.registry)
        return {value: counter.labels(self._model_name, value) for value in values}

    def _histogram(self, name: str, help: str, bounds: Sequence[float]) -> _Buckets:
        metric = _Histogram(PREFIX + name, help, ["model_name"], bounds)
        self.registry.register(metric)
        return metric.labels(self._model_name)


def _percentiles(seconds: Iterable[float]) -> dict[str, float] | None:
    """In ms; None of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return {f"p{q}": 1e3 * ordered[min(len(ordered) * q // 100, len(ordered) - 1)] for q in (50, 95)}
