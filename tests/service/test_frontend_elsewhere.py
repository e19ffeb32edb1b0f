"""Requests of several instances: over two of them, and what becomes of them when one is lost."""

import asyncio

import msgspec
import pytest

from penstock.core.errors import EngineFailure, Unavailable
from penstock.core.heartbeat import step_limit
from penstock.core.request import FinishReason, Hypothesis, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import Cancel, Enqueue, Failed, Leg, Migrate, Peer, Refused, Stayed, StepReport, Stopped
from penstock.core.wire.master import Endpoint, Place, Relocate
from penstock.kv.keys import extend_keys
from penstock.service.dispatcher import MASTER_LEARNS, SILENT_AFTER
from penstock.service.engine_client import TICK
from penstock.service.flight import ATTEMPTS, PATIENCE
from penstock.service.instances import ChannelLost
from tests.helpers.frontends import collect, ids_of, lost, one, over, run, submit, value
from tests.helpers.scripted import STATS, ready
from tests.helpers.waiting import until

STUCK_AFTER = step_limit(ready().token_budget + ready().max_sequences, ready().device)


@pytest.mark.parametrize("event", [Failed("out of memory"), ChannelLost("gone"), msgspec.DecodeError("nonsense")])
def test_the_requests_of_a_lost_engine_wait_for_another_and_then_end_with_an_error(tokenizer, event):
    async def scenario(frontend, channel, clock):
        generations = [(await submit(frontend, params=SamplingParams(n=2)))[0] for _ in range(3)]
        assert frontend.healthy
        channel.say(event)
        await until(lambda: lost(frontend))
        clock.advance(PATIENCE)
        frontend.engine_client.tick()
        assert len(frontend.engine_client.flights) == 6
        clock.advance(0.1)
        frontend.engine_client.tick()
        for generation in generations:
            with pytest.raises(
                EngineFailure, match=r"^engine-0 failed during this request .* no instance could continue it"
            ):
                await collect(generation)
        assert lost(frontend)
        assert not frontend.healthy
        assert not frontend.ready
        with pytest.raises(Unavailable):
            frontend.submit([[1]], SamplingParams(), request_id="r")
        channel.life = 2
        channel.say(ready(life=2))
        await until(lambda: frontend.ready)
        frontend.placement.prefill = [ready(life=2).peer]
        await submit(frontend)
        assert channel.sent[-1].to == 2

    run(tokenizer, scenario)


def test_a_loss_is_one_line_and_one_count(tokenizer, caplog):
    async def scenario(frontend, channels, clock):
        def up():
            return [value(frontend, "penstock:instance_up", engine=name) for name in "ab"]

        generations = [(await submit(frontend, params=SamplingParams(n=2)))[0] for _ in range(2)]
        generations.append((await submit(frontend))[0])
        assert up() == [1, 1]
        caplog.clear()
        channels["a"].say(ChannelLost("the connection was lost"))
        await until(lambda: len(channels["b"].enqueued()) == 5)
        lines = [record.getMessage() for record in caplog.records if record.name == "penstock.frontend"]
        assert lines == ["a was lost (the connection was lost): 3 requests are to go on elsewhere"]
        assert not any(over(generation) for generation in generations)
        assert up() == [0, 1]
        lost = [value(frontend, "penstock:instance_lost_total", engine=name) for name in "ab"]
        assert lost == [1, 0]
        clock.advance(STUCK_AFTER + 1)
        frontend.engine_client.tick()
        assert up() == [0, 0]
        channels["a"].say(ready("a", 2))
        await until(lambda: up() == [1, 0])

    run(tokenizer, scenario, "a", "b")


def test_an_engine_that_says_goodbye_is_not_lost(tokenizer):
    """What it still has goes on elsewhere all the same, and nobody waits to learn what broke it."""

    async def scenario(frontend, channels, clock):
        generation, (name,) = await submit(frontend)
        channels["a"].say(Stopped(1))
        channels["a"].say(ChannelLost("the connection was lost"))
        await until(channels["b"].enqueued)
        states = [state["state"] for state in frontend.instance_states()]
        assert states == ["starting", "ready"]
        assert value(frontend, "penstock:instance_lost_total", engine="a") == 0
        assert value(frontend, "penstock:instance_up", engine="a") == 0
        channels["b"].report(TokenOutput(name, [6], generation=1, finish=FinishReason.LENGTH))
        assert [d.tokens for d in await collect(generation)] == [[6]]
        channels["a"].say(ready("a", 2))
        await until(lambda: frontend.instance_states()[0]["state"] == "ready")
        frontend.registry.put(Endpoint("a", "", state="stopped"))  # which may also be heard first
        assert value(frontend, "penstock:instance_lost_total", engine="a") in (0, None)

    run(tokenizer, scenario, "a", "b", told=True)


@pytest.mark.parametrize(("life", "why"), [(2, "another incarnation"), (1, "it has dropped what it had")])
def test_an_engine_that_greets_again_has_nothing_of_what_it_had(tokenizer, life, why, caplog):
    """It is another incarnation, or has not heard this frontend for long."""

    async def scenario(frontend, channel, clock):
        generation, (name,) = await submit(frontend)
        frontend.placement.prefill = [ready(life=life).peer]
        channel.say(ready(life=life))
        await until(lambda: len(channel.enqueued()) == 2)
        assert why in caplog.text
        channel.report(TokenOutput(name, [5]))  # of the first attempt, late
        channel.life = life
        channel.report(TokenOutput(name, [6], generation=2, finish=FinishReason.LENGTH))
        assert [d.tokens for d in await collect(generation)] == [[6]]

    run(tokenizer, scenario)


def test_a_silent_engine_is_unhealthy_and_its_requests_end(tokenizer):
    async def scenario(frontend, channel, clock):
        generation, _ = await submit(frontend)
        clock.advance(SILENT_AFTER + 0.1)
        assert frontend.instance_states()[0]["state"] == "silent"
        assert frontend.healthy
        clock.advance(STUCK_AFTER)
        assert "no sign of life" in frontend.unhealthy_reason
        frontend.engine_client.tick()
        clock.advance(PATIENCE + 0.1)
        frontend.engine_client.tick()
        with pytest.raises(EngineFailure, match="no sign of life"):
            await collect(generation)
        channel.report()
        await until(lambda: frontend.healthy)

    run(tokenizer, scenario)


def test_an_engine_that_was_only_stuck_goes_on_with_its_requests(tokenizer):
    async def scenario(frontend, channel, clock):
        generation, (name,) = await submit(frontend)
        clock.advance(SILENT_AFTER + STUCK_AFTER)
        frontend.engine_client.tick()
        assert [asked.exclude for asked in frontend.placement.asked] == [[], ["engine-0"]]
        channel.report()
        await until(lambda: frontend.healthy)
        frontend.engine_client.tick()
        assert len(channel.enqueued()) == 2
        channel.report(TokenOutput(name, [6], generation=2, finish=FinishReason.LENGTH))
        assert [d.tokens for d in await collect(generation)] == [[6]]

    run(tokenizer, scenario)


@pytest.mark.parametrize(("others", "waits"), [((), 1), (("engine-1",), 0)])
def test_an_engine_that_dropped_a_request_gets_it_again_only_where_no_other_serves(tokenizer, others, waits):
    async def scenario(frontend, channels, clock):
        generation, (name,) = await submit(frontend)
        channels["engine-0"].report(TokenOutput(name, [], finish=FinishReason.ABORT))
        await until(lambda: channels["engine-0"].silent)
        assert len(frontend.placement.queued) == waits
        frontend.engine_client.tick()
        assert [len(channel.enqueued()) for channel in channels.values()] == [1 + waits, *[1 - waits for _ in others]]
        generation.cancel()

    run(tokenizer, scenario, "engine-0", *others)


def test_tokens_come_in_order_from_both_instances(tokenizer):
    ids = tokenizer.encode("def join(path): return")

    async def scenario(frontend, channels, clock):
        generation, (name,) = await submit(frontend)
        command = next(c for c in channels["p"].sent if isinstance(c, Enqueue))
        assert command.route == [Leg("decode", ready("d").peer)]
        assert not channels["d"].enqueued()
        channels["d"].report(TokenOutput(name, ids[1:], start=1, finish=FinishReason.LENGTH))
        await until(lambda: channels["d"].silent)
        channels["p"].report(TokenOutput(name, ids[:1]))
        deltas = await collect(generation)
        assert "".join(d.text for d in deltas) == tokenizer.decode(ids)
        assert generation._parts[0].routes == ["p>d"]
        assert value(frontend, "penstock:handoffs_total") == 1

    run(tokenizer, scenario, "p", "d", decode="d")


def test_what_the_master_wants_elsewhere_is_handed_over_and_settled(tokenizer):
    async def scenario(frontend, channels, clock):
        placement, client = frontend.engine_client._placement, frontend.engine_client
        generation, (name,) = await submit(frontend)
        there = ready("d").peer

        def settled():
            return [(s.request_id, s.generation, s.instance) for s in placement.settlements]

        def migrates(instance):
            return [(c.request_id, c.generation, c.peer) for c in channels[instance].sent if isinstance(c, Migrate)]

        placement.answered(Relocate(name, 0, Peer("x", 1, "")))
        assert (migrates("p"), settled()) == ([], [(name, 0, "p")]), "nobody knows x"
        placement.answered(Relocate(name, 1, there))
        assert migrates("p") == [], "another attempt"
        placement.answered(Relocate(name, 0, there))
        assert migrates("p") == [(name, 0, there)]
        placement.answered(Relocate(name, 0, there))
        assert len(migrates("p")) == 1, "it is on its way"
        channels["p"].report(TokenOutput(name, [5, 6]))
        channels["p"].say(Stayed(ready("p").peer.incarnation, name, 0, "no room", there))
        await until(lambda: len(settled()) == 2)
        assert settled()[1] == (name, 0, "p")
        placement.answered(Relocate(name, 0, there))
        channels["d"].report(TokenOutput(name, [7], start=2))
        await until(lambda: len(settled()) == 3)
        assert settled()[2] == (name, 0, "d")
        assert value(frontend, "penstock:handoffs_total") == 1
        assert generation._parts[0].routes == ["p>d"]
        channels["d"].report(TokenOutput(name, [8], start=3, finish=FinishReason.LENGTH))
        assert [t for d in await collect(generation) for t in d.tokens] == [5, 6, 7, 8]
        assert not client.flights

    run(tokenizer, scenario, "p", "d")


def test_cancelling_reaches_both_instances(tokenizer):
    async def scenario(frontend, channels, clock):
        generation, (name,) = await submit(frontend)
        generation.cancel()
        assert channels["p"].cancelled() == channels["d"].cancelled() == [name]

    run(tokenizer, scenario, "p", "d", decode="d")


def test_losing_one_of_two_instances(tokenizer):
    async def scenario(frontend, channels, clock):
        decoding, (one,) = await submit(frontend)
        prefilling, _ = await submit(frontend)
        channels["p"].report(TokenOutput(one, [5]))
        channels["d"].report(TokenOutput(one, [6], start=1))
        await until(lambda: frontend.engine_client.flights[one].handoffs)
        channels["p"].say(ChannelLost("gone"))
        await until(lambda: not frontend.engine_client.instances["p"].ready)
        channels["d"].report(TokenOutput(one, [7], start=2, finish=FinishReason.LENGTH))
        assert [t for d in await collect(decoding) for t in d.tokens] == [5, 6, 7]
        assert len(channels["q"].enqueued()) == 1, "the one that was being prefilled, at once"
        assert ids_of(prefilling) == channels["d"].cancelled(), "should it have room for it"
        assert channels["d"].sent[-1].generation == 0
        prefilling.cancel()

    run(tokenizer, scenario, "p", "q", "d", decode="d")


def interrupted(frontend, count=1):
    """As many as are held and were sent elsewhere."""
    return sum(flight.launches == 2 for flight in frontend.engine_client.flights.values()) == count


def test_a_stream_goes_on_elsewhere_where_it_stopped(tokenizer, caplog):
    caplog.set_level("INFO")
    ids = tokenizer.encode("def join(path, *more): return separator.join([path, *more])")
    prompt = list(range(60))

    async def scenario(frontend, channels, clock):
        frontend.placement.wants_keys = True
        generation, (name,) = await submit(frontend, prompt, SamplingParams(max_tokens=40, seed=7))
        clock.advance(0.5)
        channels["a"].report(TokenOutput(name, ids[:5], cached_tokens=3))
        await until(lambda: frontend.engine_client.flights[name].received == 5)
        clock.advance(1.0)
        channels["a"].say(ChannelLost("burnt"))
        await until(lambda: interrupted(frontend))
        command, asked = channels["b"].sent[-1], frontend.placement.asked[-1]
        assert (list(command.request.generated), command.generation) == (ids[:5], 1)
        assert (command.request.prompt, command.request.seed, command.request.max_tokens) == (prompt, 7, 40)
        assert (asked.prompt_tokens, asked.max_tokens, asked.generation, asked.exclude) == (65, 35, 1, ["a"])
        keys = []
        extend_keys(keys, b"root", [*prompt, *ids[:4]], 1)
        assert asked.keys == keys
        assert not over(generation)
        clock.advance(1.0)
        channels["a"].report(TokenOutput(name, ids[5:7], start=5))  # it was not dead after all
        channels["b"].report(TokenOutput(name, ids[5:6], start=5, generation=1, cached_tokens=64))
        channels["b"].report(TokenOutput(name, ids[6:], start=6, generation=1, finish=FinishReason.LENGTH))
        deltas = await collect(generation)
        assert [t for d in deltas for t in d.tokens] == ids
        assert "".join(d.text for d in deltas) == tokenizer.decode(ids)
        assert (generation.usage.completion_tokens, generation.usage.cached_tokens) == (len(ids), 3)
        assert generation._parts[0].routes == ["a", "b"]
        assert value(frontend, "penstock:recoveries_total", how="cache") == 1
        assert value(frontend, "penstock:recoveries_total", how="recompute") == 0
        assert value(frontend, "penstock:time_to_first_token_seconds_sum") == 0.5
        assert value(frontend, "penstock:time_to_first_token_seconds_count") == 1
        assert value(frontend, "penstock:generation_tokens_total") == len(ids)
        assert frontend.placement.first_tokens == [name, name]
        (outcome,) = frontend.placement.outcomes
        assert (outcome.ttft_ms, outcome.queue_ms, outcome.tokens) == (500.0, 0.0, len(ids))
        assert "it has 5 tokens" in caplog.text
        went = "goes on at b from token 5: 64 tokens of 65 were found there, after 1000.0 ms"
        assert f"request {name} {went}" in caplog.text

    run(tokenizer, scenario, "a", "b")


def test_a_stream_keeps_its_weights_as_long_as_an_instance_has_them(tokenizer):
    async def scenario(frontend, channels, clock):
        channels["b"].life = 2
        new = ready("b", 2, root_key=b"another checkpoint")
        channels["b"].say(new)
        await until(lambda: frontend.engine_client.instances["b"].ready == new)
        frontend.placement.prefill = [ready("a").peer, new.peer, ready("c").peer]
        generation, (name,) = await submit(frontend)
        channels["a"].report(TokenOutput(name, [5]))
        await until(lambda: frontend.engine_client.flights[name].received == 1)
        channels["a"].say(ChannelLost("burnt"))
        await until(channels["c"].enqueued)
        assert not channels["b"].enqueued()
        channels["c"].say(ChannelLost("drowned"))
        await until(lambda: not frontend.engine_client.flights[name].placed)
        frontend.engine_client.tick()
        assert channels["b"].enqueued(), "rather than an error"
        attempt = frontend.engine_client.flights[name].attempt
        channels["b"].report(TokenOutput(name, [6], start=1, generation=attempt, finish=FinishReason.LENGTH))
        assert [t for d in await collect(generation) for t in d.tokens] == [5, 6]

    run(tokenizer, scenario, "a", "b", "c")


def test_of_several_outputs_each_goes_on_by_itself(tokenizer):
    async def scenario(frontend, channels, clock):
        generation, names = await submit(frontend, params=SamplingParams(n=3, stop="thr"))
        words = tokenizer.encode("one two three")
        channels["a"].report(TokenOutput(names[0], [20], finish=FinishReason.LENGTH), TokenOutput(names[1], words[:1]))
        await until(lambda: len(frontend.engine_client.flights) == 2)
        channels["a"].say(ChannelLost("burnt"))
        await until(lambda: interrupted(frontend, 2))
        generated = {r.id: list(r.generated) for r in channels["b"].enqueued()}
        assert generated == {names[1]: words[:1], names[2]: []}
        for i, word in enumerate(words[1:], 1):
            channels["b"].report(TokenOutput(names[1], [word], start=i, generation=1))
        channels["b"].report(TokenOutput(names[2], [30], generation=1, finish=FinishReason.LENGTH))
        deltas = await collect(generation)
        assert "".join(d.text for d in deltas if d.index == 1) == "one two "
        assert {d.index: d.finish_reason for d in deltas if d.finish_reason} == {0: "length", 1: "stop", 2: "length"}
        assert value(frontend, "penstock:recoveries_total", how="recompute") == 2

    run(tokenizer, scenario, "a", "b")


def test_a_client_that_leaves_during_the_pause_leaves_nothing(tokenizer):
    async def scenario(frontend, channel, clock):
        generation, (name,) = await submit(frontend)
        channel.report(TokenOutput(name, [20]))
        await one(generation)
        channel.say(ChannelLost("burnt"))
        await until(lambda: lost(frontend))
        assert frontend.placement.waiting == 1
        generation.cancel()
        assert not frontend.placement.waiting
        assert frontend.placement.over == [name]
        assert value(frontend, "penstock:request_success_total", finished_reason="abort") == 1
        assert value(frontend, "penstock:recoveries_total", how="recompute") == 0

    run(tokenizer, scenario)


def test_an_engine_that_starts_again_takes_up_what_it_had(tokenizer):
    async def scenario(frontend, channel, clock):
        generation, (name,) = await submit(frontend)
        channel.report(TokenOutput(name, [20]))
        await until(lambda: frontend.engine_client.flights[name].received)
        channel.say(ChannelLost("burnt"))
        await until(lambda: lost(frontend))
        clock.advance(PATIENCE - 0.1)
        frontend.engine_client.tick()
        frontend.placement.prefill, channel.life = [ready(life=2).peer], 2
        channel.say(ready(life=2))
        await until(lambda: len(channel.enqueued()) == 2)
        attempt = frontend.engine_client.flights[name].attempt
        channel.report(TokenOutput(name, [21], start=1, generation=attempt, finish=FinishReason.LENGTH))
        assert [d.tokens for d in await collect(generation)] == [[20], [21]]

    run(tokenizer, scenario)


def test_a_request_that_ends_every_engine_does_not_meet_them_all(tokenizer):
    names = [f"e{i}" for i in range(ATTEMPTS + 2)]

    async def scenario(frontend, channels, clock):
        generation, _ = await submit(frontend)
        for i, (at, channel) in enumerate(channels.items()):
            if i == ATTEMPTS:
                break
            await until(channel.enqueued)
            frontend.placement.prefill = frontend.placement.prefill[1:]
            channel.say(ChannelLost("poisoned"))
            await until(lambda at=at: frontend.engine_client.instances[at].lost)
        last = ATTEMPTS - 1
        says = rf"^e{last} failed during this request \(poisoned\), one of {ATTEMPTS} failed attempts$"
        with pytest.raises(EngineFailure, match=says):
            await collect(generation)
        assert not any(channels[name].enqueued() for name in names[ATTEMPTS:])

    run(tokenizer, scenario, *names)


def test_an_earlier_attempt_that_still_runs_is_told_to_stop(tokenizer):
    async def scenario(frontend, channels, clock):
        generation, (name,) = await submit(frontend)
        frontend.placement.prefill = [ready("b").peer]
        channels["a"].report(TokenOutput(name, [], finish=FinishReason.ABORT))
        await until(channels["b"].enqueued)
        assert channels["a"].sent[-1] == Cancel(1, [name], 0)
        channels["a"].report(TokenOutput(name, [9]))
        await until(lambda: len(channels["a"].cancelled()) == 2)
        assert channels["a"].sent[-1] == Cancel(1, [name], 0)
        channels["b"].report(TokenOutput(name, [5], finish=FinishReason.LENGTH, generation=1))
        assert [d.tokens for d in await collect(generation)] == [[5]]

    run(tokenizer, scenario, "a", "b")


@pytest.mark.parametrize("why", ["draining", "stale"])
def test_what_an_instance_never_began_runs_elsewhere(tokenizer, why):
    async def scenario(frontend, channels, clock):
        generation, (name,) = await submit(frontend)
        channels["a"].say(Refused(1, name, "not here", why))
        await until(channels["b"].enqueued)
        assert frontend.placement.asked[-1].exclude == ["a"]
        assert channels["b"].sent[-1].generation == 1
        channels["a"].report(TokenOutput(name, [9]))
        channels["b"].report(TokenOutput(name, [5], finish=FinishReason.LENGTH, generation=1))
        assert [d.tokens for d in await collect(generation)] == [[5]]

    run(tokenizer, scenario, "a", "b")


def test_a_place_that_the_frontend_knows_to_be_gone_is_not_taken(tokenizer):
    async def scenario(frontend, channels, clock):
        channels["a"].say(ChannelLost("gone"))
        await until(lambda: not frontend.engine_client.instances["a"].ready)
        generation = frontend.submit([[1]], SamplingParams(), request_id="r")
        await until(channels["b"].enqueued)
        assert [asked.exclude for asked in frontend.placement.asked] == [[], ["a"]]
        channels["b"].report(TokenOutput(ids_of(generation)[0], [5], finish=FinishReason.LENGTH, generation=1))
        assert [d.tokens for d in await collect(generation)] == [[5]]
        assert value(frontend, "penstock:recoveries_total", how="recompute") == 0

    run(tokenizer, scenario, "a", "b")


def test_places_that_are_all_gone_are_asked_for_once_each_and_then_waited_for(tokenizer):
    async def scenario(frontend, channels, clock):
        for channel in channels.values():
            channel.say(ChannelLost("gone"))
        await until(lambda: lost(frontend))
        channels["b"].say(ready("b", 2))
        await until(lambda: frontend.ready)
        generation = frontend.submit([[1]], SamplingParams(), request_id="r")
        assert [asked.exclude for asked in frontend.placement.asked] == [[], ["a"], ["a", "b"]]
        frontend.placement.prefill = [ready("b", 2).peer]
        await until(channels["b"].enqueued)
        generation.cancel()

    run(tokenizer, scenario, "a", "b")


def test_no_place_is_believed_after_a_while(tokenizer):
    async def scenario(frontend, channel, clock):
        peers, frontend.placement.prefill = frontend.placement.prefill, None
        soon = frontend.submit([[1]], SamplingParams(), request_id="r")
        await until(lambda: frontend.placement.asked)
        frontend.placement.prefill = peers
        await until(channel.enqueued)
        soon.cancel()
        frontend.placement.prefill = None
        never = frontend.submit([[1]], SamplingParams(), request_id="r")
        await asyncio.sleep(0)
        clock.advance(MASTER_LEARNS + 1)
        with pytest.raises(Unavailable, match="nobody"):
            await collect(never)

    run(tokenizer, scenario)


def test_a_beam_search_goes_to_one_instance_whole_and_again_elsewhere_when_that_dies(tokenizer):
    async def scenario(frontend, channels, clock):
        params = SamplingParams(n=3, use_beam_search=True, max_tokens=4)
        generation = frontend.submit([[1, 2]], params, request_id="r")
        await until(lambda: any(channel.enqueued() for channel in channels.values()))
        home, other = sorted(("p", "q"), key=lambda name: not channels[name].enqueued())
        (sent,) = [command for command in channels[home].sent if isinstance(command, Enqueue)]
        assert (sent.route, sent.request.params.n) == ([], 3)
        channels[home].say(StepReport(1, [TokenOutput(sent.request.id, [])], STATS))
        await until(lambda: frontend.engine_client.flights[sent.request.id].heard)
        assert frontend.engine_client.dispatcher.queue.tokens == 0, "its prompt was prefilled"
        channels[home].say(ChannelLost("killed"))
        await until(channels[other].enqueued)
        (again,) = [command for command in channels[other].sent if isinstance(command, Enqueue)]
        assert (again.request.generated, again.request.prompt) == ((), [1, 2])
        found = [Hypothesis([5, 6, 7, 8 + i], None, FinishReason.LENGTH, None, -1.0 - i) for i in range(3)]
        last = TokenOutput(again.request.id, [], finish=FinishReason.LENGTH, hypotheses=found, generation=1)
        channels[other].say(StepReport(again.to, [last], STATS))
        await until(lambda: not frontend.engine_client.flights)
        deltas = [delta for delta in await generation.next() if delta.tokens]
        assert [(d.index, d.tokens) for d in deltas] == [(i, found[i].tokens) for i in range(3)]
        assert over(generation)
        assert generation.usage.completion_tokens == 12

    run(tokenizer, scenario, "p", "q", "d", decode="d")


def test_instances_come_and_go_and_what_runs_on_one_that_leaves_continues_elsewhere(tokenizer):
    async def scenario(frontend, channels, clock):
        client = frontend.engine_client
        generation, ids = await submit(frontend)
        channels["a"].report(TokenOutput(ids[0], [7]))
        await one(generation)
        frontend.registry.put(Endpoint("b", "there"))
        await until(lambda: client.instances["b"].ready)
        frontend.placement.prefill = [ready("b").peer]
        frontend.registry.remove("a", "nothing was heard of its host for 5 s")
        await until(channels["b"].enqueued)
        (again,) = channels["b"].enqueued()
        assert (again.id, again.generated) == (ids[0], (7,))
        assert channels["a"].closed
        assert list(client.instances) == ["b"]
        assert value(frontend, "penstock:instance_up", engine="a") is None
        assert value(frontend, "penstock:instance_up", engine="b") == 1
        channels["b"].report(TokenOutput(ids[0], [8], start=1, finish=FinishReason.STOP, generation=1))
        assert [delta.tokens for delta in await collect(generation)] == [[8]]
        frontend.registry.put(Endpoint("b", "there", state="stopped"))
        assert not client.instances
        assert not frontend.ready
        assert frontend.healthy

    run(tokenizer, scenario, "a", later=["b"])


def test_many_that_are_placed_without_a_master_at_once_do_not_all_go_to_the_same(tokenizer):
    async def scenario(frontend, channels, clock):
        for request_id in "rs":
            await submit(frontend, request_id=request_id)

        def chosen(count):
            places = [frontend.engine_client.dispatcher.choose(Place("t", 1, 10, [])) for _ in range(count)]
            return [placed.route[0].peer.name for placed in places]

        assert chosen(4) == ["b", "b", "a", "b"]
        clock.advance(TICK)
        assert chosen(2) == ["b", "b"], "nothing was sent there, after all"

    run(tokenizer, scenario, "a", "b")
