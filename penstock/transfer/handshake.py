"""Mutual authentication of a connection's two ends, by a shared secret that is never sent.

    dialler                       acceptor
                    <-            Challenge: a number drawn for this connection
    Signed Greet    ->            covers both sides' numbers, and whom it is meant for
                    <-            Signed Greet, likewise

A peer without the secret receives only a number, and cannot replay signatures of other connections. This excludes
unauthorised peers that can reach the port; it does not encrypt. Without a secret the greetings are sent unsigned, the
dialler's first.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from hmac import compare_digest

import msgspec

from penstock.core.wire.codec import decoder, encode
from penstock.transfer.frames import Challenge, Greet, Signed

NONCE_BYTES = 16
_DIALLER, _ACCEPTOR = b"D", b"A"


class Stranger(ValueError):
    """The other end is not authenticated."""


def key_of(secret: str | None) -> bytes | None:
    return None if secret is None else blake2b(secret.encode(), person=b"penstock.secret").digest()


class Handshake:
    """One connection's.

    Args:
        key: of the deployment; None when there is no secret.
    """

    def __init__(self, key: bytes | None, dialled: bool) -> None:
        self._key = key
        self._ours, self._theirs = (_DIALLER, _ACCEPTOR) if dialled else (_ACCEPTOR, _DIALLER)
        self._mine = secrets.token_bytes(NONCE_BYTES) if key is not None else b""
        self._other = b""  # the other side's number, once it is known

    def first_word(self) -> Challenge | None:
        """The acceptor's first message."""
        return Challenge(self._mine) if self._key is not None and self._ours == _ACCEPTOR else None

    @property
    def may_greet(self) -> bool:
        """Whether a greeting can be made out. The dialler's may have to wait for a challenge."""
        return self._key is None or bool(self._other)

    def seal(self, greet: Greet, to: int) -> Greet | Signed:
        """
        Args:
            to: incarnation that it is meant for.
        """
        if self._key is None:
            return greet
        body = encode(greet)
        return Signed(body, self._mine, self._proof(self._ours, to, body))

    def open(self, body: bytes | bytearray, to: int) -> bytes | bytearray | None:
        """The greeting that a frame's body brings, or None when it was the challenge. Raises Stranger.

        Args:
            to: incarnation that it says it is meant for.
        """
        try:
            said = _decode(body)
        except msgspec.DecodeError:
            if self._key is None:
                return body
            raise Stranger("it does not show that it belongs to this deployment") from None
        if self._key is None:
            raise Stranger("it asks for a deployment's secret, and there is none here")
        if isinstance(said, Challenge):
            if self._ours == _ACCEPTOR or self._other or len(said.nonce) != NONCE_BYTES:
                raise Stranger("it challenges out of turn")
            self._other = said.nonce
            return None
        if self._ours == _ACCEPTOR:
            self._other = said.nonce
        if len(self._other) != NONCE_BYTES or not compare_digest(said.proof, self._proof(self._theirs, to, said.greet)):
            raise Stranger("it does not know this deployment's secret")
        return said.greet

    def _proof(self, side: bytes, to: int, body: bytes) -> bytes:
        assert self._key is not None
        challenge, answer = (self._mine, self._other) if self._ours == _ACCEPTOR else (self._other, self._mine)
        head = b"".join((side, challenge, answer, to.to_bytes(8, "little")))  # each part has one length only
        return blake2b(head + body, key=self._key, digest_size=32, person=b"penstock.greet").digest()


_decode = decoder(Challenge | Signed).decode
