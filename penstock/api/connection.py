"""One TCP connection: limits on the head of a request, which uvicorn does not have, and on the time that an answer
waits to be read."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from penstock.api.errors import error_body

MAX_HEAD_BYTES = 64 * 2**10  # of the request line and all headers together
MAX_HEADERS = 128
REQUEST_SECONDS = 60.0  # for a request to arrive in full, from its first byte, or from connecting to a new connection
SEND_SECONDS = 60.0  # in which a client must read some of what waits for it
# Unsent bytes of an answer that the kernel may buffer. Its default is megabytes, which hides for minutes whether a
# client reads.
UNSENT_BYTES = 32 * 2**10
AT_ONCE = struct.pack("ii", 1, 0)  # how a socket lingers

log = logging.getLogger("penstock.server")


class _Excess(Exception):
    """The head is larger than allowed."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with time-outs for receiving and sending.

    A request's body is limited elsewhere (`Application`, `read_body`): uvicorn reads it no faster than it is taken.

    Args:
        send_seconds: see SEND_SECONDS.

    Attributes:
        request_seconds: see REQUEST_SECONDS.
    """

    request_seconds = REQUEST_SECONDS

    def __init__(self, *args: Any, send_seconds: float = SEND_SECONDS, **options: Any) -> None:
        super().__init__(*args, **options)
        self._send_seconds = send_seconds
        self._in_head = False
        self._fed = 0  # bytes of an unfinished head
        self._head_bytes = 0
        self._excess = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None  # at what was taken meanwhile

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            ours = transport.get_extra_info("socket")
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_longer()
        self._watch_no_longer()
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
        if self._look is None and self.cycle.response_complete:
            self._watch()  # also what is closed stays until it was taken

    # --- time

    def _watch(self) -> None:
        """From here on nothing is written until the client has taken what waits for it."""
        self._watch_no_longer()
        if waiting := self.transport.get_write_buffer_size():
            self._look = self.loop.call_later(self._send_seconds, self._expect_less, waiting)

    def _watch_no_longer(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _expect_less(self, before: int) -> None:
        self._look = None
        if self.transport.get_write_buffer_size() < before:
            self._watch()
            return
        state: dict[str, Any] = self.cycle.scope.get("state") or {} if self.cycle else {}
        log.warning(
            "a client took nothing of its answer for %g s and was disconnected, %d bytes waited for it: id=%s",
            self._send_seconds,
            before,
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
        elif cycle is None or cycle.response_complete or not cycle.response_started:
            message = f"the request did not arrive within {self.request_seconds:g} s"
            self._refuse(408, message, "request_timeout")
        else:
            self.transport.close()
