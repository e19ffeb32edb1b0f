"""What is put together for an HTTP server."""

import asyncio
import socket
import tempfile

import pytest
import zmq

from penstock.cli.http import ServerOptions, make_site
from penstock.core.clock import ManualClock
from penstock.core.wire.engine import decode_command
from penstock.core.wire.master import Endpoint
from penstock.service.checkpoint import DEMO
from penstock.service.registry import LocalRegistry


def options():
    return ServerOptions(
        directory=DEMO,
        names=["demo"],
        host="127.0.0.1",
        port=0,
        api_key=(),
        share_prefixes=False,
        chat_template=None,
        tool_call_parser="auto",
        enable_auto_tool_choice=True,
        reasoning_parser=None,
        pooling="auto",
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
    )


@pytest.mark.parametrize(("took", "patience"), [(0.5, 5.0), (10.0, 40.0), (100.0, 60.0)])
def test_interrupted_requests_wait_for_as_long_as_a_start_takes(took, patience, monkeypatch):
    async def go():
        clock = ManualClock()
        site = make_site(options(), socket.socket(), "f", clock.now(), LocalRegistry([Endpoint("e", "ipc:///nobody")]))
        site.frontend.clock = clock
        at_first = site.frontend.engine_client.patience

        async def ready():
            clock.advance(took)

        monkeypatch.setattr(site.frontend, "wait_ready", ready)
        await site._announce()
        await site.close()
        return at_first, site.frontend.engine_client.patience

    assert asyncio.run(go()) == (5.0, patience)


def test_everybody_who_speaks_with_an_engine_has_a_name_of_their_own():
    """An engine knows frontends and masters by name: two of one name would take each other's messages."""

    async def go(address):
        registry = LocalRegistry([Endpoint("e", address)])
        sites = [make_site(options(), socket.socket(), name, 0.0, registry) for name in ("f0", "f1")]
        context, speakers = zmq.Context(), set()
        engine = context.socket(zmq.ROUTER)
        engine.bind(address)
        for site in sites:
            site.frontend.start()
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
