"""Connections with TLS, over the loop that servers have: what is sent, and clients that do not take it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import uvicorn

from penstock.api.connection import Connection
from penstock.api.http import Application
from penstock.cli.reloaded import tls_context
from tests.helpers.certificates import NEEDS_OPENSSL, certificate

pytestmark = [pytest.mark.anyio, NEEDS_OPENSSL]
PATIENCE = 20.0
MUCH = "x" * (4 << 20)  # more than the system holds between two processes


class Strict(Connection):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, send_seconds=0.5, **options)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def port(make_app: Callable[..., Application]) -> AsyncIterator[int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    options: dict[str, Any] = {"log_level": "critical", "lifespan": "off", "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(make_app(), http=Strict, **options)
    config.load()
    files = certificate("server")
    names = {"ssl_certfile": files["certificate"], "ssl_keyfile": files["key"], "ssl_ca_certs": None}
    config.ssl = tls_context(names | {"ssl_cert_reqs": "none"})
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificate("server")["ca"])
    context.check_hostname = False
    return context


async def asked(port: int, **fields: Any) -> ssl.SSLSocket:
    """A client that has asked, and holds little."""

    def ask() -> ssl.SSLSocket:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.settimeout(PATIENCE)
        plain.connect(("127.0.0.1", port))
        ours = trusting().wrap_socket(plain)
        body = json.dumps({"prompt": "a"} | fields).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: slow\r\ncontent-type: application/json\r\n"
        ours.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        return ours

    return await asyncio.to_thread(ask)


def rest(ours: ssl.SSLSocket) -> bytes:
    got = bytearray()
    while not got.endswith(b"0\r\n\r\n") and (data := ours.recv(1 << 14)):
        got += data
    return bytes(got)


async def test_answers_and_streams(port: int, frontend: Any) -> None:
    async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trusting()) as client:
        for _ in range(2):  # on one connection
            answer = await client.post("/v1/completions", json={"prompt": "a"})
            assert answer.json()["choices"][0]["text"] == "Hello"
        frontend.script = lambda generation: generation.say(MUCH, finish="stop")
        streamed = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert (streamed.text.count("x") >= len(MUCH), streamed.text.endswith("data: [DONE]\n\n")) == (True, True)


async def test_who_does_not_speak_tls_is_disconnected_and_nobody_else(port: int) -> None:
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE)
    async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trusting()) as client:
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_takes_nothing_is_disconnected(
    port: int, frontend: Any, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    frontend.script = lambda generation: generation.say(MUCH, finish=None if stream else "stop")
    with await asked(port, stream=stream) as ours:
        async with asyncio.timeout(PATIENCE):
            while not any("took nothing of its answer for 0.5 s" in line for line in caplog.messages):
                await asyncio.sleep(0.01)
            if stream:
                await frontend.submitted[0].cancelled.wait()
        got = b""
        with contextlib.suppress(OSError):  # a reset, or the end in the middle of a record
            got = await asyncio.to_thread(rest, ours)
        assert got.count(b"x") < len(MUCH)


async def test_a_client_that_reads_slowly_gets_it_all(port: int, frontend: Any) -> None:
    frontend.script = lambda generation: generation.say("y" * (1 << 20), finish="stop")
    loop, got = asyncio.get_running_loop(), bytearray()
    with await asked(port, stream=True) as ours:
        began = loop.time()
        async with asyncio.timeout(60):
            while not got.endswith(b"0\r\n\r\n"):
                got += await asyncio.to_thread(ours.recv, 1 << 14)
                await asyncio.sleep(0.03)
    assert got.count(b"y") >= 1 << 20
    assert loop.time() - began > 2 * 0.5, "it was fast, and this shows nothing"
