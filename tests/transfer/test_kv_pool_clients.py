"""A KV pool server and clients that misbehave, crowd it, or find nobody there."""

import os
import socket
import struct

import msgspec
import pytest

from penstock.core.errors import ConfigError
from penstock.core.wire import PROTOCOL
from penstock.core.wire.kv_pool import (
    MAX_MESSAGE,
    Attach,
    CountPool,
    Exchange,
    KVPoolRefused,
    PoolCounts,
    decode_reply,
    frame,
)
from penstock.transfer.kv_pool_server import KVPoolServer
from tests.helpers.kv_pool import BLOCKS, EMPTY, LAYOUT
from tests.helpers.links import no_descriptors
from tests.helpers.waiting import eventually


def raw(server):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(20)
    client.connect(server.path)
    return client


def read(client, length):
    """So many bytes, or what there was before the end."""
    data = b""
    while len(data) < length and (more := client.recv(length - len(data))):
        data += more
    return data


def answer(client):
    head = read(client, 4)
    return decode_reply(read(client, *struct.unpack("<I", head))) if head else None


def attach_raw(client, name="x", **changes):
    client.sendall(frame(msgspec.structs.replace(Attach(name, 99, LAYOUT, 4), **changes)))
    return answer(client)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 0),
        struct.pack("<I", MAX_MESSAGE + 1),
        struct.pack("<I", 5) + b"\xff\xff\xff\xff\xff",
        struct.pack("<I", 2) + b"\x80\x00",
        frame(PoolCounts({})),
        frame(Exchange([], 1)),  # not attached
        os.urandom(4096),
    ],
)
def test_rubbish_ends_that_connection_only(server, rubbish):
    good = server.attach("good")
    with raw(server) as client:
        client.sendall(rubbish)
        if rubbish[3] == 0 and struct.unpack_from("<I", rubbish)[0] > len(rubbish) - 4:
            client.shutdown(socket.SHUT_WR)  # it might be waiting for the rest
        assert answer(client) is None
    assert len(good.exchange([], 8)) == 8
    assert server.counts()["clients"] == 1


@pytest.mark.parametrize(
    "request_of",
    [
        lambda held: Exchange(held, 5),  # beyond its quota
        lambda held: Exchange([], -1),
        lambda held: Exchange([BLOCKS - 1], 1),  # not its own
        lambda held: Exchange([-1], 1),
        lambda held: Exchange([held[0], held[0]], 1),
        lambda held: Attach("x", 100, LAYOUT, 4),  # twice
    ],
)
def test_what_no_sound_client_asks_ends_its_incarnation(server, request_of):
    with raw(server) as client:
        attach_raw(client)
        client.sendall(frame(Exchange([], 4)))
        held = answer(client).blocks
        client.sendall(frame(request_of(held)))
        assert answer(client) is None
    eventually(lambda: server.counts() == EMPTY)


def test_another_protocol_is_refused_with_both_values(server):
    with raw(server) as client:
        refused = attach_raw(client, protocol=1)
        assert isinstance(refused, KVPoolRefused)
        assert f"protocol: {PROTOCOL} here, 1 there" in refused.message


def test_a_message_may_come_in_pieces(server):
    with raw(server) as client:
        for byte in frame(CountPool()):
            client.sendall(bytes([byte]))
        assert isinstance(answer(client), PoolCounts)
        client.sendall(frame(CountPool()) * 3)
        assert all(isinstance(answer(client), PoolCounts) for _ in range(3))


def test_nobody_waits_for_one_who_does_not_read(server):
    good = server.attach("good")
    with raw(server) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        attach_raw(lazy, quota=100_000)
        asked = frame(Exchange([], 100_000)) + frame(Exchange([], 0)) * 3
        lazy.sendall(asked)  # an answer of 500 KB that stays unread
        [block] = good.exchange([], 1)
        for _ in range(50):
            [block] = good.exchange([block], 1)
        assert server.blocks()["held:x"] == 100_000
        assert len(answer(lazy).blocks) == 100_000  # all of it arrives in the end
        assert [answer(lazy).blocks for _ in range(3)] == [[], [], []]
        lazy.sendall(frame(CountPool()) * 500)  # and it may leave with answers unread
    eventually(lambda: server.blocks() == {"free": BLOCKS - 1, "orphaned": 0, "held:good": 1})


def test_without_descriptors_it_waits_and_does_not_spin(server, monkeypatch, caplog):
    tries = []
    accept = KVPoolServer._accept
    monkeypatch.setattr(KVPoolServer, "_accept", lambda server: (tries.append(1), accept(server)))
    good = server.attach("good")
    with socket.socket(socket.AF_UNIX) as late:
        late.settimeout(20)
        before = len(tries)
        with no_descriptors():
            late.connect(server.path)
            eventually(lambda: len(tries) > before)
            for _ in range(20):
                assert len(good.exchange([], 0)) == 0  # whoever is here is served
                assert "open_files" not in good.status().counts
            server.clock.advance(1)
            eventually(lambda: len(tries) > before + 1)
        assert len(tries) == before + 2
        server.clock.advance(1)
        assert attach_raw(late) is not None
    assert [record.getMessage() for record in caplog.records if "accepted" in record.getMessage()] == [
        "no connection can be accepted for now: [Errno 24] Too many open files"
    ]


def test_one_server_a_path(server, tmp_path):
    with pytest.raises(ConfigError, match="nobody can listen there"):
        KVPoolServer(server.path)
    assert server.counts() == EMPTY  # the first one is still there
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="nobody can listen there"):
        KVPoolServer(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(ConfigError, match="nobody can listen there"):
        KVPoolServer(str(tmp_path / ("x" * 200)))


def test_the_socket_of_a_killed_server_is_replaced(tmp_path):
    path = str(tmp_path / "kv-pool")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    KVPoolServer(path).close()
    assert not os.path.exists(path)
