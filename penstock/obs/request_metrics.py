"""Metrics of the requests of one frontend: how many, how large, how fast, and what of them kept its targets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import nan
from typing import Any

from prometheus_client import Counter, Gauge

from penstock.core.request import FinishReason
from penstock.obs.families import Families
from penstock.obs.logs import SERVICE_CLASSES, RequestRecord

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


class RequestMetrics:
    """
    Attributes:
        rejections: requests refused since too much waits.
        ttft, prediction: of first tokens, and of what was predicted for them, in seconds.
        intervals: between tokens.
    """

    def __init__(self, families: Families) -> None:
        self._prompt_tokens = families.counter("prompt_tokens", "Prompt tokens of finished requests")
        self._cached_tokens = families.counter("prompt_tokens_cached", "Those of them that were found in a cache")
        self.ttft = families.histogram("time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN)
        self.prediction = families.histogram(
            "predicted_minus_actual_ttft_seconds", "Time to first token: what was predicted, less what came", PREDICTION
        )
        self.intervals = families.histogram("inter_token_latency_seconds", "From one token to the next", PER_TOKEN)
        self._tpot = families.histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token after its first", PER_TOKEN
        )
        self._phases = {
            "e2e": families.histogram("e2e_request_latency_seconds", "Arrival to last token", WHOLE_REQUEST),
            "queue": families.histogram("request_queue_time_seconds", "Arrival to first step", WHOLE_REQUEST),
            "prefill": families.histogram("request_prefill_time_seconds", "First step to first token", WHOLE_REQUEST),
            "decode": families.histogram("request_decode_time_seconds", "First token to last", WHOLE_REQUEST),
            "encode": families.histogram(
                "request_encode_time_seconds", "Looking at its images, of requests with any to look at", FIRST_TOKEN
            ),
            "image_wait": families.histogram(
                "request_image_wait_seconds",
                "For which its prompt waited for images, of requests with any",
                FIRST_TOKEN,
            ),
        }
        self._inference = families.histogram(
            "request_inference_time_seconds", "First step to last token", WHOLE_REQUEST
        )
        self._sizes = {
            "prompt_tokens": families.histogram("request_prompt_tokens", "A request's prompt tokens", TOKENS),
            "completion_tokens": families.histogram("request_generation_tokens", "Tokens of all its outputs", TOKENS),
            "longest_completion": families.histogram(
                "request_max_num_generation_tokens", "Tokens of its longest output", TOKENS
            ),
            "preemptions": families.histogram(
                "request_num_preemptions", "How often its sequences lost their KV cache to others", PREEMPTIONS
            ),
            "n": families.histogram("request_params_n", "How many outputs it asked for", OUTPUTS),
            "max_tokens": families.histogram("request_params_max_tokens", "How long each might have become", TOKENS),
        }
        self._computed = families.histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were in no cache", TOKENS
        )
        self._success = families.counters(
            "request_success",
            "Requests that ended, by how",
            "finished_reason",
            [reason.value for reason in FinishReason],
        )
        self.rejections = families.counter("admission_rejections", "Requests refused since too much waits")
        self._classes = _service_classes(families)

    def observe(self, record: RequestRecord) -> None:
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

    def attainment(self) -> dict[str, dict[str, int]]:
        """Of each service class: how many of the last requests with targets there are, and that kept them."""
        return {name: {"requests": served.judged, "kept": served.kept} for name, served in self._classes.items()}

    def latency(self) -> dict[str, dict[str, Any]]:
        """Of each service class: percentiles of the last requests, in ms."""
        return {name: served.latency() for name, served in self._classes.items()}


def _service_classes(families: Families) -> dict[str, _ServiceClass]:
    goodput = families.counters(
        "goodput_requests",
        "Requests that were answered in full, and within their targets where they had any",
        "class",
        SERVICE_CLASSES,
    )
    attainment = families.gauges(
        "slo_attainment_ratio",
        f"Share that kept its targets, of the last {ATTAINMENT_OVER} requests with any; NaN without one",
        "class",
        SERVICE_CLASSES,
    )
    for ratio in attainment.values():
        ratio.set(nan)
    return {name: _ServiceClass(goodput[name], attainment[name]) for name in SERVICE_CLASSES}


def _percentiles(seconds: Iterable[float]) -> dict[str, float] | None:
    """In ms; None of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return {f"p{q}": 1e3 * ordered[min(len(ordered) * q // 100, len(ordered) - 1)] for q in (50, 95)}
