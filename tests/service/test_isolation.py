"""Requests that break engines, and those that only ran beside them."""

import pytest

from penstock.core.errors import BreaksEngines
from penstock.core.request import FinishReason, TokenOutput
from penstock.core.wire.engine import Failed, Peer
from penstock.core.wire.master import EngineEnded
from penstock.service.instances import ChannelLost
from penstock.service.isolation import CAUSE, PROBATION, Causes
from tests.helpers.frontends import collect, over, run, submit, value
from tests.helpers.scripted import ready
from tests.helpers.waiting import until

A, B = Peer("a", 1, ""), Peer("b", 1, "")


def isolated(frontend, verdict):
    return value(frontend, "penstock:isolated_requests_total", verdict=verdict)


def newest(channel):
    """What each request was sent with last."""
    return {request.id: request for request in channel.enqueued()}


async def several(frontend, count):
    made = [await submit(frontend, request_id=f"r{i}") for i in range(count)]
    return [generation for generation, _ in made], [name for _, (name,) in made]


def ends(name, start=0):
    return TokenOutput(name, [9], start=start, finish=FinishReason.LENGTH)


def report(frontend, channel, *outputs):
    """Of the attempts that run now."""
    for output in outputs:
        output.generation = frontend.engine_client.flights[output.request_id].attempt
    channel.report(*outputs)


def test_what_is_known_is_not_waited_for():
    causes = Causes(told=True)
    assert causes.lost(("a", 1), 0.0)
    assert causes.awaited([B, A])
    assert not causes.awaited([B])
    assert not causes.expire(CAUSE / 2)
    assert causes.learn(("a", 1))
    assert not causes.learn(("a", 1))
    causes.check()
    assert not causes.awaited([A])
    assert not causes.lost(("a", 1), 1.0)
    assert causes.lost(("a", 2), 1.0)
    assert causes.expire(1.0 + CAUSE)
    assert not causes.awaited([Peer("a", 2, "")])
    assert not Causes(told=False).lost(("a", 1), 0.0)


def test_suspects_go_on_alone_and_only_one_that_breaks_another_engine_is_refused(tokenizer):
    async def scenario(frontend, channels, clock):
        generations, (guilty, beside, queued) = await several(frontend, 3)
        channels["a"].report(TokenOutput(guilty, [4]), TokenOutput(beside, [5, 6]))
        channels["a"].say(Failed("a fault", [guilty, beside]))
        await until(lambda: len(channels["b"].enqueued()) == 3)
        asked = newest(channels["b"])
        assert [asked[name].alone for name in (guilty, beside, queued)] == [1 + PROBATION, 2 + PROBATION, 0]
        assert (isolated(frontend, "suspected"), isolated(frontend, "refused")) == (2, 0)
        channels["b"].say(Failed("a fault", [guilty]))
        await until(lambda: len(channels["c"].enqueued()) == 2)
        with pytest.raises(BreaksEngines, match=r"it has broken a and then b, the second time while nothing else"):
            await collect(generations[0])
        assert guilty not in newest(channels["c"])
        assert frontend.placement.refused.keys() == {guilty}
        assert isolated(frontend, "refused") == 1
        assert [newest(channels["c"])[name].alone for name in (beside, queued)] == [2 + PROBATION, 0]
        report(frontend, channels["c"], ends(beside, start=2), ends(queued))
        assert [t for d in await collect(generations[1]) for t in d.tokens] == [5, 6, 9]
        assert [t for d in await collect(generations[2]) for t in d.tokens] == [9]

    run(tokenizer, scenario, "a", "b", "c")


def test_one_that_has_passed_the_place_is_innocent(tokenizer):
    async def scenario(frontend, channels, clock):
        (one, _), (name, other) = await several(frontend, 2)
        channels["a"].say(Failed("a fault", [name, other]))
        await until(lambda: len(channels["b"].enqueued()) == 2)
        tokens = list(range(PROBATION))
        report(frontend, channels["b"], TokenOutput(name, tokens))
        channels["b"].say(Failed("a fault", [name]))  # of something else that it came to
        await until(lambda: len(channels["c"].enqueued()) == 2)
        assert newest(channels["c"])[name].alone == 2 * PROBATION
        report(frontend, channels["c"], ends(name, start=PROBATION), ends(other))
        assert [t for d in await collect(one) for t in d.tokens] == [*tokens, 9]

    run(tokenizer, scenario, "a", "b", "c")


@pytest.mark.parametrize("passed", [False, True])
def test_who_has_broken_a_second_engine_is_refused_also_when_that_is_known_late(tokenizer, passed):
    """Unless it has got on where it is now."""

    async def scenario(frontend, channels, clock):
        client = frontend.engine_client
        (one, _), (name, other) = await several(frontend, 2)
        channels["a"].say(Failed("a fault", [name, other]))
        await until(lambda: len(channels["b"].enqueued()) == 2)
        channels["b"].say(ChannelLost("gone"))
        await until(lambda: client.instances["b"].lost)
        clock.advance(CAUSE)
        client.tick()
        assert len(channels["c"].enqueued()) == 2
        if passed:
            report(frontend, channels["c"], TokenOutput(name, [7]))
            await until(lambda: client.flights[name].received)
        client.engine_ended(EngineEnded("b", 1, [name]))
        assert isolated(frontend, "refused") == (not passed)
        report(frontend, channels["c"], *[ends(name, start=1)] * passed, ends(other))
        if passed:
            assert [t for d in await collect(one) for t in d.tokens] == [7, 9]
        else:
            assert channels["c"].cancelled() == [name]
            with pytest.raises(BreaksEngines):
                await collect(one)

    run(tokenizer, scenario, "a", "b", "c", told=True)


@pytest.mark.parametrize("guilty", [False, True])
def test_whoever_ran_where_a_connection_ended_waits_for_the_cause(tokenizer, guilty):
    async def scenario(frontend, channels, clock):
        client = frontend.engine_client
        generations, names = await several(frontend, 2)
        channels["a"].say(ChannelLost("gone"))
        await until(lambda: client.instances["a"].lost)
        client.tick()
        assert not channels["b"].enqueued()
        ended = EngineEnded("a", 1, names if guilty else [])
        client.engine_ended(ended)
        client.engine_ended(ended)  # it is said again and again
        assert {r.id: r.alone for r in channels["b"].enqueued()} == dict.fromkeys(names, PROBATION if guilty else 0)
        assert len(channels["b"].enqueued()) == 2
        report(frontend, channels["b"], *map(ends, names))
        for generation in generations:
            await collect(generation)
        assert isolated(frontend, "suspected") == 2 * guilty

    run(tokenizer, scenario, "a", "b", told=True)


def test_the_cause_may_be_known_first_or_late_or_never(tokenizer):
    async def scenario(frontend, channels, clock):
        client = frontend.engine_client
        generations, (name, heard, other) = await several(frontend, 3)
        client.engine_ended(EngineEnded("a", 1))  # before its connection has ended
        assert {r.id: r.alone for r in channels["b"].enqueued()} == dict.fromkeys((name, heard, other), 0)
        channels["a"].say(ChannelLost("gone"))
        channels["b"].say(ChannelLost("gone"))
        await until(lambda: client.instances["b"].lost)
        clock.advance(CAUSE)
        client.tick()  # nobody has said anything, so they go on as they were
        assert {r.id: r.alone for r in channels["c"].enqueued()} == dict.fromkeys((name, heard, other), 0)
        report(frontend, channels["c"], TokenOutput(heard, [7]))
        await until(lambda: client.flights[heard].received)
        client.engine_ended(EngineEnded("b", 1, [name, heard]))
        # nothing came of one of them since, which so may be about to break the next engine
        assert channels["c"].cancelled() == [name]
        assert {r.id: r.alone for r in channels["c"].enqueued()[3:]} == {name: PROBATION}
        report(frontend, channels["c"], ends(name), ends(heard, start=1), ends(other))
        await until(lambda: all(over(one) or one._deltas for one in generations))
        for one in generations:
            await collect(one)

    run(tokenizer, scenario, "a", "b", "c", told=True)


def test_engines_that_are_killed_convict_nobody(tokenizer):
    """Not even one that was there each time."""

    async def scenario(frontend, channel, clock):
        client = frontend.engine_client
        (one,), (name,) = await several(frontend, 1)
        for life in range(1, 9):
            report(frontend, channel, TokenOutput(name, [life], start=life - 1))
            await until(lambda life=life: client.flights[name].received == life)
            channel.say(ChannelLost("killed"))
            await until(lambda: client.instances["engine-0"].lost)
            client.engine_ended(EngineEnded("engine-0", life))
            channel.life = life + 1
            frontend.placement.prefill = [ready(life=life + 1).peer]
            channel.say(ready(life=life + 1))
            await until(lambda life=life: len(channel.enqueued()) == life + 1)
        report(frontend, channel, ends(name, start=8))
        assert [t for d in await collect(one) for t in d.tokens] == [*range(1, 9), 9]

    run(tokenizer, scenario, told=True)
