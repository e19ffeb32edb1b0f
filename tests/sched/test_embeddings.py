"""What a model makes of images goes from one engine to another, over a wire that loses, doubles and reorders."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.request import MediaSpan
from penstock.core.wire.engine import Enqueue, ImageSource, Peer, Pixels
from penstock.core.wire.handoff import AskEmbedding, EmbeddingPart, Lease
from penstock.kv.embeddings import Embedding, EmbeddingCache
from penstock.sched.local.awaited_images import AwaitedImages, without_images
from penstock.sched.local.handoff.embeddings import ASK_AGAIN, GRACE, PART, REMEMBERED, WINDOW, GiveSide, TakeSide
from tests.helpers.engines import make_request

GIVER, TAKER = Peer("e", 1, "unix:/e"), Peer("p", 1, "unix:/p")
LEASE = Lease("r", 0, -2)
LARGE = Random(1).randbytes(2 * WINDOW + PART + 7)


class Wire:
    """Both ways between two engines; messages are handled when `run` is called."""

    def __init__(self, rng=None, loss=0.0):
        self.rng, self.loss, self.sent, self.now = rng, loss, [], 0.0
        self.cache, self.arrived = EmbeddingCache(64 << 20), []
        self.give = GiveSide(self.cache, self.end(TAKER))
        self.take = TakeSide(self.end(GIVER), lambda digest, came, why: self.arrived.append((digest, came, why)))

    def end(self, other):
        class End:
            def send(_, peer, message):
                assert peer == other
                self.sent.append(message)

        return End()

    def run(self):
        while self.sent:
            message = self.sent.pop(0 if self.rng is None else self.rng.randrange(len(self.sent)))
            if self.rng is not None and self.rng.random() < self.loss:
                continue
            if self.rng is not None and self.rng.random() < self.loss:
                self.sent.append(message)
            if isinstance(message, AskEmbedding):
                self.give.on_ask(self.now, TAKER, message)
            elif isinstance(message, EmbeddingPart):
                self.take.on_part(self.now, GIVER, message)
            else:
                self.take.on_none(GIVER, message)

    def later(self, seconds):
        self.now += seconds
        self.take.tick(self.now)
        self.give.tick(self.now)
        self.run()


@given(seed=st.integers(0, 1 << 30), loss=st.sampled_from((0.0, 0.2, 0.5)))
def test_all_of_it_comes_whatever_the_wire_does(seed, loss):
    wire = Wire(Random(seed), loss)
    wire.cache.put(b"d", Embedding.of(LARGE))
    wire.take.take(0.0, LEASE, b"d", GIVER, 1e9)
    wire.run()
    for _ in range(1000):
        if wire.arrived:
            break
        wire.later(ASK_AGAIN)
    ((digest, came, why),) = wire.arrived
    assert (digest, came.data, why) == (b"d", LARGE, "")
    assert not len(wire.take)


class Tier(dict):
    """Below a cache, as bytes of a host that others write and delete."""

    def read(self, digest):
        return self.get(digest)

    def write(self, digest, embedding):
        self[digest] = embedding

    def keys(self):
        now = frozenset(super().keys())
        self.known = self.known if getattr(self, "known", None) == now else now
        return self.known


def test_what_a_dead_engine_has_made_is_given_by_another_of_its_host():
    wire = Wire()
    wire.give._cache = EmbeddingCache(64 << 20, Tier({b"d": Embedding.of(LARGE)}))
    wire.take.take(0.0, LEASE, b"d", GIVER, 60.0)
    wire.run()
    ((digest, came, why),) = wire.arrived
    assert (digest, came.data, why) == (b"d", LARGE, "")


def test_how_long_a_million_bytes_take_is_measured_for_a_while():
    """From the first part on: before that the other one may have had to look at it."""
    wire = Wire()
    wire.cache.put(b"d", Embedding.of(bytes(PART + 500_000)))
    wire.cache.put(b"small", Embedding.of(b"is in one part"))
    wire.take.take(0.0, LEASE, b"small", GIVER, 60.0)
    wire.run()
    assert wire.take.mb_ms is None
    wire.take.take(5.0, LEASE, b"d", GIVER, 60.0)
    wire.give.on_ask(9.0, TAKER, wire.sent.pop())
    for now, part in zip((9.0, 9.1), list(wire.sent), strict=True):
        wire.take.on_part(now, GIVER, part)
    assert wire.take.mb_ms == pytest.approx(200)
    wire.take.tick(9.0 + REMEMBERED)
    assert wire.take.mb_ms is not None
    wire.take.tick(9.2 + REMEMBERED)
    assert wire.take.mb_ms is None


@given(st.lists(st.tuples(st.sampled_from(("put", "get", "write", "delete", "tell")), st.integers(0, 5)), max_size=40))
def test_what_is_told_is_what_is_here_or_below(steps):
    below = Tier()
    cache, told = EmbeddingCache(25, below), set()
    for what, number in [*steps, ("tell", 0)]:
        digest, made = bytes([number]), Embedding.of(bytes(10))
        match what:
            case "put":
                cache.put(digest, made)
            case "get":
                cache.get(digest)
            case "write":
                below.write(digest, made)
            case "delete":
                below.pop(digest, None)
            case "tell":
                added, removed = cache.take_changes()
                assert told.isdisjoint(added)
                assert told.issuperset(removed)
                told = told.union(added).difference(removed)
                assert told == {*cache.keys()} == {*cache._kept, *below.keys()}
        cache.check()


def test_it_is_waited_for_while_it_is_looked_at():
    wire = Wire()
    wire.give.expect(b"d")
    wire.take.take(0.0, LEASE, b"d", GIVER, 60.0)
    wire.run()
    wire.later(2 * GRACE)
    assert not wire.arrived
    wire.cache.put(b"d", Embedding.of(b"seen"))
    wire.give.made(b"d")
    wire.run()
    assert [came.data for _, came, _ in wire.arrived] == [b"seen"]


def test_what_never_comes_is_told():
    wire = Wire()
    wire.take.take(0.0, LEASE, b"nobody's", GIVER, 60.0)
    wire.run()
    wire.later(GRACE + 0.1)
    assert wire.arrived == [(b"nobody's", None, "e: nobody has it look at that")]
    wire.give.expect(b"slow")
    wire.take.take(wire.now, LEASE, b"slow", GIVER, 3.0)
    wire.run()
    wire.later(3.0)
    assert wire.arrived[1:] == [(b"slow", None, "e takes longer than 3.0 s")]
    wire.take.take(wire.now, LEASE, b"lost", GIVER, 3.0)
    wire.take.lost(GIVER)
    assert wire.arrived[2:] == [(b"lost", None, "the link to e was lost")]
    wire.cache.put(b"spoiled", Embedding(b"seem", Embedding.of(b"seen").checksum))
    wire.take.take(wire.now, LEASE, b"spoiled", GIVER, 3.0)
    wire.run()
    assert wire.arrived[3:] == [(b"spoiled", None, "e sent something else than what it made")]


def image(digest, start):
    return MediaSpan(start=start, length=2, digest=digest)


class Holding:
    """Requests with two images, both looked at elsewhere."""

    def __init__(self):
        self.wire = Wire()
        self.images = AwaitedImages(7, EmbeddingCache(1 << 20))
        self.images.side = self.wire.take
        self.wire.take._arrived = self.images.arrived
        spans = image(b"one", 1), image(b"two", 4)
        request = replace(make_request("r", list(range(1, 9))), media=spans, pixels=(b"pixels1", b"pixels2"))
        sources = [ImageSource(span.digest, GIVER, True, 5000.0) for span in spans]
        self.command = Enqueue(7, without_images(request, {b"one", b"two"}), 3, images=sources)

    def hold(self):
        self.images.hold(0.0, "f", self.command)
        self.wire.run()


@pytest.fixture
def held():
    holding = Holding()
    holding.hold()
    return holding


def test_a_request_waits_for_its_images(held):
    assert held.command.request.pixels == (b"", b""), "pixels go to who looks at them alone"
    for digest in (b"one", b"two"):
        assert not held.images.ready
        held.wire.cache.put(digest, Embedding.of(b"seen " + digest, 0.375))
        held.wire.give.made(digest)
        held.wire.run()
    ((frontend, command, seen, since),) = held.images.ready
    assert (seen.count, seen.brought, seen.encoding, since) == (2, 2, 0.75, 0.0)
    assert (frontend, command.generation, command.images) == ("f", 3, [])
    assert command.request.pixels == (b"seen one", b"seen two")
    assert all(span.embedded for span in command.request.media)
    held.images.hold(1.0, "f", held.command)
    assert len(held.images.ready) == 2, "what has come once is kept"


def test_what_lacks_is_asked_for(held):
    held.wire.cache.put(b"one", Embedding.of(b"seen one"))
    held.wire.give.made(b"one")
    held.wire.run()
    held.wire.take.lost(GIVER)
    ((frontend, said),) = held.images.lacking
    assert (frontend, said.request_id, said.generation, said.digests) == ("f", "r", 3, [b"two"])
    assert said.reason == "the link to e was lost"
    for wrong in (Pixels(7, "r", 2, [(b"two", b"pixels2")]), Pixels(7, "r", 3, [(b"one", b"pixels1")])):
        held.images.pixels("f", wrong)
        assert not held.images.ready
    held.images.pixels("f", Pixels(7, "r", 3, [(b"two", b"pixels2")]))
    ((_, command, seen, _),) = held.images.ready
    assert seen.brought == 1
    assert command.request.pixels == (b"seen one", b"pixels2")
    assert [span.embedded for span in command.request.media] == [True, False]


def test_who_leaves_waits_no_longer(held):
    held.images.cancel("r", "f", 2)
    assert len(held.images) == 1
    held.images.cancel("r", "f", 3)
    assert len(held.images) + len(held.wire.take) == 0
    held.hold()
    held.images.drop_client("f")
    assert len(held.images) + len(held.wire.take) == 0


@given(st.lists(st.tuples(st.sampled_from(b"abcde"), st.integers(1, 40)), max_size=40))
def test_the_cache_keeps_its_bound(puts):
    cache, told = EmbeddingCache(64), set()
    for name, size in puts:
        cache.put(bytes([name]), Embedding.of(bytes(size)))
        cache.check()
        added, removed = cache.take_changes()
        told = (told - set(removed)) | set(added)
        assert told == set(cache.keys())
