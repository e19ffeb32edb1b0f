"""Instances that join, leave, and are started and stopped, with real processes."""

import contextlib
import json
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import yaml
import zmq

from penstock.core.wire.codec import encode
from penstock.core.wire.engine import Hello
from tests.helpers.deployments import PACED, colocated, deployed
from tests.helpers.servers import Served
from tests.helpers.waiting import eventually

ASK = {"model": "demo", "prompt": "import os", "temperature": 0}


def complete(url, **more):
    answer = httpx.post(url + "/v1/completions", json={**ASK, **more}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def states(up):
    return {i["name"]: i["state"] for i in json.loads(up.get("/health"))["instances"]}


@pytest.mark.slow
def test_the_scaler_starts_an_instance_under_load_and_drains_and_stops_it_afterwards():
    """HFX's, whose thresholds and cooldowns (30 s until it scales in) are its own."""
    scaling = {"least": 1, "most": 2, "start-seconds": 2, "interval": 0.2}
    slow = PACED | {"slowdown": 3}
    with deployed(colocated(1, engine=slow, policy="hfx_scaling", scaling=scaling)) as up:
        assert "engine-1" not in up.pids()
        assert list(states(up)) == ["engine-0"]
        with ThreadPoolExecutor(40) as pool:
            texts = [pool.submit(complete, up.url, max_tokens=300, ignore_eos=True) for _ in range(40)]
            eventually(lambda: states(up).get("engine-1") == "ready", 30, up.log)
            assert len({text.result() for text in texts}) == 1
        long = {"max_tokens": 3000, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            alone = [pool.submit(complete, up.url, **long) for _ in range(2)]  # one on each
            eventually(lambda: any("is drained: rho 0.00" in line for line in up.lines), 90, up.log)
            assert len({text.result() for text in alone}) == 1, "what runs on it ends as ever"
        eventually(lambda: list(states(up)) in (["engine-0"], ["engine-1"]), 30, up.log)
        (left,) = states(up)
        eventually(lambda: {n for n in up.pids() if n.startswith("engine")} == {left}, 30, up.log)
        assert complete(up.url, max_tokens=12)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@contextlib.contextmanager
def joined(folder, master, cluster, **content):
    """A `penstock join`; killed at the end if it still runs. `master` is None where a registry tells it."""
    file = folder / f"{len(list(folder.iterdir()))}.yaml"
    file.write_text(yaml.safe_dump({"model": "demo", "cluster": cluster} | content, sort_keys=False))
    host = Served("join", *([master] if master else []), str(file), more=())
    try:
        yield host
    finally:
        if host.process.poll() is None:
            host.process.kill()
            host.process.wait()


def stream(url, tokens, **more):
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    ask = {**ASK, "max_tokens": tokens, "stream": True, "extra_body": {"ignore_eos": True}}
    return client.completions.create(**ask, **more)


def text_of(chunks):
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def test_hosts_join_leave_and_fail_and_no_token_is_lost(tmp_path):
    cluster = {"host": "127.0.0.1", "port": free_port(), "secret": "of these hosts"}
    slow = PACED | {"slowdown": 3}
    content = colocated(1, engine=slow, policy="round_robin", cluster=cluster)
    master, mine = f"127.0.0.1:{cluster['port']}", {"engine": slow}
    with deployed(content) as up:
        expected = text_of(stream(up.url, 300))
        with joined(tmp_path, master, cluster, **mine, instances=[{"name": "second"}]) as second:
            eventually(lambda: states(up) == {"engine-0": "ready", "second-0": "ready"}, 60, up.log)
            eventually(lambda: any("second-0 is ready: " in line for line in up.lines), 30, up.log)
            _refused_without_the_secret(up)
            with ThreadPoolExecutor(4) as pool:
                texts = [pool.submit(lambda: text_of(stream(up.url, 300))) for _ in range(4)]
                eventually(lambda: up.metric("num_requests_running", engine="second-0") == 2, 30, up.log)
                second.process.send_signal(signal.SIGTERM)
                eventually(lambda: any("second-0 is drained: it is to leave" in line for line in up.lines), 30, up.log)
                assert {text.result() for text in texts} == {expected}
            assert second.process.wait(30) == 0
            eventually(lambda: states(up) == {"engine-0": "ready"}, 30, up.log)
            assert not moved(up), "it has drained"
        with joined(tmp_path, master, cluster, **mine, instances=[{"name": "third"}]) as third:
            eventually(lambda: any("third-0 is ready: " in line for line in up.lines), 60, up.log)
            eventually(lambda: states(up) == {"engine-0": "ready", "third-0": "ready"}, 60, up.log)
            with ThreadPoolExecutor(4) as pool:
                texts = [pool.submit(lambda: text_of(stream(up.url, 300))) for _ in range(4)]
                eventually(lambda: up.metric("num_requests_running", engine="third-0") == 2, 30, up.log)
                third.process.kill()
                assert {text.result() for text in texts} == {expected}
            eventually(lambda: states(up) == {"engine-0": "ready"}, 30, up.log)
            assert moved(up) == 2


def moved(up):
    """Requests that had to go on elsewhere."""
    return sum(map(int, re.findall(r"(\d+) requests? (?:is|are) to go on elsewhere", "".join(up.lines))))


def _refused_without_the_secret(up):
    """Who does not know it cannot even greet."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED)
        stranger.connect(up.settings("engine-0")["public"]["address"])
        stranger.send(encode(Hello("stranger")))
        assert monitor.poll(10_000), "it is cut off"
        assert not stranger.poll(100)
        stranger.disable_monitor()
        monitor.close(0)
    assert os.environ.get("PENSTOCK_CLUSTER_SECRET") is None
