"""What waits in a frontend: how much of it, and what is done about it meanwhile."""

import asyncio
import threading

import pytest

from penstock.core.errors import InvalidRequest, Overloaded
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import FinishReason, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.kv.keys import extend_keys
from penstock.service import frontend as service
from penstock.service.frontend import AT_ONCE, CACHES_QUEUED, LONG_TEXT
from tests.helpers.frontends import ids_of, over, run, submit, value
from tests.helpers.waiting import until


def test_a_full_queue_refuses_and_recovers(tokenizer):
    async def scenario(frontend, channel, clock):
        frontend._max_requests = 3
        _, names = await submit(frontend, params=SamplingParams(n=2))
        with pytest.raises(Overloaded) as caught:
            frontend.submit([[1]], SamplingParams(n=2), request_id="b")
        assert 1 <= caught.value.retry_after <= 60
        assert len(channel.enqueued()) == 2
        channel.report(TokenOutput(names[0], [5], finish=FinishReason.LENGTH))
        await until(lambda: len(frontend.engine_client.flights) == 1)
        frontend.submit([[1]], SamplingParams(n=2), request_id="b")

    run(tokenizer, scenario)


def test_the_queue_is_bounded_in_tokens_and_says_how_long_it_is(tokenizer):
    async def scenario(frontend, channel, clock):
        frontend._max_queued_tokens = 100
        _, (first,) = await submit(frontend, [1] * 60)
        _, (second,) = await submit(frontend, [1] * 40)
        with pytest.raises(Overloaded, match="100 prompt tokens wait for their first token, at most 100"):
            frontend.submit([[1]], SamplingParams(), request_id="b")
        clock.advance(2.0)
        channel.report(TokenOutput(first, [5]))
        await until(lambda: frontend.engine_client.dispatcher.queue.tokens == 40)
        clock.advance(2.0)
        with pytest.raises(Overloaded) as caught:  # 60 tokens in 4 s, and 40 of them wait
            frontend.submit([[1] * 61], SamplingParams(), request_id="b")
        assert caught.value.retry_after == pytest.approx(40 / 15)
        await submit(frontend, [1] * 60)
        frontend.release([second])
        assert frontend.engine_client.dispatcher.queue.tokens == 60

    run(tokenizer, scenario)


def test_what_is_longer_than_the_queue_has_its_turn_alone(tokenizer):
    async def scenario(frontend, channel, clock):
        frontend._max_queued_tokens = 10
        generation, _ = await submit(frontend, [1] * 50)
        with pytest.raises(Overloaded):
            frontend.submit([[1]], SamplingParams(), request_id="b")
        generation.cancel()
        await submit(frontend, [1] * 50)

    run(tokenizer, scenario)


def test_without_a_limit_the_queue_holds_what_the_caches_hold_a_few_times(tokenizer):
    async def scenario(frontend, channels, clock):
        limit = CACHES_QUEUED * BLOCK_TOKENS * (4 + 4)
        generations = [frontend.submit([[1] * 64], SamplingParams(), request_id="r") for _ in range(limit // 64)]
        with pytest.raises(Overloaded, match=f"at most {limit}"):
            frontend.submit([[1]], SamplingParams(), request_id="b")
        assert len(generations) == 32

    run(tokenizer, scenario, "a", "b")


def test_texts_that_wait_for_the_tokenizer_are_bounded(tokenizer):
    async def scenario(frontend, channel, clock):
        frontend._max_requests = 3
        text = "some text " * AT_ONCE
        waiting = [asyncio.ensure_future(frontend.encode(text, True)) for _ in range(5)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [list] * 3 + [Overloaded] * 2
        assert await frontend.encode(text, True) == results[0]

    run(tokenizer, scenario)


def test_prompts_are_taken_as_a_whole_or_not_at_all(tokenizer):
    async def scenario(frontend, channel, clock):
        frontend._max_requests, frontend._max_queued_tokens = 3, 100
        first, _ = await submit(frontend, [1] * 50)
        with pytest.raises(Overloaded, match="1 sequences, at most 3"):
            frontend.submit([[1], [2], [3]], SamplingParams(), request_id="b")
        with pytest.raises(Overloaded, match="at most 100"):
            frontend.submit([[1] * 30, [2] * 30], SamplingParams(), request_id="b")
        with pytest.raises(InvalidRequest, match="empty"):
            frontend.submit([[1], []], SamplingParams(), request_id="b")
        assert len(channel.enqueued()) == len(frontend.engine_client.flights) == 1
        first.cancel()
        frontend.submit([[1], [2], [3]], SamplingParams(), request_id="b")

    run(tokenizer, scenario)


def test_what_could_never_be_held_is_no_matter_of_load(tokenizer):
    async def scenario(frontend, channel, clock):
        frontend._max_requests = 3
        for prompts, n, field in (([[1]] * 4, 1, "prompt"), ([[1], [2]], 2, "n")):
            with pytest.raises(InvalidRequest, match="are 4 sequences, at most 3") as caught:
                frontend.submit(prompts, SamplingParams(n=n), request_id="b")
            assert caught.value.field == field
        assert not channel.enqueued()

    run(tokenizer, scenario)


def test_what_a_client_does_not_take_is_joined(tokenizer):
    async def scenario(frontend, channel, clock):
        generation, names = await submit(frontend, params=SamplingParams(n=2, max_tokens=90))
        for start in range(90):
            for name in names:
                channel.report(TokenOutput(name, [5 + start], start=start))
        channel.report(*(TokenOutput(name, [7], start=90, finish=FinishReason.LENGTH) for name in names))
        await until(lambda: not frontend.engine_client.flights)
        assert len(generation._deltas) <= 22
        deltas = await generation.next()
        for index in range(2):
            own = [delta for delta in deltas if delta.index == index]
            assert [token for delta in own for token in delta.tokens] == [*range(5, 95), 7]
            assert [delta.finish_reason for delta in own if delta.finish_reason] == ["length"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.service.generation.MOST_DELTAS", 20)
        run(tokenizer, scenario)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("at_once", [69, 70])
def test_prefix_keys_of_long_prompts_are_computed_off_the_event_loop(tokenizer, monkeypatch, wanted, at_once):
    hashed_in = []

    def hashing(*args):
        hashed_in.append(threading.current_thread().name)
        extend_keys(*args)

    monkeypatch.setattr("penstock.service.frontend.extend_keys", hashing)
    monkeypatch.setattr("penstock.service.frontend.AT_ONCE", at_once)

    async def scenario(frontend, channel, clock):
        frontend.placement.wants_keys = wanted
        prompt = list(range(70))
        await submit(frontend, prompt, SamplingParams(max_tokens=5, n=2))
        keys = []
        extend_keys(keys, b"root", prompt, 1)
        assert [asked.keys for asked in frontend.placement.asked] == [keys if wanted else []] * 2
        asked = frontend.placement.asked[0]
        assert (asked.prompt_tokens, asked.max_tokens) == (70, 5)
        labels = {"policy": "scripted", "reason": "because"}
        assert value(frontend, "penstock:routing_decisions_total", **labels) == 2
        assert [name.startswith("tokenizer") for name in hashed_in] == [at_once < 70] * wanted
        await submit(frontend, prompt[:63])
        assert len(hashed_in) == wanted  # no block is full

    run(tokenizer, scenario)


def test_what_is_cancelled_while_it_is_hashed_is_never_placed(tokenizer, monkeypatch):
    monkeypatch.setattr("penstock.service.frontend.AT_ONCE", 0)

    async def scenario(frontend, channel, clock):
        frontend.placement.wants_keys = True
        going, hold = frontend.submit([[1] * 64], SamplingParams(), request_id="r"), threading.Event()
        frontend._workers.submit(hold.wait), frontend._workers.submit(hold.wait)
        gone = frontend.submit([[2] * 64], SamplingParams(), request_id="s")
        gone.cancel()
        hold.set()
        last, ids = await submit(frontend, [3] * 64)
        assert {asked.request_id for asked in frontend.placement.asked} == {*ids_of(going), *ids}
        assert not over(last)

    run(tokenizer, scenario)


def test_bytes_of_text_that_waits_are_bounded_and_a_text_of_any_size_finds_room(tokenizer, monkeypatch):
    monkeypatch.setattr(service, "MAX_TEXT_BYTES", 10 * AT_ONCE)
    text = "some text " * AT_ONCE  # as long as the bound: it counts as half of it

    async def scenario(frontend, channel, clock):
        results = await asyncio.gather(*(frontend.encode(text, True) for _ in range(4)), return_exceptions=True)
        assert [type(result) for result in results] == [list] * 2 + [Overloaded] * 2
        assert results[2].retry_after > 0
        assert await frontend.encode(text * 2, True)

    run(tokenizer, scenario)


def test_a_client_that_leaves_gives_its_bytes_back_when_the_thread_is_done(tokenizer, monkeypatch):
    monkeypatch.setattr(service, "MAX_TEXT_BYTES", 10 * AT_ONCE)
    text = "some text " * AT_ONCE
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def encode(self, *args):
            begun.set()
            assert go_on.wait(10)
            return [1]

    async def scenario(frontend, channel, clock):
        frontend.tokenizer = Slow()
        asked = [asyncio.ensure_future(frontend.encode(text, True)) for _ in range(2)]
        await until(begun.is_set)
        for one_asked in asked:
            one_asked.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        with pytest.raises(Overloaded):
            await asyncio.gather(frontend.encode(text, True), frontend.encode(text, True))
        go_on.set()
        await until(lambda: frontend._encoding == frontend._encoding_bytes == 0)

    run(tokenizer, scenario)


def test_shorter_texts_do_not_wait_for_long_ones(tokenizer):
    begun, go_on = threading.Event(), threading.Event()

    class SlowIfLong:
        def encode(self, text, *args):
            if len(text) >= LONG_TEXT:
                begun.set()
                assert go_on.wait(10)
            return [len(text)]

    async def scenario(frontend, channel, clock):
        frontend.tokenizer = SlowIfLong()
        waiting = [asyncio.ensure_future(frontend.encode("a" * LONG_TEXT, True)) for _ in range(4)]
        await until(begun.is_set)
        assert await frontend.encode("a" * (LONG_TEXT - 1), True) == [LONG_TEXT - 1]
        assert not any(one_waiting.done() for one_waiting in waiting)
        go_on.set()
        assert await asyncio.gather(*waiting) == [[LONG_TEXT]] * 4

    run(tokenizer, scenario)


def test_a_conversation_has_no_more_messages_than_the_context_has_tokens(tokenizer):
    async def scenario(frontend, channel, clock):
        most = frontend.max_model_len
        with pytest.raises(InvalidRequest, match=f"messages: {most + 1} messages, at most {most}"):
            await frontend.encode_chat(
                [{"role": "user", "content": "a"}] * (most + 1),
                size=1,
                add_generation_prompt=True,
                template_kwargs=None,
            )

    run(tokenizer, scenario)
