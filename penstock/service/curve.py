"""Encrypted and authenticated ZMQ links, by CURVE (CurveZMQ, RFC 26). The keys follow from the deployment's secret.

All that listen have one pair of keys, all that connect another one. Who does not know the secret knows neither: it
cannot speak to a listener, whose key it would need, nor pass for one, and what it sees says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

DOMAIN = "penstock"


class Curve:
    """
    Args:
        secret: of the deployment.
    """

    def __init__(self, secret: str) -> None:
        self._listener, self._connector = _pair(secret, b"pnst.listener"), _pair(secret, b"pnst.connector")

    def connect(self, socket: zmq.Socket[Any]) -> None:
        """For a socket that is about to connect."""
        socket.curve_publickey, socket.curve_secretkey = self._connector
        socket.curve_serverkey = self._listener[0]

    def listen(self, socket: zmq.Socket[Any]) -> Callable[[], None]:
        """For a socket that is about to be bound, the only such one of its context. Call what it returns before the
        context is terminated."""
        socket.curve_publickey, socket.curve_secretkey = self._listener
        socket.curve_server = True
        socket.zap_domain = DOMAIN.encode()
        guard = ThreadAuthenticator(socket.context)
        guard.start()
        guard.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        return guard.stop

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether who has this public key, in Z85, may connect."""
        return key == self._connector[0]


def _pair(secret: str, person: bytes) -> tuple[bytes, bytes]:
    """A public and a secret key."""
    own = z85.encode(blake2b(secret.encode(), digest_size=32, person=person).digest())
    return zmq.curve_public(own), own
