"""The frontend against scripted engines: delivery, stop strings, cancellation, mistakes."""

import asyncio
import threading

import pytest

from penstock.core.errors import (
    EngineFailure,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Unavailable,
    UnsupportedField,
)
from penstock.core.request import FinishReason, Timing, TokenLogprobs, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.service_level import ServiceLevel
from penstock.core.wire.engine import Cancel, Refused
from penstock.obs.logs import log_ended
from penstock.service.checkpoint import DEMO, read_defaults
from penstock.service.instances import ChannelLost
from tests.helpers.frontends import collect, ids_of, one, run, submit, value
from tests.helpers.scripted import ready
from tests.helpers.waiting import until


def test_prefix_keys_depend_on_the_salt(tokenizer):
    async def scenario(frontend, channel, clock):
        frontend.placement.wants_keys = True
        keys = []
        for count, salt in enumerate(("", "mine", "yours", "mine")):
            generation = frontend.submit([[1] * 70], SamplingParams(), request_id="r", cache_salt=salt)
            await until(lambda count=count: len(channel.enqueued()) > count)
            (flight,) = [f for f in frontend.engine_client.flights.values() if f.owner is generation]
            keys.append(flight.keys)
            assert channel.enqueued()[-1].cache_salt == salt
            extended = flight.keys.copy()
            flight.keys = []
            flight.add_keys(b"root")  # as when it goes on elsewhere
            assert flight.keys == extended
            generation.cancel()
        assert keys[1] == keys[3]
        assert len({key for (key,) in keys}) == 3

    run(tokenizer, scenario)


def test_bad_words_reach_the_engine_as_tokens_and_prompt_logprobs_come_back(tokenizer):
    async def scenario(frontend, channel, clock):
        params = SamplingParams(bad_words=["import"], prompt_logprobs=0)
        generation, (name,) = await submit(frontend, [1, 2], params)
        words = channel.enqueued()[0].bad_words
        assert {tokenizer.decode(word).strip() for word in words} == {"import"}
        reports = [TokenLogprobs(-1.0, 3, [])]
        channel.report(TokenOutput(name, [5], prompt_logprobs=reports))
        assert (await one(generation)).prompt_logprobs == reports
        channel.report(TokenOutput(name, [6], start=1))
        assert (await one(generation)).prompt_logprobs is None
        generation.cancel()

    run(tokenizer, scenario)


def test_grammars_are_checked_once_beside_the_loop_and_few_at_a_time(tokenizer, monkeypatch):
    checked, gate = [], threading.Event()

    def check(wanted):
        checked.append(wanted.regex)
        assert gate.wait(20)
        if wanted.regex == "bad":
            raise InvalidRequest("structured_outputs.regex: bad", "structured_outputs.regex")

    monkeypatch.setattr("penstock.text.grammar.check", check)
    monkeypatch.setattr("penstock.service.frontend.MAX_CHECKING", 3)

    async def scenario(frontend, channel, clock):
        def look_at(regex):
            return frontend.check_grammar(SamplingParams(structured_outputs={"regex": regex}))

        await frontend.check_grammar(SamplingParams())
        looks = [asyncio.create_task(look_at(regex)) for regex in ("a", "bad", "b")]
        await until(lambda: checked == ["a"])
        with pytest.raises(Overloaded, match="3 grammars wait"):
            await look_at("c")
        gate.set()
        found = await asyncio.gather(*looks, return_exceptions=True)
        assert [type(each) for each in found] == [type(None), InvalidRequest, type(None)]
        await look_at("a")
        assert checked == ["a", "bad", "b"], "it is known to be good"
        await submit(frontend, [1], SamplingParams(structured_outputs={"regex": "a"}))
        assert value(frontend, "penstock:structured_requests_total", kind="regex") == 1

    run(tokenizer, scenario)


def test_who_cannot_go_on_for_what_its_client_asked_is_the_clients_error(tokenizer):
    async def scenario(frontend, channel, clock):
        generation, (name,) = await submit(frontend, [1], SamplingParams(structured_outputs={"regex": "a"}))
        why = "structured_outputs: no token may come next"
        channel.report(TokenOutput(name, [], finish=FinishReason.ERROR, error=why))
        with pytest.raises(InvalidRequest, match=f"^{why}$"):
            await collect(generation)

    run(tokenizer, scenario)


def test_tokens_become_text_usage_and_metrics(tokenizer):
    ids = tokenizer.encode("def join(path): return")

    async def scenario(frontend, channel, clock):
        generation, (name,) = await submit(frontend, [1, 2, 3], SamplingParams(max_tokens=50))
        clock.advance(0.5)
        channel.report(TokenOutput(name, ids[:1], cached_tokens=2))
        first = await one(generation)
        clock.advance(0.25)
        channel.report(TokenOutput(name, ids[1:], start=1, finish=FinishReason.LENGTH, timing=Timing(0.1, 0.4, 0.25)))
        rest = await collect(generation)
        assert first.text + "".join(d.text for d in rest) == tokenizer.decode(ids)
        assert rest[-1].finish_reason == "length"
        assert generation.usage.completion_tokens == len(ids)
        assert generation.usage.cached_tokens == 2
        assert channel.cancelled() == []
        assert value(frontend, "penstock:time_to_first_token_seconds_sum") == 0.5
        assert value(frontend, "penstock:generation_tokens_total") == len(ids)
        assert value(frontend, "penstock:prompt_tokens_total") == 3
        assert value(frontend, "penstock:request_success_total", finished_reason="length") == 1
        tpot = value(frontend, "penstock:request_time_per_output_token_seconds_sum")
        assert tpot == pytest.approx(0.25 / (len(ids) - 1))

    run(tokenizer, scenario)


def test_what_operators_see_joins_the_master_and_this_frontend(tokenizer):
    async def scenario(frontend, channel, clock):
        for ttft_ms in (400.0, 600.0):
            level = ServiceLevel(ttft_ms=ttft_ms)
            generation = frontend.submit([[1, 2, 3]], SamplingParams(max_tokens=2), request_id="r", level=level)
            (name,) = ids_of(generation)
            await until(lambda name=name: name in {request.id for request in channel.enqueued()})
            clock.advance(0.5)
            channel.report(TokenOutput(name, [1, 2], finish=FinishReason.LENGTH, timing=Timing(0.1, 0.4, 0.0)))
            await collect(generation)
        await submit(frontend)
        seen = await frontend.overview()
        assert seen["master"]["placed"] == 1
        assert {"type", "number"}.isdisjoint(seen["master"])
        mine = seen["frontend"]
        assert (mine["sequences"], mine["generated_tokens"], mine["troubles"]) == (1, 4, {})
        assert mine["attainment"] == {"online": {"requests": 2, "kept": 1}, "offline": {"requests": 0, "kept": 0}}

    run(tokenizer, scenario)


def test_a_stop_string_ends_the_text_and_the_engines_work(tokenizer):
    ids = tokenizer.encode("one two three four")

    async def scenario(frontend, channel, clock):
        generation, (name,) = await submit(frontend, params=SamplingParams(stop="thr"))
        for i, token in enumerate(ids):
            channel.report(TokenOutput(name, [token], start=i))
        deltas = await collect(generation)
        assert "".join(d.text for d in deltas) == "one two "
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "thr")
        assert set(channel.cancelled()) == {name}
        assert generation.usage.completion_tokens < len(ids)

    run(tokenizer, scenario)


def test_stop_tokens_are_reported_unless_they_are_the_models_own(tokenizer):
    eos = next(iter(read_defaults(DEMO).eos_ids))

    async def scenario(frontend, channel, clock):
        for stop, want in ((eos, None), (30, 30)):
            generation, (name,) = await submit(frontend, params=SamplingParams(stop_token_ids=(30,)))
            channel.report(TokenOutput(name, [stop], finish=FinishReason.STOP, stop_token=stop))
            (delta,) = await collect(generation)
            assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", want)

    run(tokenizer, scenario)


def test_cancel_reaches_the_engine_and_late_tokens_are_dropped(tokenizer):
    async def scenario(frontend, channel, clock):
        generation, names = await submit(frontend, params=SamplingParams(n=2))
        channel.report(TokenOutput(names[0], [20], finish=FinishReason.LENGTH))
        await one(generation)
        generation.cancel()
        generation.cancel()
        assert channel.cancelled() == [names[1]]
        channel.report(TokenOutput(names[1], [21]))
        await until(lambda: channel.silent)
        assert await collect(generation) == []
        assert value(frontend, "penstock:request_success_total", finished_reason="abort") == 1
        assert sorted(frontend.placement.over) == sorted(names)

    run(tokenizer, scenario)


def test_an_engine_that_works_for_nobody_is_told(tokenizer):
    """A cancellation may miss a request that is just being handed over."""

    async def scenario(frontend, channel, clock):
        channel.report(TokenOutput("forgotten", [5]))
        await until(channel.cancelled)
        assert channel.sent[-1] == Cancel(1, ["forgotten"])

    run(tokenizer, scenario)


def test_that_all_instances_are_ready_is_told_once(tokenizer, caplog):
    caplog.set_level("INFO")

    def told():
        return [r.getMessage() for r in caplog.records if "instances are ready" in r.getMessage()]

    async def scenario(frontend, channels, clock):
        channels["a"].say(ready("a"))
        await until(lambda: frontend.engine_client.instances["a"].ready)
        assert told() == []
        channels["b"].say(ready("b"))
        await until(lambda: frontend.engine_client.instances["b"].ready)
        assert told() == ["2 of 2 instances are ready"]

    run(tokenizer, scenario, "a", "b", ready_now=False)


@pytest.mark.parametrize("model", [None, "alias"])
def test_the_log_has_the_name_that_the_client_used(tokenizer, caplog, model):
    caplog.set_level("INFO", "penstock.request")

    async def scenario(frontend, channel, clock):
        frontend.submit([[1]], SamplingParams(), request_id="r", model=model).cancel()
        log_ended()
        assert f"model={model or 'm'} id=r" in caplog.text

    run(tokenizer, scenario)


@pytest.mark.parametrize(
    ("tokens", "finish", "says"), [([], FinishReason.ERROR, "no number"), (["no token"], None, None)]
)
def test_an_answer_that_fails_harms_no_other(tokenizer, tokens, finish, says):
    async def scenario(frontend, channel, clock):
        (broken, (one,)), (fine, (two,)) = await submit(frontend), await submit(frontend)
        channel.report(
            TokenOutput(one, tokens, finish=finish, error="no number"),
            TokenOutput(two, [5], finish=FinishReason.LENGTH),
        )
        with pytest.raises(EngineFailure, match=says):
            await collect(broken)
        assert channel.cancelled() == [one]
        assert (await collect(fine))[-1].finish_reason == "length"
        assert frontend.healthy

    run(tokenizer, scenario)


def test_what_cannot_be_placed_for_a_mistake_of_ours_fails_and_harms_no_other(tokenizer):
    async def scenario(frontend, channel, clock):
        frontend.placement.answer, answer = lambda place: 1 / 0, frontend.placement.answer
        broken = frontend.submit([[1]], SamplingParams(n=2), request_id="r")
        with pytest.raises(EngineFailure, match="could not be placed: ZeroDivisionError"):
            await collect(broken)
        assert not frontend.engine_client.flights
        frontend.placement.answer = answer
        await submit(frontend)

    run(tokenizer, scenario)


def test_a_refusal_is_the_users_error(tokenizer):
    async def scenario(frontend, channel, clock):
        generation, (name,) = await submit(frontend)
        channel.say(Refused(1, name, "too odd"))
        with pytest.raises(InvalidRequest, match="too odd"):
            await collect(generation)

    run(tokenizer, scenario)


def test_outputs_end_where_the_model_does(tokenizer):
    async def scenario(frontend, channel, clock):
        for params in (SamplingParams(max_tokens=80), SamplingParams(max_tokens=None), SamplingParams(max_tokens=99)):
            await submit(frontend, [1] * 20, params)
        await submit(frontend, [1] * 95)
        assert [request.max_tokens for request in channel.enqueued()] == [80, 80, 80, 5]
        with pytest.raises(PromptTooLong):
            frontend.submit([[1] * 100], SamplingParams(max_tokens=90), request_id="r")

    run(tokenizer, scenario)


def test_nothing_is_accepted_before_an_engine_is_ready(tokenizer):
    async def scenario(frontend, channel, clock):
        assert not frontend.ready
        assert frontend.healthy
        with pytest.raises(Unavailable, match="not ready"):
            frontend.submit([[1]], SamplingParams(), request_id="r")

    run(tokenizer, scenario, ready_now=False)


def test_one_engine_of_two_is_enough_and_the_smallest_limits_hold(tokenizer, caplog):
    async def scenario(frontend, channels, clock):
        assert "max-model-len" not in caplog.text
        channels["b"].say(ready("b", 2, max_model_len=50))
        await until(lambda: frontend.max_model_len == 50)
        told = "b has a max-model-len of 50, others have 100: no request may be longer than 50, wherever it runs"
        assert told in caplog.text
        with pytest.raises(PromptTooLong):
            frontend.submit([[1] * 50], SamplingParams(), request_id="r")
        channels["a"].say(ChannelLost("burnt"))
        await until(lambda: frontend.instance_states()[0]["state"] == "lost")
        assert frontend.healthy
        assert frontend.ready
        assert frontend.instance_states()[0]["trouble"] == "burnt"
        channels["b"].say(ChannelLost("drowned"))
        await until(lambda: not frontend.healthy)
        assert frontend.unhealthy_reason == "a: burnt; b: drowned"

    run(tokenizer, scenario, "a", "b")


def test_only_modelled_engines_make_a_modelled_model(tokenizer):
    async def scenario(frontend, channels, clock):
        assert frontend.modelled is None
        channels["a"].say(ready("a", 2, device="modelled:h200", sampled_ids=(3, 9)))
        await until(lambda: frontend.engine_client.instances["a"].is_current(2))
        assert frontend.modelled is None
        channels["b"].say(ready("b", 2, device="modelled:h200", sampled_ids=(3, 9)))
        await until(lambda: frontend.modelled)
        assert frontend.modelled == {"first_token_id": 3, "last_token_id": 9}

    run(tokenizer, scenario, "a", "b")


def test_a_master_that_comes_last_makes_it_ready_too(tokenizer):
    async def scenario(frontend, channel, clock):
        frontend.placement.trouble = "the master has not answered yet"
        channel.say(ready("engine-0"))
        waiting = asyncio.create_task(frontend.wait_ready())
        await until(lambda: frontend.engine_client.instances["engine-0"].ready)
        assert not frontend.ready
        frontend.placement.trouble = ""  # of which nothing tells the frontend
        await waiting
        assert frontend.ready

    run(tokenizer, scenario, ready_now=False)


def test_to_cancel_a_beam_search_drops_it(tokenizer):
    async def scenario(frontend, channel, clock):
        params = SamplingParams(n=3, use_beam_search=True)
        generation, (one_id, *same) = await submit(frontend, [1, 2], params)
        assert set(same) == {one_id}
        generation.cancel()
        assert not frontend.engine_client.flights
        assert [c.request_ids for c in channel.sent if isinstance(c, Cancel)] == [[one_id]]

    run(tokenizer, scenario)


def test_modelled_engines_do_not_search(tokenizer):
    async def scenario(frontend, channel, clock):
        channel.say(ready("engine-0", 2, device="modelled:h200", sampled_ids=(3, 9)))
        await until(lambda: frontend.modelled)
        with pytest.raises(InvalidRequest, match=r"^use_beam_search: true, ") as caught:
            frontend.submit([[1]], SamplingParams(use_beam_search=True), request_id="r")
        assert caught.value.field == "use_beam_search"
        with pytest.raises(UnsupportedField, match=r"^structured_outputs: engines of modelled devices") as caught:
            await frontend.check_grammar(SamplingParams(structured_outputs={"regex": "a"}))
        assert caught.value.field == "structured_outputs"

    run(tokenizer, scenario)
