"""Sequences move between real engines while they run, over real transports: same tokens, nothing lost, nothing left."""

import random
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from penstock.core.clock import SystemClock
from penstock.core.request import MediaSpan, Request
from penstock.core.sampling import SamplingParams
from penstock.core.structured_outputs import StructuredOutputs
from penstock.core.wire import codec
from penstock.core.wire.engine import Enqueue, Leg, Migrate, Peer
from penstock.core.wire.handoff import MOST_PIXELS, Lease, Reserve
from penstock.core.wire.master import Placed
from penstock.engine.build import EngineOptions, build_engine
from penstock.sched.local import intake
from penstock.sched.local.intake import Intake
from penstock.service.flight import Flight
from penstock.transfer.frames import MAX_BODY
from penstock.transfer.pool import memfd_pool, shared_pool
from penstock.transfer.transports import LinkDown, open_transport
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engines import Collector
from tests.helpers.links import address, pool_server

LEASE = 2.0
DEMO = Path(penstock.__file__).parent / "demo"
VARIANTS = (
    {},
    {"temperature": 0.9, "top_p": 0.95, "logprobs": 2},
    {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0.8, "structured_outputs": StructuredOutputs(regex="([a-z]{3,9} )*[.]")},
    {"prompt_logprobs": 1, "min_tokens": 20, "max_tokens": None},
)


def options():
    return EngineOptions(
        model=str(DEMO), device="cpu", kv_cache_memory=96 << 20, max_model_len=1024, max_num_seqs=256,
        max_num_batched_tokens=256,
    )  # fmt: skip


def requests(count):
    rng = random.Random(count)
    for i in range(count):
        params = SamplingParams(**{"temperature": 0.0, **VARIANTS[i % len(VARIANTS)]})
        prompt = [rng.randrange(10, 250) for _ in range(rng.choice([5, 60, 200, 500]))]
        yield Request(
            id=f"r{i}", prompt=prompt, params=params, seed=i, stop_ids=frozenset({3}), max_tokens=rng.randrange(40, 90)
        )


class Instance:
    """An engine with its ends of the wires, driven by the test."""

    def __init__(self, stack, kind, folder, name, incarnation, kv_pool):
        self.clock = SystemClock()
        open_pool = shared_pool(kv_pool, name, incarnation) if kind == "shared" else memfd_pool
        built = stack.enter_context(closing(build_engine(options(), self.clock, open_pool)))
        where = address(kind, folder, name)
        self.transport = stack.enter_context(
            closing(open_transport(kind, where, name, incarnation, built.layout, built.pool))
        )
        self.peer = Peer(name, incarnation, self.transport.address)
        self.engine = built.engine
        self.intake = Intake(self.peer, "any", self.engine.scheduler, self.engine.add)
        self.handoffs = self.intake.hand_off(self.transport, LEASE)
        self.ticked = 0.0

    @property
    def held(self):
        """Requests that have an owner here, and blocks that are in use."""
        return len(self.intake) + self.engine.scheduler.pool.used

    def turn(self, hear, stayed):
        """What `EngineServer` does in a turn of its loop."""
        now = self.clock.now()
        for arrival in self.transport.receive():
            if isinstance(arrival, LinkDown):
                self.handoffs.lost(arrival.peer, for_good=arrival.refused)
            else:
                self.handoffs.on(now, arrival)
        self.handoffs.collect(now)
        self.engine.write_down()
        while plan := self.engine.begin():
            self.handoffs.started(now, plan)
        if (step := self.engine.end()) is not None:
            hear(self.peer, [o for own in self.intake.address(step.outputs).values() for o in own])
            self.handoffs.progress(now)
        hear(self.peer, [o for own in self.intake.address(self.intake.take_failed()).values() for o in own])
        for _, said in self.intake.take_stayed():
            stayed(self.peer, said)
        if now - self.ticked > LEASE / 20:
            self.ticked = now
            self.handoffs.tick(now)


class Deployment:
    """Three engines and a frontend."""

    def __init__(self, stack, kind, folder):
        kv_pool = stack.enter_context(pool_server(folder / "kv-pool.sock")) if kind == "shared" else ""
        names = ("a", "b", "c")
        self.instances = {n: Instance(stack, kind, folder, n, i + 1, kv_pool) for i, n in enumerate(names)}
        self.flights, self.tokens, self.logprobs, self.moves = {}, {}, {}, {}
        self.over, self.reasons = set(), []
        self.rng = random.Random(7)

    def launch(self, request):
        flight = self.flights[request.id] = Flight(None, request)
        self.tokens[request.id], self.logprobs[request.id], self.moves[request.id] = [], [], 0
        self.place(flight)

    def place(self, flight):
        instance = self.rng.choice(list(self.instances.values()))
        placed = Placed(flight.id, flight.attempt, [Leg("prefill", instance.peer)])
        request = flight.launch(placed, 0.0)
        refused = instance.intake.enqueue(0.0, "f", Enqueue(instance.peer.incarnation, request, flight.attempt))
        assert refused is None

    def hear(self, peer, outputs):
        for output in outputs:
            flight = self.flights[output.request_id]
            before = flight.handoffs
            for piece in flight.accept(peer.name, peer.incarnation, output, time.monotonic()):
                assert piece.start == len(self.tokens[flight.id])
                self.tokens[flight.id] += piece.tokens
                self.logprobs[flight.id] += piece.logprobs or []
                if piece.finish is not None:
                    assert piece.finish in ("stop", "length")
                    assert piece.timing is None or min(piece.timing.prefill, piece.timing.decode) > 0
                    self.over.add(flight.id)
            self.moves[flight.id] += flight.handoffs - before

    def stayed(self, peer, said):
        if self.flights[said.request_id].stayed(peer.name, said, time.monotonic()):
            self.reasons.append(said.reason)

    def move(self, request_id):
        flight = self.flights[request_id]
        if flight.received and request_id not in self.over:
            others = [i.peer for i in self.instances.values() if i.peer.name != flight.at]
            if others and (source := flight.move(self.rng.choice(others))) is not None:
                migrate = Migrate(source.incarnation, request_id, flight.attempt, flight.next)
                self.instances[source.name].intake.migrate(0.0, "f", migrate)

    def kill(self, name):
        gone = self.instances.pop(name)
        gone.transport.close()
        for flight in self.flights.values():
            flight.lose(gone.peer, "killed", time.monotonic())

    def run(self, each_turn):
        deadline = time.monotonic() + 300
        while len(self.over) < len(self.flights):
            assert time.monotonic() < deadline, sorted(self.flights.keys() - self.over)
            for instance in list(self.instances.values()):
                instance.turn(self.hear, self.stayed)
            for flight in self.flights.values():
                if flight.id not in self.over:
                    flight.tick(time.monotonic())
                    if flight.stranded:
                        flight.again()
                        self.place(flight)
            each_turn()

    def check_end(self):
        """Nothing is left, once messages under way have come and every lease has ended."""
        deadline = time.monotonic() + 8 * LEASE
        while any(i.handoffs.busy or i.engine.has_work or i.held for i in self.instances.values()):
            assert time.monotonic() < deadline, [
                (i.peer.name, i.held, i.handoffs.counts()) for i in self.instances.values()
            ]
            for instance in self.instances.values():
                instance.turn(self.hear, self.stayed)
        for instance in self.instances.values():
            instance.engine.check()
            instance.intake.check()


@pytest.fixture(scope="module")
def expected():
    """The tokens and log-probabilities of requests that never move."""
    known = {}

    def of(count):
        if count not in known:
            with closing(build_engine(options(), SystemClock())) as built:
                collector = Collector(built.engine)
                collector.run(*requests(count))
                known[count] = collector.tokens, collector.logprobs
        return known[count]

    return of


def moved_twice(kind, folder, expected, count):
    with ExitStack() as stack:
        deployment = Deployment(stack, kind, folder)
        for request in requests(count):
            deployment.launch(request)

        def move():
            for request_id, moves in deployment.moves.items():
                if moves < 2 and len(deployment.tokens[request_id]) > 5 * (1 + moves):
                    deployment.move(request_id)

        deployment.run(move)
        deployment.check_end()
        tokens, logprobs = expected(count)
        assert deployment.tokens == tokens
        assert deployment.logprobs == logprobs
        long_ones = [name for name, own in tokens.items() if len(own) > 30]
        assert sum(deployment.moves[name] >= 2 for name in long_ones) > 0.9 * len(long_ones), deployment.reasons
        assert all(flight.attempt == 0 for flight in deployment.flights.values())


@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_whatever_moves_twice_has_the_same_tokens(kind, tmp_path, expected):
    moved_twice(kind, tmp_path, expected, 15)


@pytest.mark.parametrize("kind", ["shared", "tcp"])
@pytest.mark.parametrize("name", ["gemma3", "deepseek-v3"])
def test_whatever_is_kept_of_a_token_moves_too(name, kind, tmp_path, monkeypatch):
    """Of a model of which some layers see 100 tokens, and some everything; and latent vectors."""
    model = write_checkpoint(tmp_path / "model", name)
    mixed = replace(options(), model=str(model), kv_cache_memory=24 << 20)
    plain = [request for request in requests(15) if request.params.structured_outputs is None]
    monkeypatch.setitem(globals(), "options", lambda: mixed)
    monkeypatch.setitem(globals(), "requests", lambda count: plain)
    with closing(build_engine(mixed, SystemClock())) as built:
        collector = Collector(built.engine)
        collector.run(*plain)
    moved_twice(kind, tmp_path, lambda count: (collector.tokens, collector.logprobs), len(plain))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_two_hundred_requests_move_twice(kind, tmp_path, expected):
    moved_twice(kind, tmp_path, expected, 200)


@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_a_peer_that_dies_in_the_middle_of_moves_loses_nothing(kind, tmp_path, expected):
    with ExitStack() as stack:
        deployment = Deployment(stack, kind, tmp_path)
        for request in requests(15):
            deployment.launch(request)

        def move():
            for request_id in deployment.flights:
                deployment.move(request_id)
            leaving = [f for f in deployment.flights.values() if f.placed and f.next is not None]
            if len(deployment.instances) == 3 and len(leaving) > 3 and sum(deployment.moves.values()) > 5:
                deployment.kill(leaving[0].next.name)

        deployment.run(move)
        deployment.check_end()
        assert len(deployment.instances) == 2
        assert deployment.tokens == expected(15)[0]


BEAMS = SamplingParams(temperature=0.0, use_beam_search=True, n=2)
LARGE = {"media": (MediaSpan(1, 1, b"large"), MediaSpan(3, 1, b"other")), "pixels": (bytes(60), bytes(60))}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"params": BEAMS}, "beam searches are not handed over"),
        (LARGE, "its images have 120 bytes, at most 100 are handed over"),
    ],
)
def test_what_is_not_handed_over_stays_and_says_why(tmp_path, monkeypatch, fields, why):
    monkeypatch.setattr(intake, "MOST_PIXELS", 100)
    with ExitStack() as stack:
        deployment = Deployment(stack, "tcp", tmp_path)
        request = next(requests(1))
        deployment.launch(replace(request, max_tokens=8, **fields))
        instance = deployment.instances[deployment.flights["r0"].at]
        instance.turn(deployment.hear, deployment.stayed)
        other = next(i.peer for i in deployment.instances.values() if i is not instance)
        deployment.flights["r0"].move(other)
        instance.intake.migrate(0.0, "f", Migrate(instance.peer.incarnation, "r0", 0, other))
        while not deployment.over:
            instance.turn(deployment.hear, deployment.stayed)
        assert deployment.reasons == [why]


def test_the_most_pixels_that_are_handed_over_fit_a_message():
    images = {"media": (MediaSpan(1, 1, b"large"),), "pixels": (bytes(MOST_PIXELS),)}
    request = replace(next(requests(1)), prompt=[1 << 17] * (1 << 20), **images)
    assert len(codec.encode(Reserve(Lease("r", 0), request, "f", []))) < MAX_BODY
