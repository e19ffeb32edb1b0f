"""Bytes and frames: whatever way a stream is cut, the same frames come out; spoiled ones do not."""

import select
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.wire.handoff import Lease, PeerMessage, Push, Release, Renew, decode_peer
from penstock.transfer.frames import (
    HEADER_BYTES,
    MAX_BODY,
    Frame,
    Greet,
    Handshake,
    make_frame,
    read_greet,
    read_header,
)
from penstock.transfer.peer_link import PeerConnection, Staging
from tests.helpers.links import LAYOUT

PAYLOAD = 3000  # bytes
leases = st.builds(Lease, st.text(max_size=20), st.integers(0, 2**31))
messages = st.one_of(
    st.builds(Release, leases, st.text(max_size=40)),
    st.builds(Renew, st.lists(leases, max_size=2000).map(lambda found: found * 20)),
    st.builds(
        Push, leases, st.integers(0, 10**6), st.binary(max_size=16), st.integers(0, 2**40), st.integers(0, 2**63),
        st.integers(0, 2**64 - 1),
    ),
)  # fmt: skip
payloads = st.one_of(st.none(), st.integers(0, 255).map(lambda byte: bytes([byte]) * PAYLOAD))
numbers = st.integers(0, 2**64 - 1)


def wire(frame: Frame) -> bytes:
    return frame.header + frame.body + (bytes(frame.payload) if frame.payload is not None else b"")


@pytest.fixture(scope="module")
def pair():
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


def reader(sock: socket.socket, slots: int = 4) -> PeerConnection:
    connection = PeerConnection(sock, Handshake(None, dialled=False))
    connection.ready = True
    connection.accept_payloads(Staging(slots, PAYLOAD, lambda: None))
    return connection


@given(st.lists(st.tuples(messages, payloads), min_size=1, max_size=5), numbers, numbers, st.data())
def test_however_a_stream_is_cut_the_frames_are_the_same(pair, sent, sender, to, data):
    ours, theirs = pair
    stream = b"".join(
        wire(make_frame(message, sender, to, memoryview(payload) if payload else None)) for message, payload in sent
    )
    connection, found = reader(theirs), []
    while stream:
        size = data.draw(st.sampled_from([1, 7, HEADER_BYTES, 500, 5000, 60_000]))
        ours.sendall(stream[:size])
        stream = stream[size:]
        while select.select([theirs], [], [], 0)[0]:
            for received in connection.read():
                assert received.header.intact(received.body)
                payload = bytes(received.payload.buffer) if received.payload else None
                found.append((decode_peer(received.body), payload))
                assert (received.header.sender, received.header.to) == (sender, to)
    assert found == sent


@given(messages, numbers, numbers, st.data())
def test_no_flipped_bit_goes_unnoticed(message: PeerMessage, sender: int, to: int, data):
    frame = make_frame(message, sender, to)
    spoiled = bytearray(wire(frame))
    spoiled[data.draw(st.integers(0, len(spoiled) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        header = read_header(spoiled)
    except ValueError:
        return
    lengths = (header.body, header.payload) == (len(frame.body), 0)
    assert not lengths or not header.intact(bytes(spoiled[HEADER_BYTES:]))


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_other_bytes_are_no_header(data):
    with pytest.raises(ValueError, match="no frame"):
        read_header(b"x" + data[1:])


@pytest.mark.parametrize(("body", "payload"), [(MAX_BODY + 1, 0), (4, PAYLOAD + 1), (4, 1)])
def test_lengths_that_cannot_be_end_the_connection(pair, body, payload):
    ours, theirs = pair
    frame = make_frame(Release(Lease("r", 0), ""), 1, 2)
    lying = bytearray(frame.header)
    lying[4:12] = body.to_bytes(4, "little") + payload.to_bytes(4, "little")
    ours.sendall(lying)
    with pytest.raises(ValueError, match="bytes"):
        list(reader(theirs).read())


def test_a_stranger_may_not_send_much(pair):
    ours, theirs = pair
    lease = Lease("r" * 100_000, 0)
    ours.sendall(make_frame(Release(lease, ""), 1, 2).header)
    with pytest.raises(ValueError, match="body of"):
        list(PeerConnection(theirs, Handshake(None, dialled=False)).read())


def test_reading_pauses_without_staging_memory_and_goes_on_with_it(pair):
    ours, theirs = pair
    told: list[None] = []
    connection = PeerConnection(theirs, Handshake(None, dialled=False))
    connection.ready = True
    connection.accept_payloads(Staging(2, PAYLOAD, lambda: told.append(None)))
    push = Push(Lease("r", 0), 0, b"", 0, 0, 0)
    for byte in b"abc":
        ours.sendall(wire(make_frame(push, 1, 2, memoryview(bytes([byte]) * PAYLOAD))))
    found = list(connection.read())
    while len(found) < 2:
        found += connection.read()
    while not connection.starved:
        found += connection.read()
    assert [bytes(f.payload.buffer) for f in found] == [b"a" * PAYLOAD, b"b" * PAYLOAD]
    assert not told
    del found[0]  # never landed, only forgotten
    assert told
    found = list(connection.frames())
    assert not connection.starved
    while not found:
        found += connection.read()
    assert bytes(found[0].payload.buffer) == b"c" * PAYLOAD


def test_payloads_count_for_no_backlog_however_they_are_sent():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connection = PeerConnection(ours, Handshake(None, dialled=False))
    frames = [
        make_frame(Push(Lease("r", 0), index, b"", 0, 0, 0), 1, 2, memoryview(bytes(1 << 20))) for index in range(2)
    ]
    for frame in frames:
        connection.queue(frame)
    assert connection.backlog == sum(frame.own_bytes for frame in frames)
    connection.flush()
    assert connection.backlog == frames[1].own_bytes, "the first payload did not fit into the socket"
    while connection.unsent:
        theirs.recv(1 << 16)
        connection.flush()
    assert connection.backlog == 0
    connection.close()
    theirs.close()


def test_greetings_tell_both_values():
    mine = Greet(name="a", incarnation=1, address="", transport="tcp", layout=LAYOUT)
    theirs = msgspec.structs.replace(mine, name="b", transport="shared", pool="1:2")
    assert mine.difference(mine) == ""
    assert mine.difference(theirs) == "transport: tcp here, shared there; pool:  here, 1:2 there"


def test_a_greeting_in_another_protocol_is_still_understood_to_be_one():
    mine = Greet(name="a", incarnation=1, address="x", transport="tcp", layout=LAYOUT, protocol=99)
    assert read_greet(make_frame(mine, 1, 2).body).protocol == 99
    future = msgspec.msgpack.encode({"type": "Greet", "name": "a", "incarnation": 1, "address": "x", "protocol": 99})
    assert read_greet(future).protocol == 99
    with pytest.raises(msgspec.DecodeError):
        read_greet(msgspec.msgpack.encode({"type": "Hello", "protocol": 99}))
