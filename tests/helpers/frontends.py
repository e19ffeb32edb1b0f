"""A frontend with scripted engines and a scripted master, for tests of what it does with what they say."""

import asyncio
import random
from typing import ClassVar

import msgspec

from penstock.core.clock import ManualClock
from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import Leg
from penstock.core.wire.master import Endpoint, History, NoPlace, Overview, Placed, Queued
from penstock.obs.metrics import Metrics
from penstock.service.checkpoint import DEMO, read_defaults
from penstock.service.engine_client import EngineClient
from penstock.service.frontend import Frontend
from penstock.service.placement import NOBODY
from penstock.service.registry import LocalRegistry
from tests.helpers.scripted import ScriptedChannel, ready
from tests.helpers.waiting import until


class ScriptedPlacement:
    """Sends everything to the same place, unless that is excluded or `prefill` is None: then it waits as long as it is
    patient, as at the master."""

    trouble = ""
    troubles: ClassVar[dict[str, str]] = {}
    wants_keys = False

    def __init__(self, prefill, clock, decode=None):
        self._prefill, self.clock, self.decode = prefill, clock, decode
        self.queued, self.refused = {}, {}
        self.asked, self.over, self.first_tokens, self.outcomes, self.settlements = [], [], [], [], []

    def start(self, answered, choose):
        self.answered = answered

    def ask(self, place):
        self.asked.append(place)
        answer = self.answer(place)
        if isinstance(answer, NoPlace) and place.patience:
            self.queued[place.request_id] = place, self.clock.now() + place.patience
            answer = Queued(place.request_id, place.generation)
        self.answered(answer)

    fleet = None
    prefixes = None

    @property
    def waiting(self):
        return len(self.queued)

    @property
    def prefill(self):
        return self._prefill

    @prefill.setter
    def prefill(self, peers):
        """Whoever is new here has failed nothing yet."""
        self._prefill = peers
        for request_id, (place, _) in list(self.queued.items()):
            answer = self.answer(msgspec.structs.replace(place, exclude=[]))
            if isinstance(answer, Placed):
                del self.queued[request_id]
                self.answered(answer)

    def answer(self, place):
        if self.prefill is None:
            return NoPlace(place.request_id, place.generation, "nobody")
        prefill = next((p for p in self.prefill if p.name not in place.exclude), None)
        if prefill is None:
            return NoPlace(place.request_id, place.generation, "all are excluded")
        route = [Leg("prefill", prefill), *([Leg("decode", self.decode)] if self.decode is not None else [])]
        return Placed(place.request_id, place.generation, route, "scripted", "because: it says so")

    def settled(self, settled):
        self.queued.pop(settled.request_id, None)
        self.settlements.append(settled)

    def begun(self, request_ids):
        self.first_tokens += request_ids

    def ended(self, request_ids, outcomes=(), refused=NOBODY):
        self.over += request_ids
        self.refused |= refused
        for request_id in request_ids:
            self.queued.pop(request_id, None)
        self.outcomes += outcomes

    async def overview(self):
        rates = {"window": 10.0, "arrivals": 1, "completions": 0, "attained": 0}
        counts = {"frontends": 1, "waiting": 0, "offline_waiting": 0, "unplaceable": 0, "placed": 1}
        return Overview(number=3, **counts, **rates, prompt_tokens=3.0, output_tokens=0.0, instances=[])

    async def history(self, request):
        return History(0, 0, b"")

    def tick(self, now):
        for request_id, (place, deadline) in list(self.queued.items()):
            if deadline < now and self.queued.pop(request_id, None):
                self.answered(NoPlace(request_id, place.generation, "nobody"))

    async def close(self):
        pass


def run(tokenizer, scenario, *names, ready_now=True, decode=None, later=(), told=False):
    """Run scenario(frontend, channels, clock) inside an event loop; channels by name, or the only one. Instances that
    join `later` are ready then."""

    async def go():
        instances = names or ("engine-0",)
        channels, clock = {name: ScriptedChannel(name) for name in (*instances, *later)}, ManualClock()
        for name in later:
            channels[name].say(ready(name))
        peers = [ready(name).peer for name in instances if name != decode]
        placement = ScriptedPlacement(peers, clock, ready(decode).peer if decode else None)
        metrics, registry = Metrics("m", []), LocalRegistry(Endpoint(name, "") for name in instances)
        frontend = Frontend(
            tokenizer,
            ["m"],
            read_defaults(DEMO),
            EngineClient(registry, lambda endpoint: channels[endpoint.name], placement, metrics, clock, told),
            metrics,
            clock,
            random.Random(0),
        )
        frontend.placement, frontend.registry = placement, registry
        frontend.start()
        if ready_now:
            for name in instances:
                channels[name].say(ready(name))
            await frontend.wait_ready()
            await until(lambda: all(i.ready for i in frontend.engine_client.instances.values()))
        try:
            await scenario(frontend, channels if names else channels["engine-0"], clock)
        finally:
            await frontend.close()
        assert all(channel.closed for channel in channels.values())
        frontend.engine_client.check()
        assert not frontend.engine_client.flights

    asyncio.run(asyncio.wait_for(go(), 20))


def lost(frontend):
    return all(instance.lost for instance in frontend.engine_client.instances.values())


async def submit(frontend, prompt=(1,), params=None, request_id="r"):
    """The generation, once its sequences were sent to an engine; and their ids."""
    params = params or SamplingParams()
    generation = frontend.submit([list(prompt)], params, request_id=request_id)
    ids = ids_of(generation)
    channels = frontend.engine_client._channels._open.values()
    await until(lambda: set(ids) <= {r.id for _, channel in channels for r in channel.enqueued()})
    return generation, ids


def ids_of(generation):
    """Of its sequences, one for each output."""
    return [sequence.id for part in generation._parts for sequence in part.sequences]


def over(generation):
    """Whether every output has ended and all was taken."""
    return not generation._open and not generation._deltas


async def one(generation):
    (delta,) = await generation.next()
    return delta


def value(frontend, name, **labels):
    return frontend.metrics.registry.get_sample_value(name, {"model_name": "m", **labels})


async def collect(generation):
    deltas = []
    while arrived := await generation.next():
        deltas += arrived
    return deltas
