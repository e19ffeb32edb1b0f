"""Who knows the secret is let in, once for every proof; nobody else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.wire.codec import encode
from penstock.transfer.frames import Challenge, Greet, Handshake, Stranger, key_of, read_greet
from tests.helpers.links import LAYOUT

KEY = key_of("the deployment's")
DIALLER = Greet(name="a", incarnation=11, address="unix:/a", transport="tcp", layout=LAYOUT)
ACCEPTOR = Greet(name="b", incarnation=22, address="unix:/b", transport="tcp", layout=LAYOUT)


def met(key=KEY, other=KEY):
    """(dialler, acceptor) that have exchanged the challenge."""
    dialler, acceptor = Handshake(key, dialled=True), Handshake(other, dialled=False)
    if challenge := acceptor.first_word():
        assert dialler.open(encode(challenge), 0) is None
    return dialler, acceptor


@pytest.mark.parametrize("key", [KEY, None])
def test_both_hear_who_the_other_is(key):
    dialler, acceptor = met(key, key)
    assert dialler.may_greet
    assert read_greet(acceptor.open(encode(dialler.seal(DIALLER, 22)), 22)) == DIALLER
    assert read_greet(dialler.open(encode(acceptor.seal(ACCEPTOR, 11)), 11)) == ACCEPTOR


def test_without_a_secret_the_dialler_speaks_first_and_with_one_it_waits():
    assert Handshake(None, dialled=True).may_greet
    assert Handshake(None, dialled=False).first_word() is None
    assert not Handshake(KEY, dialled=True).may_greet


@pytest.mark.parametrize("other", [key_of("another's"), key_of("")])
def test_another_secret_is_none(other):
    dialler, acceptor = met(other, KEY)
    with pytest.raises(Stranger, match="does not know"):
        acceptor.open(encode(dialler.seal(DIALLER, 22)), 22)


def test_who_shows_nothing_is_a_stranger():
    for body in (encode(DIALLER), b"", b"\xc1 rubbish"):
        with pytest.raises(Stranger, match="does not show"):
            met()[1].open(body, 22)
    with pytest.raises(Stranger, match="there is none here"):
        Handshake(None, dialled=True).open(encode(Challenge(b"x" * 16)), 0)


def test_a_proof_is_of_no_use_elsewhere():
    dialler, acceptor = met()
    signed = dialler.seal(DIALLER, 22)
    for elsewhere in (met()[1], met()[0], dialler):  # another connection, the other direction, back to who made it
        with pytest.raises(Stranger):
            elsewhere.open(encode(signed), 22)
    with pytest.raises(Stranger):
        acceptor.open(encode(signed), 23)  # for another life
    with pytest.raises(Stranger):
        acceptor.open(encode(type(signed)(encode(ACCEPTOR), signed.nonce, signed.proof)), 22)
    assert acceptor.open(encode(signed), 22) is not None


def test_nobody_is_challenged_twice():
    dialler, acceptor = met()
    for end in (dialler, acceptor):
        with pytest.raises(Stranger, match="out of turn"):
            end.open(encode(Challenge(b"x" * 16)), 0)
    with pytest.raises(Stranger):
        Handshake(KEY, dialled=True).open(encode(Challenge(b"")), 0)


@given(st.integers(0, 8 * 200), st.booleans())
def test_one_wrong_bit_is_enough(bit, back):
    dialler, acceptor = met()
    signed = dialler.seal(DIALLER, 22)
    if back:
        assert acceptor.open(encode(signed), 22) is not None
        signed, acceptor = acceptor.seal(ACCEPTOR, 22), dialler
    for field in ("greet", "proof"):
        spoiled = bytearray(getattr(signed, field))
        spoiled[bit // 8 % len(spoiled)] ^= 1 << bit % 8
        parts = {name: getattr(signed, name) for name in ("greet", "nonce", "proof")} | {field: bytes(spoiled)}
        with pytest.raises(Stranger):
            acceptor.open(encode(type(signed)(**parts)), 22)
