"""Who may speak with whom: every transport greets a peer before anything else, and knows a stranger."""

import contextlib
import dataclasses
import re
import socket
import ssl
from contextlib import closing

import pytest

import penstock.transfer.carrier
from penstock.core.errors import ConfigError
from penstock.core.layout import attention_groups
from penstock.core.wire.codec import encode
from penstock.core.wire.engine import Peer
from penstock.transfer.addresses import listen
from penstock.transfer.frames import Challenge, make_frame, read_header
from tests.helpers.certificates import NEEDS_OPENSSL, certificate
from tests.helpers.links import (
    LAYOUT,
    LEASE_OVER,
    TLS,
    End,
    address,
    ends,
    open_pool,
    open_transport,
)
from tests.helpers.strangers import Stranger, greet, hear, under

INT8 = attention_groups((None, None), 1, 16, "int8")


def test_another_layout_is_refused_on_both_sides_with_both_values(way, tmp_path):
    kind, faults = way
    with ends(kind, tmp_path, "a", faults=faults) as (a,):
        pool, other = a.pool, dataclasses.replace(LAYOUT, dtype="bfloat16", groups=INT8)
        transport = open_transport(kind, address(kind, tmp_path, "o"), "o", 2, other, pool, faults)
        b = End(transport, pool, "o", 2)
        b.transport.send(a.peer, LEASE_OVER)
        for end, peer, here, there in ((a, b.peer, LAYOUT, other), (b, a.peer, other, LAYOUT)):
            end.until(lambda end=end: end.downs)
            assert [(down.peer, down.refused) for down in end.downs] == [(peer, True)]
            assert f"dtype: {here.dtype} here, {there.dtype} there" in end.downs[0].message
            assert f"kv_dtype: {here.kv_dtype} here, {there.kv_dtype} there" in end.downs[0].message
            assert not end.arrivals
        transport.close()


@pytest.mark.parametrize(
    ("field", "theirs"), [("protocol", 99), ("transport", "carrier pigeon"), ("pool", "another server's")]
)
def test_other_differences_are_refused_too(pair, kind, field, theirs):
    a, _ = pair
    stranger = Stranger(a.peer.address, kind)
    stranger.say(greet(a, kind, **{field: theirs}))
    mine = getattr(stranger.hear_greet(), field)
    assert stranger.is_sent_away()
    a.until(lambda: a.downs)
    assert a.downs[0].refused
    assert a.downs[0].message == f"{field}: {mine} here, {theirs} there"


def test_an_earlier_incarnation_of_ours_gets_no_message(pair):
    a, b = pair
    b.transport.send(Peer("a", 77, a.peer.address), LEASE_OVER)
    b.until(lambda: b.downs)
    assert "a/1 now, not a/77" in b.downs[0].message
    assert not b.downs[0].refused
    assert a.transport.counters.dropped == {"stale": 1}
    assert not a.transport.receive()


def test_messages_from_or_for_another_incarnation_are_dropped_on_a_link_that_stands(pair, kind):
    a, _ = pair
    stranger = Stranger(a.peer.address, kind)
    stranger.say(greet(a, kind))
    stranger.hear_greet()
    stranger.say(LEASE_OVER, sender=8)
    stranger.say(LEASE_OVER, to=2)
    stranger.say(LEASE_OVER)
    a.until(lambda: a.arrivals)
    assert len(a.arrivals) == 1
    assert a.transport.counters.dropped == {"stale": 2}


def test_a_new_incarnation_ends_the_one_before_it(pair, kind):
    a, _ = pair
    old, new, again = (Stranger(a.peer.address, kind) for _ in range(3))
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
    a, b = pair
    a.transport.send(b.peer, LEASE_OVER)
    b.until(lambda: b.arrivals)
    if noise == "silence":
        monkeypatch.setattr(penstock.transfer.carrier, "GREET_SECONDS", 0.1)
    stranger = Stranger(a.peer.address, kind)
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


def test_a_late_greeting_of_an_earlier_incarnation_is_stale(pair, kind):
    a, _ = pair
    new, late, again = (Stranger(a.peer.address, kind) for _ in range(3))
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
        assert b.land(b.arrivals[0], b.pool.blocks[0]) is not None
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
            stranger = Stranger(a.peer.address, kind)
            stranger.say(greet(a, kind, transport=transport))
            first, body = hear(stranger.sock)
            header = read_header(first)
            heard.append(body)
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
            accepted, _ = listener.accept()
            with under(kind, accepted, dialled=False) as sock:
                challenge = make_frame(Challenge(b"0123456789abcdef"), 0, 0)
                sock.sendall(challenge.header + challenge.body)
                header, body = hear(sock)
                sock.sendall(header + body)  # as if it could prove something with that
                with contextlib.suppress(ConnectionError):
                    assert sock.recv(1) == b""
            a.until(lambda: a.downs)
            assert "does not know this deployment's secret" in a.downs[0].message
            assert a.transport.counters.dropped["stranger"] == 1


# --- certificates


@NEEDS_OPENSSL
@pytest.mark.parametrize(
    ("theirs", "secret", "here", "there"),
    [
        (
            "another deployment's",
            "s",
            "it does not accept this side's certificate",
            "its certificate is not one of",
        ),
        (
            "signed by another CA",
            "s",
            "its certificate is not one of",
            "it does not accept this side's certificate",
        ),
        ("no TLS", None, "no TLS as expected", "b at .* (ended|cannot be reached)"),
    ],
)
def test_without_a_certificate_of_the_deployment_there_is_no_link(theirs, secret, here, there, tmp_path, caplog):
    another = certificate("another")
    with ends(TLS, tmp_path, "b", secret=secret) as (b,):
        kinds = {"another deployment's": another, "signed by another CA": another | {"ca": certificate()["ca"]}}
        where, tls = address(TLS, tmp_path, "o"), kinds.get(theirs)
        with closing(open_transport("tcp", where, "o", 7, LAYOUT, b.pool, secret=secret, tls=tls)) as transport:
            o = End(transport, b.pool, "o", 7)
            transport.send(b.peer, LEASE_OVER)
            o.until(lambda: o.downs)
            assert re.search(there, o.downs[0].message)
            b.until(lambda: b.transport.counters.dropped["stranger"])
            assert f"a stranger was turned away: {here}" in caplog.text
            assert not b.news


@NEEDS_OPENSSL
def test_who_shows_no_certificate_is_turned_away(tmp_path, caplog):
    with ends(TLS, tmp_path, "a") as (a,):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(certificate()["ca"])
        with socket.create_connection(("127.0.0.1", int(a.peer.address.rpartition(":")[2])), 10) as sock:
            secure = context.wrap_socket(sock)
            with secure, pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
                secure.recv(1)
        assert "a stranger was turned away: it shows no certificate" in caplog.text


@NEEDS_OPENSSL
def test_who_speaks_tls_to_one_that_does_not_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr(penstock.transfer.carrier, "CONNECT_SECONDS", 0.3)
    with ends("tcp", tmp_path, "b") as (b,), ends(TLS, tmp_path, "a") as (a,):
        a.transport.send(b.peer, LEASE_OVER)
        a.until(lambda: a.downs)
        assert "it hung up in the middle of TLS" in a.downs[0].message
        assert not b.transport.receive()


@NEEDS_OPENSSL
@pytest.mark.parametrize(
    ("kind", "wrong", "why"),
    [
        ("tcp", {"ca": "/nowhere"}, "transport.tls.ca: '/nowhere', cannot be read: No such file"),
        ("tcp", {"ca": __file__}, "transport.tls.ca: .*cannot be used: no certificate"),
        ("tcp", {"key": "/nowhere"}, "transport.tls.certificate: .* and key '/nowhere', cannot be read: No such file"),
        ("tcp", {"key": "another's"}, "transport.tls.certificate: .*cannot be used: key values mismatch"),
        ("mooncake", {}, "transport.tls: allowed with tcp, and not with mooncake"),
    ],
)
def test_certificates_that_cannot_be_used_are_named(kind, wrong, why):
    if wrong.get("key") == "another's":
        wrong = {"key": certificate("another")["key"]}
    with closing(open_pool("tcp", "", "a", 1)) as pool, pytest.raises(ConfigError, match=why):
        open_transport(kind, "tcp:127.0.0.1:0", "a", 1, LAYOUT, pool, tls=certificate() | wrong)
