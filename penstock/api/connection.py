"""One TCP connection: limits on the head of a request, which uvicorn does not have, and on the time that an answer
waits to be read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from penstock.api.errors import error_body
from penstock.service.answer_guard import AnswerLog, ConnectionLog, Next, sent
from penstock.service.flight import AGAIN

MAX_HEAD_BYTES = 64 * 2**10  # of the request line and all headers together
MAX_HEADERS = 128
# for a request to arrive in full, from its first byte, or from connecting to a new connection; for some of a body to
# arrive, where a route takes it in pieces
REQUEST_SECONDS = 60.0
SEND_SECONDS = 60.0  # in which a client must read some of what waits for it
# Unsent bytes of an answer that the kernel may buffer. Its default is megabytes, which hides for minutes whether a
# client reads.
UNSENT_BYTES = 32 * 2**10
AT_ONCE = struct.pack("ii", 1, 0)  # how a socket lingers
UNSENT_TLS_BYTES = 64 * 2**10  # of an answer that TLS may hold back; its default is eight times as much

log = logging.getLogger("penstock.server")


def endings() -> tuple[bytes, bytes]:
    """What ends an answer when this process was killed: one that had not begun, and a stream."""
    error = error_body(f"the frontend failed during this request, {AGAIN}", "server_error", None, "frontend_failed")
    body = msgspec.json.encode(error)
    head = b"content-type: application/json\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    event = b"data: " + body + b"\n\n"
    return STATUS_LINE[503] + head % len(body) + body, b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)


class _Excess(Exception):
    """The head is larger than allowed."""


class _LoggedTransport:
    """A transport whose writes are noted before they are done."""

    def __init__(self, transport: asyncio.Transport, connection: Connection, log: ConnectionLog) -> None:
        self._transport, self._connection, self._log = transport, connection, log

    def write(self, data: bytes) -> None:
        self._log.write(len(data), self._connection.next)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _WatchedTransport:
    """One with TLS, which asks for no pause while what it has written waits below it."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport, self._connection = transport, connection

    def write(self, data: bytes) -> None:
        self._transport.write(data)
        self._connection.wrote()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with time-outs for receiving and sending.

    A request's body is limited elsewhere (`Application`, `read_body`): uvicorn reads it no faster than it is taken.

    Args:
        send_seconds: see SEND_SECONDS.
        answers: for who ends the answers if this process is killed; None when nobody does.

    Attributes:
        request_seconds: see REQUEST_SECONDS.
    """

    request_seconds = REQUEST_SECONDS

    def __init__(
        self, *args: Any, send_seconds: float = SEND_SECONDS, answers: AnswerLog | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._answers = answers
        self._log: ConnectionLog | None = None
        self._send_seconds = send_seconds
        self._encrypted = False
        self._in_head = False
        self._fed = 0  # bytes of an unfinished head
        self._head_bytes = 0
        self._excess = ""
        self._arrived = 0  # bytes of a body that is taken in pieces, when it was last looked at
        self._deadline: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None  # at what was taken meanwhile

    @property
    def next(self) -> Next:
        """What may follow what was written."""
        cycle = self.cycle
        if self.pipeline:
            return Next.NOTHING  # `cycle` is not the one that writes
        if cycle is None or cycle.response_complete:
            return Next.ANSWER if self._in_head else Next.NOTHING
        if not cycle.response_started:
            return Next.ANSWER
        return Next.EVENT if cycle.chunked_encoding else Next.NOTHING  # only streams are chunked

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._answers is not None:
            self._log = self._answers.open(transport.get_extra_info("socket").fileno())
        if self._log is not None:
            transport = cast(asyncio.Transport, _LoggedTransport(transport, self, self._log))
        self._encrypted = transport.get_extra_info("ssl_object") is not None
        if self._encrypted:
            transport.set_write_buffer_limits(UNSENT_TLS_BYTES)
            transport = cast(asyncio.Transport, _WatchedTransport(transport, self))
        super().connection_made(transport)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            ours = transport.get_extra_info("socket")
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_longer()
        self._watch_no_longer()
        if self._log is not None:
            self._log.close()
            _shut_down(self.transport.get_extra_info("socket").fileno())
            self._log = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._fed = self._fed + len(data) if self._in_head else 0
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._wait()  # also what begins no request, such as empty lines, does not go on for ever
        super().data_received(data)
        # the parser holds back a header until it has all of it
        if self._in_head and self._fed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._excess = f"the request's head has more than the {MAX_HEAD_BYTES} bytes that are allowed"
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self.flow.write_paused:
            self._watch_no_longer()  # another answer will come
        self._in_head, self._head_bytes = True, 0
        if self._log is not None:
            self._log.note(self.next)
        if self._deadline is None:
            self._wait()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)
        if len(self.headers) > MAX_HEADERS:
            self._excess = f"the request has more than the {MAX_HEADERS} headers that are allowed"
            raise _Excess  # the parser stops, and `data_received` answers

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._wait_no_longer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What cannot be read as a request is answered as every other error is, and ends the connection."""
        if self._excess:
            self._refuse(431, self._excess, "request_header_fields_too_large")
        else:
            self._refuse(400, "this is no valid HTTP request", "invalid_http")

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._excess = f"the request's head has more than the {MAX_HEAD_BYTES} bytes that are allowed"
            raise _Excess

    def _refuse(self, status: int, message: str, code: str) -> None:
        body = msgspec.json.encode(error_body(message, "invalid_request_error", None, code))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_no_longer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._log is not None:
            self._log.note(self.next)
        if self._look is None and self.cycle.response_complete:
            self._watch()  # also what is closed stays until it was taken

    # --- time

    def wrote(self) -> None:
        """Something of an answer, with TLS."""
        if self._look is None:
            self._watch()

    def _watch(self) -> None:
        """The client has to take some of what waits for it: without TLS nothing is written meanwhile."""
        self._watch_no_longer()
        if waiting := self._waiting():
            self._look = self.loop.call_later(self._send_seconds, self._expect_less, waiting)

    def _waiting(self) -> int:
        """0 when nothing waits for the client; else what becomes less whenever it takes some: bytes of it, but with
        TLS, which does not say what lies between it and the kernel, what is left of a large number."""
        waiting = self.transport.get_write_buffer_size()
        if not self._encrypted:
            return waiting
        try:
            acknowledged, unsent = sent(self.transport.get_extra_info("socket"))
        except OSError:  # it is being closed
            return 0
        return waiting + unsent and (1 << 62) - acknowledged

    def _watch_no_longer(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _expect_less(self, before: int) -> None:
        self._look = None
        if self._waiting() < before:
            self._watch()
            return
        state: dict[str, Any] = self.cycle.scope.get("state") or {} if self.cycle else {}
        log.warning(
            "a client took nothing of its answer for %g s and was disconnected, %d bytes waited for it: id=%s",
            self._send_seconds,
            self.transport.get_write_buffer_size(),
            state.get("request_id", "-"),
        )
        # or the system would go on to offer it what it holds
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self.transport.abort()

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(self.request_seconds, self._too_slow)

    def _wait_no_longer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        cycle = self.cycle
        if self.transport.is_closing():
            return
        if self.pipeline or (cycle is not None and not cycle.response_complete and not cycle.more_body):
            self._wait()  # it is being answered, and what comes next is not read meanwhile
        elif self._arrives():
            self._wait()
        elif cycle is None or cycle.response_complete or not cycle.response_started:
            message = f"the request did not arrive within {self.request_seconds:g} s"
            self._refuse(408, message, "request_timeout")
        else:
            self.transport.close()

    def _arrives(self) -> bool:
        """Whether something came, since this was asked last, of a body that is taken in pieces."""
        state = {} if self.cycle is None else self.cycle.scope.get("state") or {}
        before, self._arrived = self._arrived, state.get("body_bytes", 0) if state.get("in_pieces") else 0
        return self._arrived != before and self._arrived > 0


def _shut_down(descriptor: int) -> None:
    """End a connection although the launcher still has it, for a moment."""
    connection = socket.socket(fileno=descriptor)
    with contextlib.suppress(OSError):  # the client has ended it
        connection.shutdown(socket.SHUT_RDWR)
    connection.detach()
