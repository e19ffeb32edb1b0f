"""One trace for a request: what is in it, and what it hangs from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from penstock.core.errors import ConfigError
from penstock.core.sampling import SamplingParams
from penstock.obs.logs import RequestRecord
from penstock.obs.tracing import CURRENT_TRACE, Tracing, otlp_tracing
from tests.helpers.traces import receiving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
RECORD = RequestRecord(
    request_id="abc", model="m", instance="p0>d1", prompt_tokens=12, cached_tokens=3, completion_tokens=40,
    finish_reason="stop", ttft=0.5, tpot=0.02, e2e=1.5, queue=0.1, prefill=0.3, decode=1.0, seed=7, slo_met=True,
)  # fmt: skip


def traced(record: RequestRecord | None = RECORD, status: int = 200, headers: dict[str, str] = GIVEN) -> dict[str, Any]:
    """Spans of one exchange, by name."""
    exporter = InMemorySpanExporter()
    trace = Tracing(SimpleSpanProcessor(exporter)).begin("POST", "/v1/chat/completions", headers)
    assert CURRENT_TRACE.get() is trace
    if record is not None:
        trace.prompt_ended(record, SamplingParams(n=2, temperature=0.5, max_tokens=50))
    trace.end("/v1/chat/completions", status)
    assert CURRENT_TRACE.get() is None
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds(span: Any) -> float:
    return (span.end_time - span.start_time) / 1e9


def test_one_trace_from_http_to_decode() -> None:
    spans = traced()
    http, chat = spans["POST /v1/chat/completions"], spans["chat m"]
    assert set(spans) == {http.name, chat.name, "queue", "prefill", "decode"}
    assert {span.context.trace_id for span in spans.values()} == {int(TRACE, 16)}
    assert http.parent.span_id == int(PARENT, 16)
    assert chat.parent.span_id == http.context.span_id
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(phase.parent.span_id == chat.context.span_id for phase in phases)
    assert [seconds(phase) for phase in phases] == pytest.approx([0.2, 0.3, 1.0], abs=1e-6)
    assert [chat.start_time, *(p.end_time for p in phases)] == [*(p.start_time for p in phases), chat.end_time]


def test_attributes_follow_the_conventions() -> None:
    spans = traced()
    chat = dict(spans["chat m"].attributes)
    assert chat.items() >= {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "penstock", "gen_ai.request.model": "m",
        "gen_ai.response.model": "m", "gen_ai.response.id": "abc", "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 12, "gen_ai.usage.output_tokens": 40, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 50, "gen_ai.request.choice.count": 2, "gen_ai.request.seed": 7,
        "gen_ai.latency.time_to_first_token": 0.5, "penstock.instance": "p0>d1", "penstock.slo_met": True,
    }.items()  # fmt: skip
    http = dict(spans["POST /v1/chat/completions"].attributes)
    assert http["http.response.status_code"] == 200
    assert http["http.route"] == "/v1/chat/completions"


def test_what_failed_or_never_began() -> None:
    failed = RequestRecord(request_id="a", model="m", e2e=0.1, status=500)
    spans = traced(failed, 500)
    assert set(spans) == {"POST /v1/chat/completions", "chat m"}
    assert {span.status.status_code for span in spans.values()} == {StatusCode.ERROR}
    refused = traced(None, 400)
    assert refused["POST /v1/chat/completions"].status.status_code is StatusCode.UNSET


def test_without_timing_of_an_engine_the_phases_before_the_first_token_are_not_guessed() -> None:
    spans = traced(RequestRecord(request_id="a", model="m", finish_reason="stop", ttft=0.2, e2e=0.5))
    assert set(spans) == {"POST /v1/chat/completions", "chat m", "decode"}
    assert seconds(spans["decode"]) == pytest.approx(0.3, abs=1e-6)


@pytest.mark.parametrize("given", [{}, {"traceparent": "nonsense"}, {"traceparent": "00-" + "0" * 32 + "-1-01"}])
def test_without_a_parent_a_trace_begins(given: dict[str, str]) -> None:
    span = traced(headers=given)["POST /v1/chat/completions"]
    assert span.parent is None


def test_a_client_that_does_not_sample_gets_no_spans() -> None:
    assert traced(headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}) == {}


@pytest.mark.parametrize("endpoint", ["here", "grpc://a:4317", "http://", "http://[::1/", ""])
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp-traces-endpoint: "):
        otlp_tracing(endpoint)


def test_without_the_extra_it_says_what_to_install() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
import penstock.obs.tracing as tracing
try:
    tracing.otlp_tracing("http://127.0.0.1:4318")
except tracing.ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("otlp-traces-endpoint: the package opentelemetry"), done.stderr
    assert "install penstock[otel]" in done.stdout


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[Any]]]:
    with receiving() as address_and_got:
        yield address_and_got


def test_spans_reach_a_receiver_before_the_end(receiver: tuple[str, list[Any]], monkeypatch: Any) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_COMPRESSION", raising=False)
    url, got = receiver
    tracing = otlp_tracing(url)
    trace = tracing.begin("POST", "/v1/completions", {})
    trace.prompt_ended(RECORD, SamplingParams())
    trace.end("/v1/completions", 200)
    tracing.close()
    ((path, message),) = got
    assert path == "/v1/traces"
    (resource,) = message.resource_spans
    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert attributes["service.name"] == "penstock"
    names = {span.name for scope in resource.scope_spans for span in scope.spans}
    assert {"POST /v1/completions", "text_completion m", "queue", "prefill", "decode"} == names
