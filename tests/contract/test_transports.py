"""What every transport promises, whichever it is and whether or not faults can be put into it."""

import contextlib
import dataclasses
import gc
import os
import re
import socket
import threading
import time
from contextlib import closing
from itertools import product

import msgspec
import pytest

import penstock.transfer.carrier
from penstock.core.errors import ConfigError
from penstock.core.wire.codec import encode
from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import Commit, Lease, Push, Release, Renew, Reserved
from penstock.transfer.addresses import dial, listen, parse
from penstock.transfer.frames import HEADER_BYTES, Challenge, Greet, make_frame, read_greet, read_header
from penstock.transfer.transports import TRANSPORTS, open_transport
from tests.helpers.links import (
    KEY,
    LAYOUT,
    End,
    address,
    ends,
    far_process,
    keeper,
    no_descriptors,
    open_files,
    open_pool,
    transfer_threads,
)

LEASE = Lease("r", 0)
LEASE_OVER = Release(LEASE, "over")


@pytest.fixture(params=product(TRANSPORTS, (None, {})), ids=lambda p: f"{p[0]}{'-faulty' if p[1] is not None else ''}")
def way(request):
    """(kind, faults)"""
    return request.param


@pytest.fixture
def kind(way):
    return way[0]


@pytest.fixture
def pair(way, tmp_path):
    with ends(way[0], tmp_path, faults=way[1]) as two:
        yield two


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
        block = b.transport.land(arrival, into)
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
    before = b.fill(into, 2, key=b"")
    push = a.push(a.peer, block)  # only for the stamp
    if a.transport.shares:
        a.pool.keeper.exchange([block], 1)  # the keeper leases it out anew
    else:
        a.pool.memory.block(block)[100] ^= 4
    a.transport.send(b.peer, push)
    b.until(lambda: b.arrivals)
    assert b.transport.land(b.arrivals[0], into) is None
    assert bytes(b.pool.memory.block(into)) == before
    assert b.transport.counters.dropped == {"unverified": 1}


def test_a_shared_block_with_another_key_is_not_landed(tmp_path):
    with ends("shared", tmp_path) as (a, b):
        block = a.pool.blocks[0]
        a.fill(block, 1, b"k" * 16)
        a.push(b.peer, block, key=b"l" * 16)
        b.until(lambda: b.arrivals)
        assert b.transport.land(b.arrivals[0], b.pool.blocks[0]) is None
        assert b.pool.keeper.status().counts["held:b"] == 16


@pytest.mark.parametrize("block", [1 << 20, 1 << 40, 2**64 - 1, -1, -(2**63)])
def test_an_absurd_block_is_not_landed(pair, block):
    a, b = pair
    for index, key in enumerate((KEY, b"")):
        a.transport.send(b.peer, Push(LEASE, index, key, a.pool.blocks[0], 1, 0))
    b.until(lambda: len(b.arrivals) == 2)
    for arrival in b.arrivals:
        push = msgspec.structs.replace(arrival.message, block=block)
        assert b.transport.land(dataclasses.replace(arrival, message=push), b.pool.blocks[0]) is None
    assert b.transport.counters.dropped == {"unverified": 2}


def test_a_shared_block_that_its_owner_does_not_cache_is_landed(tmp_path):
    with ends("shared", tmp_path) as (a, b):
        block = a.pool.blocks[0]
        a.fill(block, 1, b"")
        a.push(b.peer, block, key=b"k" * 16)
        b.until(lambda: b.arrivals)
        assert b.transport.land(b.arrivals[0], b.pool.blocks[0]) == block


def test_an_engine_that_does_not_look_slows_its_peer_but_stops_nobody(pair, monkeypatch, tmp_path):
    monkeypatch.setattr(penstock.transfer.carrier, "STAGING_BYTES", 0)  # leaves 2 blocks per connection
    a, b = pair
    count = 2000  # 32 MiB of blocks: more than the sockets hold
    for index in range(count):
        a.push(b.peer, a.pool.blocks[index % 16], index, request=f"r{index % 5}", key=b"")
    a.transport.send(b.peer, LEASE_OVER)
    b.until(lambda: LEASE_OVER in b.messages)  # it is not behind the blocks
    if not b.transport.shares:
        assert len(b.arrivals) <= 8 + 1
    landed = set()
    while len(landed) < count:
        b.until(lambda: b.news)
        for arrival in b.arrivals:
            if arrival.message != LEASE_OVER:
                assert b.transport.shares or b.transport.land(arrival, b.pool.blocks[0]) is not None
                landed.add(arrival.message.index)
        b.news.clear()
    assert landed == set(range(count))


# --- who may speak with whom


def greet(end: End, kind: str, **changes) -> Greet:
    pool = f"{os.fstat(end.pool.memory.fd).st_dev}:{os.fstat(end.pool.memory.fd).st_ino}" if kind == "shared" else ""
    me = Greet(name="x", incarnation=9, address=end.peer.address, transport=kind, layout=LAYOUT, pool=pool)
    return msgspec.structs.replace(me, **changes)


class Stranger:
    """A peer that speaks bytes."""

    def __init__(self, where: str) -> None:
        self.sock = dial(where)
        self.sock.setblocking(True)
        self.sock.settimeout(10)

    def say(self, message, sender: int = 9, to: int = 1) -> None:
        frame = make_frame(message, sender, to)
        self.sock.sendall(frame.header + frame.body)

    def hear_greet(self) -> Greet:
        header = read_header(self.sock.recv(HEADER_BYTES, socket.MSG_WAITALL))
        return read_greet(self.sock.recv(header.body, socket.MSG_WAITALL))

    def is_sent_away(self) -> bool:
        try:
            while self.sock.recv(4096):
                pass
        except ConnectionError:
            pass
        return True


def test_another_layout_is_refused_on_both_sides_with_both_values(way, tmp_path):
    kind, faults = way
    with ends(kind, tmp_path, "a", faults=faults) as (a,):
        pool, other = a.pool, dataclasses.replace(LAYOUT, dtype="bfloat16", layers=3)
        transport = open_transport(kind, address(kind, tmp_path, "o"), "o", 2, other, pool, faults)
        b = End(transport, pool, "o", 2)
        b.transport.send(a.peer, LEASE_OVER)
        for end, peer, here, there in ((a, b.peer, LAYOUT, other), (b, a.peer, other, LAYOUT)):
            end.until(lambda end=end: end.downs)
            assert [(down.peer, down.refused) for down in end.downs] == [(peer, True)]
            assert f"dtype: {here.dtype} here, {there.dtype} there" in end.downs[0].message
            assert f"layers: {here.layers} here, {there.layers} there" in end.downs[0].message
            assert not end.arrivals
        transport.close()


@pytest.mark.parametrize(
    ("field", "theirs"), [("protocol", 99), ("transport", "carrier pigeon"), ("pool", "another keeper's")]
)
def test_other_differences_are_refused_too(pair, kind, field, theirs):
    a, _ = pair
    stranger = Stranger(a.peer.address)
    stranger.say(greet(a, kind, **{field: theirs}))
    mine = getattr(stranger.hear_greet(), field)
    assert stranger.is_sent_away()
    a.until(lambda: a.downs)
    assert a.downs[0].refused
    assert a.downs[0].message == f"{field}: {mine} here, {theirs} there"


def test_an_earlier_life_of_ours_gets_no_message(pair):
    a, b = pair
    b.transport.send(Peer("a", 77, a.peer.address), LEASE_OVER)
    b.until(lambda: b.downs)
    assert "a/1 now, not a/77" in b.downs[0].message
    assert not b.downs[0].refused
    assert a.transport.counters.dropped == {"stale": 1}
    assert not a.transport.receive()


def test_messages_from_or_for_another_life_are_dropped_on_a_link_that_stands(pair, kind):
    a, _ = pair
    stranger = Stranger(a.peer.address)
    stranger.say(greet(a, kind))
    stranger.hear_greet()
    stranger.say(LEASE_OVER, sender=8)
    stranger.say(LEASE_OVER, to=2)
    stranger.say(LEASE_OVER)
    a.until(lambda: a.arrivals)
    assert len(a.arrivals) == 1
    assert a.transport.counters.dropped == {"stale": 2}


def test_a_new_life_ends_the_one_before_it(pair, kind):
    a, _ = pair
    old, new, again = (Stranger(a.peer.address) for _ in range(3))
    old.say(greet(a, kind))
    old.hear_greet()
    new.say(greet(a, kind, incarnation=15), sender=15)
    new.hear_greet()
    assert old.is_sent_away()
    again.say(greet(a, kind))
    assert again.is_sent_away()
    new.say(LEASE_OVER, sender=15)
    a.until(lambda: a.arrivals)
    assert [down.peer.incarnation for down in a.downs] == [9]
    assert a.transport.counters.dropped == {"stale": 1}
    a.transport.send(a.downs[0].peer, LEASE_OVER)
    a.until(lambda: len(a.downs) == 2)
    assert "was followed by 15" in a.downs[1].message


@pytest.mark.parametrize(
    "noise", ["garbage", "no greeting", "a greeting out of place", "no life", "two greetings", "silence"]
)
def test_broken_bytes_end_their_own_connection_only(pair, kind, noise, monkeypatch):
    if noise == "silence":
        monkeypatch.setattr(penstock.transfer.carrier, "GREET_SECONDS", 0.1)
    a, b = pair
    a.transport.send(b.peer, LEASE_OVER)
    stranger = Stranger(a.peer.address)
    if noise == "garbage":
        stranger.sock.sendall(b"GET / HTTP/1.1\r\nHost: penstock.example.com\r\n\r\n")
    elif noise == "no greeting":
        stranger.say(LEASE_OVER)
    elif noise == "a greeting out of place":
        stranger.say(greet(a, kind, socket=3, sockets=2))
    elif noise == "no life":
        stranger.say(greet(a, kind, incarnation=-1))
    elif noise == "two greetings":
        stranger.say(greet(a, kind))
        stranger.say(greet(a, kind))
    assert stranger.is_sent_away()
    a.transport.send(b.peer, LEASE_OVER)
    b.until(lambda: len(b.arrivals) == 2)
    assert not b.downs
    assert noise == "silence" or a.transport.counters.dropped["garbage"] == 1


def test_a_late_greeting_of_an_earlier_life_is_stale(pair, kind):
    a, _ = pair
    new, late, again = (Stranger(a.peer.address) for _ in range(3))
    new.say(greet(a, kind, incarnation=15), sender=15)
    new.hear_greet()
    late.say(greet(a, kind))
    assert late.is_sent_away()
    again.say(greet(a, kind, incarnation=15, link=1), sender=15)
    again.hear_greet()
    for number, life in enumerate((new, again), 1):
        life.say(LEASE_OVER, sender=15)
        a.until(lambda number=number: len(a.arrivals) == number)
    assert a.transport.counters.dropped == {"stale": 1}
    assert not a.downs


# --- secrets


def test_engines_that_know_the_secret_meet(way, tmp_path):
    kind, faults = way
    with ends(kind, tmp_path, faults=faults, secret="of the deployment") as (a, b):
        a.fill(a.pool.blocks[0], 1)
        a.push(b.peer, a.pool.blocks[0])
        b.until(lambda: b.arrivals)
        assert b.transport.land(b.arrivals[0], b.pool.blocks[0]) is not None
        b.transport.send(a.peer, LEASE_OVER)
        a.until(lambda: a.arrivals)
        a.transport.send(Peer("b", 77, b.peer.address), LEASE_OVER)  # what is wrong is told to whoever belongs here
        a.until(lambda: a.downs)
        assert "b/2 now, not b/77" in a.downs[0].message
        assert not b.transport.counters.dropped["stranger"]


def test_a_stranger_hears_nothing_but_a_number(way, tmp_path, caplog):
    kind, faults = way
    with ends(kind, tmp_path, "a", faults=faults, secret="of the deployment") as (a,):
        heard = []
        for transport in (kind, "?"):
            stranger = Stranger(a.peer.address)
            stranger.say(greet(a, kind, transport=transport))
            header = read_header(stranger.sock.recv(HEADER_BYTES, socket.MSG_WAITALL))
            heard.append(stranger.sock.recv(header.body, socket.MSG_WAITALL))
            assert (header.sender, header.to, len(heard[-1])) == (0, 0, len(encode(Challenge(bytes(16)))))
            with contextlib.suppress(ConnectionError):  # it may not have read all that was said
                assert stranger.sock.recv(1) == b""
        assert heard[0] != heard[1]
        assert a.transport.counters.dropped == {"stranger": 2}
        assert a.transport.receive() == []
    assert len([record for record in caplog.records if "a stranger was turned away" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ("x", "y", "link to b at .* ended"),
        (None, "y", "it asks for a deployment's secret, and there is none here"),
        ("x", None, "did not answer in time"),
    ],
)
def test_another_secret_makes_no_link(kind, tmp_path, ours, theirs, why, monkeypatch):
    monkeypatch.setattr(penstock.transfer.carrier, "CONNECT_SECONDS", 0.3)
    with ends(kind, tmp_path, "b", secret=theirs) as (b,):
        where = address(kind, tmp_path, "o")
        transport = open_transport(kind, where, "o", 7, LAYOUT, b.pool, secret=ours)
        with closing(transport):
            o = End(transport, b.pool, "o", 7)
            transport.send(b.peer, LEASE_OVER)
            o.until(lambda: o.downs)
            assert re.search(why, o.downs[0].message)
            assert b.transport.receive() == []


def test_who_only_sits_at_a_peers_address_is_told_nothing_more(kind, tmp_path):
    """It may have taken the port of an engine that died."""
    with ends(kind, tmp_path, "a", secret="of the deployment") as (a,):
        listener, where = listen(address(kind, tmp_path, "n"))
        with listener:
            a.transport.send(Peer("n", 9, where), LEASE_OVER)
            listener.setblocking(True)
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(10)
                challenge = make_frame(Challenge(b"0123456789abcdef"), 0, 0)
                sock.sendall(challenge.header + challenge.body)
                header = sock.recv(HEADER_BYTES, socket.MSG_WAITALL)
                body = sock.recv(read_header(header).body, socket.MSG_WAITALL)
                sock.sendall(header + body)  # as if it could prove something with that
                with contextlib.suppress(ConnectionError):
                    assert sock.recv(1) == b""
            a.until(lambda: a.downs)
            assert "does not know this deployment's secret" in a.downs[0].message
            assert a.transport.counters.dropped["stranger"] == 1


# --- too much, too little


def test_a_peer_that_does_not_read_is_lost(pair, kind, monkeypatch):
    monkeypatch.setattr(penstock.transfer.carrier, "BACKLOG_BYTES", 1 << 20)
    a, b = pair
    deaf = Stranger(a.peer.address)
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


def test_blocks_that_wait_are_no_backlog(pair, monkeypatch):
    """They lie in the pool in any case, and a whole prompt's may be pushed at once."""
    monkeypatch.setattr(penstock.transfer.carrier, "BACKLOG_BYTES", 1 << 20)
    monkeypatch.setattr(penstock.transfer.carrier, "STAGING_BYTES", 0)
    a, b = pair
    for index in range(1000):  # 16 MiB
        a.push(b.peer, a.pool.blocks[index % 16], index, key=b"")
    landed = 0
    while landed < 1000:
        b.until(lambda: b.news)
        assert not b.downs + a.downs
        for arrival in b.arrivals:
            assert b.transport.shares or b.transport.land(arrival, b.pool.blocks[0]) is not None
            landed += 1
        b.news.clear()


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
        late.sendall(frame.header + frame.body)
        assert late.recv(HEADER_BYTES)
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
        if kind == "tcp":
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
    with far_process(kind, tmp_path, keeper_path=str(tmp_path / "keeper.sock")) as (far, peer):
        a.transport.send(peer, Commit(LEASE, 0, [], 0, 0.0, 0.0))
        a.until(lambda: a.arrivals)
        far.kill()
        a.until(lambda: a.downs, 3)
        assert [down.peer for down in a.downs] == [peer]


def test_nothing_is_left_after_close(way, tmp_path):
    kind, faults = way
    with keeper(tmp_path / "keeper.sock") if kind == "shared" else open(os.devnull) as path:
        pools = [open_pool(kind, path, name, 1) for name in ("a", "b")]
        gc.collect()  # what tests before this one left to the collector is not to be missed at the end
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
        assert open_files() == files
        assert transfer_threads() == threads
        assert set(os.listdir(tmp_path)) == folder
        for pool in pools:
            pool.close()


def test_an_address_is_free_again_after_a_kill_but_not_before(pair, kind, tmp_path):
    a, _ = pair
    with far_process(kind, tmp_path, keeper_path=str(tmp_path / "keeper.sock")) as (far, peer):
        with pytest.raises(ConfigError, match="cannot listen there"):
            open_transport(kind, peer.address, "far", 3, LAYOUT, a.pool)
        far.kill()
        far.wait()
        open_transport(kind, peer.address, "far", 3, LAYOUT, a.pool).close()


@pytest.mark.parametrize(
    ("kind", "where", "message"),
    [
        ("pigeon", "unix:/tmp/x", "transport: 'pigeon', allowed: shared, tcp"),
        ("tcp", "127.0.0.1:80", "allowed: unix:/path or tcp:host:port"),
        ("tcp", "tcp:127.0.0.1:http", "allowed: unix:/path or tcp:host:port"),
        ("tcp", "tcp:0.0.0.0:80", "as its peers reach it"),
        ("tcp", f"unix:/tmp/{'x' * 200}", "at most 107 bytes"),
        ("tcp", "unix:/nowhere/at/all", "cannot listen there"),
        ("shared", "unix:/tmp/x", "needs a pool in a keeper"),
    ],
)
def test_what_cannot_be_opened_says_why(kind, where, message, tmp_path):
    pool, files = open_pool("tcp", "", "a", 1), open_files()
    with pytest.raises(ConfigError, match=message):
        open_transport(kind, where, "a", 1, LAYOUT, pool)
    assert open_files() == files
    pool.close()


def test_shared_stays_on_one_host(tmp_path):
    with keeper(tmp_path / "k") as path:
        pool = open_pool("shared", path, "a", 1)
        with pytest.raises(ConfigError, match="stays on one host"):
            open_transport("shared", "tcp:127.0.0.1:0", "a", 1, LAYOUT, pool)
        pool.close()
