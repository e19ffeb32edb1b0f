"""Prometheus metrics. Those that vLLM has too have its names, labels and buckets (and more of these); with
`--metrics-compat vllm` they are exported a second time under vLLM's prefix, for dashboards made for vLLM.

Series with the label `engine` are an engine's, and the same on all frontends: take one (`max by (engine)`), not their
sum. The others count one frontend's requests: add them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Literal, TypeVarTuple, Unpack

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from penstock.core.structured_outputs import KINDS
from penstock.core.wire.engine import EngineStats
from penstock.obs.engine_metrics import EngineMetrics
from penstock.obs.families import PREFIX, Families
from penstock.obs.fleet_metrics import FleetCollector, IdealCollector
from penstock.obs.logs import RequestRecord
from penstock.obs.request_metrics import FIRST_TOKEN, RequestMetrics

MANY = 1024  # pending observations

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


Compat = Literal["none", "vllm"]
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
        families = Families(model_name, self.registry)
        self._engines = EngineMetrics(model_name, self.registry, engines)
        self._requests = RequestMetrics(families)
        self._routing = Counter(
            PREFIX + "routing_decisions",
            "Places given to sequences, by policy and reason",
            ["model_name", "policy", "reason"],
            registry=self.registry,
        )
        self._structured = families.counters(
            "structured_requests", "Prompts whose outputs are to have a form, by what says which", "kind", KINDS
        )
        self._relocations = Counter(
            PREFIX + "relocations",
            "Sequences that were told where to go on, by reason",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._handoffs = families.counter(
            "handoffs", "Sequences that went on in another instance, after their prompt or since"
        )
        self._lacking = families.counter(
            "image_fallbacks", "Images that another instance was to look at, and that were looked at where prefilled"
        )
        self._make_recoveries(families)
        self._hedged = families.counters(
            "hedged_requests",
            "Sequences that began again elsewhere while their engine stood still; overtaken: they went on there; "
            "returned: the engine went on first",
            "how",
            ("overtaken", "returned"),
        )
        self._isolated = families.counters(
            "isolated_requests",
            "Sequences that were in a step that broke an engine, and went on alone; refused: that broke another one so",
            "verdict",
            ("suspected", "refused"),
        )
        self._batch_lines = families.gauges(
            "batch_lines",
            "Lines that are not answered, of batches that this frontend runs",
            "state",
            ("queued", "running"),
        )
        self._batch_done = families.counters(
            "batch_lines_answered", "Lines of batches that were answered", "outcome", ("completed", "failed")
        )
        self._recorded = families.counters(
            "recorded_requests",
            "Requests that ended while they were to be recorded for a replay; dropped: they are not in the record",
            "outcome",
            ("written", "dropped"),
        )

    def set_batch_lines(self, queued: int, running: int) -> None:
        """Of the batches that this process runs."""
        self._batch_lines["queued"].set(queued)
        self._batch_lines["running"].set(running)

    def observe_batch_line(self, failed: bool) -> None:
        self._batch_done["failed" if failed else "completed"].inc()

    def _make_recoveries(self, families: Families) -> None:
        """What went on after a loss: how often, how long that took, and what was predicted."""
        how = "recompute", "cache", "fetch", "remap"
        self._recovery_took = families.histograms(
            "recovery_seconds", "From an interrupted sequence's new place to its next token", "how", how, FIRST_TOKEN
        )
        counters = [
            families.counters(name, help, "how", how)
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

    @property
    def generated_tokens(self) -> int:
        """So far."""
        self._count()
        return self._generated.tokens

    def attainment(self) -> dict[str, dict[str, int]]:
        """Of each service class: how many of the last requests with targets there are, and that kept them."""
        self._count()
        return self._requests.attainment()

    def latency(self) -> dict[str, dict[str, Any]]:
        """Of each service class: percentiles of the last requests, in ms."""
        self._count()
        return self._requests.latency()

    def prefixes(self) -> dict[str, Any]:
        """Prompt tokens that engines have looked up, and those that were found, by where: a tier, or "peer"."""
        self._count()
        return self._engines.prefixes()

    @_later
    def observe_stats(self, engine: str, stats: EngineStats, step_tokens: int) -> None:
        """Set an engine's load and totals. A total that decreased means that the engine was restarted."""
        self._engines.observe(engine, stats, step_tokens)

    @_later
    def add_engine(self, engine: str) -> None:
        """An instance has joined. No effect when it is known."""
        self._engines.add(engine)

    @_later
    def forget_engine(self, engine: str) -> None:
        """An instance has left: its series end."""
        self._engines.forget(engine)

    @_later
    def observe_queue(self, waiting: int) -> None:
        """The length of the master's queue."""
        self._engines.observe_queue(waiting)

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
        self._engines.observe_up(engine, up)

    def observe_weights(self, engine: str, source: str, seconds: float) -> None:
        """An engine has begun, with weights from there; "" for one without weights."""
        self._engines.observe_weights(engine, source, seconds)

    def observe_cache(self, engine: str, blocks: int, block_tokens: int, max_model_len: int) -> None:
        """An engine has begun, with room for the KV of so many blocks."""
        self._engines.observe_cache(engine, blocks, block_tokens, max_model_len)

    @_later
    def observe_rejection(self) -> None:
        """A request was refused since too much waits."""
        self._requests.rejections.inc()

    @_later
    def observe_loss(self, engine: str) -> None:
        """An engine that had been ready is lost; its load is reset."""
        self._engines.observe_end(engine, lost=True)

    @_later
    def observe_stop(self, engine: str) -> None:
        """The same of one that was told to end."""
        self._engines.observe_end(engine, lost=False)

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
    def observe_relocation(self, reason: str) -> None:
        """A sequence that runs is to go on at another instance, or where it is."""
        self._relocations.labels(self._model_name, reason).inc()

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
        self._requests.ttft.observe(seconds)
        self._generated.tokens += 1

    @_later
    def observe_prediction(self, predicted: float, actual: float) -> None:
        """The error of a predicted time to first token, in seconds."""
        self._requests.prediction.observe(predicted - actual)

    def observe_inter_token(self, seconds: float, tokens: int) -> None:
        """`tokens` more came together, this long after the one before them. Counts them as generated."""
        if tokens:
            self._generated.tokens += tokens
            self._requests.intervals.observe(seconds / tokens, tokens)

    def observe_together(self, tokens: int) -> None:
        """`tokens` arrived together with the first one; they have no inter-token time."""
        self._generated.tokens += tokens

    @_later
    def observe_request(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._requests.observe(record)

    def _count(self) -> None:
        notes, self._notes = self._notes, []
        for observe, args in notes:
            observe(self, *args)
        self._engines.show()
