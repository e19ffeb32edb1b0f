"""Traces at the edge: which exchanges have one, and what their clients hear of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.obs.tracing import CURRENT_TRACE, Tracing

pytestmark = pytest.mark.anyio
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_an_exchange_has_a_span_and_the_answer_its_name(
    make_client: Callable[..., httpx.AsyncClient], frontend: Any
) -> None:
    exporter, seen = InMemorySpanExporter(), []
    frontend.script = lambda generation: (seen.append(CURRENT_TRACE.get()), generation.say("x", finish="stop"))
    async with make_client(tracing=Tracing(SimpleSpanProcessor(exporter))) as client:
        given = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        first = await client.post("/v1/completions", json={"prompt": "a"}, headers=given)
        second = await client.post("/v1/completions", json={"prompt": "a", "model": "?"})
        for path in ("/health", "/metrics", "/ready"):
            await client.get(path)
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["POST /v1/completions"] * 2
    assert [span.attributes["http.response.status_code"] for span in spans if span.attributes] == [200, 404]
    assert spans[0].parent is not None
    assert f"{spans[0].parent.span_id:016x}" == PARENT
    for span, response in zip(spans, (first, second), strict=True):
        trace, name = span.context.trace_id, span.context.span_id
        assert response.headers["traceparent"].startswith(f"00-{trace:032x}-{name:016x}-")
    assert first.headers["traceparent"].split("-")[1] == TRACE
    assert seen[0] is not None  # what serves the request finds it
    assert CURRENT_TRACE.get() is None
