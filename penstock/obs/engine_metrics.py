"""Metrics of engines: a series of each for every engine, which is the same in every frontend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, lt
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.core.wire.engine import EngineStats, TierStats
from penstock.obs.families import PREFIX, Buckets, Histogram

ENGINE_LABELS = ["model_name", "engine"]
CACHE_LABELS = ["block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"]
SAME = "; of the engine, so the same in every frontend"  # in the help of series with these labels
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

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

Metric = TypeVar("Metric", Counter, Gauge)


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
    step_tokens: Buckets
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


class EngineMetrics:
    """The metrics that have a series for each engine.

    Args:
        engines: those that are there at first, by name; values of the label `engine`.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry, engines: Iterable[str]) -> None:
        self._model_name, self._registry = model_name, registry
        self._metrics: list[Counter | Gauge | Histogram] = []
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
        self.step_tokens = Histogram(
            PREFIX + "iteration_tokens_total",
            "Tokens of prompts, also of those found in a cache, and of outputs in one engine step" + SAME,
            ENGINE_LABELS,
            STEP_TOKENS,
        )
        registry.register(self.step_tokens)
        self._metrics.append(self.step_tokens)
        self.cache = self._metric(Gauge, "cache_config_info", "What the KV cache is like; always 1", CACHE_LABELS)
        self._queue = self.waiting.labels(model_name, MASTER)
        self._engines = {name: self._make(name) for name in engines}

    def add(self, name: str) -> None:
        """An instance has joined. No effect when it is known."""
        if name not in self._engines:
            self._engines[name] = self._make(name)

    def forget(self, name: str) -> None:
        """An instance has left: its series end."""
        if self._engines.pop(name, None) is not None:
            for metric in self._metrics:
                metric.remove_by_labels({"engine": name})

    def observe(self, name: str, stats: EngineStats, step_tokens: int) -> None:
        """Set an engine's load and totals. A total that decreased means that the engine was restarted."""
        self._engines[name].observe(stats, step_tokens)

    def observe_queue(self, waiting: int) -> None:
        """The length of the master's queue."""
        self._queue.set(waiting)

    def observe_up(self, name: str, up: bool) -> None:
        """Whether an engine serves."""
        self._engines[name].up.set(up)

    def observe_weights(self, name: str, source: str, seconds: float) -> None:
        """An engine has begun, with weights from there; "" for one without weights."""
        self.weights.remove_by_labels({"engine": name})
        if source:
            self.weights.labels(self._model_name, name, source).set(seconds)

    def observe_cache(self, name: str, blocks: int, block_tokens: int, max_model_len: int) -> None:
        """An engine has begun, with room for the KV of so many blocks."""
        size = blocks * block_tokens
        self.cache.remove_by_labels({"engine": name})
        said = [str(each) for each in (block_tokens, blocks, size, round(size / max_model_len, 2))]
        self.cache.labels(self._model_name, name, *said).set(1)

    def observe_end(self, name: str, *, lost: bool) -> None:
        """An engine that had been ready is lost, or has ended as it was told to; its load is reset."""
        engine = self._engines[name]
        if lost:
            engine.lost.inc()
        engine.up.set(False)
        engine.load = NO_STATS

    def show(self) -> None:
        """Have the registry show the latest."""
        for engine in self._engines.values():
            engine.show()

    def prefixes(self) -> dict[str, Any]:
        """Prompt tokens that engines have looked up, and those that were found, by where: a tier, or "peer"."""
        found: dict[str, int] = {}
        for engine in self._engines.values():
            for where, tokens in engine.found.items():
                found[where] = found.get(where, 0) + tokens
        return {"prompt_tokens": sum(engine.asked for engine in self._engines.values()), "found_tokens": found}

    def _make(self, name: str) -> _Engine:
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

    def _metric(self, kind: type[Metric], name: str, help: str, labels: Sequence[str] = ()) -> Metric:
        metric = kind(PREFIX + name, help + SAME, [*ENGINE_LABELS, *labels], registry=self._registry)
        self._metrics.append(metric)
        return metric
