"""What every transport promises, whichever it is and whether or not faults can be put into it."""

import dataclasses
import os
import socket
import threading
import time

import msgspec
import pytest

import penstock.transfer.carrier
from penstock.core.errors import ConfigError
from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import Commit, Lease, Push, Release, Renew, Reserved
from penstock.transfer.addresses import dial, listen, parse
from penstock.transfer.frames import HEADER_BYTES, make_frame
from tests.helpers.links import (
    KEY,
    LAYOUT,
    LEASE,
    LEASE_OVER,
    TLS,
    End,
    address,
    ends,
    far_process,
    no_descriptors,
    open_files,
    open_pool,
    open_transport,
    pool_server,
    transfer_threads,
)
from tests.helpers.strangers import Stranger, greet, under


def releases(count: int) -> list[Release]:
    return [Release(LEASE, str(i)) for i in range(count)]


# --- messages


def test_messages_arrive_in_order_and_both_ways(pair):
    a, b = pair
    sent = [Reserved(LEASE, 3), Renew([LEASE] * 5000), *releases(200)]
    for message in sent:
        a.transport.send(b.peer, message)
    b.until(lambda: len(b.news) >= len(sent))
    assert b.messages == sent
    assert {arrival.peer for arrival in b.arrivals} == {a.peer}
    for message in sent:
        b.transport.send(b.arrivals[0].peer, message)
    a.until(lambda: len(a.news) >= len(sent))
    assert a.messages == sent
    assert not a.downs + b.downs
    assert a.transport.counters.frames_sent == b.transport.counters.frames_received
    assert a.transport.counters.bytes_sent == b.transport.counters.bytes_received > 0


def test_both_may_speak_first(pair):
    a, b = pair
    for message in releases(50):
        a.transport.send(b.peer, message)
        b.transport.send(a.peer, message)
    for end in pair:
        end.until(lambda end=end: len(end.news) >= 50)
        assert end.messages == releases(50)


def test_a_link_can_be_made_before_it_is_needed_and_again_after_it_ended(pair):
    a, b = pair
    a.transport.connect(b.peer)
    a.transport.connect(b.peer)
    for round_ in range(3):
        a.transport.send(b.peer, LEASE_OVER)
        b.until(lambda round_=round_: len(b.arrivals) == round_ + 1)
        a.transport.disconnect(b.peer)
        b.until(lambda round_=round_: len(b.downs) == round_ + 1)
    assert {down.peer for down in b.downs} == {a.peer}
    assert not any(down.refused for down in b.downs)
    assert not a.transport.receive()


def test_what_is_sent_right_before_disconnecting_and_right_after_arrives(pair):
    a, b = pair
    a.transport.send(b.peer, releases(1)[0])
    b.until(lambda: b.arrivals)
    a.transport.send(b.peer, releases(2)[1])
    a.transport.disconnect(b.peer)
    a.transport.send(b.peer, releases(3)[2])
    b.until(lambda: len(b.arrivals) == 3)
    assert b.messages == releases(3)


# --- blocks


def test_a_pushed_block_is_the_same_at_the_other_end(pair):
    a, b = pair
    for index in range(8):
        a.fill(a.pool.blocks[index], index)
        a.push(b.peer, a.pool.blocks[index], index, request=f"r{index % 3}")
    b.until(lambda: len(b.arrivals) == 8)
    for arrival in b.arrivals:
        push, into = arrival.message, b.pool.blocks[arrival.message.index]
        block = b.land(arrival, into)
        assert block == (push.block if b.transport.shares else into)
        assert bytes(b.pool.memory.block(block)) == a.fill(push.block, push.index)
    assert not b.transport.counters.dropped


def test_a_commit_never_overtakes_the_blocks_of_its_request(pair):
    a, b = pair
    requests = [f"r{i}" for i in range(6)]
    for index in range(10):
        for request in requests:
            a.push(b.peer, a.pool.blocks[index], index, request, key=b"")
    for request in requests:
        a.transport.send(b.peer, Commit(Lease(request, 0), 10, [1], 0, 0.0, 0.0))
    b.until(lambda: len(b.arrivals) == 66)
    for request in requests:
        mine = [message for message in b.messages if message.lease.request_id == request]
        assert [push.index for push in mine[:-1]] == list(range(10))
        assert isinstance(mine[-1], Commit)


def test_what_changed_after_the_stamp_is_not_landed(pair):
    a, b = pair
    block, into = a.pool.blocks[0], b.pool.blocks[0]
    a.fill(block, 1)
    push = a.push(a.peer, block)  # only for the stamp
    if a.transport.shares:
        a.pool.client.exchange([block], 1)  # the KV pool server leases it out anew
    else:
        a.pool.memory.block(block)[100] ^= 4
    a.transport.send(b.peer, push)
    b.until(lambda: b.arrivals)
    assert b.land(b.arrivals[0], into) is None
    assert b.transport.counters.dropped == {"unverified": 1}


def test_a_shared_block_with_another_key_is_not_landed(tmp_path):
    with ends("shared", tmp_path) as (a, b):
        block = a.pool.blocks[0]
        a.fill(block, 1, b"k" * 16)
        a.push(b.peer, block, key=b"l" * 16)
        b.until(lambda: b.arrivals)
        assert b.land(b.arrivals[0], b.pool.blocks[0]) is None
        assert b.pool.client.status().counts["held:b"] == 16


@pytest.mark.parametrize("block", [1 << 20, 1 << 40, 2**64 - 1, -1, -(2**63)])
def test_an_absurd_block_is_not_landed(pair, block):
    a, b = pair
    for index, key in enumerate((KEY, b"")):
        a.transport.send(b.peer, Push(LEASE, index, key, a.pool.blocks[0], 1, 0))
    b.until(lambda: len(b.arrivals) == 2)
    for arrival in b.arrivals:
        push = msgspec.structs.replace(arrival.message, block=block)
        assert b.land(dataclasses.replace(arrival, message=push), b.pool.blocks[0]) is None
    assert b.transport.counters.dropped == {"unverified": 2}


def test_a_shared_block_that_its_owner_does_not_cache_is_landed(tmp_path):
    with ends("shared", tmp_path) as (a, b):
        block = a.pool.blocks[0]
        a.fill(block, 1, b"")
        a.push(b.peer, block, key=b"k" * 16)
        b.until(lambda: b.arrivals)
        assert b.land(b.arrivals[0], b.pool.blocks[0]) == block


def test_an_engine_that_does_not_look_slows_its_peer_but_stops_nobody(pair, kind, monkeypatch):
    """Nor are blocks that wait a backlog: they lie in the pool in any case."""
    monkeypatch.setattr(penstock.transfer.carrier, "STAGING_BYTES", 0)  # leaves 2 blocks per connection
    monkeypatch.setattr(penstock.transfer.carrier, "BACKLOG_BYTES", 1 << 20)
    a, b = pair
    count = 2000  # 32 MiB of blocks: more than the sockets hold
    for index in range(count):
        a.push(b.peer, a.pool.blocks[index % 16], index, request=f"r{index % 5}", key=b"")
    a.transport.send(b.peer, LEASE_OVER)
    b.until(lambda: LEASE_OVER in b.messages)  # it is not behind the blocks
    if kind in ("tcp", TLS):
        assert len(b.arrivals) <= 8 + 1
    landed = set()
    while len(landed) < count:
        b.until(lambda: b.news)
        assert not a.downs + b.downs
        for arrival in b.arrivals:
            if arrival.message != LEASE_OVER:
                assert b.transport.shares or b.land(arrival, b.pool.blocks[0]) is not None
                landed.add(arrival.message.index)
        b.news.clear()
    assert landed == set(range(count))


# --- too much, too little


def test_a_peer_that_does_not_read_is_lost(pair, kind, monkeypatch):
    monkeypatch.setattr(penstock.transfer.carrier, "BACKLOG_BYTES", 1 << 20)
    a, b = pair
    deaf = Stranger(a.peer.address, kind)
    deaf.say(greet(a, kind))
    deaf.hear_greet()
    peer = Peer("x", 9, a.peer.address)
    for _ in range(800):  # 32 MiB: more than the sockets hold
        a.transport.send(peer, Renew([Lease("x" * 40_000, 0)]))
    a.until(lambda: a.downs)
    assert a.downs[0].peer == peer
    assert "does not read: 1 MiB wait for it" in a.downs[0].message
    assert deaf.is_sent_away()
    a.transport.send(b.peer, LEASE_OVER)
    b.until(lambda: b.arrivals)


def test_what_waits_for_a_link_is_bounded_too(pair, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(penstock.transfer.carrier, "BACKLOG_BYTES", 1 << 20)
    a, _ = pair
    listener, where = listen(address(kind, tmp_path, "n"))
    with listener:  # nobody accepts
        for _ in range(100):
            a.transport.send(Peer("n", 9, where), Renew([Lease("x" * 40_000, 0)]))
        a.until(lambda: a.downs, 1.0)
        assert "does not read" in a.downs[0].message


def test_without_descriptors_it_waits_and_does_not_spin(pair, kind, monkeypatch, caplog):
    tries = []
    monkeypatch.setattr(penstock.transfer.carrier, "ACCEPT_PAUSE", 0.05)
    a, b = pair
    a.transport.send(b.peer, LEASE_OVER)
    b.until(lambda: b.arrivals)
    accept = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", lambda sock: (tries.append(1), accept(sock))[1])
    family, where = parse(a.peer.address)
    with socket.socket(family, socket.SOCK_STREAM) as late:
        late.settimeout(10)
        with no_descriptors():
            late.connect(where)
            a.until(lambda: len(tries) > 2)
            began, before = time.monotonic(), len(tries)
            for number in range(2, 8):
                a.transport.send(b.peer, LEASE_OVER)  # links that stand go on
                b.until(lambda number=number: len(b.arrivals) == number)
                threading.Event().wait(0.05)
            assert len(tries) - before <= (time.monotonic() - began) / 0.05 + 1
        frame = make_frame(greet(a, kind), 9, 1)
        with under(kind, late, dialled=True) as greeting:
            greeting.sendall(frame.header + frame.body)
            assert greeting.recv(HEADER_BYTES)
    told = [record for record in caplog.records if "no connection can be accepted" in record.getMessage()]
    assert len(told) == 1


# --- ends of lives


def test_nobody_there_is_a_link_down(pair, tmp_path, kind):
    a, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    nobody = Peer("n", 1, f"unix:{tmp_path}/nobody" if kind == "shared" else f"tcp:127.0.0.1:{port}")
    began = time.monotonic()
    a.transport.send(nobody, LEASE_OVER)
    a.until(lambda: a.downs, 5)
    assert a.downs[0].peer == nobody
    assert time.monotonic() - began > 0.3  # it was tried more than once
    assert a.transport.counters.dropped == {"link_down": 1}


@pytest.mark.parametrize("nonsense", ["", "tcp:x", "tcp:a\0b:1", f"tcp:{'a' * 70}.b:1", "unix:\udc80", "unix:a\0b"])
def test_an_address_that_is_none_is_a_link_down(pair, nonsense):
    a, b = pair
    a.transport.send(Peer("n", 1, nonsense), LEASE_OVER)
    a.until(lambda: a.downs)
    a.transport.send(b.peer, LEASE_OVER)
    b.until(lambda: b.arrivals)


def test_a_peer_may_still_be_starting(way, tmp_path):
    kind, faults = way
    with ends(kind, tmp_path, "a", faults=faults) as (a,):
        where = address(kind, tmp_path, "late")
        if kind != "shared":
            with socket.create_server(("127.0.0.1", 0)) as unused:
                where = f"tcp:127.0.0.1:{unused.getsockname()[1]}"
        late = Peer("late", 2, where)
        a.transport.send(late, LEASE_OVER)
        threading.Event().wait(0.1)  # the first attempt has failed by now, or else the test is only easier
        transport = open_transport(kind, where, "late", 2, LAYOUT, a.pool, faults)
        end = End(transport, a.pool, "late", 2)
        end.until(lambda: end.arrivals)
        transport.close()


def test_a_killed_process_is_a_link_down_soon(pair, kind, tmp_path):
    a, _ = pair
    with far_process(kind, tmp_path, kv_pool_path=str(tmp_path / "kv-pool.sock")) as (far, peer):
        a.transport.send(peer, Commit(LEASE, 0, [], 0, 0.0, 0.0))
        a.until(lambda: a.arrivals)
        far.kill()
        a.until(lambda: a.downs, 3)
        assert [down.peer for down in a.downs] == [peer]


def test_nothing_is_left_after_close(way, tmp_path):
    kind, faults = way
    with pool_server(tmp_path / "kv-pool.sock") if kind == "shared" else open(os.devnull) as path:
        pools = [open_pool(kind, path, name, 1) for name in ("a", "b")]
        files, threads, folder = open_files(), transfer_threads(), set(os.listdir(tmp_path))
        made = [
            End(open_transport(kind, address(kind, tmp_path, name), name, 1, LAYOUT, pool, faults), pool, name, 1)
            for name, pool in zip(("a", "b"), pools, strict=True)
        ]
        a, b = made
        strangers = [dial(a.peer.address) for _ in range(3)]
        for index in range(500):  # still under way when it ends
            a.push(b.peer, a.pool.blocks[0], index, key=b"")
            b.transport.send(a.peer, LEASE_OVER)
        a.transport.send(Peer("n", 1, f"unix:{tmp_path}/nobody"), LEASE_OVER)
        a.until(lambda: a.arrivals)
        a.transport.close()
        b.until(lambda: b.downs)
        b.transport.close()
        b.transport.close()
        assert a.transport.receive() == []
        a.transport.send(b.peer, LEASE_OVER)
        for stranger in strangers:
            stranger.close()
        assert not open_files() - files  # what earlier tests left may be closed meanwhile
        assert transfer_threads() == threads
        assert set(os.listdir(tmp_path)) == folder
        for pool in pools:
            pool.close()


def test_an_address_is_free_again_after_a_kill_but_not_before(pair, kind, tmp_path):
    a, _ = pair
    with far_process(kind, tmp_path, kv_pool_path=str(tmp_path / "kv-pool.sock")) as (far, peer):
        with pytest.raises(ConfigError, match="cannot listen there"):
            open_transport(kind, peer.address, "far", 3, LAYOUT, a.pool)
        far.kill()
        far.wait()
        open_transport(kind, peer.address, "far", 3, LAYOUT, a.pool).close()


@pytest.mark.parametrize(
    ("kind", "where", "message"),
    [
        ("pigeon", "unix:/tmp/x", "transport: 'pigeon', allowed: shared, tcp, mooncake"),
        ("tcp", "127.0.0.1:80", "allowed: unix:/path or tcp:host:port"),
        ("tcp", "tcp:127.0.0.1:http", "allowed: unix:/path or tcp:host:port"),
        ("tcp", "tcp:::1:80", "allowed: unix:/path or tcp:host:port"),
        ("tcp", "tcp:0.0.0.0:80", "as its peers reach it"),
        ("tcp", "tcp:[::]:80", "as its peers reach it"),
        ("tcp", f"unix:/tmp/{'x' * 200}", "at most 107 bytes"),
        ("tcp", "unix:/nowhere/at/all", "cannot listen there"),
        ("shared", "unix:/tmp/x", "needs a KV pool server"),
    ],
)
def test_what_cannot_be_opened_says_why(kind, where, message, tmp_path):
    pool, files = open_pool("tcp", "", "a", 1), open_files()
    with pytest.raises(ConfigError, match=message):
        open_transport(kind, where, "a", 1, LAYOUT, pool)
    assert not open_files() - files
    pool.close()


def test_shared_stays_on_one_host(tmp_path):
    with pool_server(tmp_path / "k") as path:
        pool = open_pool("shared", path, "a", 1)
        with pytest.raises(ConfigError, match="stays on one host"):
            open_transport("shared", "tcp:127.0.0.1:0", "a", 1, LAYOUT, pool)
        pool.close()
