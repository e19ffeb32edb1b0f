"""Each fault does what it says, and nothing spoiled is ever taken for good."""

import logging
import random
import time
from itertools import pairwise

import pytest

import penstock.transfer.faulty
from penstock.core.errors import ConfigError
from penstock.core.wire.handoff import AskEmbedding, Commit, EmbeddingPart, Lease, Release, Renew
from penstock.kv.embeddings import Embedding, EmbeddingCache
from penstock.sched.local.handoff.embeddings import PART, WINDOW, GiveSide, TakeSide
from penstock.transfer.faulty import Faults, Partition
from tests.helpers.links import KINDS, contents, ends

LEASE = Lease("r", 0)
END = Renew([LEASE])


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def releases(count: int) -> list[Release]:
    return [Release(LEASE, str(i)) for i in range(count)]


def through(kind, folder, faults, messages):
    """What arrives of `messages`, and both ends' counters. `END`, which has no faults, goes last."""
    with ends(kind, folder, faults={**faults, "only": ["Release"]}) as (a, b):
        for message in (*messages, END):
            a.transport.send(b.peer, message)
        b.until(lambda: END in b.messages)
        return b, [m for m in b.messages if m != END], a.transport.counters, b.transport.counters


def test_drop(kind, tmp_path):
    sent = releases(200)
    _, found, ours, _ = through(kind, tmp_path, {"drop": 0.5, "seed": 3}, sent)
    assert found == [m for m in sent if m in found]
    assert 50 < len(found) < 150
    assert ours.dropped == {"fault": 200 - len(found)}
    folder = tmp_path / "again"
    folder.mkdir()
    assert through(kind, folder, {"drop": 0.5, "seed": 3}, sent)[1] == found
    folder = tmp_path / "other"
    folder.mkdir()
    assert through(kind, folder, {"drop": 0.5, "seed": 4}, sent)[1] != found


def test_duplicate(kind, tmp_path):
    _, found, _, _ = through(kind, tmp_path, {"duplicate": 1}, releases(50))
    assert found == [m for m in releases(50) for _ in range(2)]


def test_reorder(kind, tmp_path):
    with ends(kind, tmp_path, faults={"reorder": 0.3}) as (a, b):
        for message in releases(100):
            a.transport.send(b.peer, message)
        b.until(lambda: len(b.arrivals) == 100)
        numbers = [int(message.reason) for message in b.messages]
        assert sorted(numbers) == list(range(100))
        assert any(x > y for x, y in pairwise(numbers))


def test_a_frame_that_nothing_overtakes_still_goes(kind, tmp_path):
    with ends(kind, tmp_path, faults={"reorder": 1}) as (a, b):
        a.transport.send(b.peer, releases(1)[0])
        b.until(lambda: b.arrivals)


def test_delay(kind, tmp_path):
    with ends(kind, tmp_path, faults={"delay_ms": 120}) as (a, b):
        began = time.monotonic()
        for message in releases(20):
            a.transport.send(b.peer, message)
        b.until(lambda: len(b.arrivals) == 20)
        assert time.monotonic() - began >= 0.12
        assert b.messages == releases(20)


def test_corrupt_messages_are_dropped_and_the_link_goes_on(kind, tmp_path):
    _, found, _, theirs = through(kind, tmp_path, {"corrupt": 0.5}, releases(100))
    assert found == [m for m in releases(100) if m in found]
    assert 20 < len(found) < 80
    assert theirs.dropped == {"corrupt": 100 - len(found)}


def test_corrupt_blocks_are_not_landed(kind, tmp_path):
    with ends(kind, tmp_path, faults={"corrupt": 0.6}) as (a, b):
        for index in range(10):
            a.fill(a.pool.blocks[index], index)
        good = bad = 0
        for index in range(10):
            into = b.pool.blocks[0]
            total = len(b.arrivals) + b.transport.counters.dropped["corrupt"]
            a.push(b.peer, a.pool.blocks[index], index)
            b.until(lambda t=total: len(b.arrivals) + b.transport.counters.dropped["corrupt"] > t)
            arrival = b.arrivals[-1] if b.arrivals and b.messages[-1].index == index else None
            block = b.land(arrival, into) if arrival else None
            if block is None:
                bad += 1
            else:
                good += 1
                assert bytes(b.pool.memory.block(block)) == contents(index)
                b.pool.blocks[0] = block
            # what was spoiled is the copy that travels
            assert bytes(a.pool.memory.block(a.pool.blocks[index])) == contents(index)
        assert good
        assert bad


def test_stall_keeps_the_first_of_each_request_and_says_so(kind, tmp_path, caplog):
    commits = [Commit(Lease(f"r{i}", 0), 0, [n], 0, 0.0, 0.0) for i in range(2) for n in range(3)]
    with caplog.at_level(logging.WARNING), ends(kind, tmp_path, faults={"stall": ["Commit", "Renew"]}) as (a, b):
        for message in (releases(1)[0], *commits, END, END):
            a.transport.send(b.peer, message)
        b.until(lambda: len(b.arrivals) == 6)
        passed = [m for m in commits if m.tokens != [0]]
        assert sorted(map(repr, b.messages)) == sorted(map(repr, (releases(1)[0], *passed, END)))
    said = [record.message for record in caplog.records if "stalled" in record.message]
    assert said == ["stalled Commit of r0", "stalled Commit of r1", "stalled Renew of r"]


def test_a_partition_swallows_both_directions_and_keeps_the_sockets(kind, tmp_path):
    with ends(kind, tmp_path, faults={"partition": {"after": 10}}) as (a, b):
        for message in releases(5):
            a.transport.send(b.peer, message)
        b.until(lambda: len(b.arrivals) == 5)
        for message in releases(8):
            b.transport.send(a.peer, message)
        # what was dropped is counted where it comes in, perhaps before what came before it is taken
        a.until(lambda: a.transport.counters.dropped["partition"] == 3 and len(a.arrivals) == 5)
        for message in releases(4):
            a.transport.send(b.peer, message)
        a.until(lambda: a.transport.counters.dropped["partition"] == 7)
        assert len(b.arrivals) == 5
        assert not b.transport.receive()
        assert not a.downs
        # the sockets stand: ending the link is heard at once
        a.transport.disconnect(b.peer)
        b.until(lambda: b.downs)
        # and no new one is made
        a.transport.connect(b.peer)
        a.until(lambda: a.downs, 4)
        assert "did not answer" in a.downs[0].message


def test_a_partition_heals(kind, tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(penstock.transfer.faulty, "monotonic", lambda: now[0])
    with ends(kind, tmp_path, faults={"partition": {"after": 1, "for_s": 5}}) as (a, b):
        first, lost, last = releases(3)
        a.transport.send(b.peer, first)
        b.until(lambda: b.arrivals)
        a.transport.send(b.peer, lost)
        a.until(lambda: a.transport.counters.dropped["partition"])
        now[0] += 5.1
        a.transport.send(b.peer, last)
        b.until(lambda: len(b.arrivals) == 2)
        assert b.messages == [first, last]


def test_all_of_them_at_once_bring_nothing_wrong(kind, tmp_path):
    faults = {"drop": 0.1, "duplicate": 0.2, "reorder": 0.2, "corrupt": 0.2, "delay_ms": 5, "seed": 1}
    with ends(kind, tmp_path, faults=faults) as (a, b):
        for index in range(16):
            a.fill(a.pool.blocks[index], index)
        right: dict[int, int] = {}
        for _ in range(20):  # as the hand-off repeats itself
            for index in range(16):
                if index not in right:
                    a.push(b.peer, a.pool.blocks[index], index)
            for message in releases(10):
                a.transport.send(b.peer, message)
            deadline = time.monotonic() + 0.05  # what is late is there in the next round
            b.until(lambda d=deadline: time.monotonic() > d)
            for arrival in b.arrivals:
                if isinstance(arrival.message, Release) or arrival.message.index in right:
                    continue
                index, into = arrival.message.index, b.pool.blocks[arrival.message.index]
                block = b.land(arrival, into)
                if block is not None:
                    assert bytes(b.pool.memory.block(block)) == contents(index)
                    right[index] = block
            b.news.clear()
            if len(right) == 16:
                break
        assert len(right) == 16
        assert not a.downs


def test_what_can_be_said():
    said = {
        "seed": 1, "delay_ms": 3, "drop": 0.1, "duplicate": 0, "reorder": 1, "corrupt": 0.5,
        "partition": {"after": 3, "for_s": None}, "only": ["Push"], "stall": ["Commit"],
    }  # fmt: skip
    assert Faults.parse(said).partition == Partition(3, None)
    assert Faults.parse({}) == Faults()


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"drop": 1.5}, "faults.drop: 1.5, allowed: a probability from 0 to 1"),
        ({"corrupt": -1}, "faults.corrupt: -1.0, allowed"),
        ({"delay_ms": -1}, "faults.delay_ms: -1.0, allowed: 0 or more"),
        ({"only": ["Pusch"]}, "faults.only: 'Pusch', allowed: Reserve, Waiting, Reserved, Rejected, Push"),
        ({"stall": ["x"]}, "faults.stall: 'x', allowed"),
        ({"dorp": 1}, "unknown field `dorp`"),
        ({"drop": "often"}, r"Expected `float`, got `str` - at `\$.drop`"),
        ({"partition": {"for": 1}}, "unknown field `for`"),
    ],
)
def test_what_cannot(faults, message):
    with pytest.raises(ConfigError, match=message):
        Faults.parse(faults)


def test_what_was_seen_in_an_image_comes_whole_whatever_is_lost_doubled_or_spoiled(kind, tmp_path):
    """More than a window of it, each part of which may have to be asked for again."""
    seen = Embedding.of(random.Random(1).randbytes(WINDOW + PART + 5))
    faults = {"drop": 0.15, "duplicate": 0.15, "reorder": 0.15, "corrupt": 0.15, "seed": 5}
    with ends(kind, tmp_path, faults=faults) as (giver, taker):
        cache, arrived = EmbeddingCache(1 << 30), []
        cache.put(b"image", seen)
        give = GiveSide(cache, giver.transport)
        take = TakeSide(taker.transport, lambda digest, came, why: arrived.append((digest, came, why)))
        take.take(time.monotonic(), LEASE, b"image", giver.peer, 30.0)
        handled = {giver: 0, taker: 0}

        def over():
            now = time.monotonic()
            giver.news += giver.transport.receive()
            for end in (giver, taker):
                for message in end.messages[handled[end] :]:
                    if isinstance(message, AskEmbedding):
                        give.on_ask(now, taker.peer, message)
                    elif isinstance(message, EmbeddingPart):
                        take.on_part(now, giver.peer, message)
                handled[end] = len(end.messages)
            take.tick(now)
            return bool(arrived)

        taker.until(over, 30.0)
    assert arrived == [(b"image", seen, "")]
    assert sum(giver.transport.counters.dropped.values()) > 0
