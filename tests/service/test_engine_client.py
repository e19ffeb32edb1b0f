"""Sequences between a frontend and a master that is really there, with scripted engines behind both."""

import asyncio
import random

import pytest

from penstock.core.clock import SystemClock
from penstock.core.errors import Unavailable
from penstock.core.wire.master import Endpoint
from penstock.obs.exposition import Exposition
from penstock.obs.metrics import Metrics
from penstock.sched.cluster import DISPATCH, Decision, Later
from penstock.service import dispatcher
from penstock.service.dispatcher import MASTER_LEARNS
from penstock.service.engine_client import TICK, EngineClient
from penstock.service.events import FromFrontend
from penstock.service.flight import Flight
from penstock.service.master import Master
from penstock.service.master_pump import LocalPlacement, MasterPump
from penstock.service.policies import Policies
from penstock.service.registry import LocalRegistry
from tests.helpers.engines import make_request
from tests.helpers.scripted import ScriptedChannel, ready
from tests.helpers.waiting import until


class Asker:
    """What a sequence belongs to."""

    def __init__(self, engine_client):
        self.engine_client, self.error = engine_client, None

    def fail(self, error):
        self.error = error
        self.engine_client.dispatcher.release([self.name])

    def routed(self, index, route, fingerprint):
        pass

    def interrupted(self, index, tokens, why):
        pass


class Service:
    """One engine, of which the frontend knows and the master does not yet."""

    def __init__(self, dispatch):
        self.clock, registry = SystemClock(), LocalRegistry([Endpoint("e0", "")])
        self.to_master, self.channel = ScriptedChannel("e0"), ScriptedChannel("e0")
        self.master = Master((), Policies(dispatch=dispatch), random.Random(0))
        self.questions = 0
        placement = LocalPlacement(MasterPump(self.master, registry, lambda _: self.to_master, self.clock), "f")
        self.metrics = Metrics("m", [])
        self.engine_client = EngineClient(registry, lambda _: self.channel, placement, self.metrics, self.clock)
        self.engine_client.start()
        tick = self.master.tick

        def counting(now, happening=None):
            asks = isinstance(happening, FromFrontend) and type(happening.message).__name__ == "Place"
            self.questions += asks
            return tick(now, happening)

        self.master.tick = counting
        self.channel.say(ready("e0", max_model_len=10**6))

    def add(self, *names):
        askers = []
        for name in names:
            asker = Asker(self.engine_client)
            asker.name = name
            flights = [Flight(asker, make_request(name, [1] * 500), self.clock.now())]
            self.engine_client.dispatcher.add(flights)
            self.engine_client.dispatcher.find_places(flights)
            askers.append(asker)
        return askers

    def learn(self):
        self.to_master.say(ready("e0", max_model_len=10**6))


def run(scenario, dispatch=None):
    async def go():
        service = Service(dispatch or DISPATCH["least-loaded"]())
        await until(lambda: service.engine_client.instances["e0"].ready)
        try:
            await scenario(service)
        finally:
            await service.engine_client.close()

    asyncio.run(asyncio.wait_for(go(), 20))


def test_what_is_cancelled_while_it_waits_for_a_place_leaves_nothing_in_the_master():
    async def scenario(service):
        names = [f"r{i}" for i in range(50)]
        service.add(*names)
        service.engine_client.dispatcher.release(names)
        service.learn()
        await until(lambda: service.master.fleet.states(service.clock.now()) == {"e0": "ready"})
        assert service.questions == len(names)
        assert not service.master._placed.sequences
        assert service.master.fleet.sessions["e0"].view().held_tokens == 0
        assert not service.engine_client.flights

    run(scenario)


def test_those_that_nobody_can_take_ask_once_and_wait_at_the_master_in_order(monkeypatch):
    monkeypatch.setattr(dispatcher, "MASTER_LEARNS", 30.0)  # a busy machine needs more than a second

    async def scenario(service):
        askers = service.add(*(f"r{i}" for i in range(500)))
        await asyncio.sleep(0.2)
        service.learn()
        await until(lambda: len(service.channel.enqueued()) == 500)
        assert not any(asker.error for asker in askers)
        assert [request.id for request in service.channel.enqueued()] == [f"r{i}" for i in range(500)]
        assert service.questions == 500
        service.add("quick")  # nobody waits any longer, so it is not made to wait
        assert (service.questions, service.channel.enqueued()[-1].id) == (501, "quick")

    run(scenario)


def test_waiting_for_an_instance_has_an_end():
    async def scenario(service):
        askers = service.add(*(f"r{i}" for i in range(100)))
        await until(lambda: all(asker.error for asker in askers))
        assert {type(asker.error) for asker in askers} == {Unavailable}
        assert not service.engine_client.flights
        assert service.questions == len(askers)

    run(scenario)


class Closed:
    """A policy that makes all wait until it is opened."""

    name, wants_keys, open = "closed", False, False

    def decide(self, view, rng):
        if not self.open:
            return Later()
        demand = view.queue[-1]  # the newest first: it has to know them all
        return Decision(key=demand.key, prefill="e0", decode=None, policy=self.name, reason="open", costs={})


def test_what_an_instance_can_take_waits_as_long_as_the_policy_wants():
    async def scenario(service):
        askers = service.add(*(f"r{i}" for i in range(40)))  # nobody can take them yet
        service.learn()
        await until(lambda: service.master.waiting == 40)
        await until(lambda: not service.master._waiting.unplaceable)
        service.engine_client.tick()
        assert b'num_requests_waiting{engine="master",model_name="m"} 40.0' in Exposition([service.metrics]).render()[0]
        await asyncio.sleep(MASTER_LEARNS + 2 * TICK)
        assert not any(asker.error for asker in askers)
        service.engine_client.dispatcher.release(["r39"])
        dispatch.open = True
        service.add("last")
        assert [request.id for request in service.channel.enqueued()] == [
            "last",
            *(f"r{i}" for i in reversed(range(39))),
        ]

    dispatch = Closed()
    run(scenario, dispatch)


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_a_place_is_found_before_the_call_returns(names):
    async def scenario(service):
        service.learn()
        await until(lambda: service.master.fleet.states(service.clock.now()) == {"e0": "ready"})
        service.add(*names)
        assert [request.id for request in service.channel.enqueued()] == names

    run(scenario)
