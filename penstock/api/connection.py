"""One TCP connection: limits on what uvicorn reads before the application hears of a request, which itself has none."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from penstock.api.errors import error_body

MAX_HEAD_BYTES = 64 * 2**10  # of the request line and all headers together
MAX_HEADERS = 128
REQUEST_SECONDS = 60.0  # for a request to arrive in full, from its first byte, or from connecting to a new connection


class _Excess(Exception):
    """The head is larger than allowed."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with an end to patience.

    A request's body is limited elsewhere (`Edge`, `read_body`): uvicorn reads it no faster than it is taken.

    Attributes:
        request_seconds: see REQUEST_SECONDS.
    """

    request_seconds = REQUEST_SECONDS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = False
        self._fed = 0  # bytes of an unfinished head
        self._head_bytes = 0
        self._excess = ""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_longer()
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

    # --- time

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
