"""Both ends of a hand-off over a channel that loses, delays, doubles, reorders and corrupts, and ends that die."""

import random
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.plan import BLOCK_TOKENS, StepResult
from penstock.core.request import FinishReason
from penstock.core.wire.engine import Peer, Source
from penstock.core.wire.handoff import (
    Commit,
    Committed,
    Lease,
    Missing,
    PeerMessage,
    Push,
    Rejected,
    Release,
    Reserve,
    Reserved,
    Waiting,
)
from penstock.kv.connector import Moved
from penstock.kv.depot import Depot, DepotSource
from penstock.kv.groups import WHOLE
from penstock.kv.keys import extend_keys
from penstock.kv.pool import BlockPool
from penstock.sched.local import Limits, Scheduler
from penstock.sched.local.handoff import Handoffs
from tests.helpers.engines import make_request

LEASE = 1.0
TICK = 0.05
MIXED = (None, 100, 2)  # of groups of layers


def draw(tokens):
    """The next token is a function of everything before it."""
    return zlib.crc32(repr(list(tokens)).encode()) % 5000


def expected(request):
    tokens = list(request.prompt)
    while len(tokens) - len(request.prompt) < request.max_tokens:
        tokens.append(draw(tokens))
    return tokens[len(request.prompt) :]


@dataclass
class Faults:
    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0  # seconds at most; different delays reorder
    slow: float = 0.0  # seconds that a pull takes at most
    partition: tuple[float, float] = (0.0, 0.0)
    kill: tuple[str, float] | None = None
    move: float = 0.0  # chance that some running request of an engine is to move in a turn
    keep: float = 0.0  # chance that one that leaves is to stay, after all
    cancel: float | None = None  # when the clients leave


@dataclass
class Arrival:
    peer: Peer
    message: PeerMessage
    payload: list | None


@dataclass
class Network:
    faults: Faults
    rng: random.Random
    now: float = 0.0
    queue: list = field(default_factory=list)

    def send(self, sender, receiver, message, payload):
        start, end = self.faults.partition
        if start <= self.now < end or self.rng.random() < self.faults.drop:
            return
        for _ in range(1 + (self.rng.random() < self.faults.duplicate)):
            copy = payload
            if payload is not None and self.rng.random() < self.faults.corrupt:
                copy = [*payload[:-1], -1]
            due = self.now + self.rng.random() * self.faults.delay
            self.queue.append((due, receiver.name, Arrival(sender, message, copy)))

    def deliver(self, receiver):
        due, later = [], []
        for entry in self.queue:
            (due if entry[0] <= self.now and entry[1] == receiver else later).append(entry)
        self.queue = later
        return sorted(due, key=lambda entry: entry[0])


class Node:
    """An engine without a device; it is runner, carrier and host at once.

    Where the world schedules ahead, a step is always in flight while messages come, and its work is done when it ends.
    """

    def __init__(self, name, world, blocks, source, memory):
        self.peer = Peer(name, 1, "")
        self.world, self.memory, self.source = world, memory, source
        self.shares = source is not None
        limits = Limits(token_budget=world.budget, max_sequences=8, max_model_len=600)
        self.scheduler = Scheduler(
            limits, BlockPool(blocks, source), prefix_cache=world.prefix_cache, windows=world.windows
        )
        self.handoffs = Handoffs(self.scheduler, self, self, LEASE)
        self.joins = 0
        self.flying, self.sampled = [], []
        self.handles, self.pulls = count(), []

    # carrier
    def send(self, peer, message):
        payload = list(self.memory[message.block]) if isinstance(message, Push) and not self.shares else None
        self.world.network.send(self.peer, peer, message, payload)

    def stamp(self, block):
        generation = self.source.depot.generation(block) if self.shares else 0
        return generation, zlib.crc32(repr(self.memory[block]).encode())

    def pull(self, arrival, into):
        handle, due = next(self.handles), self.world.network.now + self.world.rng.random() * self.world.faults.slow
        self.pulls.append((due, handle, arrival, into))
        return handle

    def poll(self):
        over = [pull for pull in self.pulls if pull[0] <= self.world.network.now]
        self.pulls = [pull for pull in self.pulls if pull not in over]
        return [Moved(handle, self.take(arrival, into), 0.0) for _, handle, arrival, into in over]

    def take(self, arrival, into):
        """At the last moment, so that a block which was given to somebody else meanwhile shows it."""
        push = arrival.message
        if self.shares:
            return (push.block,) if self.source.hold([(push.block, push.generation)], [into]) else ()
        self.memory[into] = list(arrival.payload)
        return (into,) if zlib.crc32(repr(arrival.payload).encode()) == push.checksum else ()

    # host
    def refuses(self, request, frontend):
        return "" if frontend == "frontend" else "not connected"

    def migrated(self, request_id):
        pass

    def stayed(self, request_id, peer, reason):
        pass

    def joined(self, request, frontend, generation):
        self.joins += 1

    def failed(self, output):
        self.world.receive(self.peer.name, output)

    def embedded(self, digest, came, why):
        raise AssertionError("nobody sends images")

    def fetched(self, request_id, tokens, ms):
        self.world.fetched[request_id] = tokens

    # engine
    def step(self):
        self.begin()
        if self.world.ahead:
            self.begin()
            self.world.hear(self.peer.name)
        if self.flying:
            self.end(self.flying.pop(0))

    def begin(self):
        if not self.scheduler.has_work or (self.flying and not (len(self.flying) == 1 and self.scheduler.look_ahead())):
            return
        plan = self.scheduler.schedule()
        if not plan.sequences:
            return
        self.flying.append(plan)
        if self.world.ahead:
            self.scheduler.launch(plan)
        self.handoffs.started(self.world.network.now, plan)

    def end(self, plan):
        for block in plan.fresh_blocks:
            self.memory[block] = [None] * BLOCK_TOKENS
        for source, target, kept in plan.copies:
            self.memory[target] = [*self.memory[source][:kept], *[None] * (BLOCK_TOKENS - kept)]
        tokens = []
        for s in plan.sequences:
            for i, token in enumerate(s.tokens, s.start):
                real = self.sampled[-1 - token] if token < 0 else token
                for table in self.tables(s):
                    self.memory[table[i // BLOCK_TOKENS]][i % BLOCK_TOKENS] = real
            whole, *others = [self.read(table, s.start + len(s.tokens)) for table in self.tables(s)]
            for window, seen in zip(self.world.windows[1:], others, strict=True):
                first = max(0, s.start + 1 - window)
                assert seen[first:] == whole[first:], "what a window sees is another's"
            if s.sample:
                tokens.append(draw(whole))
        self.sampled = tokens
        for output in self.scheduler.update(plan, StepResult([[token] for token in tokens], [None] * len(tokens))):
            self.world.receive(self.peer.name, output)
        self.handoffs.progress(self.world.network.now)

    def tables(self, step):
        groups = len(self.world.windows)
        return [step.blocks[group::groups] for group in range(groups)]

    def read(self, table, end):
        return [self.memory[table[i // BLOCK_TOKENS]][i % BLOCK_TOKENS] for i in range(end)]

    def check(self):
        self.scheduler.check()
        self.handoffs.check()
        for plan in self.flying:
            for block in [*plan.fresh_blocks, *(b for s in plan.sequences for b in s.blocks)]:
                assert self.scheduler.pool.owns(block), "a block that a step may touch is another's"
                assert self.scheduler.pool.holders(block) > 0, "a block is anybody's while a step may touch it"


class World:
    def __init__(
        self,
        seed,
        faults,
        *,
        shared,
        requests=6,
        budget=96,
        prefix_cache=True,
        room=40,
        decoder_room=None,
        local=0.0,
        begun=0.0,
        held=0.0,
        fetches=0.0,
        ahead=False,
        windows=WHOLE,
    ):
        self.ahead, self.faults, self.windows = ahead, faults, windows
        self.rng = random.Random(seed)
        self.budget, self.prefix_cache = budget, prefix_cache
        self.network = Network(faults, self.rng)
        self.depot = Depot(150 * len(windows)) if shared else None
        self.nodes = {}
        memory = {}
        for name, each in (("prefiller", room), ("decoder", decoder_room or room), ("other", room)):
            own = each * len(windows)
            if shared:
                self.depot.attach(name, 1, own)
                blocks, source = self.depot.lease(name, own), DepotSource(self.depot, name)
            else:
                blocks, source, memory = range(own), None, {}
            self.nodes[name] = Node(name, self, blocks, source, memory)
        common = [self.rng.randrange(5000) for _ in range(200)]
        self.requests = {}
        for i in range(requests):
            shared_part = common[: self.rng.choice([0, 64, 150, 200])]
            prompt = shared_part + [self.rng.randrange(5000) for _ in range(self.rng.randrange(1, 200))]
            priority = self.rng.randrange(2) if local else 0
            length = self.rng.randrange(1, 40)
            self.requests[f"r{i}"] = make_request(f"r{i}", prompt, max_tokens=length, priority=priority)
        for name, request in self.requests.items():
            if self.rng.random() < begun:  # elsewhere, where it was interrupted
                generated = expected(request)[: self.rng.randrange(request.max_tokens)]
                self.requests[name] = replace(request, generated=generated)
        # a third engine runs these, and fetches what the first has of them
        self.fetching = {name for name in self.requests if self.rng.random() < fetches}
        self.fetched = {}
        self.held = {name for name in self.requests if self.rng.random() < held}  # at first nobody says where they go
        self.local = {name for name in self.requests if self.rng.random() < local}  # they never leave
        self.texts = {name: list(request.generated) for name, request in self.requests.items()}
        self.ended = {}
        self.cancelled = set()
        self.gone = None  # who was killed

    def receive(self, node, output):
        text, request = self.texts[output.request_id], self.requests[output.request_id]
        assert expected(request)[output.start : output.start + len(output.tokens)] == output.tokens, "a wrong token"
        if output.finish is FinishReason.ABORT:
            self.ended.setdefault(output.request_id, "error")
            return
        text += output.tokens[max(0, len(text) - output.start) :]
        if output.finish is not None:
            self.ended[output.request_id] = "full"

    def run(self):
        prefiller, decoder = self.nodes["prefiller"], self.nodes["decoder"]
        for name, request in self.requests.items():
            if name in self.fetching:
                continue
            prefiller.scheduler.add(request, migrates=name not in self.local)
            if name in self.held - self.local:
                prefiller.handoffs.hold(request, 0, "frontend")
            elif name not in self.local:
                prefiller.handoffs.begin(0.0, request, 0, "frontend", decoder.peer)
        network, faults = self.network, self.network.faults
        while network.now < 25 * LEASE:
            for node in self.nodes.values():
                if network.now < 8 * LEASE and self.rng.random() < faults.move:
                    self.move(node)
                if faults.keep and self.rng.random() < faults.keep:
                    self.keep(node)
            network.now += TICK
            if network.now > 1.5 * LEASE and self.fetching - self.fetched.keys() - self.cancelled:
                self.fetch()
            if faults.kill and network.now >= faults.kill[1] and faults.kill[0] in self.nodes:
                self.kill(faults.kill[0])
            if faults.cancel is not None and network.now >= faults.cancel and not self.cancelled:
                self.cancel()
            for name in list(self.nodes):
                if not self.ahead or self.rng.random() < 0.5:  # else when the next step is scheduled too
                    self.hear(name)
            for node in self.nodes.values():
                node.step()
                node.handoffs.tick(network.now)
                node.check()
            self.check_owners()

    def fetch(self):
        """Those that were not begun yet, one in a turn."""
        other = self.nodes["other"]
        for name in sorted(self.fetching - self.fetched.keys() - self.cancelled):
            request = self.requests[name]
            if not other.scheduler.holds(name) and name not in self.ended:
                other.scheduler.add(request, awaits=True)
                holder, keys = self.nodes.get("prefiller") or self.gone, []
                extend_keys(keys, b"", request.context, len(request.context) // BLOCK_TOKENS)
                blocks = len(holder.scheduler.pool.match(keys))  # as the master's index knows it
                other.handoffs.fetch(self.network.now, name, 0, Source(holder.peer, blocks, 100.0))
                return

    def move(self, node):
        """Some request that is there and not leaving is to leave."""
        here = [name for name in self.requests if node.scheduler.holds(name) and not node.handoffs.leaving(name)]
        others = [other for other in self.nodes.values() if other is not node]
        if not here or not others:
            return
        sequence = node.scheduler.sequence(self.rng.choice(here))
        if not sequence.generated:
            node.scheduler.leave(sequence.id)
        node.handoffs.begin(self.network.now, sequence.request, 0, "frontend", self.rng.choice(others).peer)

    def keep(self, node):
        leaving = [name for name in self.requests if node.handoffs.leaving(name)]
        if leaving:
            node.handoffs.go_on(self.rng.choice(leaving))

    def hear(self, name):
        for _, _, arrival in self.network.deliver(name):
            self.nodes[name].handoffs.on(self.network.now, arrival)
        self.nodes[name].handoffs.collect(self.network.now)

    def kill(self, name):
        victim = self.gone = self.nodes.pop(name)
        if self.depot is not None:
            self.depot.detach(name, [])
            self.depot.expire(name)
        for node in self.nodes.values():
            node.handoffs.lost(victim.peer, for_good=True)

    def cancel(self):
        self.cancelled = set(self.requests) - set(self.ended)
        for node in self.nodes.values():
            for request_id in self.cancelled:
                node.handoffs.cancel(request_id, "frontend")
                node.scheduler.cancel(request_id)
                node.handoffs.fetch_side.cancel(request_id)

    def check_owners(self):
        """Nobody runs what another engine runs."""
        for request_id in self.requests:
            holding = [node.scheduler for node in self.nodes.values() if node.scheduler.holds(request_id)]
            assert sum(not scheduler.migrating(request_id) for scheduler in holding) <= 1

    def check_end(self):
        for node in self.nodes.values():
            assert not node.handoffs.busy, "a hand-off never ends"
            assert not node.scheduler.has_work
            assert node.scheduler.pool.used == 0, "a block leaks"
        if self.depot is not None:
            self.depot.check()
        for request_id, request in self.requests.items():
            if self.ended.get(request_id) == "full":
                assert self.texts[request_id] == expected(request)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "copied"])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("begun", [0.0, 1.0], ids=["new", "interrupted"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize("windows", [WHOLE, MIXED], ids=["whole", "mixed"])
def test_every_request_moves_and_none_changes(shared, prefix_cache, begun, ahead, windows):
    world = World(1, Faults(), shared=shared, prefix_cache=prefix_cache, begun=begun, ahead=ahead, windows=windows)
    assert any(r.generated for r in world.requests.values()) == bool(begun)
    world.run()
    world.check_end()
    assert set(world.ended.values()) == {"full"}
    long_ones = sum(r.max_tokens - len(r.generated) > 1 for r in world.requests.values())
    assert world.nodes["decoder"].joins == long_ones == world.nodes["prefiller"].handoffs.counts()["handoffs_completed"]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "copied"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize("last", [0, 4])
def test_what_runs_or_is_held_moves_as_often_as_it_is_told(shared, ahead, last, monkeypatch):
    monkeypatch.setattr("penstock.sched.local.handoff.prefill_side.LAST", last)
    world = World(1, Faults(move=0.5), shared=shared, ahead=ahead, requests=12, local=0.5, held=0.5)
    world.run()
    world.check_end()
    assert set(world.ended.values()) == {"full"}
    assert sum(node.joins for node in world.nodes.values()) > 2 * len(world.requests)


@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
def test_what_is_told_to_stay_goes_on_here_or_there_and_never_at_both(ahead):
    world = World(1, Faults(move=0.3, keep=0.3), shared=True, ahead=ahead, requests=12)
    world.run()
    world.check_end()
    assert set(world.ended.values()) == {"full"}
    done = [node.handoffs.counts() for node in world.nodes.values()]
    assert sum(counts["handoffs_abandoned"] for counts in done) > 3
    assert sum(counts["handoffs_completed"] for counts in done) > 3


def test_what_is_held_goes_on_here_when_nobody_says_where():
    world = World(4, Faults(), shared=False, held=1.0)
    world.run()
    world.check_end()
    assert set(world.ended.values()) == {"full"}
    assert world.nodes["decoder"].joins == 0
    world = World(4, Faults(), shared=False, requests=0)
    world.receive = lambda *_: None
    node, request = world.nodes["prefiller"], make_request("r", list(range(64)), max_tokens=4)
    node.scheduler.add(request, migrates=True)
    node.handoffs.hold(request, 0, "frontend")
    node.step()
    assert node.scheduler.migrating("r")
    assert not node.handoffs.leaving("r")
    node.handoffs.go_on("r")
    assert not node.handoffs.busy
    assert node.scheduler.has_work


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "copied"])
def test_a_prompt_that_takes_longer_than_a_lease_is_handed_over_too(shared):
    world = World(0, Faults(), shared=shared, budget=8, requests=0)
    world.requests["long"] = make_request("long", list(range(500)), max_tokens=4)
    world.texts["long"] = []
    assert 500 / 8 * TICK > 3 * LEASE
    world.run()
    world.check_end()
    assert world.ended == {"long": "full"}
    assert world.nodes["prefiller"].handoffs.counts()["handoffs_abandoned"] == 0
    assert world.nodes["decoder"].joins == 1


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "copied"])
@pytest.mark.parametrize("windows", [WHOLE, MIXED], ids=["whole", "mixed"])
def test_what_a_peer_has_of_a_prompt_is_fetched(shared, windows):
    """As far as it is there: prompts begin alike, and what the first engine computed of them is still in its cache."""
    world = World(3, Faults(), shared=shared, requests=12, fetches=0.5, windows=windows)
    world.run()
    world.check_end()
    assert set(world.ended.values()) == {"full"}
    assert world.fetched.keys() == world.fetching
    other, prefiller = world.nodes["other"].handoffs, world.nodes["prefiller"].handoffs
    assert sum(world.fetched.values()) > 0
    assert other.fetch_side.fetched_blocks == prefiller.lend_side.lent_blocks > 0
    assert other.fetch_side.block_ms is not None


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "copied"])
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    faults=st.builds(
        Faults,
        drop=st.sampled_from([0.0, 0.1, 0.5]),
        duplicate=st.sampled_from([0.0, 0.3]),
        corrupt=st.sampled_from([0.0, 0.3, 1.0]),
        delay=st.sampled_from([0.0, 0.2, 3.0]),
        slow=st.sampled_from([0.0, 0.3, 3.0]),
        partition=st.sampled_from([(0.0, 0.0), (0.2, 0.6), (0.3, 9.0), (0.0, 99.0)]),
        kill=st.sampled_from([None, ("prefiller", 0.3), ("decoder", 0.2), ("decoder", 0.5), ("decoder", 1.2)]),
        cancel=st.sampled_from([None, None, 0.1, 0.4]),
        move=st.sampled_from([0.0, 0.1, 0.5]),
        keep=st.sampled_from([0.0, 0.1, 0.5]),
    ),
    prefix_cache=st.booleans(),
    room=st.sampled_from([10, 14, 40]),
    local=st.sampled_from([0.0, 0.5]),
    begun=st.sampled_from([0.0, 0.5]),
    held=st.sampled_from([0.0, 0.7]),
    fetches=st.sampled_from([0.0, 0.5]),
    ahead=st.booleans(),
    windows=st.sampled_from([WHOLE, MIXED]),
)
def test_whatever_happens_no_wrong_token_and_nothing_is_left(shared, faults, **variant):
    world = World(faults=faults, shared=shared, **variant)
    world.run()
    world.check_end()
    if faults.kill is None and faults.cancel is None:
        assert set(world.ended) == set(world.requests), "a client waits for ever"
    bad = (faults.drop, faults.corrupt, faults.delay, faults.slow, faults.partition[1], faults.kill, faults.cancel)
    if not any(bad):
        assert set(world.ended.values()) <= {"full"}


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "copied"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
def test_a_full_decoder_leaves_requests_where_they_are(shared, ahead):
    world = World(3, Faults(), shared=shared, room=40, decoder_room=10, ahead=ahead)
    world.run()
    world.check_end()
    assert set(world.ended.values()) == {"full"}
    assert world.nodes["prefiller"].handoffs.counts()["handoffs_abandoned"] > 0


def test_who_asked_first_has_room_first_and_online_before_offline():
    world = World(0, Faults(), shared=False, requests=0, room=10)
    world.receive = lambda *_: None
    node, sent, source = world.nodes["decoder"], [], Peer("prefiller", 1, "")
    node.send = lambda peer, message: sent.append((type(message), getattr(message, "lease", None)))
    node.scheduler.add(make_request("fills", list(range(330)), max_tokens=240))
    node.step()

    def ask(name, tokens, offline=False):
        request = replace(make_request(name, list(range(1000, 1000 + tokens)), max_tokens=4), offline=offline)
        node.handoffs.on(world.network.now, Arrival(source, Reserve(Lease(name, 0), request, "frontend"), None))

    asked = [("background", 10, True), ("large", 500, False), ("small", 10, False)]
    ask(*asked[0])
    assert sent.pop() == (Reserved, Lease("background", 0))
    node.handoffs.on(0.0, Arrival(source, Release(Lease("background", 0), "no"), None))
    ask("later", 500, offline=True)
    for request in asked[1:]:
        ask(*request)
    ask("later", 500, offline=True)
    assert [kind for kind, _ in sent] == [Waiting] * 4
    assert len(node.handoffs.decode_side.queue) == 3
    node.handoffs.tick(LEASE / 2)
    assert node.handoffs.decode_side.queue.first_waits == LEASE / 2
    sent.clear()
    node.handoffs.on(LEASE / 2, Arrival(source, Release(Lease("large", 0), "no longer"), None))
    node.handoffs.tick(LEASE / 2)
    assert sent == [(Reserved, Lease("small", 0))], "nobody before it wants room any longer"
    node.handoffs.tick(1.5 * LEASE)
    assert sent[-1] == (Rejected, Lease("later", 0)), "it was not asked for again"
    assert len(node.handoffs.decode_side.queue) == 0


@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize("faults", [{}, {"drop": 0.1, "duplicate": 0.3}], ids=["corrupt", "and more"])
def test_blocks_that_never_arrive_whole_are_sent_less_and_less_often(faults, ahead):
    world = World(1, Faults(corrupt=1.0, **faults), shared=False, ahead=ahead)
    sent, send = [], world.network.send

    def counted(sender, receiver, message, payload):
        sent.append(message)
        send(sender, receiver, message, payload)

    world.network.send = counted
    world.run()
    world.check_end()
    assert "error" in world.ended.values()
    assert faults or "full" not in world.ended.values()
    blocks = sum(-(-len(r.prompt) // BLOCK_TOKENS) for r in world.requests.values())
    assert sum(isinstance(m, Push) for m in sent) <= 6 * blocks
    assert len(sent) <= 75 * len(world.requests)


def test_what_left_the_window_is_not_sent():
    """Of a prompt of 500 tokens the next row sees two blocks of one group and one of the other."""
    world, sent = World(0, Faults(), shared=False, requests=0, windows=MIXED), []
    world.requests["long"], world.texts["long"] = make_request("long", list(range(500)), max_tokens=4), []
    send = world.network.send
    world.network.send = lambda *args: (sent.append(args[2]), send(*args))
    world.run()
    world.check_end()
    assert world.ended == {"long": "full"}
    assert Counter(m.index % 3 for m in sent if isinstance(m, Push)) == {0: 8, 1: 2, 2: 1}


def test_lost_answers_are_asked_for_again():
    world = World(5, Faults(), shared=False, requests=1)
    lost = []

    def lossy(sender, receiver, message, payload, send=world.network.send):
        if isinstance(message, Committed | Commit) and len(lost) < 4:
            lost.append(message)
        else:
            send(sender, receiver, message, payload)

    world.network.send = lossy
    world.run()
    world.check_end()
    assert world.ended == {"r0": "full"}
    assert len(lost) == 4
    assert world.nodes["decoder"].joins == 1


def test_a_request_is_taken_over_once_whoever_else_brings_it():
    world = World(7, Faults(), shared=False, requests=1)
    (request,) = world.requests.values()
    decoder, answers = world.nodes["decoder"], []
    world.network.send = lambda sender, receiver, message, payload: answers.append((receiver.name, message))
    first, other, lease = Peer("one", 1, ""), Peer("two", 1, ""), Lease(request.id, 0)

    def bring(peer, lease=lease):
        answers.clear()
        decoder.handoffs.on(0.0, Arrival(peer, Reserve(lease, request, "frontend"), None))
        decoder.check()
        return answers[:]

    assert bring(first) == [("one", Reserved(lease, 0))]
    for again in (lease, Lease(request.id, 0, attempt=-1)):
        assert bring(other, again) == [("two", Rejected(again, "this request is here already"))]
    assert bring(first) == [("one", Reserved(lease, 0))], "the other one changed nothing"
    for index in range(-(-len(request.prompt) // BLOCK_TOKENS)):
        key = (decoder.handoffs.decode_side._incoming[request.id].reservation.keys[index : index + 1] or [b""])[0]
        content = [1] * BLOCK_TOKENS
        push = Push(lease, index, key, 0, 0, zlib.crc32(repr(content).encode()))
        decoder.handoffs.on(0.0, Arrival(first, push, content))
    blocks = -(-len(request.prompt) // BLOCK_TOKENS)
    decoder.handoffs.on(0.0, Arrival(first, Commit(lease, blocks, [5], 0, 0.0, 0.0), None))
    assert decoder.scheduler.holds(request.id)
    later = Lease(request.id, 3)
    assert bring(other, later) == [("two", Rejected(later, "this request is here already"))]


class Silent:
    """A carrier to a decoder that says what the test says."""

    shares = False

    def __init__(self):
        self.sent = []

    def send(self, peer, message):
        self.sent.append(message)

    def stamp(self, block):
        return 0, 0

    def poll(self):
        return []


DECODER = Peer("decoder", 1, "")


def prefiller(blocks, prefix_cache=True):
    """A node that hands over to a decoder which promises room as soon as it is asked."""
    world = World(0, Faults(), shared=False, requests=0, prefix_cache=prefix_cache, room=blocks)
    node, carrier = world.nodes["prefiller"], Silent()
    node.handoffs = Handoffs(node.scheduler, carrier, node, LEASE)
    world.receive = lambda *_: None

    def step(now=0.0):
        world.network.now = now
        node.step()
        for message in [m for m in carrier.sent if isinstance(m, Reserve)]:
            carrier.sent.remove(message)
            node.handoffs.on(now, Arrival(DECODER, Reserved(message.lease, 0), None))
        node.check()

    return node, carrier, step


def migrate(node, request):
    node.scheduler.add(request, migrates=True)
    node.handoffs.begin(0.0, request, 0, "frontend", DECODER)


def test_blocks_in_transfer_do_not_keep_a_more_urgent_request_out():
    node, carrier, step = prefiller(10)
    migrate(node, make_request("low", list(range(590)), max_tokens=4, priority=1))
    for _ in range(4):
        step()
    assert [m.index for m in carrier.sent if isinstance(m, Push)] == list(range(6))
    node.scheduler.add(make_request("high", list(range(1000, 1500)), max_tokens=4))
    for _ in range(30):
        step()
    assert not node.scheduler.holds("high"), "it never ended"
    assert [m.index for m in carrier.sent if isinstance(m, Push)] == list(range(10)), "each block once, tail and all"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_blocks_in_transfer_do_not_stop_one_that_grows(prefix_cache):
    node, carrier, step = prefiller(10, prefix_cache)
    node.scheduler.add(make_request("grows", list(range(5000, 5060)), max_tokens=200))
    step()
    migrate(node, make_request("big", list(range(576)), max_tokens=4))
    for i in range(300):
        step(i * 1e-3)
        if any(isinstance(m, Commit) for m in carrier.sent):
            break
    assert not node.scheduler.holds("grows")
    assert node.scheduler.migrating("big")


def test_nobody_but_the_decoder_is_believed():
    node, carrier, step = prefiller(10)
    migrate(node, make_request("r", list(range(100)), max_tokens=4))
    step()
    step()
    (commit,) = [m for m in carrier.sent if isinstance(m, Commit)]
    for message in (Committed(commit.lease), Release(commit.lease, "no"), Rejected(commit.lease, "no")):
        node.handoffs.on(0.0, Arrival(Peer("decoder", 2, ""), message, None))
        assert node.scheduler.migrating("r")
    node.handoffs.on(0.0, Arrival(Peer("decoder", 1, "by another name"), Committed(commit.lease), None))
    assert not node.scheduler.holds("r")


def test_a_decoder_that_falls_silent_before_the_commit_is_not_waited_for():
    node, _carrier, step = prefiller(10)
    migrate(node, make_request("r", list(range(500)), max_tokens=4))
    step()
    assert node.handoffs.promised("r")
    node.handoffs.tick(1.5 * LEASE)
    assert not node.handoffs.busy
    step(1.5 * LEASE)
    for _ in range(20):
        step(1.5 * LEASE)
    assert not node.scheduler.holds("r"), "it was decoded here"


def test_a_silent_decoder_is_asked_less_and_less_often():
    node, carrier, _step = prefiller(40)
    for i in range(8):
        migrate(node, make_request(f"r{i}", list(range(i, 500 + i)), max_tokens=4))
    assert not carrier.sent, "nobody is asked to keep room for what waits"
    world_step = node.step
    world_step()
    asked = [m for m in carrier.sent if isinstance(m, Reserve)]
    assert 1 <= len(asked) < 8
    for tick in range(100):
        node.handoffs.tick(tick * LEASE / 20)
    assert len([m for m in carrier.sent if isinstance(m, Reserve)]) <= 5 * len(asked)


def test_room_that_needs_preempting_is_made_when_no_step_is_in_flight():
    world = World(0, Faults(), shared=False, requests=0, room=10, ahead=True)
    world.receive = lambda *_: None
    node, sent = world.nodes["decoder"], []
    node.send = lambda peer, message: sent.append(message)
    node.scheduler.add(replace(make_request("fills", list(range(500)), max_tokens=60), offline=True))
    node.step()
    node.step()
    request = make_request("online", list(range(1000, 1400)), max_tokens=4)
    reserve = Reserve(Lease("online", 0), request, "frontend")
    node.handoffs.on(0.0, Arrival(Peer("prefiller", 1, ""), reserve, None))
    assert [type(message) for message in sent] == [Waiting]
    assert node.scheduler.counters.preemptions == 0
    for _ in range(3):
        node.step()
        node.check()
    assert [type(message) for message in sent] == [Waiting, Reserved]
    assert node.scheduler.counters.preemptions == 1


def test_a_request_that_begins_here_anew_is_not_taken_over_too():
    world = World(0, Faults(), shared=False, requests=0)
    node = world.nodes["decoder"]
    sent = []
    node.send = lambda peer, message: sent.append(message)
    lease = Lease("r", 0)
    request = make_request("r", list(range(10)), max_tokens=4)
    source = Peer("prefiller", 1, "")
    node.handoffs.on(0.0, Arrival(source, Reserve(lease, request, "frontend"), None))
    assert isinstance(sent.pop(), Reserved)
    node.handoffs.supersede("r")
    node.scheduler.add(request)
    node.handoffs.on(0.0, Arrival(source, Commit(lease, 1, [5], 0, 0.0, 0.0), None))
    assert [type(m) for m in sent] == [Release, Release]
    node.check()


def test_a_block_of_other_tokens_has_not_arrived():
    world = World(0, Faults(), shared=False, requests=0)
    node, source, lease = world.nodes["decoder"], Peer("prefiller", 1, ""), Lease("r", 0)
    sent = []
    node.send = lambda peer, message: sent.append(message)
    prompt = list(range(100))
    reserve = Reserve(lease, make_request("r", prompt, max_tokens=4), "frontend")
    node.handoffs.on(0.0, Arrival(source, reserve, None))
    payload = prompt[:BLOCK_TOKENS]
    push = Push(lease, 0, b"another key", 7, 0, zlib.crc32(repr(payload).encode()))
    node.handoffs.on(0.0, Arrival(source, push, payload))
    commit = Commit(lease, 2, [5], 0, 0.0, 0.0)
    for _ in range(2):
        node.handoffs.on(0.0, Arrival(source, commit, None))
    assert sent[1:] == [Missing(lease, [0, 1])]


def test_those_who_wait_here_come_before_those_who_come_from_elsewhere():
    world = World(0, Faults(), shared=False, requests=0, room=10)
    node = world.nodes["decoder"]
    node.scheduler.add(make_request("runs", list(range(400)), max_tokens=40))
    node.scheduler.add(make_request("waits", list(range(1000, 1300)), max_tokens=40))
    node.scheduler.schedule()
    assert node.scheduler.num_waiting == 1
    small = make_request("r", list(range(60)), max_tokens=4)
    assert node.scheduler.reserve(small) is None
    node.scheduler.cancel("waits")
    reservation = node.scheduler.reserve(small)
    assert reservation is not None
    node.scheduler.reservations.cancel(reservation)
