"""What an engine had when it died is brought to another one by each way, over real transports: the same tokens follow,
and where nothing comes they are computed."""

import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from penstock.core.clock import SystemClock
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import Cancel, Enqueue, Peer, Source
from penstock.engine.build import EngineOptions, build_engine
from penstock.sched.local.handoff import fetches
from penstock.sched.local.handoff.fetches import GRACE, REMEMBERED
from penstock.sched.local.intake import Intake
from penstock.transfer.orphans import OrphanedBlocks
from penstock.transfer.pool import shared_pool
from penstock.transfer.transports import LinkDown, open_transport
from tests.helpers.engines import make_request
from tests.helpers.links import address, pool_server

LEASE = 2.0
DEMO = Path(penstock.__file__).parent / "demo"
OPTIONS = EngineOptions(
    model=str(DEMO), device="cpu", kv_cache_memory=32 << 20, max_model_len=1024, max_num_batched_tokens=256
)
PROMPT = [10 + 7 * i % 240 for i in range(500)]
TOKENS = 60
BLOCKS = (len(PROMPT) + TOKENS // 2 - 1) // BLOCK_TOKENS  # full ones of what is known when an engine dies


class Instance:
    """An engine with its ends of the wires, driven by the test."""

    def __init__(self, stack, kind, folder, name, incarnation, kv_pool, faults=None):
        self.clock, self.stack = SystemClock(), stack.enter_context(ExitStack())
        enter = self.stack.enter_context
        self.built = enter(closing(build_engine(OPTIONS, self.clock, shared_pool(kv_pool, name, incarnation))))
        where = address(kind, folder, name)
        self.transport = enter(
            closing(open_transport(kind, where, name, incarnation, self.built.layout, self.built.pool, faults))
        )
        orphans = enter(closing(OrphanedBlocks(self.built.pool)))
        self.peer = Peer(name, incarnation, self.transport.address)
        self.engine = self.built.engine
        self.intake = Intake(self.peer, "any", self.engine.scheduler, self.engine.add)
        self.handoffs = self.intake.hand_off(self.transport, LEASE, orphans)
        self.tokens, self.cached, self.said, self.over = [], None, [], False
        self.ticked = 0.0

    def start(self, name, generated=(), source=None, generation=0):
        self.tokens, self.cached, self.over = list(generated), None, False
        request = make_request(name, PROMPT, seed=5, max_tokens=TOKENS, temperature=0.9)
        request = replace(request, generated=tuple(generated))
        command = Enqueue(self.peer.incarnation, request, generation, source=source)
        assert self.intake.enqueue(self.clock.now(), "f", command) is None

    def turn(self):
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
            for output in (o for own in self.intake.address(step.outputs).values() for o in own):
                self.cached = output.cached_tokens if self.cached is None else self.cached
                assert output.start == len(self.tokens)
                self.tokens += output.tokens
                self.over |= output.finish is not None
            self.handoffs.progress(now)
        self.said += [said for _, said in self.intake.take_fetched()]
        if now - self.ticked > LEASE / 20:
            self.ticked = now
            self.handoffs.tick(now)

    def die(self):
        self.stack.close()


def run(*instances, until, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, [i.handoffs.counts() for i in instances]
        for instance in instances:
            instance.turn()


def run_to_end(*instances):
    """Until all is answered, and nothing is left of it."""
    run(*instances, until=lambda: not any(i.engine.has_work or i.handoffs.busy for i in instances))
    for instance in instances:
        instance.engine.check()
        instance.intake.check()
        assert not instance.engine.scheduler.pool.used


@pytest.fixture(scope="module")
def expected():
    with closing(build_engine(OPTIONS, SystemClock())) as built:
        tokens = []
        built.engine.add(make_request("r", PROMPT, seed=5, max_tokens=TOKENS, temperature=0.9))
        while built.engine.has_work:
            tokens += [token for output in built.engine.step()[0] for token in output.tokens]
    assert len(tokens) == TOKENS
    return tokens


@pytest.fixture(params=["shared", "tcp"])
def cluster(request, tmp_path):
    """Makes instances whose blocks are in one KV pool server's memory, of each kind of transport."""
    with ExitStack() as stack:
        kv_pool = stack.enter_context(pool_server(tmp_path / "kv-pool.sock"))

        def make(name, incarnation, faults=None):
            return Instance(stack, request.param, tmp_path, name, incarnation, kv_pool, faults)

        yield make


def half_way(instance):
    """Have it run until half of the answer has come; returns that half."""
    instance.start("r")
    run(instance, until=lambda: len(instance.tokens) >= TOKENS // 2)
    return instance.tokens[: TOKENS // 2]


def test_from_a_peer_that_has_it(cluster, expected):
    holder, heir = cluster("holder", 1), cluster("heir", 2)
    holder.start("before")  # the same, so that all of it is there
    run_to_end(holder)
    heir.start("r", expected[: TOKENS // 2], Source(holder.peer, BLOCKS, 50.0), generation=1)
    assert heir.engine.scheduler.num_waiting == 1
    assert heir.intake.snapshot().waiting_tokens == len(PROMPT) + TOKENS // 2
    run(holder, heir, until=lambda: heir.over)
    assert heir.tokens == expected
    assert heir.cached == heir.said[0].tokens == BLOCKS * BLOCK_TOKENS
    assert heir.handoffs.fetch_side.fetched_blocks == holder.handoffs.lend_side.lent_blocks == BLOCKS
    assert heir.intake.snapshot().fetch_ms >= 0
    run_to_end(holder, heir)
    heir.start("again", expected[:30], Source(holder.peer, BLOCKS, 50.0))
    assert not heir.handoffs.busy, "it has everything"
    run_to_end(holder, heir)
    assert heir.said[1].tokens == 0
    assert heir.tokens == expected


def test_a_new_prompt_is_fetched_from_a_healthy_peer_and_its_tokens_are_the_same(cluster, expected):
    holder, heir = cluster("holder", 1), cluster("heir", 2)
    holder.start("before")
    run_to_end(holder)
    most = (len(PROMPT) - 1) // BLOCK_TOKENS
    holder.start("beside")  # it is busy, and lends nevertheless
    heir.start("r", (), Source(holder.peer, most + 3, 50.0))
    run(holder, heir, until=lambda: heir.over and holder.over)
    assert heir.tokens == holder.tokens == expected
    assert heir.cached == heir.said[0].tokens == most * BLOCK_TOKENS
    seen = heir.intake.snapshot()
    assert seen.fetch_ms >= 0 < seen.fetch_wait_ms
    run_to_end(holder, heir)
    heir.handoffs.tick(heir.clock.now() + REMEMBERED)
    seen = heir.intake.snapshot()
    assert seen.fetch_ms is seen.fetch_wait_ms is None, "what was slow is tried again"


def test_it_is_waited_for_no_longer_than_computing_would_take_and_a_little(cluster, expected):
    holder, heir = cluster("holder", 1, {"drop": 1.0}), cluster("heir", 2)
    began = heir.clock.now()
    heir.start("r", (), Source(holder.peer, 7, 1e4, 30.0))
    (fetch,) = heir.handoffs.fetch_side._fetches.values()
    assert fetch.deadline <= heir.clock.now() + 0.03 + GRACE
    run(holder, heir, until=lambda: heir.said)
    assert heir.clock.now() >= began + GRACE
    assert heir.intake.snapshot().fetch_wait_ms >= GRACE * 1e3, "the next one is not believed to be quicker"
    run(heir, until=lambda: heir.over)
    assert (heir.tokens, heir.cached) == (expected, 0)


def test_a_peer_lends_only_a_part_of_its_blocks_at_a_time(cluster, expected, monkeypatch):
    holder, heir = cluster("holder", 1), cluster("heir", 2)
    holder.start("before")
    run_to_end(holder)
    for number, blocks in enumerate((0, 3)):
        monkeypatch.setattr(fetches, "LENT", (blocks + 0.5) / holder.engine.scheduler.pool.num_blocks)
        heir.start("r", (), Source(holder.peer, 7, 50.0), generation=number)
        run(holder, heir, until=lambda: heir.over)
        assert heir.tokens == expected
        assert heir.said[number].tokens == heir.cached == blocks * BLOCK_TOKENS
        run_to_end(holder, heir)
        heir.engine.clear_cache()


def test_from_what_a_dead_one_left(cluster, expected):
    victim, heir = cluster("victim", 1), cluster("heir", 2)
    known = half_way(victim)
    victim.die()
    heir.start("r", known, Source(None, BLOCKS, 50.0), generation=1)
    run(heir, until=lambda: heir.over)
    assert heir.tokens == expected
    assert heir.cached == heir.said[0].tokens == BLOCKS * BLOCK_TOKENS
    assert heir.handoffs.fetch_side.remapped_blocks == BLOCKS
    run_to_end(heir)
    successor = cluster("victim", 3)  # it inherits what is left, and computes the same
    successor.start("r", known)
    run_to_end(heir, successor)
    assert successor.tokens == expected


def test_a_part_is_there_a_part_is_fetched_and_the_rest_computed(cluster, expected):
    holder, heir = cluster("holder", 1), cluster("heir", 2)
    holder.start("before")
    run_to_end(holder)
    heir.start("first")
    run(heir, until=lambda: heir.engine.scheduler.pool.cached >= 3)
    heir.intake.obey("f", Cancel(2, ["first"]))
    run_to_end(heir)
    there = heir.engine.scheduler.pool.cached
    heir.start("r", expected[: TOKENS // 2], Source(holder.peer, BLOCKS - 1, 50.0))
    run(holder, heir, until=lambda: heir.over)
    assert heir.tokens == expected
    assert heir.said[0].tokens == (BLOCKS - 1 - there) * BLOCK_TOKENS
    assert heir.cached == (BLOCKS - 1) * BLOCK_TOKENS
    run_to_end(holder, heir)


FAULTS = {
    "spoiled": {"corrupt": 1.0, "only": ["Push"]},
    "lost": {"drop": 1.0, "only": ["Push"]},
    "unheard": {"drop": 1.0, "only": ["Lent", "Push"]},
    "some lost": {"drop": 0.4, "duplicate": 0.4, "reorder": 0.4, "seed": 3},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_midst_of_a_fetch(cluster, expected, fault):
    """Costs the time until it is given up, and no token."""
    holder, heir = cluster("holder", 1, FAULTS[fault]), cluster("heir", 2)
    holder.start("before")
    run_to_end(holder)
    began = time.monotonic()
    heir.start("r", expected[: TOKENS // 2], Source(holder.peer, BLOCKS, 50.0), generation=1)
    run(holder, heir, until=lambda: heir.said)
    assert time.monotonic() - began < LEASE
    run(holder, heir, until=lambda: heir.over)
    assert heir.tokens == expected
    assert heir.cached == heir.said[0].tokens
    assert fault == "some lost" or not heir.cached
    run_to_end(holder, heir)


@pytest.mark.parametrize("end", ["dies", "stands still", "another incarnation"])
def test_a_peer_that_goes_in_the_midst_of_a_fetch(cluster, expected, end):
    holder, heir = cluster("holder", 1), cluster("heir", 2)
    holder.start("before")
    run_to_end(holder)
    source = Source(holder.peer, BLOCKS, 50.0)
    heir.start("r", expected[: TOKENS // 2], source, generation=1)
    if end != "stands still":
        holder.die()
    if end == "another incarnation":
        holder = cluster("holder", 3)
    alive = [heir] + [holder] * (end == "another incarnation")
    run(*alive, until=lambda: heir.over)
    assert heir.tokens == expected
    assert heir.said[0].tokens == heir.cached == 0
    run_to_end(*alive)


def test_of_what_nobody_has_nothing_comes(cluster, expected):
    holder, heir = cluster("holder", 1), cluster("heir", 2)
    for generation, source in enumerate((Source(holder.peer, BLOCKS, 50.0), Source(None, BLOCKS, 50.0))):
        heir.start("r", expected[: TOKENS // 2], source, generation)
        run(holder, heir, until=lambda: heir.over)
        assert heir.said[-1].tokens == 0
        assert heir.tokens == expected
        run_to_end(holder, heir)
        heir.engine.clear_cache()


def test_one_that_ends_or_begins_anew_while_it_waits_leaves_nothing(cluster, expected):
    holder, heir = cluster("holder", 1), cluster("heir", 2)
    holder.start("before")
    run_to_end(holder)
    source = Source(holder.peer, BLOCKS, 50.0)
    for generation in range(3):  # each ends the one before
        heir.start("r", expected[:10], source, generation)
        heir.turn()
    heir.intake.obey("f", Cancel(2, ["r"]))
    run(holder, heir, until=lambda: not (holder.handoffs.busy or heir.handoffs.busy))
    assert not heir.engine.has_work
    assert not heir.said
    heir.start("r", expected[:30], source, 3)
    run(holder, heir, until=lambda: heir.over)
    assert heir.tokens == expected
    run_to_end(holder, heir)
