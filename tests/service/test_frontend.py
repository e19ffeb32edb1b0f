"""The frontend against scripted engines: delivery, stop strings, cancellation, hand-offs, loss."""

import asyncio
import random
import threading

import msgspec
import pytest

from penstock.core.clock import ManualClock
from penstock.core.errors import EngineFailure, InvalidRequest, Overloaded, PromptTooLong, Unavailable
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.pulse import step_limit
from penstock.core.request import FinishReason, Hypothesis, Timing, TokenLogprobs, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import Cancel, Enqueue, Failed, Refused, StepReport
from penstock.core.wire.master import NoPlace, Placed
from penstock.kv.keys import extend_keys
from penstock.obs.logs import log_ended
from penstock.obs.metrics import Metrics
from penstock.service.checkpoint import DEMO, read_defaults
from penstock.service.flight import ATTEMPTS, PATIENCE
from penstock.service.frontend import AT_ONCE, CACHES_QUEUED, Frontend
from penstock.service.instances import SILENT_AFTER, Endpoint, LinkLost
from penstock.service.traffic import MASTER_LEARNS, Traffic
from penstock.text.tokenizer import Tokenizer
from tests.helpers.scripted import STATS, ScriptedLink, ready

STUCK_AFTER = step_limit(ready().token_budget + ready().max_sequences, ready().device)


class ScriptedPlacement:
    """Sends everything to the same place, unless that is excluded or `prefill` is None."""

    trouble = ""
    wants_keys = False
    since, waiting = float("-inf"), 0

    def __init__(self, prefill, decode=None):
        self.prefill, self.decode = prefill, decode
        self.asked, self.over, self.first_tokens, self.outcomes = [], [], [], []

    def start(self, answered):
        self.answered = answered

    def ask(self, place):
        self.asked.append(place)
        self.answered(self.answer(place))

    def answer(self, place):
        if self.prefill is None:
            return NoPlace(place.request_id, place.generation, "nobody")
        prefill = next((p for p in self.prefill if p.name not in place.exclude), None)
        if prefill is None:
            return NoPlace(place.request_id, place.generation, "all are excluded")
        return Placed(place.request_id, place.generation, prefill, self.decode, "scripted", "because: it says so")

    def begun(self, request_ids):
        self.first_tokens += request_ids

    def ended(self, request_ids, outcomes=()):
        self.over += request_ids
        self.outcomes += outcomes

    def tick(self, now):
        pass

    async def close(self):
        pass


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(DEMO)


def run(tokenizer, scenario, *names, ready_now=True, decode=None):
    """Run scenario(frontend, links, clock) inside an event loop; links by name, or the only one."""

    async def go():
        instances = names or ("engine-0",)
        links, clock = {name: ScriptedLink(name) for name in instances}, ManualClock()
        peers = [ready(name).peer for name in instances if name != decode]
        placement = ScriptedPlacement(peers, ready(decode).peer if decode else None)
        metrics = Metrics("m", instances)
        frontend = Frontend(
            tokenizer,
            ["m"],
            read_defaults(DEMO),
            Traffic([Endpoint(name, "") for name in instances], links, placement, metrics, clock),
            metrics,
            clock,
            random.Random(0),
        )
        frontend.placement = placement
        frontend.start()
        if ready_now:
            for name, link in links.items():
                link.say(ready(name))
            await frontend.wait_ready()
            await until(lambda: all(i.ready for i in frontend.traffic.instances.values()))
        try:
            await scenario(frontend, links if names else links["engine-0"], clock)
        finally:
            await frontend.close()
        assert all(link.closed for link in links.values())
        assert not frontend.traffic.held

    asyncio.run(asyncio.wait_for(go(), 20))


def lost(frontend):
    return all(instance.lost for instance in frontend.traffic.instances.values())


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


async def submit(frontend, prompt=(1,), params=None, request_id="r"):
    """The generation, once its sequences were sent to an engine; and their ids."""
    params = params or SamplingParams()
    generation = frontend.submit(list(prompt), params, request_id=request_id)
    ids = [s.id for s in generation._sequences]
    await until(lambda: set(ids) <= {r.id for link in frontend.traffic._links.values() for r in link.enqueued()})
    return generation, ids


async def one(generation):
    await until(lambda: generation._deltas)
    (delta,) = generation.take()
    return delta


def test_prefix_keys_depend_on_the_salt(tokenizer):
    async def scenario(frontend, link, clock):
        frontend.placement.wants_keys = True
        keys = []
        for count, salt in enumerate(("", "mine", "yours", "mine")):
            generation = frontend.submit([1] * 70, SamplingParams(), request_id="r", cache_salt=salt)
            await until(lambda count=count: len(link.enqueued()) > count)
            (held,) = [held for held in frontend.traffic.held.values() if held.generation is generation]
            flight = held.flight
            keys.append(flight.keys)
            assert link.enqueued()[-1].cache_salt == salt
            extended = flight.keys.copy()
            flight.keys = []
            flight.add_keys(b"root")  # as when it goes on elsewhere
            assert flight.keys == extended
            generation.cancel()
        assert keys[1] == keys[3]
        assert len({key for (key,) in keys}) == 3

    run(tokenizer, scenario)


def test_bad_words_reach_the_engine_as_tokens_and_prompt_logprobs_come_back(tokenizer):
    async def scenario(frontend, link, clock):
        params = SamplingParams(bad_words=["import"], prompt_logprobs=0)
        generation, (name,) = await submit(frontend, [1, 2], params)
        words = link.enqueued()[0].bad_words
        assert {tokenizer.decode(word).strip() for word in words} == {"import"}
        reports = [TokenLogprobs(-1.0, 3, [])]
        link.report(TokenOutput(name, [5], prompt_logprobs=reports))
        assert (await one(generation)).prompt_logprobs == reports
        link.report(TokenOutput(name, [6], start=1))
        assert (await one(generation)).prompt_logprobs is None
        generation.cancel()

    run(tokenizer, scenario)


def value(frontend, name, **labels):
    return frontend.metrics.registry.get_sample_value(name, {"model_name": "m", **labels})


async def collect(generation):
    deltas = []
    while not generation.over:
        deltas += generation.take()
        await asyncio.sleep(0)
    return deltas + generation.take()


def test_tokens_become_text_usage_and_metrics(tokenizer):
    ids = tokenizer.encode("def join(path): return")

    async def scenario(frontend, link, clock):
        generation, (name,) = await submit(frontend, [1, 2, 3], SamplingParams(max_tokens=50))
        clock.advance(0.5)
        link.report(TokenOutput(name, ids[:1], cached_tokens=2))
        first = await one(generation)
        clock.advance(0.25)
        link.report(TokenOutput(name, ids[1:], start=1, finish=FinishReason.LENGTH, timing=Timing(0.1, 0.4, 0.25)))
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
        generation, (name,) = await submit(frontend, params=SamplingParams(stop="thr"))
        for i, token in enumerate(ids):
            link.report(TokenOutput(name, [token], start=i))
        deltas = await collect(generation)
        assert "".join(d.text for d in deltas) == "one two "
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "thr")
        assert set(link.cancelled()) == {name}
        assert generation.usage.completion_tokens < len(ids)

    run(tokenizer, scenario)


def test_several_outputs_come_interleaved(tokenizer):
    async def scenario(frontend, link, clock):
        generation, names = await submit(frontend, params=SamplingParams(n=3, seed=5))
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
            generation, (name,) = await submit(frontend, params=SamplingParams(stop_token_ids=(30,)))
            link.report(TokenOutput(name, [stop], finish=FinishReason.STOP, stop_token=stop))
            (delta,) = await collect(generation)
            assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", want)

    run(tokenizer, scenario)


def test_cancel_reaches_the_engine_and_late_tokens_are_dropped(tokenizer):
    async def scenario(frontend, link, clock):
        generation, names = await submit(frontend, params=SamplingParams(n=2))
        link.report(TokenOutput(names[0], [20], finish=FinishReason.LENGTH))
        await one(generation)
        generation.cancel()
        generation.cancel()
        assert link.cancelled() == [names[1]]
        link.report(TokenOutput(names[1], [21]))
        await until(link.events.empty)
        assert await collect(generation) == []
        assert value(frontend, "penstock:request_success_total", finished_reason="abort") == 1
        assert sorted(frontend.placement.over) == sorted(names)

    run(tokenizer, scenario)


def test_an_engine_that_works_for_nobody_is_told(tokenizer):
    """A cancellation may miss a request that is just being handed over."""

    async def scenario(frontend, link, clock):
        link.report(TokenOutput("forgotten", [5]))
        await until(link.cancelled)
        assert link.sent[-1] == Cancel(1, ["forgotten"])

    run(tokenizer, scenario)


@pytest.mark.parametrize("event", [Failed("out of memory"), LinkLost("gone"), msgspec.DecodeError("nonsense")])
def test_the_requests_of_a_lost_engine_wait_for_another_and_then_end_with_an_error(tokenizer, event):
    async def scenario(frontend, link, clock):
        generations = [(await submit(frontend, params=SamplingParams(n=2)))[0] for _ in range(3)]
        assert frontend.healthy
        link.say(event)
        await until(lambda: lost(frontend))
        clock.advance(PATIENCE)
        frontend.traffic.tick()
        assert len(frontend.traffic.held) == 6
        clock.advance(0.1)
        frontend.traffic.tick()
        for generation in generations:
            with pytest.raises(
                EngineFailure, match=r"^engine-0 failed during this request .* nobody could go on with it"
            ):
                await collect(generation)
        assert lost(frontend)
        assert not frontend.healthy
        assert not frontend.ready
        with pytest.raises(Unavailable):
            frontend.submit([1], SamplingParams(), request_id="r")
        link.life = 2
        link.say(ready(life=2))
        await until(lambda: frontend.ready)
        frontend.placement.prefill = [ready(life=2).peer]
        await submit(frontend)
        assert link.sent[-1].to == 2

    run(tokenizer, scenario)


def test_a_loss_is_one_line_and_one_count(tokenizer, caplog):
    async def scenario(frontend, links, clock):
        def up():
            return [value(frontend, "penstock:instance_up", engine=name) for name in "ab"]

        generations = [(await submit(frontend, params=SamplingParams(n=2)))[0] for _ in range(2)]
        generations.append((await submit(frontend))[0])
        assert up() == [1, 1]
        caplog.clear()
        links["a"].say(LinkLost("the connection was lost"))
        await until(lambda: len(links["b"].enqueued()) == 5)
        lines = [record.getMessage() for record in caplog.records if record.name == "penstock.frontend"]
        assert lines == ["a was lost (the connection was lost): 3 requests are to go on elsewhere"]
        assert not any(generation.over for generation in generations)
        assert up() == [0, 1]
        lost = [value(frontend, "penstock:instance_lost_total", engine=name) for name in "ab"]
        assert lost == [1, 0]
        clock.advance(STUCK_AFTER + 1)
        frontend.traffic.tick()
        assert up() == [0, 0]
        links["a"].say(ready("a", 2))
        await until(lambda: up() == [1, 0])

    run(tokenizer, scenario, "a", "b")


def test_that_all_instances_are_ready_is_told_once(tokenizer, caplog):
    caplog.set_level("INFO")

    def told():
        return [r.getMessage() for r in caplog.records if "instances are ready" in r.getMessage()]

    async def scenario(frontend, links, clock):
        links["a"].say(ready("a"))
        await until(lambda: frontend.traffic.instances["a"].ready)
        assert told() == []
        links["b"].say(ready("b"))
        await until(lambda: frontend.traffic.instances["b"].ready)
        assert told() == ["2 of 2 instances are ready"]

    run(tokenizer, scenario, "a", "b", ready_now=False)


@pytest.mark.parametrize("model", [None, "alias"])
def test_the_log_has_the_name_that_the_client_used(tokenizer, caplog, model):
    caplog.set_level("INFO", "penstock.request")

    async def scenario(frontend, link, clock):
        frontend.submit([1], SamplingParams(), request_id="r", model=model).cancel()
        log_ended()
        assert f"model={model or 'm'} id=r" in caplog.text

    run(tokenizer, scenario)


def test_another_life_of_an_engine_knows_nothing_of_its_last(tokenizer):
    async def scenario(frontend, link, clock):
        generation, (name,) = await submit(frontend)
        frontend.placement.prefill = [ready(life=2).peer]
        link.say(ready(life=2))
        await until(lambda: link.sent[-1].to == 2)
        link.report(TokenOutput(name, [5]))  # of the first life, late
        link.life = 2
        link.report(TokenOutput(name, [6], generation=1, finish=FinishReason.LENGTH))
        assert [d.tokens for d in await collect(generation)] == [[6]]

    run(tokenizer, scenario)


def test_numbers_that_are_none_fail_one_request_only(tokenizer):
    async def scenario(frontend, link, clock):
        (broken, (one,)), (fine, (two,)) = await submit(frontend), await submit(frontend)
        names = [one, two]
        link.report(
            TokenOutput(names[0], [], finish=FinishReason.ERROR), TokenOutput(names[1], [5], finish=FinishReason.LENGTH)
        )
        with pytest.raises(EngineFailure, match="no number"):
            await collect(broken)
        assert (await collect(fine))[-1].finish_reason == "length"

    run(tokenizer, scenario)


def test_an_answer_that_cannot_be_put_together_harms_no_other(tokenizer):
    async def scenario(frontend, link, clock):
        (odd, (one,)), (fine, (two,)) = await submit(frontend), await submit(frontend)
        names = [one, two]
        link.report(TokenOutput(names[0], ["no token"]), TokenOutput(names[1], [5], finish=FinishReason.LENGTH))
        with pytest.raises(EngineFailure):
            await collect(odd)
        assert link.cancelled() == [names[0]]
        assert (await collect(fine))[-1].finish_reason == "length"
        assert frontend.healthy

    run(tokenizer, scenario)


def test_what_cannot_be_placed_for_a_mistake_of_ours_fails_and_harms_no_other(tokenizer):
    async def scenario(frontend, link, clock):
        frontend.placement.answer, answer = lambda place: 1 / 0, frontend.placement.answer
        broken = frontend.submit([1], SamplingParams(n=2), request_id="r")
        with pytest.raises(EngineFailure, match="could not be placed: ZeroDivisionError"):
            await collect(broken)
        assert not frontend.traffic.held
        frontend.placement.answer = answer
        await submit(frontend)

    run(tokenizer, scenario)


def test_a_refusal_is_the_users_error(tokenizer):
    async def scenario(frontend, link, clock):
        generation, (name,) = await submit(frontend)
        link.say(Refused(1, name, "too odd"))
        with pytest.raises(InvalidRequest, match="too odd"):
            await collect(generation)

    run(tokenizer, scenario)


def test_a_silent_engine_is_unhealthy_and_its_requests_end(tokenizer):
    async def scenario(frontend, link, clock):
        generation, _ = await submit(frontend)
        clock.advance(SILENT_AFTER + 0.1)
        assert frontend.instance_states()[0]["state"] == "silent"
        assert frontend.healthy
        clock.advance(STUCK_AFTER)
        assert "no sign of life" in frontend.unhealthy_reason
        frontend.traffic.tick()
        clock.advance(PATIENCE + 0.1)
        frontend.traffic.tick()
        with pytest.raises(EngineFailure, match="no sign of life"):
            await collect(generation)
        link.report()
        await until(lambda: frontend.healthy)

    run(tokenizer, scenario)


def test_a_full_queue_refuses_and_recovers(tokenizer):
    async def scenario(frontend, link, clock):
        frontend._max_requests = 3
        _, names = await submit(frontend, params=SamplingParams(n=2))
        with pytest.raises(Overloaded) as caught:
            frontend.submit([1], SamplingParams(n=2), request_id="b")
        assert 1 <= caught.value.retry_after <= 60
        assert len(link.enqueued()) == 2
        link.report(TokenOutput(names[0], [5], finish=FinishReason.LENGTH))
        await until(lambda: len(frontend.traffic.held) == 1)
        frontend.submit([1], SamplingParams(n=2), request_id="b")

    run(tokenizer, scenario)


def test_the_queue_is_bounded_in_tokens_and_says_how_long_it_is(tokenizer):
    async def scenario(frontend, link, clock):
        frontend._max_queued_tokens = 100
        _, (first,) = await submit(frontend, [1] * 60)
        _, (second,) = await submit(frontend, [1] * 40)
        with pytest.raises(Overloaded, match="100 prompt tokens wait for their first token, at most 100"):
            frontend.submit([1], SamplingParams(), request_id="b")
        clock.advance(2.0)
        link.report(TokenOutput(first, [5]))
        await until(lambda: frontend.traffic.queued_tokens == 40)
        clock.advance(2.0)
        with pytest.raises(Overloaded) as caught:  # 60 tokens in 4 s, and 40 of them wait
            frontend.submit([1] * 61, SamplingParams(), request_id="b")
        assert caught.value.retry_after == pytest.approx(40 / 15)
        await submit(frontend, [1] * 60)
        frontend.traffic.release([second])
        assert frontend.traffic.queued_tokens == 60

    run(tokenizer, scenario)


def test_what_is_longer_than_the_queue_has_its_turn_alone(tokenizer):
    async def scenario(frontend, link, clock):
        frontend._max_queued_tokens = 10
        generation, _ = await submit(frontend, [1] * 50)
        with pytest.raises(Overloaded):
            frontend.submit([1], SamplingParams(), request_id="b")
        generation.cancel()
        await submit(frontend, [1] * 50)

    run(tokenizer, scenario)


def test_without_a_limit_the_queue_holds_what_the_caches_hold_a_few_times(tokenizer):
    async def scenario(frontend, links, clock):
        limit = CACHES_QUEUED * BLOCK_TOKENS * (4 + 4)
        generations = [frontend.submit([1] * 64, SamplingParams(), request_id="r") for _ in range(limit // 64)]
        with pytest.raises(Overloaded, match=f"at most {limit}"):
            frontend.submit([1], SamplingParams(), request_id="b")
        assert len(generations) == 32

    run(tokenizer, scenario, "a", "b")


def test_texts_that_wait_for_the_tokenizer_are_bounded(tokenizer):
    async def scenario(frontend, link, clock):
        frontend._max_requests = 3
        text = "some text " * AT_ONCE
        waiting = [asyncio.ensure_future(frontend.encode(text, True)) for _ in range(5)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [list] * 3 + [Overloaded] * 2
        assert await frontend.encode(text, True) == results[0]

    run(tokenizer, scenario)


def test_outputs_end_where_the_model_does(tokenizer):
    async def scenario(frontend, link, clock):
        for params in (SamplingParams(max_tokens=80), SamplingParams(max_tokens=None), SamplingParams(max_tokens=99)):
            await submit(frontend, [1] * 20, params)
        await submit(frontend, [1] * 95)
        assert [request.max_tokens for request in link.enqueued()] == [80, 80, 80, 5]
        with pytest.raises(PromptTooLong):
            frontend.submit([1] * 100, SamplingParams(max_tokens=90), request_id="r")

    run(tokenizer, scenario)


def test_what_a_client_does_not_take_is_joined(tokenizer):
    async def scenario(frontend, link, clock):
        generation, names = await submit(frontend, params=SamplingParams(n=2, max_tokens=90))
        for start in range(90):
            for name in names:
                link.report(TokenOutput(name, [5 + start], start=start))
        link.report(*(TokenOutput(name, [7], start=90, finish=FinishReason.LENGTH) for name in names))
        await until(lambda: not frontend.traffic.held)
        assert len(generation._deltas) <= 22
        deltas = generation.take()
        for index in range(2):
            own = [delta for delta in deltas if delta.index == index]
            assert [token for delta in own for token in delta.tokens] == [*range(5, 95), 7]
            assert [delta.finish_reason for delta in own if delta.finish_reason] == ["length"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.service.generation.MOST_DELTAS", 20)
        run(tokenizer, scenario)


def test_nothing_is_accepted_before_an_engine_is_ready(tokenizer):
    async def scenario(frontend, link, clock):
        assert not frontend.ready
        assert frontend.healthy
        with pytest.raises(Unavailable, match="loading"):
            frontend.submit([1], SamplingParams(), request_id="r")

    run(tokenizer, scenario, ready_now=False)


def test_one_engine_of_two_is_enough_and_the_smallest_limits_hold(tokenizer, caplog):
    async def scenario(frontend, links, clock):
        assert "max-model-len" not in caplog.text
        links["b"].say(ready("b", 2, max_model_len=50))
        await until(lambda: frontend.max_model_len == 50)
        told = "b has a max-model-len of 50, others have 100: no request may be longer than 50, wherever it runs"
        assert told in caplog.text
        with pytest.raises(PromptTooLong):
            frontend.submit([1] * 50, SamplingParams(), request_id="r")
        links["a"].say(LinkLost("burnt"))
        await until(lambda: frontend.instance_states()[0]["state"] == "lost")
        assert frontend.healthy
        assert frontend.ready
        assert frontend.instance_states()[0]["trouble"] == "burnt"
        links["b"].say(LinkLost("drowned"))
        await until(lambda: not frontend.healthy)
        assert frontend.unhealthy_reason == "a: burnt; b: drowned"

    run(tokenizer, scenario, "a", "b")


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("at_once", [69, 70])
def test_prefix_keys_of_long_prompts_are_computed_off_the_event_loop(tokenizer, monkeypatch, wanted, at_once):
    hashed_in = []

    def hashing(*args):
        hashed_in.append(threading.current_thread().name)
        extend_keys(*args)

    monkeypatch.setattr("penstock.service.frontend.extend_keys", hashing)
    monkeypatch.setattr("penstock.service.frontend.AT_ONCE", at_once)

    async def scenario(frontend, link, clock):
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

    async def scenario(frontend, link, clock):
        frontend.placement.wants_keys = True
        going, hold = frontend.submit([1] * 64, SamplingParams(), request_id="r"), threading.Event()
        frontend._workers.submit(hold.wait), frontend._workers.submit(hold.wait)
        gone = frontend.submit([2] * 64, SamplingParams(), request_id="s")
        gone.cancel()
        hold.set()
        last, ids = await submit(frontend, [3] * 64)
        assert {asked.request_id for asked in frontend.placement.asked} == {going._sequences[0].id, *ids}
        assert not last.over

    run(tokenizer, scenario)


def test_tokens_come_in_order_from_both_instances(tokenizer):
    ids = tokenizer.encode("def join(path): return")

    async def scenario(frontend, links, clock):
        generation, (name,) = await submit(frontend)
        command = next(c for c in links["p"].sent if isinstance(c, Enqueue))
        assert command.decode == ready("d").peer
        assert not links["d"].enqueued()
        links["d"].report(TokenOutput(name, ids[1:], start=1, finish=FinishReason.LENGTH))
        await until(links["d"].events.empty)
        links["p"].report(TokenOutput(name, ids[:1]))
        deltas = await collect(generation)
        assert "".join(d.text for d in deltas) == tokenizer.decode(ids)
        assert generation._routes == ["p>d"]
        assert value(frontend, "penstock:handoffs_total") == 1
        assert links["p"].cancelled() == [name]  # in case that it does not know of the end

    run(tokenizer, scenario, "p", "d", decode="d")


def test_cancelling_reaches_both_instances(tokenizer):
    async def scenario(frontend, links, clock):
        generation, (name,) = await submit(frontend)
        generation.cancel()
        assert links["p"].cancelled() == links["d"].cancelled() == [name]

    run(tokenizer, scenario, "p", "d", decode="d")


def test_losing_one_of_two_instances(tokenizer):
    async def scenario(frontend, links, clock):
        decoding, (one,) = await submit(frontend)
        reading, _ = await submit(frontend)
        links["p"].report(TokenOutput(one, [5]))
        links["d"].report(TokenOutput(one, [6], start=1))
        await until(lambda: frontend.traffic.held[one].flight.handed_over)
        links["p"].say(LinkLost("gone"))
        await until(lambda: not frontend.traffic.instances["p"].ready)
        links["d"].report(TokenOutput(one, [7], start=2, finish=FinishReason.LENGTH))
        assert [t for d in await collect(decoding) for t in d.tokens] == [5, 6, 7]
        assert len(links["q"].enqueued()) == 1, "the one whose prompt was being read, at once"
        assert [s.id for s in reading._sequences] == links["d"].cancelled(), "should it have room for it"
        assert links["d"].sent[-1].generation == 0
        reading.cancel()

    run(tokenizer, scenario, "p", "q", "d", decode="d")


# --- going on elsewhere


def interrupted(frontend, count=1):
    """As many as are held and were sent elsewhere."""
    return sum(held.flight.launches == 2 for held in frontend.traffic.held.values()) == count


def test_a_stream_goes_on_elsewhere_where_it_stopped(tokenizer, caplog):
    caplog.set_level("INFO")
    ids = tokenizer.encode("def join(path, *more): return separator.join([path, *more])")
    prompt = list(range(60))

    async def scenario(frontend, links, clock):
        frontend.placement.wants_keys = True
        generation, (name,) = await submit(frontend, prompt, SamplingParams(max_tokens=40, seed=7))
        clock.advance(0.5)
        links["a"].report(TokenOutput(name, ids[:5], cached_tokens=3))
        await until(lambda: frontend.traffic.held[name].flight.received == 5)
        clock.advance(1.0)
        links["a"].say(LinkLost("burnt"))
        await until(lambda: interrupted(frontend))
        command, asked = links["b"].sent[-1], frontend.placement.asked[-1]
        assert (list(command.request.generated), command.generation) == (ids[:5], 1)
        assert (command.request.prompt, command.request.seed, command.request.max_tokens) == (prompt, 7, 40)
        assert (asked.prompt_tokens, asked.max_tokens, asked.generation, asked.exclude) == (65, 35, 1, ["a"])
        keys = []
        extend_keys(keys, b"root", [*prompt, *ids[:4]], 1)
        assert asked.keys == keys
        assert not generation.over
        clock.advance(1.0)
        links["a"].report(TokenOutput(name, ids[5:7], start=5))  # it was not dead after all
        links["b"].report(TokenOutput(name, ids[5:6], start=5, generation=1, cached_tokens=64))
        links["b"].report(TokenOutput(name, ids[6:], start=6, generation=1, finish=FinishReason.LENGTH))
        deltas = await collect(generation)
        assert [t for d in deltas for t in d.tokens] == ids
        assert "".join(d.text for d in deltas) == tokenizer.decode(ids)
        assert (generation.usage.completion_tokens, generation.usage.cached_tokens) == (len(ids), 3)
        assert generation._routes == ["a", "b"]
        assert value(frontend, "penstock:recoveries_total", how="fetch") == 1
        assert value(frontend, "penstock:recoveries_total", how="recompute") == 0
        assert value(frontend, "penstock:time_to_first_token_seconds_sum") == 0.5
        assert value(frontend, "penstock:time_to_first_token_seconds_count") == 1
        assert value(frontend, "penstock:generation_tokens_total") == len(ids)
        assert frontend.placement.first_tokens == [name, name]
        (outcome,) = frontend.placement.outcomes
        assert (outcome.ttft_ms, outcome.queue_ms, outcome.tokens) == (500.0, 0.0, len(ids))
        assert "it has 5 tokens" in caplog.text
        assert f"request {name} goes on at b from token 5: 64 tokens of 65 were found there" in caplog.text

    run(tokenizer, scenario, "a", "b")


def test_of_several_outputs_each_goes_on_by_itself(tokenizer):
    async def scenario(frontend, links, clock):
        generation, names = await submit(frontend, params=SamplingParams(n=3, stop="thr"))
        words = tokenizer.encode("one two three")
        links["a"].report(TokenOutput(names[0], [20], finish=FinishReason.LENGTH), TokenOutput(names[1], words[:1]))
        await until(lambda: len(frontend.traffic.held) == 2)
        links["a"].say(LinkLost("burnt"))
        await until(lambda: interrupted(frontend, 2))
        generated = {r.id: list(r.generated) for r in links["b"].enqueued()}
        assert generated == {names[1]: words[:1], names[2]: []}
        for i, word in enumerate(words[1:], 1):
            links["b"].report(TokenOutput(names[1], [word], start=i, generation=1))
        links["b"].report(TokenOutput(names[2], [30], generation=1, finish=FinishReason.LENGTH))
        deltas = await collect(generation)
        assert "".join(d.text for d in deltas if d.index == 1) == "one two "
        assert {d.index: d.finish_reason for d in deltas if d.finish_reason} == {0: "length", 1: "stop", 2: "length"}
        assert value(frontend, "penstock:recoveries_total", how="recompute") == 2

    run(tokenizer, scenario, "a", "b")


def test_whoever_leaves_during_the_pause_leaves_nothing(tokenizer):
    async def scenario(frontend, link, clock):
        generation, (name,) = await submit(frontend)
        link.report(TokenOutput(name, [20]))
        await one(generation)
        link.say(LinkLost("burnt"))
        await until(lambda: lost(frontend))
        assert len(frontend.traffic._waiting) == 1
        generation.cancel()
        assert not frontend.traffic._waiting
        assert frontend.placement.over == [name]
        assert value(frontend, "penstock:request_success_total", finished_reason="abort") == 1
        assert value(frontend, "penstock:recoveries_total", how="recompute") == 0

    run(tokenizer, scenario)


def test_an_engine_that_starts_again_takes_up_what_it_had(tokenizer):
    async def scenario(frontend, link, clock):
        generation, (name,) = await submit(frontend)
        link.report(TokenOutput(name, [20]))
        await until(lambda: frontend.traffic.held[name].flight.received)
        link.say(LinkLost("burnt"))
        await until(lambda: lost(frontend))
        clock.advance(PATIENCE - 0.1)
        frontend.traffic.tick()
        frontend.placement.prefill, link.life = [ready(life=2).peer], 2
        link.say(ready(life=2))
        await until(lambda: len(link.enqueued()) == 2)
        link.report(TokenOutput(name, [21], start=1, generation=1, finish=FinishReason.LENGTH))
        assert [d.tokens for d in await collect(generation)] == [[20], [21]]

    run(tokenizer, scenario)


def test_a_request_that_ends_every_engine_does_not_meet_them_all(tokenizer):
    names = [f"e{i}" for i in range(ATTEMPTS + 2)]

    async def scenario(frontend, links, clock):
        generation, _ = await submit(frontend)
        for i, (at, link) in enumerate(links.items()):
            if i == ATTEMPTS:
                break
            await until(link.enqueued)
            frontend.placement.prefill = frontend.placement.prefill[1:]
            link.say(LinkLost("poisoned"))
            await until(lambda at=at: frontend.traffic.instances[at].lost)
        last = ATTEMPTS - 1
        says = (
            rf"^e{last} failed during this request \(poisoned\), one of {ATTEMPTS} places where it was tried in vain$"
        )
        with pytest.raises(EngineFailure, match=says):
            await collect(generation)
        assert not any(links[name].enqueued() for name in names[ATTEMPTS:])

    run(tokenizer, scenario, *names)


def test_an_earlier_attempt_that_still_runs_is_told_to_stop(tokenizer):
    async def scenario(frontend, links, clock):
        generation, (name,) = await submit(frontend)
        frontend.placement.prefill = [ready("b").peer]
        links["a"].report(TokenOutput(name, [], finish=FinishReason.ABORT))
        await until(links["b"].enqueued)
        assert links["a"].sent[-1] == Cancel(1, [name], 0)
        links["a"].report(TokenOutput(name, [9]))
        await until(lambda: len(links["a"].cancelled()) == 2)
        assert links["a"].sent[-1] == Cancel(1, [name], 0)
        links["b"].report(TokenOutput(name, [5], finish=FinishReason.LENGTH, generation=1))
        assert [d.tokens for d in await collect(generation)] == [[5]]

    run(tokenizer, scenario, "a", "b")


@pytest.mark.parametrize("why", ["draining", "stale"])
def test_what_an_instance_never_began_runs_elsewhere(tokenizer, why):
    async def scenario(frontend, links, clock):
        generation, (name,) = await submit(frontend)
        links["a"].say(Refused(1, name, "not here", why))
        await until(links["b"].enqueued)
        assert frontend.placement.asked[-1].exclude == ["a"]
        assert links["b"].sent[-1].generation == 1
        links["a"].report(TokenOutput(name, [9]))
        links["b"].report(TokenOutput(name, [5], finish=FinishReason.LENGTH, generation=1))
        assert [d.tokens for d in await collect(generation)] == [[5]]

    run(tokenizer, scenario, "a", "b")


def test_a_place_that_the_frontend_knows_to_be_gone_is_not_taken(tokenizer):
    async def scenario(frontend, links, clock):
        links["a"].say(LinkLost("gone"))
        await until(lambda: not frontend.traffic.instances["a"].ready)
        generation = frontend.submit([1], SamplingParams(), request_id="r")
        await until(links["b"].enqueued)
        assert [asked.exclude for asked in frontend.placement.asked] == [[], ["a"]]
        links["b"].report(TokenOutput(generation._sequences[0].id, [5], finish=FinishReason.LENGTH, generation=1))
        assert [d.tokens for d in await collect(generation)] == [[5]]
        assert value(frontend, "penstock:recoveries_total", how="recompute") == 0

    run(tokenizer, scenario, "a", "b")


def test_places_that_are_all_gone_are_asked_for_once_each_and_then_waited_for(tokenizer):
    async def scenario(frontend, links, clock):
        for link in links.values():
            link.say(LinkLost("gone"))
        await until(lambda: lost(frontend))
        links["b"].say(ready("b", 2))
        await until(lambda: frontend.ready)
        generation = frontend.submit([1], SamplingParams(), request_id="r")
        assert [asked.exclude for asked in frontend.placement.asked] == [[], ["a"], ["a", "b"]]
        frontend.placement.prefill = [ready("b", 2).peer]
        await until(links["b"].enqueued)
        generation.cancel()

    run(tokenizer, scenario, "a", "b")


def test_no_place_is_believed_after_a_while(tokenizer):
    async def scenario(frontend, link, clock):
        peers, frontend.placement.prefill = frontend.placement.prefill, None
        soon = frontend.submit([1], SamplingParams(), request_id="r")
        await until(lambda: frontend.placement.asked)
        frontend.placement.prefill = peers
        await until(link.enqueued)
        soon.cancel()
        frontend.placement.prefill = None
        never = frontend.submit([1], SamplingParams(), request_id="r")
        await asyncio.sleep(0)
        clock.advance(MASTER_LEARNS + 1)
        with pytest.raises(Unavailable, match="nobody"):
            await collect(never)

    run(tokenizer, scenario)


def test_only_modelled_engines_make_a_modelled_model(tokenizer):
    async def scenario(frontend, links, clock):
        assert frontend.modelled is None
        links["a"].say(ready("a", 2, device="modelled:h200", drawn_ids=(3, 9)))
        await until(lambda: frontend.traffic.instances["a"].is_life(2))
        assert frontend.modelled is None
        links["b"].say(ready("b", 2, device="modelled:h200", drawn_ids=(3, 9)))
        await until(lambda: frontend.modelled)
        assert frontend.modelled == {"first_token_id": 3, "last_token_id": 9}

    run(tokenizer, scenario, "a", "b")


def test_a_master_that_comes_last_makes_it_ready_too(tokenizer):
    async def scenario(frontend, link, clock):
        frontend.placement.trouble = "the master has not answered yet"
        link.say(ready("engine-0"))
        waiting = asyncio.create_task(frontend.wait_ready())
        await until(lambda: frontend.traffic.instances["engine-0"].ready)
        assert not frontend.ready
        frontend.placement.trouble = ""  # of which nothing tells the frontend
        await waiting
        assert frontend.ready

    run(tokenizer, scenario, ready_now=False)


# --- beam search


def test_a_beam_search_goes_to_one_instance_whole_and_again_elsewhere_when_that_dies(tokenizer):
    async def scenario(frontend, links, clock):
        params = SamplingParams(n=3, use_beam_search=True, max_tokens=4)
        generation = frontend.submit([1, 2], params, request_id="r")
        await until(lambda: any(link.enqueued() for link in links.values()))
        home, other = sorted(("p", "q"), key=lambda name: not links[name].enqueued())
        (sent,) = [command for command in links[home].sent if isinstance(command, Enqueue)]
        assert (sent.decode, sent.request.params.n) == (None, 3)
        links[home].say(StepReport(1, [TokenOutput(sent.request.id, [])], STATS))
        await until(lambda: frontend.traffic.held[sent.request.id].flight.heard)
        assert frontend.traffic.queued_tokens == 0, "its prompt was read"
        links[home].say(LinkLost("killed"))
        await until(links[other].enqueued)
        (again,) = [command for command in links[other].sent if isinstance(command, Enqueue)]
        assert (again.request.generated, again.request.prompt) == ((), [1, 2])
        found = [Hypothesis([5, 6, 7, 8 + i], None, FinishReason.LENGTH, None, -1.0 - i) for i in range(3)]
        last = TokenOutput(again.request.id, [], finish=FinishReason.LENGTH, hypotheses=found, generation=1)
        links[other].say(StepReport(again.to, [last], STATS))
        await until(lambda: not frontend.traffic.held)
        deltas = [delta for delta in generation.take() if delta.tokens]
        assert [(d.index, d.tokens) for d in deltas] == [(i, found[i].tokens) for i in range(3)]
        assert generation.over
        assert generation.usage.completion_tokens == 12

    run(tokenizer, scenario, "p", "q", "d", decode="d")


def test_to_cancel_a_beam_search_drops_it(tokenizer):
    async def scenario(frontend, link, clock):
        params = SamplingParams(n=3, use_beam_search=True)
        generation, (one_id, *same) = await submit(frontend, [1, 2], params)
        assert set(same) == {one_id}
        generation.cancel()
        assert not frontend.traffic.held
        assert [c.request_ids for c in link.sent if isinstance(c, Cancel)] == [[one_id]]

    run(tokenizer, scenario)


def test_modelled_engines_do_not_search(tokenizer):
    async def scenario(frontend, link, clock):
        link.say(ready("engine-0", 2, device="modelled:h200", drawn_ids=(3, 9)))
        await until(lambda: frontend.modelled)
        with pytest.raises(InvalidRequest, match=r"^use_beam_search: true, ") as caught:
            frontend.submit([1], SamplingParams(use_beam_search=True), request_id="r")
        assert caught.value.field == "use_beam_search"

    run(tokenizer, scenario)
