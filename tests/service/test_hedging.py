"""Sequences of an engine that stands still begin again elsewhere, and go on with the attempt that is ahead."""

import pytest

from penstock.core.request import FinishReason, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.service_level import ServiceLevel
from penstock.core.wire.engine import Cancel, Enqueue, Failed, Migrate, Refused, Stayed
from penstock.service.flight import ATTEMPTS, OBEYS, PATIENCE
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
        assert not frontend.engine_client.flights[first].held_at, "it is back at the one that may hang"
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


# --- in the middle of a hand-over, from a to d


def elsewhere(frontend, *names):
    """From now on these are where sequences go, and they stay there."""
    frontend.placement.decode = None
    frontend.placement.prefill = [channel_peer(frontend, name) for name in names]


def test_who_has_it_keeps_it_when_who_is_to_get_it_stands_still(tokenizer):
    async def scenario(frontend, channels, clock):
        a, d = channels["a"], channels["d"]
        generation, name = await begun(frontend, a)
        stand_still(frontend, clock, "d")
        told = [command for command in a.sent if isinstance(command, Migrate)]
        assert told == [Migrate(1, name, 0, channel_peer(frontend, "a"))]
        frontend.engine_client.tick()
        assert a.sent[-1] is told[0], "it is told once, and has time to obey"
        a.say(Stayed(1, name, 0, "it is to go on here", channel_peer(frontend, "d")))
        await until(lambda: a.silent)
        assert frontend.placement.settlements[-1].instance == "a"
        stand_still(frontend, clock, "d", quiet=OBEYS + 0.1)
        a.report(TokenOutput(name, [6], start=1, finish=FinishReason.LENGTH))
        assert [delta.tokens for delta in await collect(generation)] == [[6]]
        assert len(frontend.placement.asked) == 1
        assert not d.cancelled()
        assert hedges(frontend) == [0, 0]

    run(tokenizer, scenario, "a", "b", "d", decode="d")


@pytest.mark.parametrize("back", [False, True])
def test_what_may_have_been_given_away_begins_again_beside_both(tokenizer, back):
    """Its first instance cannot keep it: it has committed. The one that stands still may have it, or come to."""

    async def scenario(frontend, channels, clock):
        a, b, d = channels["a"], channels["b"], channels["d"]
        generation, name = await begun(frontend, a)
        stand_still(frontend, clock, "d")
        elsewhere(frontend, "a", "b", "d")
        stand_still(frontend, clock, "d", quiet=OBEYS + 0.1)
        asked = frontend.placement.asked[-1]
        assert (asked.hedged, set(asked.exclude), attempts(b)) == (True, {"a", "d"}, [1])
        assert a.cancelled() == d.cancelled() == []
        if back:
            d.report(TokenOutput(name, [6], start=1))
            assert (await one(generation)).tokens == [6]
            assert b.cancelled() == [name]
            settled = frontend.placement.settlements
            assert [(each.generation, each.instance) for each in settled] == [(0, "a"), (0, "d")]
            d.report(TokenOutput(name, [7], start=2, finish=FinishReason.LENGTH))
        else:
            b.report(TokenOutput(name, [6], start=1, generation=1))
            assert (await one(generation)).tokens == [6]
            assert Cancel(1, [name], 0) in a.sent
            assert Cancel(1, [name], 0) in d.sent
            d.report(TokenOutput(name, [6], start=1))  # it goes on, with what it had
            await until(lambda: d.silent)
            b.report(TokenOutput(name, [7], start=2, generation=1, finish=FinishReason.LENGTH))
        assert [delta.tokens for delta in await collect(generation)] == [[7]]
        assert hedges(frontend) == [not back, back]

    run(tokenizer, scenario, "a", "b", "d", decode="d")


@pytest.mark.parametrize("how", ["token", "stays", "dropped", "killed"])
def test_what_one_that_stands_still_was_handing_over(tokenizer, how):
    async def scenario(frontend, channels, clock):
        a, b, d = channels["a"], channels["b"], channels["d"]
        generation, name = await begun(frontend, a)
        elsewhere(frontend, "b")
        stand_still(frontend, clock, "a")
        assert frontend.placement.asked[-1].hedged
        assert attempts(b) == [1]
        attempt = 0
        match how:
            case "token":  # it was given away before
                d.report(TokenOutput(name, [6], start=1))
                await until(lambda: d.silent)
                assert frontend.engine_client.flights[name].places == [channel_peer(frontend, "d")]
                back = d
            case "stays":
                a.say(Stayed(1, name, 0, "no answer", channel_peer(frontend, "d")))
                a.report(TokenOutput(name, [6], start=1))
                await until(lambda: a.silent)
                assert frontend.engine_client.flights[name].places == [channel_peer(frontend, "a")]
                back = a
            case "dropped":  # who knows who has it
                a.report(TokenOutput(name, [], start=1, finish=FinishReason.ABORT))
                await until(lambda: a.silent)
                back, attempt = b, 1
            case "killed":
                a.say(ChannelLost("killed"))
                await until(lambda: frontend.engine_client.instances["a"].lost)
                back, attempt = b, 1
        if attempt:
            assert Cancel(1, [name], 0) in d.sent, "nobody else goes on with it"
            assert not b.cancelled()
            b.report(TokenOutput(name, [6], start=1, generation=1))
        else:
            assert b.cancelled() == [name]
        back.report(TokenOutput(name, [7], start=2, generation=attempt, finish=FinishReason.LENGTH))
        assert [token for delta in await collect(generation) for token in delta.tokens] == [6, 7]
        assert hedges(frontend) == [0, not attempt]

    run(tokenizer, scenario, "a", "b", "d", decode="d")


@pytest.mark.parametrize("first", ["frozen", "token"])
def test_what_waits_for_a_token_of_one_that_stands_still_begins_again(tokenizer, first):
    """Who has it goes on, and what was computed before it was given away does not come. That is of no use, whenever it
    was that it came."""

    async def scenario(frontend, channels, clock):
        a, b, d = channels["a"], channels["b"], channels["d"]
        generation, name = await begun(frontend, a)
        ahead = TokenOutput(name, [7], start=2)
        if first == "token":
            d.report(ahead)
            await until(lambda: d.silent)
        elsewhere(frontend, "b")
        stand_still(frontend, clock, "a")
        if first == "frozen":
            d.report(ahead)
            await until(lambda: d.silent)
            assert frontend.placement.asked[-1].hedged
        else:
            assert d.cancelled() == a.cancelled() == [name]
        assert attempts(b) == [1]
        b.report(TokenOutput(name, [6], start=1, generation=1))
        b.report(TokenOutput(name, [7], start=2, generation=1, finish=FinishReason.LENGTH))
        assert [token for delta in await collect(generation) for token in delta.tokens] == [6, 7]
        assert Cancel(1, [name], 0) in d.sent

    run(tokenizer, scenario, "a", "b", "d", decode="d")


# --- hosts that cannot be reached


def on_hosts(frontend, **hosts):
    for name, host in hosts.items():
        frontend.engine_client.instances[name].host = host


def hear(frontend, clock, *names, after):
    """So many seconds later these are heard, and the others were not."""
    clock.advance(after)
    for name in names:
        frontend.engine_client.instances[name].heard = clock.now()
    frontend.engine_client.tick()


def test_what_runs_on_a_host_of_which_nothing_is_heard_begins_again_on_others(tokenizer):
    async def scenario(frontend, channels, clock):
        a, b = channels["a"], channels["b"]
        generation, name = await begun(frontend, a)
        on_hosts(frontend, a="10.0.0.2", c="10.0.0.2", b="10.0.0.1", d="10.0.0.1")
        hear(frontend, clock, "b", "d", after=QUIET)
        assert attempts(b) == []
        frontend.placement.prefill = [channel_peer(frontend, n) for n in "acb"]
        hear(frontend, clock, "b", "d", after=0.1)
        assert set(frontend.placement.asked[-1].exclude) == {"a", "c"}, "the whole host"
        assert attempts(b) == [1]
        b.report(TokenOutput(name, [6], start=1, generation=1, finish=FinishReason.LENGTH))
        assert [delta.tokens for delta in await collect(generation)] == [[6]]
        assert hedges(frontend) == [1, 0]

    run(tokenizer, scenario, "a", "b", "c", "d")


@pytest.mark.parametrize(
    ("hosts", "heard"),
    [
        ({"a": "10.0.0.2", "b": "10.0.0.1", "c": "10.0.0.2"}, "bc"),  # others of the host are heard
        ({"a": "10.0.0.2", "b": "10.0.0.1", "c": "10.0.0.3"}, ""),  # nobody is: it is this process that stood still
        ({"a": "10.0.0.2", "b": "10.0.0.1", "c": "10.0.0.2"}, "b"),  # most would be away
        ({"a": "10.0.0.2", "b": "10.0.0.1", "c": "10.0.0.3"}, "idle"),  # it had nothing to do, and has just got it
        ({}, "bc"),  # all are here, where launchers tell
    ],
)
def test_who_is_not_cut_off(tokenizer, hosts, heard):
    async def scenario(frontend, channels, clock):
        generation, _ = await begun(frontend, channels["a"])
        on_hosts(frontend, **hosts)
        if heard == "idle":
            frontend.engine_client.instances["a"].load = 0
        hear(frontend, clock, *"abc", after=0.1)
        for _ in range(2 if heard == "idle" else 4):
            hear(frontend, clock, *("bc" if heard == "idle" else heard), after=QUIET)
        assert len(frontend.placement.asked) == 1
        if heard == "idle":
            hear(frontend, clock, *"bc", after=QUIET)
            assert len(frontend.placement.asked) == 2, "now it is long enough"
        generation.cancel()

    run(tokenizer, scenario, "a", "b", "c")
