"""What is put together for an HTTP server."""

import asyncio
import socket
import tempfile
from dataclasses import replace

import httpx
import pytest
import zmq

from penstock.cli.http import ModelOptions, OwnMaster, ServerOptions, make_site, with_cors
from penstock.core.clock import ManualClock
from penstock.core.wire.engine import decode_command
from penstock.core.wire.master import Endpoint
from penstock.service.checkpoint import DEMO
from penstock.service.registry import LocalRegistry


def options():
    return ServerOptions(
        host="127.0.0.1",
        port=0,
        api_key=(),
        api_key_file=None,
        ssl_certfile=None,
        ssl_keyfile=None,
        ssl_ca_certs=None,
        ssl_cert_reqs="none",
        allowed_origins=(),
        allowed_methods=("*",),
        allowed_headers=("*",),
        allow_credentials=False,
        root_path="",
        share_prefixes=False,
        max_queued_requests=16,
        max_queued_tokens=None,
        seed=0,
        drain_timeout=1,
        send_timeout=60.0,
        log_level="info",
        log_format="text",
        max_body_size=1 << 20,
        metrics_compat="none",
        otlp_traces_endpoint=None,
        enable_sleep_mode=False,
        record_requests=None,
        record_requests_size=1 << 20,
        batch_dir=None,
        max_file_size=1 << 20,
        return_tokens_as_token_ids=False,
        enable_force_include_usage=False,
        enable_per_request_metrics=False,
        enable_tokenizer_info_endpoint=False,
    )


def site_of(name, began, *endpoints):
    """With one model, of these engines."""
    model = ModelOptions(
        directory=DEMO,
        names=["demo"],
        chat_template=None,
        override_generation_config=None,
        tool_call_parser="auto",
        enable_auto_tool_choice=True,
        reasoning_parser=None,
        pooling="auto",
    )
    master = OwnMaster(LocalRegistry(endpoints), "least_loaded")
    return make_site(options(), [(model, master)], socket.socket(), name, began)


@pytest.mark.parametrize(("took", "patience"), [(0.5, 5.0), (10.0, 40.0), (100.0, 60.0)])
def test_interrupted_requests_wait_for_as_long_as_a_start_takes(took, patience, monkeypatch):
    async def go():
        clock = ManualClock()
        site = site_of("f", clock.now(), Endpoint("e", "ipc:///nobody"))
        (frontend,) = site.models.frontends
        frontend.clock = clock
        at_first = frontend.engine_client.dispatcher.patience

        async def ready():
            clock.advance(took)

        monkeypatch.setattr(frontend, "wait_ready", ready)
        await site._announce(frontend)
        await site.close()
        return at_first, frontend.engine_client.dispatcher.patience

    assert asyncio.run(go()) == (5.0, patience)


def test_everybody_who_speaks_with_an_engine_has_a_name_of_their_own():
    """An engine knows frontends and masters by name: two of one name would take each other's messages."""

    async def go(address):
        sites = [site_of(name, 0.0, Endpoint("e", address)) for name in ("f0", "f1")]
        context, speakers = zmq.Context(), set()
        engine = context.socket(zmq.ROUTER)
        engine.bind(address)
        for site in sites:
            site.models.frontends[0].start()
        while len(speakers) < 4:
            await asyncio.sleep(0.005)
            while engine.poll(0):
                name, data = engine.recv_multipart()
                hello = decode_command(data)
                assert hello.sender.encode() == name
                speakers.add((hello.sender, hello.kind))
        for site in sites:
            await site.close()
        engine.close(0)
        context.term()
        return speakers

    with tempfile.TemporaryDirectory(prefix="penstock-", dir="/tmp") as folder:
        speakers = asyncio.run(asyncio.wait_for(go(f"ipc://{folder}/e"), 20))
    assert speakers == {(f, "frontend") for f in ("f0", "f1")} | {(f"{f}-master", "master") for f in ("f0", "f1")}


def preflight(app, origin, method="POST", headers="authorization"):
    """What a browser asks before a page of this origin may call the server: without an API key."""
    asked = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": headers}
    return call(app, "OPTIONS", asked)


def call(app, method, headers):
    async def go():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, "/v1/models", headers=headers)

    return asyncio.run(go())


async def refuses(scope, receive, send):
    """As the application does without a key."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"x-request-id", b"r")]})
    await send({"type": "http.response.body", "body": b""})


def test_pages_of_other_origins_may_call_it_only_where_they_are_allowed_to():
    assert with_cors(refuses, options()) is refuses
    some = with_cors(refuses, replace(options(), allowed_origins=["https://a.example"], allowed_methods=["POST"]))
    answer = preflight(some, "https://a.example")
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://a.example")
    assert answer.headers["access-control-allow-headers"] == "authorization"
    assert "access-control-allow-credentials" not in answer.headers
    assert preflight(some, "https://b.example").status_code == 400
    assert preflight(some, "https://a.example", "DELETE").status_code == 400
    answer = call(some, "GET", {"origin": "https://a.example"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "https://a.example")
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in call(some, "GET", {"origin": "https://b.example"}).headers
    assert "access-control-allow-origin" not in call(some, "GET", {}).headers


def test_all_origins_with_credentials():
    every = with_cors(refuses, replace(options(), allowed_origins=["*"], allow_credentials=True))
    answer = preflight(every, "https://any.example", "DELETE", "x-mine")
    assert (answer.status_code, answer.headers["access-control-allow-credentials"]) == (200, "true")
    assert answer.headers["access-control-allow-headers"] == "x-mine"
