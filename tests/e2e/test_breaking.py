"""What a server stands: an engine that dies or stands still, more work than it can do, clients that do not read."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.helpers.servers import QUICK, serving
from tests.helpers.waiting import eventually

# sampled: a greedy text soon repeats itself, and is over in no time
LONG = {
    "model": "demo",
    "prompt": "a",
    "max_tokens": 500,
    "temperature": 1,
    "seed": 1,
    "stream": True,
    "ignore_eos": True,
}


def text_of(lines):
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def health(server):
    return httpx.get(server.url + "/health", timeout=10)


def stuck_or_dead(server, how, timeout):
    """Send the engine a signal in the middle of a stream, which goes on to the end when the next one is there."""
    mark = len(server.lines)
    whole = httpx.post(server.url + "/v1/completions", json=LONG | {"stream": False}, timeout=120).json()
    with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=timeout) as answer:
        lines = answer.iter_lines()
        came = [next(lines)]
        first, killed = server.engine_pid(), time.monotonic()
        os.kill(first, how)
        if how == signal.SIGKILL:
            eventually(lambda: health(server).status_code == 503, 2, lambda: "/health does not know")
            assert time.monotonic() - killed < 2
            refused = httpx.post(server.url + "/v1/completions", json=LONG, timeout=10)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
        came += [line for line in lines if line]
    assert came[-1] == "data: [DONE]"
    assert text_of(came) == whole["choices"][0]["text"]
    assert server.engine_pid() != first
    assert health(server).status_code == 200
    assert not any("Traceback" in line for line in server.lines[mark:])


def test_a_stream_goes_on_when_a_killed_engine_is_back(alone):
    stuck_or_dead(alone, signal.SIGKILL, 60)


@pytest.mark.slow
def test_an_engine_that_stands_still_is_killed_and_started_again():
    with serving("demo", *QUICK, "--dtype", "float32") as server:
        stuck_or_dead(server, signal.SIGSTOP, 60)
        assert any("engine-0 is killed: it hangs: no heartbeat for" in line for line in server.lines)
        assert server.stop() == 0


def test_three_deaths_in_a_row_end_the_server_with_the_cause():
    with serving("demo", *QUICK) as server:
        with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            dead = None
            for _ in range(3):
                eventually(lambda dead=dead: server.has_engine(dead))
                dead = server.engine_pid()
                os.kill(dead, signal.SIGKILL)
            rest = [line for line in lines if line]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert "engine-0" in error["message"]
        assert "can be sent again" in error["message"]
        assert server.process.wait(30) == 1
        eventually(lambda: any("the server ends: engine-0 ended 3 times in a row" in line for line in server.lines), 5)
        (cause,) = [line for line in server.lines if "the server ends" in line]
        assert "the last time with SIGKILL" in cause
        assert "Traceback" not in "".join(server.lines)


# --- more work than it can do

BURST = 40  # clients at once, of which four run and about as many may wait


async def burst(url, rounds):
    """Every client asks again as soon as it has an answer, whatever that was; all answers."""
    ask = {"model": "demo", "prompt": "Return the " * 40, "max_tokens": 64, "ignore_eos": True}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:

        async def one():
            return [await client.post(url + "/v1/completions", json=ask) for _ in range(rounds)]

        return [answer for answers in await asyncio.gather(*(one() for _ in range(BURST))) for answer in answers]


@pytest.mark.parametrize(
    "limit",
    [("--max-queued-requests", "4"), pytest.param(("--max-queued-tokens", "300"), marks=pytest.mark.slow)],
    ids=lambda flag: flag[0],
)
def test_ten_times_too_much_is_refused_and_nothing_is_lost(limit):
    with serving("demo", *QUICK, "--max-num-seqs", "4", *limit) as server:
        asyncio.run(burst(server.url, 3))
        before = server.memory()
        answers = asyncio.run(burst(server.url, 3))
        assert server.memory() - before < 24 << 20
        good = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(good) + len(refused) == len(answers) == 3 * BURST
        assert all(answer.json()["usage"]["completion_tokens"] == 64 for answer in good)
        assert good
        assert len(refused) > BURST
        assert all(1 <= int(answer.headers["retry-after"]) <= 120 for answer in refused)
        assert {answer.json()["error"]["type"] for answer in refused} == {"rate_limit_error"}
        assert all("queue is full" in answer.json()["error"]["message"] for answer in refused)
        eventually(lambda: server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0)
        assert httpx.post(server.url + "/v1/completions", json=LONG | {"max_tokens": 2}, timeout=30).status_code == 200
        assert server.stop() == 0


# --- clients that do not read, and such that do not ask


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    ours = socket.socket()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    ours.connect((host, int(port)))
    return ours


@pytest.mark.slow
def test_a_client_that_hardly_reads_slows_nobody_and_loses_its_request():
    """A byte a second: by the time one fills a packet, whoever read so has been given up. What it asked for takes
    several times as long as that. A second such client costs no memory that the first did not."""
    # so that KV is shared memory, which is not counted: its pages come with the tokens
    settings = (*QUICK, "--kv-cache-memory", "512M", "--kv-address-mode", "contiguous", "--send-timeout", "3")
    with serving("demo", *settings) as server:
        is_read_a_byte_a_second(server)
        before = server.memory()
        is_read_a_byte_a_second(server)
        assert server.memory() - before < 48 << 20
        assert server.stop() == 0


def is_read_a_byte_a_second(server):
    body = json.dumps(LONG | {"n": 16, "max_tokens": 4000, "logprobs": 5}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
    with contextlib.closing(connect(server)) as slow:
        slow.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
        assert slow.recv(1) == b"H"
        ask = LONG | {"max_tokens": 20, "stream": False}
        for byte in b"TTP":
            answer = httpx.post(server.url + "/v1/completions", json=ask, timeout=30)
            assert answer.json()["usage"]["completion_tokens"] == 20
            assert slow.recv(1) == bytes([byte])
        server.wait_for("took nothing of its answer for 3 s and was disconnected")
        ended = server.wait_for(r"499 abort.* completion=(\d+)")
        assert int(ended[1]) < 16 * 4000, "it was not broken off"
        eventually(lambda: server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0, 5)
        # the step that was in flight when its request was broken off holds its blocks until it has ended
        eventually(lambda: server.metric("kv_cache_usage_perc") == 0, 5)


def test_a_thousand_connections_that_say_nothing():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))  # what the server inherits is too few
    try:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(serving("demo", *QUICK))
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
            for _ in range(1000):
                stack.enter_context(contextlib.closing(connect(server)))
            files = Path(f"/proc/{server.process.pid}/fd")
            eventually(lambda: len(list(files.iterdir())) > 1000, 30, lambda: "they are not accepted")
            answer = httpx.post(server.url + "/v1/completions", json=LONG | {"stream": False}, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 500
            assert health(server).status_code == 200
            assert server.stop() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
