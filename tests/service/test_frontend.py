"""The frontend against a scripted engine: delivery, stop strings, cancellation, loss."""

import asyncio
import random

import msgspec
import pytest

from penstock.core.clock import ManualClock
from penstock.core.errors import EngineFailure, InvalidRequest, Overloaded, Unavailable
from penstock.core.messages import Cancel, EngineStats, Enqueue, Failed, Hello, Ready, Refused, StepReport
from penstock.core.request import FinishReason, Timing, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.obs.metrics import Metrics
from penstock.service.checkpoint import DEMO, read_defaults
from penstock.service.frontend import STUCK_AFTER, Frontend
from penstock.text.tokenizer import Tokenizer

STATS = EngineStats(
    running=1, waiting=0, used_blocks=1, num_blocks=4, preemptions=0, prefix_queries=0, prefix_hits=0, steps=1
)
READY = Ready(
    protocol=1, max_model_len=100, vocab_size=4096, num_blocks=4, token_budget=64, device="cpu", dtype="float32"
)


class ScriptedLink:
    """An engine that says what the test tells it to say."""

    def __init__(self):
        self.sent = []
        self.events = asyncio.Queue()

    def send(self, command):
        self.sent.append(command)

    async def receive(self):
        event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def close(self):
        pass

    def report(self, *outputs):
        self.events.put_nowait(StepReport(list(outputs), STATS, 1))

    def enqueued(self):
        return [c.request for c in self.sent if isinstance(c, Enqueue)]

    def cancelled(self):
        return [r for c in self.sent if isinstance(c, Cancel) for r in c.request_ids]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(DEMO)


def run(tokenizer, scenario, ready=True):
    """Run scenario(frontend, link, clock) inside an event loop."""

    async def go():
        link, clock = ScriptedLink(), ManualClock()
        frontend = Frontend(tokenizer, ["m"], read_defaults(DEMO), link, Metrics("m"), clock, random.Random(0))
        frontend.start()
        if ready:
            link.events.put_nowait(READY)
            await frontend.wait_ready()
        try:
            await scenario(frontend, link, clock)
        finally:
            await frontend.close()

    asyncio.run(asyncio.wait_for(go(), 20))


def value(frontend, name, **labels):
    return frontend.metrics.registry.get_sample_value(name, {"model_name": "m", **labels})


async def collect(generation):
    return [delta async for delta in generation]


def test_tokens_become_text_usage_and_metrics(tokenizer):
    ids = tokenizer.encode("def join(path): return")

    async def scenario(frontend, link, clock):
        generation = frontend.submit([1, 2, 3], SamplingParams(max_tokens=50), request_id="r")
        name = link.enqueued()[0].id
        clock.advance(0.5)
        link.report(TokenOutput(name, ids[:1], cached_tokens=2))
        first = await anext(generation)
        clock.advance(0.25)
        link.report(TokenOutput(name, ids[1:], finish=FinishReason.LENGTH, timing=Timing(0.1, 0.4, 0.25)))
        rest = await collect(generation)
        assert first.text + "".join(d.text for d in rest) == tokenizer.decode(ids)
        assert rest[-1].finish_reason == "length"
        assert generation.usage.completion_tokens == len(ids)
        assert generation.usage.cached_tokens == 2
        assert link.cancelled() == []
        assert value(frontend, "penstock:time_to_first_token_seconds_sum") == 0.5
        assert value(frontend, "penstock:generation_tokens_total") == len(ids)
        assert value(frontend, "penstock:prompt_tokens_total") == 3
        assert value(frontend, "penstock:request_success_total", finished_reason="length") == 1
        tpot = value(frontend, "penstock:request_time_per_output_token_seconds_sum")
        assert tpot == pytest.approx(0.25 / (len(ids) - 1))

    run(tokenizer, scenario)


def test_a_stop_string_ends_the_text_and_the_engines_work(tokenizer):
    ids = tokenizer.encode("one two three four")

    async def scenario(frontend, link, clock):
        generation = frontend.submit([1], SamplingParams(stop="thr"), request_id="r")
        name = link.enqueued()[0].id
        for token in ids:
            link.report(TokenOutput(name, [token]))
        deltas = await collect(generation)
        assert "".join(d.text for d in deltas) == "one two "
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "thr")
        assert link.cancelled() == [name]
        assert generation.usage.completion_tokens < len(ids)

    run(tokenizer, scenario)


def test_several_outputs_come_interleaved(tokenizer):
    async def scenario(frontend, link, clock):
        generation = frontend.submit([1], SamplingParams(n=3, seed=5), request_id="r")
        names = [r.id for r in link.enqueued()]
        assert [r.seed for r in link.enqueued()] == [5, 6, 7]
        for i in (2, 0, 1):
            link.report(TokenOutput(names[i], [20 + i], finish=FinishReason.LENGTH))
        deltas = await collect(generation)
        assert sorted((d.index, d.tokens[0]) for d in deltas) == [(0, 20), (1, 21), (2, 22)]
        assert generation.usage.prompt_tokens == 1
        assert generation.usage.completion_tokens == 3

    run(tokenizer, scenario)


def test_stop_tokens_are_reported_unless_they_are_the_models_own(tokenizer):
    eos = next(iter(read_defaults(DEMO).eos_ids))

    async def scenario(frontend, link, clock):
        for stop, want in ((eos, None), (30, 30)):
            generation = frontend.submit([1], SamplingParams(stop_token_ids=(30,)), request_id="r")
            link.report(TokenOutput(link.enqueued()[-1].id, [stop], finish=FinishReason.STOP, stop_token=stop))
            (delta,) = await collect(generation)
            assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", want)

    run(tokenizer, scenario)


def test_cancel_reaches_the_engine_once_and_late_tokens_are_dropped(tokenizer):
    async def scenario(frontend, link, clock):
        generation = frontend.submit([1], SamplingParams(n=2), request_id="r")
        names = [r.id for r in link.enqueued()]
        link.report(TokenOutput(names[0], [20], finish=FinishReason.LENGTH))
        await anext(generation)
        generation.cancel()
        generation.cancel()
        link.report(TokenOutput(names[1], [21]))
        assert await collect(generation) == []
        assert link.cancelled() == [names[1]]
        assert value(frontend, "penstock:request_success_total", finished_reason="abort") == 1

    run(tokenizer, scenario)


@pytest.mark.parametrize("event", [Failed("out of memory"), msgspec.DecodeError("nonsense")])
def test_a_lost_engine_ends_every_request_with_an_error(tokenizer, event):
    async def scenario(frontend, link, clock):
        generations = [frontend.submit([1], SamplingParams(n=2), request_id="r") for _ in range(3)]
        assert frontend.healthy
        link.events.put_nowait(event)
        for generation in generations:
            with pytest.raises(EngineFailure):
                await collect(generation)
        assert not frontend.healthy
        assert not frontend.ready
        with pytest.raises(Unavailable):
            frontend.submit([1], SamplingParams(), request_id="r")

    run(tokenizer, scenario)


def test_numbers_that_are_none_fail_one_request_only(tokenizer):
    async def scenario(frontend, link, clock):
        broken, fine = (frontend.submit([1], SamplingParams(), request_id=r) for r in "ab")
        names = [r.id for r in link.enqueued()]
        link.report(
            TokenOutput(names[0], [], finish=FinishReason.ERROR), TokenOutput(names[1], [5], finish=FinishReason.LENGTH)
        )
        with pytest.raises(EngineFailure, match="no number"):
            await collect(broken)
        assert (await collect(fine))[-1].finish_reason == "length"

    run(tokenizer, scenario)


def test_an_answer_that_cannot_be_put_together_harms_no_other(tokenizer):
    async def scenario(frontend, link, clock):
        odd, fine = (frontend.submit([1], SamplingParams(), request_id=r) for r in "ab")
        names = [r.id for r in link.enqueued()]
        link.report(TokenOutput(names[0], ["no token"]), TokenOutput(names[1], [5], finish=FinishReason.LENGTH))
        with pytest.raises(EngineFailure):
            await collect(odd)
        assert link.cancelled() == [names[0]]
        assert (await collect(fine))[-1].finish_reason == "length"
        assert frontend.healthy

    run(tokenizer, scenario)


def test_a_refusal_is_the_users_error(tokenizer):
    async def scenario(frontend, link, clock):
        generation = frontend.submit([1], SamplingParams(), request_id="r")
        link.events.put_nowait(Refused(link.enqueued()[0].id, "too odd"))
        with pytest.raises(InvalidRequest, match="too odd"):
            await collect(generation)

    run(tokenizer, scenario)


def test_a_silent_engine_is_unhealthy(tokenizer):
    async def scenario(frontend, link, clock):
        clock.advance(STUCK_AFTER - 1)
        assert frontend.healthy
        clock.advance(2)
        assert "no sign of life" in frontend.unhealthy_reason
        link.report()
        while not frontend.healthy:
            await asyncio.sleep(0)

    run(tokenizer, scenario)


def test_a_full_queue_refuses_and_recovers(tokenizer):
    async def scenario(frontend, link, clock):
        frontend._max_requests = 3
        frontend.submit([1], SamplingParams(n=2), request_id="a")
        with pytest.raises(Overloaded) as caught:
            frontend.submit([1], SamplingParams(n=2), request_id="b")
        assert 1 <= caught.value.retry_after <= 60
        assert len(link.enqueued()) == 2
        link.report(TokenOutput(link.enqueued()[0].id, [5], finish=FinishReason.LENGTH))
        while len(frontend._generations) > 1:
            await asyncio.sleep(0)
        frontend.submit([1], SamplingParams(n=2), request_id="b")

    run(tokenizer, scenario)


def test_nothing_is_accepted_before_the_engine_is_ready(tokenizer):
    async def scenario(frontend, link, clock):
        assert isinstance(link.sent[0], Hello)
        assert not frontend.ready
        with pytest.raises(Unavailable, match="loading"):
            frontend.submit([1], SamplingParams(), request_id="r")

    run(tokenizer, scenario, ready=False)
