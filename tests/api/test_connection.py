"""What a connection may send, and how long it may take: over the real server's protocol, byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from penstock.api import connection
from penstock.api.connection import MAX_HEAD_BYTES, MAX_HEADERS, Connection, endings
from penstock.api.http import Application
from penstock.cli.http import KEEP_ALIVE
from penstock.service.answer_guard import AnswerGuard, AnswerLog
from penstock.service.batch_store import BatchStore
from tests.helpers.waiting import until

pytestmark = pytest.mark.anyio
PATIENCE = 20.0
BODY = b'{"prompt": "a"}'


class Hasty(Connection):
    request_seconds = 0.3


class Strict(Connection):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, send_seconds=0.5, **options)


class Guarded(Connection):
    """Of a process whose launcher has its connections too."""

    guard: AnswerGuard
    log: AnswerLog

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, answers=self.log, **options)


@pytest.fixture(params=[Connection])
def protocol(request: pytest.FixtureRequest) -> Iterator[type[Connection]]:
    Guarded.guard = AnswerGuard()
    Guarded.log = AnswerLog(Guarded.guard.link, endings())
    yield request.param
    Guarded.guard.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    store = BatchStore(tmp_path)
    yield store
    store.close()


@pytest.fixture
async def port(
    make_app: Callable[..., Application], protocol: type[Connection], store: BatchStore
) -> AsyncIterator[int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    options: dict[str, Any] = {"log_level": "critical", "lifespan": "off", "timeout_graceful_shutdown": 1}
    server = uvicorn.Server(uvicorn.Config(make_app(max_body_bytes=10**6, batch_store=store), http=protocol, **options))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


async def exchange(port: int, *pieces: bytes, pause: float = 0.0) -> tuple[int, dict[str, Any]]:
    """Status and body of the first answer; the pieces are sent one by one until there is one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(PATIENCE):
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
        except ConnectionError:
            pass
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length"))
        body = json.loads(await reader.readexactly(length))
        writer.close()
    return int(head.split()[1]), body


def post(*headers: bytes, length: int = len(BODY)) -> bytes:
    own = (b"host: x", b"content-type: application/json", b"content-length: %d" % length)
    return b"POST /v1/completions HTTP/1.1\r\n" + b"\r\n".join((*own, *headers)) + b"\r\n\r\n"


@pytest.mark.parametrize("protocol", [Guarded], indirect=True)
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_connection_is_closed_for_its_client_although_the_launcher_still_has_it(
    port: int, version: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/%b\r\nhost: x\r\nconnection: close\r\n\r\n" % version)
    async with asyncio.timeout(PATIENCE):
        assert b" 200 " in await reader.read()
    writer.close()


@pytest.mark.parametrize("protocol", [Guarded], indirect=True)
async def test_what_the_launcher_would_write_depends_on_whether_a_request_has_come(port: int) -> None:
    whole = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    async with asyncio.timeout(PATIENCE):
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for (reader, writer), more in zip(pairs, (b"", b"GET /hea"), strict=True):
            writer.write(whole + more)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        ended = Guarded.guard.end()
        assert (ended.answers, ended.unfinished) == (1, 1)
        assert await reader.read() == endings()[0]
        for _, writer in pairs:
            writer.close()


async def test_an_ordinary_request_in_pieces(port: int) -> None:
    whole = post(b"x-long: " + b"a" * 30_000) + BODY
    status, body = await exchange(port, *(whole[i : i + 5000] for i in range(0, len(whole), 5000)))
    assert (status, body["object"]) == (200, "text_completion")


@pytest.mark.parametrize(
    "pieces",
    [
        [post(*(b"h-%d: 1" % i for i in range(MAX_HEADERS)))],
        [post(b"x: " + b"a" * MAX_HEAD_BYTES)],
        [b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
    ],
    ids=["many", "long", "path"],
)
async def test_heads_that_are_too_large(port: int, pieces: list[bytes]) -> None:
    status, body = await exchange(port, *pieces)
    assert (status, body["error"]["code"]) == (431, "request_header_fields_too_large")
    assert str(MAX_HEADERS) in body["error"]["message"] or str(MAX_HEAD_BYTES) in body["error"]["message"]


@pytest.mark.parametrize("piece", [b"a" * 4096, b"x: " + b"a" * 500 + b"\r\n"], ids=["one header", "headers"])
async def test_a_head_without_an_end_is_cut_off(port: int, piece: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nx: ")

    async def send() -> None:
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(send(), PATIENCE)


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"hello there\r\n\r\n"])
async def test_what_is_no_http(port: int, garbage: bytes) -> None:
    status, body = await exchange(port, garbage)
    assert (status, body["error"]["code"]) == (400, "invalid_http")


async def test_ten_megabytes_are_refused_before_they_are_read(port: int, frontend: Any) -> None:
    status, body = await exchange(port, post(length=10 * 2**20))  # and not a byte of it
    assert (status, body["error"]["code"]) == (413, "request_too_large")
    assert "10485760 bytes, at most 1000000" in body["error"]["message"]
    chunked = post().replace(b"content-length: %d" % len(BODY), b"transfer-encoding: chunked")
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    status, body = await exchange(port, chunked, *[piece] * 160)
    assert status == 413
    assert "at most 1000000" in body["error"]["message"]
    assert not frontend.submitted


@pytest.mark.parametrize("protocol", [Hasty], indirect=True)
@pytest.mark.parametrize(
    "pieces", [[], [b"\r\n"], [b"POST /v1/comp"], [post()], [post(), BODY[:3]]], ids=["", "lf", "line", "head", "body"]
)
async def test_requests_that_do_not_arrive(port: int, pieces: list[bytes], frontend: Any) -> None:
    status, body = await exchange(port, *pieces, pause=0.01)
    assert (status, body["error"]["code"]) == (408, "request_timeout")
    assert not frontend.submitted


def form(size: int) -> tuple[bytes, bytes, bytes]:
    """Head, content and end of an upload."""
    start = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    start += b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
    end = b"\r\n--b--\r\n"
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    return head + b"content-length: %d\r\n\r\n" % (len(start) + size + len(end)) + start, b"y" * size, end


@pytest.mark.parametrize("protocol", [Hasty], indirect=True)
async def test_an_upload_may_take_as_long_as_something_comes(port: int, store: BatchStore) -> None:
    head, content, end = form(size=20)
    pieces = [content[i : i + 1] for i in range(len(content))]
    status, body = await exchange(port, head, *pieces, end, pause=0.1)
    assert (status, body["bytes"]) == (200, 20)
    assert store.path(body["id"]).read_bytes() == content


@pytest.mark.parametrize("protocol", [Hasty], indirect=True)
async def test_an_upload_that_stops_ends(port: int, store: BatchStore) -> None:
    head, content, _ = form(size=20)
    status, body = await exchange(port, head, content[:5], pause=0.1)
    assert (status, body["error"]["code"]) == (408, "request_timeout")
    await until(lambda: not [*store.path("").iterdir()])


@pytest.mark.parametrize("protocol", [Hasty], indirect=True)
async def test_an_answer_may_take_longer_than_a_request(port: int, frontend: Any) -> None:
    frontend.script = lambda generation: asyncio.get_running_loop().call_later(1.0, generation.say, "late", 0, "stop")
    status, body = await exchange(port, post() + BODY, b"POST /v1/completions HT")  # the next one is begun already
    assert (status, body["choices"][0]["text"]) == (200, "late")


# --- clients that do not take what they asked for

MUCH = "x" * (4 << 20)  # more than the system holds between two processes


def asked(port: int, *headers: bytes, **fields: Any) -> socket.socket:
    """A client that has asked, and holds little."""
    ours = socket.socket()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    ours.connect(("127.0.0.1", port))
    ours.setblocking(False)
    body = json.dumps({"prompt": "a"} | fields).encode()
    ours.send(post(b"x-request-id: slow", *headers, length=len(body)) + body)
    return ours


async def rest(ours: socket.socket, pause: float = 0.0) -> bytes:
    """What comes until the other side is done. Raises ConnectionError when it is broken off."""
    loop, got = asyncio.get_running_loop(), bytearray()
    while data := await loop.sock_recv(ours, 1 << 16):
        got += data
        await asyncio.sleep(pause)
        if got.endswith(b"0\r\n\r\n"):
            break
    return bytes(got)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "penstock.server"]


@pytest.mark.parametrize("protocol", [Strict], indirect=True)
@pytest.mark.parametrize("first", [b"", b"H"], ids=["nothing", "a byte"])
async def test_a_client_that_takes_nothing_loses_its_request(
    port: int, frontend: Any, first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    frontend.script = lambda generation: generation.say(MUCH)  # and it would go on
    with asked(port, stream=True) as ours:
        async with asyncio.timeout(PATIENCE):
            if first:
                assert await asyncio.get_running_loop().sock_recv(ours, 1) == first
            while not frontend.submitted:
                await asyncio.sleep(0.01)
            await frontend.submitted[0].cancelled.wait()
            with pytest.raises(ConnectionError):
                await rest(ours)
    (line,) = said(caplog)
    assert "took nothing of its answer for 0.5 s" in line
    assert line.endswith("id=slow")


@pytest.mark.parametrize("protocol", [Strict], indirect=True)
@pytest.mark.parametrize("then", [b"close", b"keep-alive"])
async def test_a_whole_answer_does_not_wait_for_ever_either(
    port: int, frontend: Any, then: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    frontend.script = lambda generation: generation.say(MUCH, finish="stop")
    with asked(port, b"connection: " + then) as ours:
        async with asyncio.timeout(PATIENCE):
            while not said(caplog):
                await asyncio.sleep(0.01)
            with pytest.raises(ConnectionError):
                await rest(ours)


@pytest.mark.parametrize("protocol", [Strict], indirect=True)
async def test_a_client_that_reads_slowly_gets_it_all(port: int, frontend: Any) -> None:
    frontend.script = lambda generation: generation.say("y" * (1 << 20), finish="stop")
    loop = asyncio.get_running_loop()
    with asked(port, stream=True) as ours:
        began = loop.time()
        async with asyncio.timeout(60):
            got = await rest(ours, pause=0.01)
        assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert got.count(b"y") >= 1 << 20
        assert loop.time() - began > 2 * 0.5, "it was fast, and this shows nothing"


def test_the_limits_are_what_is_documented() -> None:
    assert (connection.MAX_HEAD_BYTES, connection.MAX_HEADERS, connection.REQUEST_SECONDS) == (65536, 128, 60.0)
    assert (connection.SEND_SECONDS, KEEP_ALIVE) == (60.0, 120)
