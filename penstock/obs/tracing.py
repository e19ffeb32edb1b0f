"""OpenTelemetry traces: one span per HTTP exchange, below it one per prompt, and below that its phases.

Spans of a prompt are made at its end, from its record: there is no work per token, and none in engines.
opentelemetry is imported only with an endpoint: it is the extra `penstock[otel]`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError
from penstock.core.sampling import SamplingParams
from penstock.obs.logs import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

FLAG = "otlp-traces-endpoint"
SERVICE = "penstock"  # unless OTEL_SERVICE_NAME says otherwise
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
EMBEDS = "embeddings"
# attribute -> field of SamplingParams
ASKED = {
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.presence_penalty": "presence_penalty",
    "gen_ai.request.max_tokens": "max_tokens",
}
# attribute -> field of RequestRecord. The latencies have the names that vLLM gives them, in seconds.
BECAME = {
    "gen_ai.request.model": "model",
    "gen_ai.request.seed": "seed",
    "gen_ai.response.id": "request_id",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.cache_read.input_tokens": "cached_tokens",
    "gen_ai.usage.output_tokens": "completion_tokens",
    "gen_ai.latency.time_to_first_token": "ttft",
    "gen_ai.latency.e2e": "e2e",
    "gen_ai.latency.time_in_queue": "queue",
    "gen_ai.latency.time_in_model_prefill": "prefill",
    "gen_ai.latency.time_in_model_decode": "decode",
    "penstock.instance": "instance",
    "penstock.slo_met": "slo_met",
}

# The trace of the exchange that a task serves; None without tracing
CURRENT_TRACE: ContextVar[ExchangeTrace | None] = ContextVar("penstock_trace", default=None)


class Tracing:
    """
    Args:
        processor: receives every ended span.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("penstock")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, path: str, headers: Mapping[str, str]) -> ExchangeTrace:
        """Begin an exchange's span, in the trace that its `traceparent` names, or in a new one."""
        from opentelemetry.trace import SpanKind

        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        context = self._propagator.extract(given)
        attributes = {"http.request.method": method, "url.path": path}
        span = self._tracer.start_span(method, context, SpanKind.SERVER, attributes)
        return ExchangeTrace(self, span, path)

    def child(self, name: str, parent: Span, start: int, attributes: Mapping[str, Any] | None = None) -> Span:
        """A span of a phase that has ended; `start` in nanoseconds since 1970."""
        from opentelemetry.trace import set_span_in_context

        return self._tracer.start_span(
            name, set_span_in_context(parent), attributes=dict(attributes or {}), start_time=start
        )

    def traceparent(self, span: Span) -> str:
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier["traceparent"]

    def close(self) -> None:
        """Send the remaining spans; returns within the exporter's timeout."""
        self._provider.shutdown()


class ExchangeTrace:
    """The span of one HTTP exchange, and what happens in it."""

    def __init__(self, tracing: Tracing, span: Span, path: str) -> None:
        self._tracing = tracing
        self._span = span
        self._path = path
        self._token = CURRENT_TRACE.set(self)

    @property
    def traceparent(self) -> str:
        """For the answer, so that the client can find the trace."""
        return self._tracing.traceparent(self._span)

    def prompt_ended(self, record: RequestRecord, params: SamplingParams) -> None:
        """A prompt's outputs have just ended."""
        if not self._span.is_recording():
            return
        end = time.time_ns()
        start = end - _nanoseconds(record.e2e or 0.0)
        operation = EMBEDS if record.max_tokens == 0 else OPERATIONS.get(self._path, "text_completion")
        attributes = _attributes(record, params) | {"gen_ai.operation.name": operation}
        span = self._tracing.child(f"{operation} {record.model}", self._span, start, attributes)
        for name, begun, ended in _phases(record, start, end):
            self._tracing.child(name, span, begun).end(ended)
        if record.finish_reason is None:
            _failed(span, str(record.status))
        span.end(end)

    def end(self, route: str, status: int) -> None:
        """The answer was sent, with this `status`."""
        CURRENT_TRACE.reset(self._token)
        method = self._span.attributes["http.request.method"] if self._span.is_recording() else ""  # type: ignore[attr-defined]
        self._span.update_name(f"{method} {route}")
        self._span.set_attribute("http.route", route)
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            _failed(self._span, str(status))
        self._span.end()


def otlp_tracing(endpoint: str) -> Tracing:
    """Traces that are sent to an OTLP receiver, over HTTP, by a thread.

    Args:
        endpoint: such as http://127.0.0.1:4318/v1/traces; without a path that one is taken.

    Raises:
        ConfigError: no URL, or the extra is not installed.
    """
    try:
        url = urlsplit(endpoint)
        good = url.scheme in ("http", "https") and bool(url.hostname)
    except ValueError:  # half an IPv6 address
        good = False
    if not good:
        raise ConfigError(f"{FLAG}: {endpoint!r}, allowed is a URL such as http://127.0.0.1:4318/v1/traces", FLAG)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        missing = error.name or "opentelemetry"
        raise ConfigError(f"{FLAG}: the package {missing} is missing, install penstock[otel]", FLAG) from None
    if url.path in ("", "/"):
        url = url._replace(path="/v1/traces")
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=url.geturl())))


def _attributes(record: RequestRecord, params: SamplingParams) -> dict[str, Any]:
    asked = {name: getattr(params, field) for name, field in ASKED.items()} if record.max_tokens != 0 else {}
    became = {name: getattr(record, field) for name, field in BECAME.items()}
    attributes = asked | became | {"gen_ai.provider.name": SERVICE, "gen_ai.response.model": record.model}
    if params.n > 1:
        attributes["gen_ai.request.choice.count"] = params.n
    if record.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [record.finish_reason]
    return {name: value for name, value in attributes.items() if value is not None}


def _phases(record: RequestRecord, start: int, end: int) -> Iterable[tuple[str, int, int]]:
    """(name, begin, end) of the phases that are known. All time before the first step counts as queueing, including
    frontend and master."""
    if record.ttft is None:
        return
    first = min(start + _nanoseconds(record.ttft), end)
    if record.prefill is not None:
        begun = max(start, first - _nanoseconds(record.prefill))
        yield "queue", start, begun
        yield "prefill", begun, first
    if record.max_tokens != 0:
        yield "decode", first, end


def _failed(span: Span, kind: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
