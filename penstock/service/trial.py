"""Whether a new engine is fit to serve: it answers a request, and later all frontends know it."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from penstock.core.errors import PenstockError, Unavailable
from penstock.core.request import FinishReason, Request
from penstock.core.sampling import SamplingParams
from penstock.core.wire import codec
from penstock.core.wire.engine import Enqueue, Failed, Hello, Ready, Refused, StepReport, decode_event
from penstock.service.channel import GREETING_INTERVAL, make_context, prepare
from penstock.service.curve import Curve

SENDER = "launcher"
PROMPT_TOKENS, OUTPUT_TOKENS = 8, 4
LOOK = 0.05  # seconds between two looks
PATIENCE = 2.0  # seconds that one question to a frontend may take


class Trial:
    """Whether an engine answers; in a thread of its own, for it waits.

    Args:
        address: the ZMQ endpoint of its engine, which may be bound later; "" while it is not known.
        secret: of the deployment, where its links are protected.

    Attributes:
        verdict: as of `rollout.Fleet.verdict`.
    """

    def __init__(self, address: Callable[[], str], secret: str | None = None) -> None:
        self.verdict: str | None = None
        self._address, self._secret = address, secret
        self._over = threading.Event()
        threading.Thread(target=self._probe, daemon=True).start()

    def close(self) -> None:
        """It is over soon, and nothing waits for that."""
        self._over.set()

    def _probe(self) -> None:
        try:
            self._ask_engine()
        except (PenstockError, zmq.ZMQError, msgspec.DecodeError) as error:
            self.verdict = f"its probe failed: {error}"

    def _ask_engine(self) -> None:
        while not (address := self._address()):
            if self._over.wait(LOOK):
                return
        with make_context() as context, context.socket(zmq.DEALER) as link:
            link.setsockopt(zmq.LINGER, 0)
            link.setsockopt(zmq.ROUTING_ID, SENDER.encode())
            prepare(link, address, None if self._secret is None else Curve(self._secret))
            link.connect(address)
            hello, greeted, asked = Hello(SENDER, time.time_ns(), "probe"), 0.0, False
            while not self._over.is_set():
                if time.monotonic() - greeted >= GREETING_INTERVAL:
                    greeted = time.monotonic()
                    link.send(codec.encode(hello))
                if not link.poll(int(LOOK * 1e3)):
                    continue
                match decode_event(b"".join(link.recv_multipart())):
                    case Ready() as ready if not asked:
                        asked = True
                        link.send(codec.encode(Enqueue(ready.peer.incarnation, _request(ready))))
                    case StepReport(outputs=outputs):
                        for output in outputs:
                            if output.finish in (FinishReason.ERROR, FinishReason.ABORT):
                                raise Unavailable(output.error or "it gave the request up")
                            if output.finish is not None:
                                self.verdict = ""
                                return
                    case Failed(message=message) | Refused(message=message):
                        raise Unavailable(message)


class Introduction:
    """Whether the frontends know an instance that is registered by now; likewise.

    Args:
        name: of the instance.
        frontends: addresses of all, by HTTP.
        tls: whether they speak TLS.

    Attributes:
        known: all of them serve with it.
    """

    def __init__(self, name: str, frontends: Sequence[tuple[str, int]], tls: bool = False) -> None:
        self.known = False
        self._name, self._frontends, self._tls = name, frontends, tls
        self._over = threading.Event()
        threading.Thread(target=self._await_frontends, daemon=True).start()

    def close(self) -> None:
        """It is over soon, and nothing waits for that."""
        self._over.set()

    def _await_frontends(self) -> None:
        unaware = list(self._frontends)
        while unaware and not self._over.wait(LOOK):
            unaware = [address for address in unaware if not self._knows(address)]
        self.known = not unaware

    def _knows(self, address: tuple[str, int]) -> bool:
        link = http.client.HTTPConnection(*address, timeout=PATIENCE)
        if self._tls:  # it is our own: whom its certificate names does not matter
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            link = http.client.HTTPSConnection(*address, timeout=PATIENCE, context=context)
        try:
            link.request("GET", "/health")
            states = json.loads(link.getresponse().read())["instances"]
            return any(one["name"] == self._name and one["state"] == "ready" for one in states)
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return False  # it restarts, or is busy
        finally:
            link.close()


def _request(ready: Ready) -> Request:
    """A short one that every engine can answer."""
    prompt = [i % ready.vocab_size for i in range(PROMPT_TOKENS)]
    params = SamplingParams(temperature=0.0)
    if not ready.generates:
        return Request(
            id="probe", prompt=prompt, params=params, seed=0, stop_ids=frozenset(), max_tokens=0, pooling="last"
        )
    return Request(id="probe", prompt=prompt, params=params, seed=0, stop_ids=frozenset(), max_tokens=OUTPUT_TOKENS)
