"""What is written down of a request at its end."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.core.clock import ManualClock
from penstock.core.errors import ClientTooSlow, EngineFailure
from penstock.core.request import FinishReason, Hypothesis, Request, Timing, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.obs.logs import Format, log_ended
from penstock.obs.metrics import Metrics
from penstock.obs.tracing import Tracing
from penstock.service.checkpoint import DEMO
from penstock.service.generation import MOST_UNTAKEN, Generation
from penstock.text.tokenizer import Tokenizer


class Owner:
    tokenizer = Tokenizer(DEMO)
    log_format: Format = "json"

    def __init__(self) -> None:
        self.metrics = Metrics("m", ["e0"])
        self.clock = ManualClock()
        self.released: list[str] = []

    def release(self, sequence_ids: Any) -> None:
        self.released += sequence_ids


def begin(owner: Owner, ttft_ms: float | None = None, tpot_ms: float | None = None) -> Generation:
    params = SamplingParams(max_tokens=9)
    request = Request(
        id="r", prompt=[5, 6, 7], params=params, seed=1, stop_ids=frozenset(), max_tokens=9, ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
    )  # fmt: skip
    generation = Generation(owner, "r", [request], params, owner.clock.now(), "m")
    generation.routed("e0")
    return generation


def say(owner: Owner, generation: Generation, tokens: int, *, last: bool = False) -> None:
    output = TokenOutput("r", [50] * tokens)
    if last:
        output.finish, output.timing = FinishReason.LENGTH, Timing(queue=0.1, prefill=0.4, decode=1.0)
    generation.receive(0, output, owner.clock.now())


@pytest.fixture
def line(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "penstock.request")

    def read() -> dict[str, Any]:
        log_ended()
        (record,) = caplog.records
        return json.loads(record.message)

    return read


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "met"),
    [
        (None, None, None),
        (500.0, None, True),
        (499.0, None, False),
        (None, 250.0, True),
        (None, 249.0, False),
        (500.0, 249.0, False),
        (600.0, 300.0, True),
    ],
)
def test_promises(line: Any, ttft_ms: float | None, tpot_ms: float | None, met: bool | None) -> None:
    owner = Owner()
    generation = begin(owner, ttft_ms, tpot_ms)
    owner.clock.advance(0.5)
    say(owner, generation, 1)
    owner.clock.advance(1.0)
    say(owner, generation, 4, last=True)
    written = line()
    assert (written["slo_met"], written["service_class"]) == (met, "online")
    assert (written["ttft"], written["tpot"]) == (0.5, 0.25)
    assert (written["instance"], written["prompt_tokens"], written["completion_tokens"]) == ("e0", 3, 5)
    assert (written["n"], written["longest_completion"], written["max_tokens"]) == (1, 5, 9)
    assert not {"prompt", "text", "tokens", "messages"} & written.keys()


def test_what_failed_kept_no_promise_and_what_was_left_has_no_verdict(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.request")
    owner = Owner()
    begin(owner, 500.0).fail(EngineFailure("gone"))
    begin(owner, 500.0).cancel()
    log_ended()
    assert [json.loads(record.message)["slo_met"] for record in caplog.records] == [False, None]


def test_what_nobody_takes_is_given_up(line: Any) -> None:
    owner = Owner()
    generation = begin(owner)
    for _ in range(6):  # as long as somebody takes what comes it goes on
        say(owner, generation, MOST_UNTAKEN // 4)
        assert generation.take()
    for _ in range(4):
        say(owner, generation, MOST_UNTAKEN // 4)
    assert not owner.released
    say(owner, generation, 1)
    assert owner.released == ["r"]
    with pytest.raises(ClientTooSlow, match=f"{MOST_UNTAKEN + 1} tokens"):
        generation.take()
    assert line()["status"] == 408


def test_its_spans_hang_from_the_exchange_it_began_in() -> None:
    exporter, owner = InMemorySpanExporter(), Owner()
    trace = Tracing(SimpleSpanProcessor(exporter)).begin("POST", "/v1/completions", {})
    generation = begin(owner)
    owner.clock.advance(0.5)
    say(owner, generation, 1)
    assert not exporter.get_finished_spans()  # nothing happens per token
    say(owner, generation, 1, last=True)
    trace.end("/v1/completions", 200)
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["queue", "prefill", "decode", "text_completion m", "POST /v1/completions"]
    generation.cancel()  # after the end
    begin(owner).cancel()  # outside of any exchange
    assert len(exporter.get_finished_spans()) == len(names)


def test_the_results_of_a_beam_search_are_its_outputs(line: Any) -> None:
    owner = Owner()
    params = SamplingParams(n=2, use_beam_search=True, max_tokens=9, stop_token_ids=(51,))
    request = Request(id="r", prompt=[5, 6, 7], params=params, seed=1, stop_ids=frozenset([51]), max_tokens=9)
    generation = Generation(owner, "r", [request], params, owner.clock.now(), "m")
    owner.clock.advance(1.0)
    generation.receive(0, TokenOutput("r", [], cached_tokens=2), owner.clock.now())
    assert not generation.over
    owner.clock.advance(1.0)
    found = [
        Hypothesis([50, 50, 51], None, FinishReason.STOP, 51, -1.0),
        Hypothesis([50, 50, 50, 50], None, FinishReason.LENGTH, None, -2.0),
    ]
    last = TokenOutput("r", [], finish=FinishReason.STOP, hypotheses=found, cached_tokens=2)
    generation.receive(0, last, owner.clock.now())
    deltas = [delta for delta in generation.take() if delta.tokens]
    ends = [(d.index, d.tokens, d.finish_reason, d.stop_reason) for d in deltas]
    assert ends == [(0, [50, 50, 51], "stop", 51), (1, [50] * 4, "length", None)]
    assert generation.over
    assert (generation.usage.completion_tokens, generation.usage.cached_tokens) == (7, 2)
    written = line()
    assert (written["n"], written["completion_tokens"]) == (2, 7)
    assert written["ttft"] == pytest.approx(2.0)
    assert written.get("tpot") is None
