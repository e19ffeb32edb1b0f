"""Frontends and a master over real wires, with scripted engines behind it."""

import asyncio
import random
import tempfile
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from penstock.core.clock import ManualClock, SystemClock
from penstock.core.errors import Unavailable
from penstock.core.wire.codec import encode
from penstock.core.wire.engine import LEASE, Leg, LinkPeer
from penstock.core.wire.master import (
    Endpoint,
    History,
    HostReport,
    Join,
    Joined,
    NoPlace,
    Place,
    Placed,
    Queued,
    Settled,
)
from penstock.sched.cluster import DISPATCH
from penstock.service import placement as placement_module
from penstock.service.channel import master_channel
from penstock.service.events import FromFrontend, ToFrontend
from penstock.service.fallback import least_loaded
from penstock.service.instances import ChannelLost
from penstock.service.master import Master
from penstock.service.master_pump import TICK, LocalPlacement, MasterPump, Minutes, serve_frontends
from penstock.service.placement import FALL_BACK_AFTER, PATIENCE, QUEUED_AFTER, SILENT_AFTER, RemotePlacement
from penstock.service.policies import Policies
from penstock.service.recorder import FlightRecorder
from penstock.service.registry import LocalRegistry
from tests.helpers.scripted import ScriptedChannel, ready
from tests.helpers.waiting import until


def place(request_id="r", prompt_tokens=10, max_tokens=10, **changes):
    return Place(request_id, prompt_tokens, max_tokens, [], **changes)


def make_pump(*roles):
    names = [f"{role}-{i}" for i, role in enumerate(roles)]
    channels = {name: ScriptedChannel(name) for name in names}
    endpoints = [Endpoint(n, "", n.split("-")[0]) for n in names]
    minutes = Minutes(FlightRecorder())
    master = Master((), Policies(dispatch=DISPATCH["least-loaded"]()), random.Random(0), 3, recorder=minutes)
    connect, registry = (lambda endpoint: channels[endpoint.name]), LocalRegistry(endpoints)
    pump = MasterPump(master, registry, connect, SystemClock(), minutes=minutes, wall=lambda: 1_790_000_000.0)
    for name, channel in channels.items():
        channel.say(ready(name, 1, name.split("-")[0]))
    return pump, channels


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 20))


class Asked:
    """A placement whose answers are kept, by request."""

    def __init__(self, placement, choose=lambda place: None):
        self.placement, self.answers = placement, {}
        placement.start(lambda answer: self.answers.update({answer.request_id: answer}), choose)

    async def place(self, request_id="r"):
        self.placement.ask(place(request_id))
        await until(lambda: request_id in self.answers)
        return self.answers.pop(request_id)


def test_a_master_in_the_same_process():
    async def scenario():
        pump, channels = make_pump("prefill", "decode")
        placement = LocalPlacement(pump, "f")
        asked = Asked(placement)
        assert "absent" in (await asked.place()).message
        await until(lambda: channels["prefill-0"].sent)
        assert isinstance(channels["prefill-0"].sent[0], LinkPeer)
        placed = await asked.place()
        assert [leg.peer.name for leg in placed.route] == ["prefill-0", "decode-1"]
        assert placed.policy == "least-loaded"
        assert not placement.wants_keys
        (decision,) = (await placement.overview()).decisions
        assert (decision.request_id, decision.prefill, decision.decode) == ("r", "prefill-0", "decode-1")
        placement.ended(["r"])
        assert not pump.master._placed.sequences
        await placement.close()
        assert all(channel.closed for channel in channels.values())

    run(scenario)


def test_a_master_in_the_same_process_knows_what_the_launcher_suspects():
    async def scenario():
        pump, _ = make_pump("any", "any")
        placement = LocalPlacement(pump, "f")
        asked = Asked(placement)
        await asked.place()
        told = []
        suspect = pump.master.fleet.suspect
        pump.master.fleet.suspect = lambda troubles: told.append(troubles) or suspect(troubles)
        for troubles in ({}, {"any-0": "it hangs"}, {"any-0": "it hangs"}, {}):
            placement.suspect(troubles)
            assert placement.troubles == troubles
        assert told == [{"any-0": "it hangs"}, {}], "what is no news is not told"
        await placement.close()

    run(scenario)


def test_only_one_timer_waits_for_the_master():
    async def scenario():
        timers, loop = [], asyncio.get_running_loop()
        call_later = loop.call_later
        loop.call_later = lambda *args: timers.append(call_later(*args)) or timers[-1]
        pump, _ = make_pump("any")
        pump.master = SimpleNamespace(tick=lambda now, happening: [], wake=TICK / 2)
        for _ in range(50):
            pump.handle(None)
        assert [timer.cancelled() for timer in timers] == [True] * 49 + [False]
        await pump.close()
        assert all(timer.cancelled() for timer in timers)

    run(scenario)


class Deployment:
    """A master that can die and come back, and a frontend's way to it."""

    def __init__(self, folder):
        self.address, self.context = f"ipc://{folder}/m", zmq.Context()
        self.placement = RemotePlacement(master_channel(self.context, self.address, "f", SystemClock()), SystemClock())

    def start_master(self):
        self.pump, self.channels = make_pump("any")
        self.pump.start()
        self.masters = zmq.Context()
        registry = self.pump._registry
        self.serving = asyncio.create_task(serve_frontends(self.pump, registry, self.masters, self.address))

    async def stop_master(self):
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        await self.pump.close()
        self.masters.term()


def test_a_master_that_dies_is_asked_again_when_it_is_back():
    async def scenario():
        with tempfile.TemporaryDirectory(prefix="penstock-", dir="/tmp") as folder:
            deployment = Deployment(folder)
            placement = deployment.placement
            asked = Asked(placement)
            assert "has not answered yet" in placement.trouble
            deployment.start_master()
            await until(lambda: not placement.trouble)
            await until(lambda: deployment.pump.master.fleet.states(SystemClock().now()) == {"any-0": "ready"})
            assert (await asked.place("a")).route[0].peer.name == "any-0"
            overview, history, unknown = await asyncio.gather(
                placement.overview(), placement.history("a"), placement.history("b")
            )
            assert [(i.name, i.state, i.waiting) for i in overview.instances] == [("any-0", "ready", 1)]
            assert (overview.placed, overview.frontends, overview.decisions[0].request_id) == (1, 1, "a")
            (sequence,) = msgspec.json.decode(history.sequences)
            assert (sequence["id"], sequence["placements"][0]["prefill"]) == ("a", "any-0")
            assert (unknown.decisions, unknown.sequences) == (1, b"")
            placement.ended(["a"])
            await until(lambda: not deployment.pump.master._placed.sequences)
            await deployment.stop_master()
            await until(lambda: placement._absent)
            with pytest.raises(Unavailable, match="the master cannot be asked"):
                await placement.overview()
            assert not placement.trouble  # for a while
            waiting = asyncio.create_task(asked.place("b"))
            placement.ask(place("cancelled"))
            await asyncio.sleep(0)
            placement.ended(["cancelled"])
            deployment.start_master()
            answer = await waiting
            assert isinstance(answer, Placed) or "any-0 absent" in answer.message  # the master too only just began
            assert (await asked.place("c")).request_id == "c"
            assert "cancelled" not in asked.answers
            assert not [key for key in deployment.pump.master._placed.sequences if key[1] == "cancelled"]
            await deployment.stop_master()
            await placement.close()
            deployment.context.term()

    run(scenario)


class ScriptedMasterChannel(ScriptedChannel):
    connected = True


def run_scripted(scenario):
    """scenario(placement, channel, clock, asked): a master that says what it is told to."""

    async def go():
        clock, channel = ManualClock(), ScriptedMasterChannel()
        placement = RemotePlacement(channel, clock)
        await scenario(placement, channel, clock, Asked(placement))
        await placement.close()

    run(go)


def pass_time(placement, clock, seconds):
    for _ in range(round(2 * seconds)):
        clock.advance(0.5)
        placement.tick(clock.now())


def test_a_master_of_another_protocol_is_trouble_and_one_that_is_away_is_not():
    async def scenario(placement, channel, clock, asked):
        channel.say(Joined(1))
        await until(lambda: not placement.trouble)
        channel.say(ChannelLost("gone"))
        await until(lambda: placement._absent)
        clock.advance(60.0)
        assert not placement.trouble, "it is done without"
        channel.say(Joined(2, wants_keys=True))
        await until(lambda: placement.wants_keys)
        channel.say(Joined(3, protocol=99))
        await until(lambda: "protocol 99" in placement.trouble)
        placement.ask(place("late"))
        pass_time(placement, clock, PATIENCE / 2)
        placement.ask(place("later"))
        pass_time(placement, clock, PATIENCE / 2 + 0.5)
        assert asked.answers["late"].message.startswith("the master cannot be asked: it speaks protocol 99")
        assert "later" not in asked.answers

    run_scripted(scenario)


def test_what_was_queued_is_asked_again_by_its_true_age_when_the_master_is_back():
    async def scenario(placement, channel, clock, asked):
        channel.say(Joined(1, waiting=3))
        await until(lambda: placement.waiting == 3)
        for name in ("r", "gone"):
            placement.ask(place(name, waited=0.5))
            channel.say(Queued(name, 0))
        await until(lambda: len(asked.answers) == 2)
        clock.advance(60.0)  # however long: it is the master's to say
        channel.say(Joined(1))
        await until(lambda: placement.waiting == 2)
        placement.tick(clock.now())
        placement.ended(["gone"])
        channel.say(ChannelLost("gone"))
        await until(lambda: placement._absent)
        assert placement.waiting == 1
        clock.advance(2.0)
        placement.tick(clock.now())
        channel.sent.clear()
        channel.say(Joined(2))
        await until(lambda: channel.silent)
        (again,) = (message for message in channel.sent if isinstance(message, Place))
        assert (again.request_id, again.waited) == ("r", 62.5)
        channel.say(Queued("r", 0))
        channel.say(Placed("r", 0, [Leg("prefill", ready("a").peer)]))
        await until(lambda: isinstance(asked.answers["r"], Placed))
        assert isinstance(asked.answers["gone"], Queued)

    run_scripted(scenario)


def test_while_there_is_no_master_a_frontend_decides_by_itself():
    async def go():
        clock, channel = ManualClock(), ScriptedMasterChannel()
        placement = RemotePlacement(channel, clock)
        serving, loads = [ready("p", role="prefill"), ready("d", role="decode"), ready("e", role="decode")], {"d": 2}
        asked = Asked(placement, lambda place: least_loaded(place, serving, loads))
        placement.ask(place("early"))
        pass_time(placement, clock, SILENT_AFTER + 0.5)
        assert placement.trouble, "there has never been one"
        channel.say(Joined(1))
        await until(lambda: not placement.trouble)
        channel.say(Queued("early", 0))
        await until(lambda: "early" in asked.answers)
        channel.say(ChannelLost("gone"))
        await until(lambda: placement._absent)
        placement.ask(place("late"))
        placement.ask(place("avoids", exclude=["e"]))
        assert "late" not in asked.answers, "it may be back at once"
        pass_time(placement, clock, FALL_BACK_AFTER)
        assert isinstance(asked.answers["late"], Placed)
        assert isinstance(asked.answers["early"], Queued), "a queue goes to the engines only when there is no hope"
        pass_time(placement, clock, QUEUED_AFTER)
        assert not placement.trouble
        placed = [([leg.peer.name for leg in p.route], p.policy) for p in map(asked.answers.get, ("early", "late"))]
        assert placed == [(["p", "e"], "fallback")] * 2
        told = [(m.request_id, m.generation, m.instance) for m in channel.sent if isinstance(m, Settled)]
        assert told == [("late", 0, "p"), ("avoids", 0, "p"), ("early", 0, "p")], "in case it only stood still"
        assert asked.answers["avoids"].at("decode").name == "d"
        placement.ask(place("next", max_tokens=0))
        assert len(asked.answers["next"].route) == 1, "at once, and nothing is left to do after a prompt to embed"
        placement.ask(place("long", prompt_tokens=1000))
        assert "long" not in asked.answers
        channel.sent.clear()
        channel.say(Joined(2))
        await until(lambda: channel.silent)
        assert [m.request_id for m in channel.sent if isinstance(m, Place)] == ["long"]
        placement.ask(place("led"))
        assert "led" not in asked.answers
        await placement.close()

    run(go)


def test_an_operators_question_that_nobody_answers_ends(monkeypatch):
    monkeypatch.setattr(placement_module, "SILENT_AFTER", 0.01)

    async def scenario(placement, channel, clock, asked):
        channel.say(Joined(1))
        await until(lambda: not placement._absent)
        with pytest.raises(Unavailable, match="it does not answer"):
            await placement.history("r")
        channel.say(History(channel.sent[-1].number, 0, b""))  # too late
        await until(lambda: channel.silent)
        assert not placement._learning

    run_scripted(scenario)


def test_a_master_that_falls_silent_is_done_without_and_asked_again():
    async def scenario(placement, channel, clock, asked):
        channel.say(Joined(1))
        placement.ask(place("r"))
        channel.say(Queued("r", 0))
        await until(lambda: "r" in asked.answers)
        placement.tick(clock.advance(60.0) or clock.now())
        assert not placement._absent, "it was this process that stood still"
        pass_time(placement, clock, SILENT_AFTER + 0.5)
        assert placement._absent.startswith("nothing was heard of it for ")
        assert not placement.trouble
        channel.sent.clear()
        channel.say(Joined(1))
        await until(lambda: channel.sent)
        channel.say(Queued("r", 0))
        await until(lambda: placement._queued)
        pass_time(placement, clock, SILENT_AFTER + PATIENCE + 1)
        assert asked.answers["r"] == NoPlace("r", 0, f"the master cannot be asked: {placement._absent}")

    run_scripted(scenario)


def test_an_answer_to_an_earlier_question_is_none():
    async def scenario(placement, channel, clock, asked):
        placement.ask(place(generation=1))
        channel.say(Placed("r", 0, [Leg("prefill", ready("a").peer)]))
        channel.say(Placed("nobody", 0, [Leg("prefill", ready("a").peer)]))
        channel.say(Placed("r", 1, [Leg("prefill", ready("b").peer)]))
        channel.say(Placed("r", 1, [Leg("prefill", ready("c").peer)]))  # asked twice, answered twice
        await until(lambda: channel.silent)
        assert asked.answers["r"].route[0].peer.name == "b"
        assert list(asked.answers) == ["r"]

    run_scripted(scenario)


def test_what_launchers_say_of_their_instances_reaches_the_frontends():
    async def scenario():
        with tempfile.TemporaryDirectory(prefix="penstock-", dir="/tmp") as folder:
            deployment = Deployment(folder)
            deployment.start_master()
            clock = deployment.pump.clock = ManualClock()
            Asked(deployment.placement)
            with deployment.context.socket(zmq.DEALER) as launcher:
                launcher.connect(deployment.address)
                for host, troubles in (("a", {"a-0": "kv-pool hangs"}), ("b", {"b-0": "burnt"}), ("b", {})):
                    launcher.send(encode(HostReport(host, 1, [], troubles)))
                await until(lambda: deployment.placement.troubles == {"a-0": "kv-pool hangs"})
                clock.advance(LEASE + 0.1)  # that launcher has gone
                await until(lambda: deployment.placement.troubles == {})
            await deployment.stop_master()
            await deployment.placement.close()
            deployment.context.term()

    run(scenario)


def test_what_arrives_while_the_master_speaks_by_itself_is_read():
    """To send swallows what ZMQ's file descriptor would have told of it."""

    async def scenario():
        with tempfile.TemporaryDirectory(prefix="penstock-", dir="/tmp") as folder:
            pump, _ = make_pump("any")
            pump.start()
            masters, clients, heard = zmq.Context(), zmq.Context(), []
            pump.master.tick = lambda now, happening=None: heard.append(happening) or []
            serving = asyncio.create_task(serve_frontends(pump, pump._registry, masters, f"ipc://{folder}/m"))
            await asyncio.sleep(0)  # it has bound
            client = clients.socket(zmq.DEALER)
            client.setsockopt(zmq.ROUTING_ID, b"f")
            client.connect(f"ipc://{folder}/m")
            for number in range(5):
                client.send(encode(Join("f", number)))
                time.sleep(0.02)  # it has arrived, and the event loop had no chance to look
                pump.deliver(ToFrontend("f", Joined(1)))
                await asyncio.wait_for(until(lambda n=number: FromFrontend("f", Join("f", n)) in heard), 5)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await pump.close()
            client.close(0)
            clients.term(), masters.term()

    run(scenario)
