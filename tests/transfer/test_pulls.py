"""What becomes of a pull whose peer is slow, dies, or comes back as another incarnation: the right block or none, and
nothing is written once it is over."""

import dataclasses
import select
import signal
import sys
import time

import msgspec
import pytest

import penstock.transfer.mooncake
from penstock.core.errors import ConfigError, EngineFailure
from penstock.core.wire.handoff import Missing
from penstock.kv.connector import Move
from penstock.transfer.mooncake import MooncakeBlocks
from penstock.transfer.transports import open_transport
from tests.helpers.links import (
    KINDS,
    LAYOUT,
    LEASE,
    NEEDS_MOONCAKE,
    connected_to,
    contents,
    ends,
    far_process,
    open_pool,
)
from tests.helpers.waiting import eventually


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def pushed(kind, tmp_path):
    """An end, a process, and what that has pushed: three blocks."""
    with (
        ends(kind, tmp_path, "a") as (a,),
        far_process(kind, tmp_path, kv_pool_path=str(tmp_path / "kv-pool.sock")) as (far, peer),
    ):
        a.transport.send(peer, Missing(LEASE, [0, 1, 2]))
        a.until(lambda: len(a.arrivals) == 3)
        yield a, far, a.arrivals
        far.send_signal(signal.SIGCONT)


def test_a_pull_is_told_once_and_waits_for_nobody(pushed):
    a, _, arrivals = pushed
    handles = [a.transport.pull(arrival, a.pool.blocks[i]) for i, arrival in enumerate(arrivals)]
    over = []
    while len(over) < 3:
        over += a.pulled()
    assert sorted(moved.handle for moved in over) == sorted(handles)
    assert a.pulled(0.05) == []
    a.transport.receive()  # what else it may ring for
    assert not select.select([a.transport], [], [], 0)[0]
    for moved in over:
        (block,) = moved.blocks
        assert bytes(a.pool.memory.block(block)) == contents(handles.index(moved.handle))


def test_of_a_killed_peer_comes_the_right_block_or_none(pushed):
    a, far, arrivals = pushed
    assert a.land(arrivals[0], a.pool.blocks[0]) is not None
    far.kill()
    far.wait()
    for index in (1, 2):
        block = a.land(arrivals[index], a.pool.blocks[index])
        assert block is None or bytes(a.pool.memory.block(block)) == contents(index)


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_a_peer_that_stands_still_keeps_the_block_until_it_goes_on_or_is_dead(pushed, kind, end):
    """What was asked of it may be written at any time until then, however long ago the lease has ended."""
    a, far, arrivals = pushed
    far.send_signal(signal.SIGSTOP)
    handle, began = a.transport.pull(arrivals[0], a.pool.blocks[0]), time.monotonic()
    over = a.pulled(0.3)
    assert bool(over) == (kind != "mooncake")  # the others have what they need already
    if not over:
        assert time.monotonic() - began >= 0.3
        far.send_signal(end)
        over = a.pulled()
    ((ended, blocks, _),) = over
    assert ended == handle
    assert [bytes(a.pool.memory.block(block)) for block in blocks] in ([contents(0)], [])
    assert blocks or end is signal.SIGKILL


@NEEDS_MOONCAKE
class TestMooncake:
    @pytest.fixture
    def two(self, tmp_path):
        with ends("mooncake", tmp_path) as (a, b):
            a.fill(a.pool.blocks[3], 5)
            a.push(b.peer, a.pool.blocks[3])
            b.until(lambda: b.arrivals)
            yield a, b, b.arrivals[0]

    def test_another_incarnation_that_listens_where_one_did_before_is_read(self, two):
        """Else its memory would be looked for where that of the earlier one was."""
        _, b, arrival = two
        assert b.land(arrival, b.pool.blocks[0]) is not None
        readers = b.transport._path._readers
        assert len(readers) == 1
        later = dataclasses.replace(arrival, peer=msgspec.structs.replace(arrival.peer, incarnation=77))
        assert b.land(later, b.pool.blocks[1]) == b.pool.blocks[1]
        assert bytes(b.pool.memory.block(b.pool.blocks[1])) == contents(5)
        assert len(readers) == 2
        assert b.land(later, b.pool.blocks[1]) is not None
        assert len(readers) == 2

    @pytest.mark.parametrize("memory", ["", "nonsense", "127.0.0.1:1/7f0000000000", "{session}/1000", "{session}/-1"])
    def test_memory_that_is_not_there_brings_nothing(self, two, memory):
        _, b, arrival = two
        session = arrival.memory.partition("/")[0]
        wrong = dataclasses.replace(arrival, memory=memory.format(session=session))
        assert b.land(wrong, b.pool.blocks[0]) is None
        assert b.land(arrival, b.pool.blocks[0]) is not None, "and harms nothing else"

    def test_several_blocks_are_brought_from_the_first_to_the_first_that_is_wrong(self, two):
        a, b, arrival = two
        moves = []
        for index in range(4):
            a.fill(a.pool.blocks[index], index)
            moves.append(
                Move(b.pool.blocks[index], a.pool.blocks[index], b"", *a.transport.stamp(a.pool.blocks[index]))
            )
        a.pool.memory.block(a.pool.blocks[2])[0] ^= 1
        path = b.transport._path
        handle = path.pull(moves, arrival)
        ((ended, blocks, seconds),) = b.pulled()
        assert (ended, blocks) == (handle, tuple(b.pool.blocks[:2]))
        assert seconds > 0

    def test_connections_to_one_that_came_back_elsewhere_are_closed(self, tmp_path):
        """Mooncake would keep them as long as they are not used."""
        with ends("mooncake", tmp_path, "a") as (a,):
            others = connected_to()  # what earlier tests left to the collector
            before = set()  # whom there were connections to at the last one's time
            for _ in range(3):
                with far_process("mooncake", tmp_path) as (far, peer):
                    a.transport.send(peer, Missing(LEASE, list(range(8))))
                    a.until(lambda: len(a.arrivals) == 8)
                    for arrival in a.arrivals:
                        a.transport.pull(arrival, a.pool.blocks[arrival.message.index])
                    came = []
                    while len(came) < 8:
                        came += a.pulled()
                    assert all(moved.blocks for moved in came)
                    eventually(lambda gone=before: not gone & connected_to())
                    before = connected_to() - others
                    assert before
                    far.kill()
                    a.until(lambda: a.downs)
                    a.news.clear()

    def test_a_thread_that_fails_ends_the_engine_and_not_in_silence(self, two, monkeypatch):
        _, b, arrival = two
        monkeypatch.setattr(penstock.transfer.mooncake.Engine, "status", lambda *_: 1 // 0)
        b.transport.pull(arrival, b.pool.blocks[0])
        with pytest.raises(EngineFailure, match="ZeroDivisionError"):
            b.pulled()

    def test_what_has_not_begun_is_dropped_at_the_end(self, tmp_path):
        pool = open_pool("mooncake", "", "a", 1)
        path = MooncakeBlocks(pool, LAYOUT, "tcp:127.0.0.1:0")
        path.close()
        path.close()
        assert not path._thread.is_alive()
        pool.close()


@pytest.mark.parametrize("where", ["unix:{folder}/a.sock", "tcp:127.0.0.1:0"])
def test_without_it_the_error_says_what_to_install(where, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    penstock.transfer.mooncake.engine_of.cache_clear()
    pool = open_pool("mooncake", "", "a", 1)
    needed = (
        "tcp:host:port" if where.startswith("unix") else r"penstock\[mooncake\].*libibverbs1, librdmacm1 and libnuma1"
    )
    with pytest.raises(ConfigError, match=needed):
        open_transport("mooncake", where.format(folder=tmp_path), "a", 1, LAYOUT, pool)
    pool.close()
