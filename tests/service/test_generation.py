"""What is written down of a request at its end."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
from penstock.service.generation import MOST_UNTAKEN, Generation, merge
from penstock.text.detokenizer import Delta
from penstock.text.tokenizer import Tokenizer


class Owner:
    tokenizer = Tokenizer(DEMO)
    log_format: Format = "json"
    recorder = None

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
    generation = Generation(cast(Any, owner), params, owner.clock.now(), "m")
    generation.add("r", [request])
    generation.routed(0, "e0")
    return generation


def begin_several(owner: Owner, prompts: int = 1, n: int = 1) -> Generation:
    """With the prompt [p] and sequence ids pn: prompt p, its output n."""
    generation = Generation(cast(Any, owner), SamplingParams(n=n), owner.clock.now(), "m")
    for p in range(prompts):
        common = {"params": SamplingParams(n=n), "seed": 1, "stop_ids": frozenset(), "max_tokens": 99}
        requests = [Request(id=f"{p}{i}", prompt=[p], **cast(Any, common)) for i in range(n)]
        assert generation.add(f"r-{p}", requests) == p * n
    return generation


def say(owner: Owner, generation: Generation, tokens: int, *, index: int = 0, last: bool = False) -> None:
    output = TokenOutput("r", [50] * tokens)
    if last:
        output.finish, output.timing = FinishReason.LENGTH, Timing(queue=0.1, prefill=0.4, decode=1.0)
    generation.receive(index, output, owner.clock.now())


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


@pytest.mark.anyio
async def test_what_nobody_takes_is_given_up(line: Any) -> None:
    owner = Owner()
    generation = begin(owner)
    for _ in range(6):  # as long as somebody takes what comes it goes on
        say(owner, generation, MOST_UNTAKEN // 4)
        assert await generation.next()
    for _ in range(4):
        say(owner, generation, MOST_UNTAKEN // 4)
    assert not owner.released
    say(owner, generation, 1)
    assert owner.released == ["r"]
    with pytest.raises(ClientTooSlow, match=f"{MOST_UNTAKEN + 1} tokens"):
        await generation.next()
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


@pytest.mark.anyio
async def test_the_results_of_a_beam_search_are_its_outputs(line: Any) -> None:
    owner = Owner()
    params = SamplingParams(n=2, use_beam_search=True, max_tokens=9, stop_token_ids=(51,))
    request = Request(id="r", prompt=[5, 6, 7], params=params, seed=1, stop_ids=frozenset([51]), max_tokens=9)
    generation = Generation(cast(Any, owner), params, owner.clock.now(), "m")
    generation.add("r", [request])
    owner.clock.advance(1.0)
    generation.receive(0, TokenOutput("r", [], cached_tokens=2), owner.clock.now())
    assert generation._open == 2
    owner.clock.advance(1.0)
    found = [
        Hypothesis([50, 50, 51], None, FinishReason.STOP, 51, -1.0),
        Hypothesis([50, 50, 50, 50], None, FinishReason.LENGTH, None, -2.0),
    ]
    last = TokenOutput("r", [], finish=FinishReason.STOP, hypotheses=found, cached_tokens=2)
    generation.receive(0, last, owner.clock.now())
    deltas = [delta for delta in await generation.next() if delta.tokens]
    ends = [(d.index, d.tokens, d.finish_reason, d.stop_reason) for d in deltas]
    assert ends == [(0, [50, 50, 51], "stop", 51), (1, [50] * 4, "length", None)]
    assert await generation.next() == []
    assert (generation.usage.completion_tokens, generation.usage.cached_tokens) == (7, 2)
    written = line()
    assert (written["n"], written["completion_tokens"]) == (2, 7)
    assert written["ttft"] == pytest.approx(2.0)
    assert written.get("tpot") is None


@pytest.mark.anyio
async def test_a_beam_search_that_finds_less_than_was_asked_for_is_over() -> None:
    owner = Owner()
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=9, allowed_token_ids=(50, 51))
    generation = Generation(cast(Any, owner), params, owner.clock.now(), "m")
    for name in ("q", "r"):
        stop = frozenset([51])
        generation.add(name, [Request(id=name, prompt=[5], params=params, seed=1, stop_ids=stop, max_tokens=9)])
    for index, name in ((4, "r"), (0, "q")):
        found = [Hypothesis([50] * count, None, FinishReason.STOP, None, -count) for count in (1, 2)]
        output = TokenOutput(name, [], finish=FinishReason.STOP, hypotheses=found)
        generation.receive(index, output, owner.clock.now())
    assert [(d.index, d.tokens) for d in await generation.whole()] == [
        (0, [50]), (1, [50, 50]), (4, [50]), (5, [50, 50]),
    ]  # fmt: skip
    assert generation._open == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.text(max_size=3), st.lists(st.integers(), max_size=3)), min_size=1))
def test_merging_keeps_every_outputs_text_and_tokens(parts: list[tuple[int, str, list[int]]]) -> None:
    merged = merge([Delta(index, text, list(tokens)) for index, text, tokens in parts])
    assert len({delta.index for delta in merged}) == len(merged)
    for delta in merged:
        assert delta.text == "".join(text for index, text, _ in parts if index == delta.index)
        assert delta.tokens == [token for index, _, tokens in parts if index == delta.index for token in tokens]
        assert delta.logprobs is None


@pytest.mark.anyio
async def test_a_delta_never_waits_for_the_next() -> None:
    owner = Owner()
    with begin_several(owner) as generation:
        for count in (1, 2):
            say(owner, generation, count)
            assert [len(delta.tokens) for delta in await generation.next()] == [count]
        say(owner, generation, 1)
        say(owner, generation, 2, last=True)
        (last,) = await generation.next()
        assert (len(last.tokens), last.finish_reason) == (3, "length")
        assert await generation.next() == []
        assert await generation.next() == []


@pytest.mark.anyio
async def test_several_prompts_share_one_stream() -> None:
    owner = Owner()
    with begin_several(owner, prompts=2, n=2) as generation:
        say(owner, generation, 1, index=3)
        assert [delta.index for delta in await generation.next()] == [3]
        for index in range(4):
            say(owner, generation, 1, index=index, last=True)
        assert [delta.index for delta in await generation.whole()] == [0, 1, 2, 3]
        assert (generation.usage.prompt_tokens, generation.usage.completion_tokens) == (2, 5)


@pytest.mark.anyio
async def test_a_failure_comes_after_what_came_before_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.request")
    owner = Owner()
    with begin_several(owner, prompts=2) as generation:
        say(owner, generation, 1, index=1)
        generation.fail(EngineFailure("dead"))
        assert [delta.index for delta in await generation.next()] == [1]
        with pytest.raises(EngineFailure):
            await generation.next()
    assert {"00", "10"} == set(owner.released)
    log_ended()
    ended = [json.loads(record.message) for record in caplog.records]
    assert [(one["request_id"], one["status"]) for one in ended] == [("r-0", 500), ("r-1", 500)]


@pytest.mark.anyio
async def test_leaving_lets_go_of_everything() -> None:
    owner, before = Owner(), asyncio.all_tasks()
    with begin_several(owner, prompts=3) as generation:
        waiting = asyncio.create_task(generation.next())
        await asyncio.sleep(0)
        assert asyncio.all_tasks() - before == {waiting}  # nobody works for it but who asks
        waiting.cancel()
    assert owner.released == ["00", "10", "20"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
