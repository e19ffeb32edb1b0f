"""Sequences of an engine that stands still begin again elsewhere, and go on with the attempt that is ahead."""

import pytest

from penstock.core.request import FinishReason, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.service_level import ServiceLevel
from penstock.core.wire.engine import Cancel, Enqueue, Failed, Refused
from penstock.service.flight import ATTEMPTS, PATIENCE
from penstock.service.hedging import AGAIN, QUIET
from penstock.service.instances import ChannelLost
from tests.helpers.frontends import collect, one, run, submit, value
from tests.helpers.waiting import until

STOPPED = "a hangs: no heartbeat for 1 s, a signal has stopped it"


def stand_still(frontend, clock, *names, quiet=QUIET + 0.1):
    """Nothing has been heard of these, and their launchers say why."""
    clock.advance(quiet)
    for name in set(frontend.engine_client.instances) - set(names):
        frontend.engine_client.instances[name].heard = clock.now()
    frontend.placement.troubles = dict.fromkeys(names, STOPPED)
    frontend.engine_client.tick()


def attempts(channel):
    """Generations that it was sent."""
    return [command.generation for command in channel.sent if isinstance(command, Enqueue)]


def hedges(frontend):
    return [value(frontend, "penstock:hedged_requests_total", how=how) for how in ("overtaken", "returned")]


async def begun(frontend, channel, tokens=(5,)):
    """A sequence that has brought these."""
    generation, (name,) = await submit(frontend)
    channel.report(TokenOutput(name, list(tokens)))
    await one(generation)
    return generation, name


def test_it_goes_on_where_the_next_token_comes_first(tokenizer):
    async def scenario(frontend, channels, clock):
        a, b = channels["a"], channels["b"]
        generation, name = await begun(frontend, a)
        stand_still(frontend, clock, "a")
        asked = frontend.placement.asked[-1]
        assert (asked.hedged, asked.interrupted, asked.exclude, asked.prompt_tokens) == (True, True, ["a"], 2)
        assert attempts(b) == [1]
        assert not a.cancelled(), "it may still be the first"
        frontend.engine_client.tick()
        assert attempts(b) == [1], "it is tried once"
        b.report(TokenOutput(name, [6], start=1, generation=1))
        assert (await one(generation)).tokens == [6]
        assert a.sent[-1] == Cancel(1, [name], 0)
        a.report(TokenOutput(name, [6], start=1), TokenOutput(name, [7], start=2))  # it has come back, too late
        b.report(TokenOutput(name, [7], start=2, generation=1, finish=FinishReason.LENGTH))
        assert [delta.tokens for delta in await collect(generation)] == [[7]]
        assert hedges(frontend) == [1, 0]
        assert value(frontend, "penstock:recoveries_total", how="recompute") == 1

    run(tokenizer, scenario, "a", "b")


@pytest.mark.parametrize("placed", [True, False])
def test_whoever_comes_back_in_time_keeps_it(tokenizer, placed):
    async def scenario(frontend, channels, clock):
        a, b = channels["a"], channels["b"]
        generation, name = await begun(frontend, a)
        if not placed:
            frontend.placement.prefill = None
        stand_still(frontend, clock, "a")
        assert (attempts(b), len(frontend.placement.queued)) == (([1], 0) if placed else ([], 1))
        a.report(TokenOutput(name, [6], start=1))
        assert (await one(generation)).tokens == [6]
        assert b.cancelled() == [name] * placed
        assert not frontend.placement.queued, "no place is wanted any more"
        (settled,) = frontend.placement.settlements
        assert (settled.generation, settled.instance) == (0, "a")
        b.report(TokenOutput(name, [6], start=1, generation=1), TokenOutput(name, [9], start=2, generation=1))
        await until(lambda: b.silent)
        # it can stand still again, and no number comes twice
        frontend.placement.prefill = [channel_peer(frontend, n) for n in "ab"]
        stand_still(frontend, clock, "a")
        assert frontend.placement.asked[-1].generation == 2
        b.report(TokenOutput(name, [9], start=2, generation=1))  # of the attempt that was cancelled
        b.report(TokenOutput(name, [7], start=2, generation=2, finish=FinishReason.LENGTH))
        assert [delta.tokens for delta in await collect(generation)] == [[7]]
        assert hedges(frontend) == [1, 1]

    run(tokenizer, scenario, "a", "b")


def channel_peer(frontend, name):
    return frontend.engine_client.instances[name].ready.peer


def losses(generation):
    """That a record of the request has."""
    return [(each.tokens, each.why) for part in generation._parts for each in part.interruptions]


def test_the_rest_of_it_when_either_is_lost(tokenizer):
    """Whichever attempt is left goes on; one that only waited for room to spare takes any place."""

    async def scenario(frontend, channels, clock):
        a, b, c = channels["a"], channels["b"], channels["c"]
        one_, first = await begun(frontend, a)
        stand_still(frontend, clock, "a")
        assert attempts(b) == [1]
        b.say(ChannelLost("gone"))
        frontend.placement.prefill = [channel_peer(frontend, "c")]
        await until(lambda: frontend.engine_client.instances["b"].lost)
        assert frontend.engine_client.flights[first].held_at is None, "it is back at the one that may hang"
        frontend.engine_client.tick()
        assert attempts(c) == [2], "which still may"
        a.say(ChannelLost("killed"))
        await until(lambda: frontend.engine_client.instances["a"].lost)
        c.report(TokenOutput(first, [6], start=1, generation=2, finish=FinishReason.LENGTH))
        assert [delta.tokens for delta in await collect(one_)] == [[6]]
        assert not c.cancelled()
        assert losses(one_) == [(1, "a failed during this request (killed)")]

    run(tokenizer, scenario, "a", "b", "c")

    async def waits(frontend, channels, clock):
        a, b = channels["a"], channels["b"]
        generation, name = await begun(frontend, a)
        frontend.placement.prefill = None
        stand_still(frontend, clock, "a")
        clock.advance(PATIENCE - 0.5)
        a.say(ChannelLost("killed"))
        await until(lambda: frontend.engine_client.instances["a"].lost)
        asked = frontend.placement.asked[-1]
        assert (asked.hedged, asked.interrupted, asked.generation) == (False, True, 2)
        assert asked.patience == PATIENCE, "which counts from the loss"
        assert frontend.engine_client.flights[name].interrupted == "a failed during this request (killed)"
        assert losses(generation) == [(1, "a failed during this request (killed)")]
        frontend.placement.prefill = [channel_peer(frontend, "b")]
        b.report(TokenOutput(name, [6], start=1, generation=2, finish=FinishReason.LENGTH))
        assert [delta.tokens for delta in await collect(generation)] == [[6]]

    run(tokenizer, waits, "a", "b")


def test_where_it_is_refused_or_dropped(tokenizer):
    async def scenario(frontend, channels, clock):
        a, b, c = channels["a"], channels["b"], channels["c"]
        generation, name = await begun(frontend, a)
        stand_still(frontend, clock, "a")
        b.say(Refused(1, name, "it drains", "draining"))
        await until(lambda: attempts(c))
        assert frontend.placement.asked[-1].exclude == ["b", "a"]
        a.report(TokenOutput(name, [], finish=FinishReason.ABORT))  # for its frontend was silent to it
        await until(lambda: a.silent)
        c.report(TokenOutput(name, [6], start=1, generation=2, finish=FinishReason.LENGTH))
        assert [delta.tokens for delta in await collect(generation)] == [[6]]
        assert losses(generation) == [(1, "a dropped this request")]

    run(tokenizer, scenario, "a", "b", "c")


def test_what_may_have_broken_the_other_does_not_go_back_among_others(tokenizer):
    async def scenario(frontend, channels, clock):
        a, b, c = channels["a"], channels["b"], channels["c"]
        generation, name = await begun(frontend, a)
        stand_still(frontend, clock, "a")
        assert attempts(b) == [1]
        frontend.placement.prefill = [channel_peer(frontend, "c")]
        b.say(Failed("a fault", [name, "another"]))
        await until(lambda: frontend.engine_client.instances["b"].lost)
        assert a.cancelled() == [name]
        assert attempts(c) == [2]
        assert c.enqueued()[-1].alone
        generation.cancel()

    run(tokenizer, scenario, "a", "b", "c")


def test_one_that_makes_engines_hang_gets_to_no_more_than_one_that_kills_them(tokenizer):
    names = "abcdef"

    async def scenario(frontend, channels, clock):
        client = frontend.engine_client
        _, name = await begun(frontend, channels["a"])
        for _ in range(ATTEMPTS):
            at = client.flights[name].here.name
            stand_still(frontend, clock, at)
            channels[at].say(ChannelLost("killed"))
            await until(lambda at=at: client.instances[at].lost)
            frontend.placement.prefill = [channel_peer(frontend, n) for n in names if client.instances[n].ready]
        assert name not in client.flights
        assert sum(len(attempts(channel)) for channel in channels.values()) == ATTEMPTS

    run(tokenizer, scenario, *names)


def test_it_is_not_given_up_for_suspicions_alone(tokenizer):
    async def scenario(frontend, channels, clock):
        generation, (name,) = await submit(frontend)
        for _ in range(ATTEMPTS + 1):
            stand_still(frontend, clock, frontend.engine_client.flights[name].here.name)
        assert len(attempts(channels["a"])) + len(attempts(channels["b"])) == ATTEMPTS
        generation.cancel()

    run(tokenizer, scenario, "a", "b", "d", decode="d")


def test_where_its_first_token_comes_from_is_what_is_told_of_it(tokenizer):
    async def scenario(frontend, channels, clock):
        generation, (name,) = await submit(frontend)
        stand_still(frontend, clock, "a")
        assert attempts(channels["b"]) == [1]
        channels["a"].report(TokenOutput(name, [6], finish=FinishReason.LENGTH))
        await collect(generation)
        (outcome,) = frontend.placement.outcomes
        assert (outcome.ttft_ms > 0, outcome.queue_ms) == (True, 0.0)

    run(tokenizer, scenario, "a", "b")


def test_a_client_that_leaves_is_cancelled_at_both(tokenizer):
    async def scenario(frontend, channels, clock):
        generation, name = await begun(frontend, channels["a"])
        stand_still(frontend, clock, "a")
        generation.cancel()
        assert [channel.cancelled() for channel in channels.values()] == [[name], [name]]

    run(tokenizer, scenario, "a", "b")


def test_where_there_is_no_room_it_waits_and_is_tried_again(tokenizer):
    async def scenario(frontend, channels, clock):
        _, name = await begun(frontend, channels["a"])
        frontend.placement.prefill = None
        stand_still(frontend, clock, "a")
        asked = len(frontend.placement.asked)
        clock.advance(asked_for := frontend.placement.asked[-1].patience + 0.1)
        assert asked_for > 0
        frontend.engine_client.tick()
        assert name in frontend.engine_client.flights, "it is where it was"
        assert frontend.placement.settlements[-1].instance == "a"
        frontend.engine_client.tick()
        assert len(frontend.placement.asked) == asked
        stand_still(frontend, clock, "a", quiet=AGAIN)
        assert len(frontend.placement.asked) == asked + 1

    run(tokenizer, scenario, "a", "b")


def test_what_is_left_where_it_is(tokenizer):
    """Nothing begins again for an engine that speaks, nor when most are suspected, nor what nobody waits for."""

    async def scenario(frontend, channels, clock):
        offline = frontend.submit([[1]], SamplingParams(), request_id="o", level=ServiceLevel(offline=True))
        await begun(frontend, channels["a"])
        asked = len(frontend.placement.asked)
        stand_still(frontend, clock, "a", quiet=QUIET / 2)
        assert len(frontend.placement.asked) == asked, "it was heard"
        stand_still(frontend, clock, "a", "b")
        assert len(frontend.placement.asked) == asked, "the machine is slow"
        stand_still(frontend, clock, "a")
        assert [place.offline for place in frontend.placement.asked[asked:]] == [False]
        offline.cancel()

    run(tokenizer, scenario, "a", "b", "c")


def test_what_is_handed_over_and_was_never_heard_of_begins_again(tokenizer):
    """Who is to decode it has nothing of it yet: there is nothing to wait for."""

    async def scenario(frontend, channels, clock):
        generation, (name,) = await submit(frontend)
        stand_still(frontend, clock, "a")
        assert channels["a"].cancelled() == channels["d"].cancelled() == [name]
        asked = frontend.placement.asked[-1]
        assert (asked.hedged, asked.exclude) == (False, ["a"])
        channels["b"].report(TokenOutput(name, [6], generation=1, finish=FinishReason.LENGTH))
        assert [delta.tokens for delta in await collect(generation)] == [[6]]

    run(tokenizer, scenario, "a", "b", "d", decode="d")
