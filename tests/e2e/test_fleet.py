"""Instances that join, leave, and are started and stopped, with real processes."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import httpx
import openai
import pytest
import yaml
import zmq

from penstock.cli.top import scaling_lines
from penstock.core.wire.codec import encode
from penstock.core.wire.engine import Hello
from penstock.drill.holdings import open_files, pool_inodes
from tests.helpers.chaos import raised
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


FLOOR, CEILING, TIDES = 1, 3, 5
SHORT, LONG = 150, 1200  # tokens
BACK = 2.0  # seconds; the cooldown of a cut
CHANGE = re.compile(r"(\S+)Z INFO +penstock\.master.*: \S+ is (started|drained)\b")


class Gauge:
    """Looks at the engines' processes many times a second.

    Attributes:
        pids: of all that there have been.
        most: that there were at once.
        seconds: for which they were there, together.
    """

    def __init__(self, up):
        self.pids, self.most, self.seconds = set(), 0, 0.0
        self._up, self._over = up, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self):
        before = time.monotonic()
        while not self._over.wait(0.02):
            there = {pid for name, pid in self._up.pids().items() if name.startswith("engine")}
            now = time.monotonic()
            self.pids |= there
            self.most = max(self.most, len(there))
            self.seconds += len(there) * (now - before)
            before = now

    def stop(self):
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def gauged(up):
    gauge = Gauge(up)
    try:
        yield gauge
    finally:
        gauge.stop()


@pytest.mark.slow
def test_the_fleet_goes_with_the_tide_and_nothing_fails_or_stays():
    """HFX's scaler, whose thresholds are its own, and whose rates are of the last ten seconds. The budget of devices is
    the ceiling."""
    scaling = {"least": FLOOR, "most": CEILING + 1, "devices": CEILING, "start-seconds": 2, "interval": 0.2}
    scaling |= {"cooldown-out": 0.5, "cooldown-in": BACK}
    content = colocated(FLOOR, engine=PACED | {"slowdown": 3}, policy="hfx_scaling", scaling=scaling)
    with deployed(content) as up:
        expected = {tokens: complete(up.url, max_tokens=tokens, ignore_eos=True) for tokens in (SHORT, LONG)}
        with gauged(up) as gauge, ThreadPoolExecutor(40) as pool:
            cost, seen = up.metric("instance_seconds_total"), gauge.seconds
            low = []
            for _ in range(TIDES):
                texts = _rise(up, pool, expected)
                _fall(up)
                assert {text.result() for text in texts} == {expected[LONG]}, "what runs on it goes on elsewhere"
                low.append(belongings(up))
            eventually(lambda: belongings(up) <= low[0], 10, lambda: f"{low}, {belongings(up)}")
            told = [way for _, way in changes(up)]
            eventually(lambda: up.metric("instance_starts_total") == FLOOR + told.count("started"), 10, up.log)
            spent, seconds = up.metric("instance_seconds_total") - cost, gauge.seconds - seen
        assert spent == pytest.approx(seconds, rel=0.03, abs=CEILING)  # the metric is renewed every second
        assert gauge.most == CEILING
        assert told.count("started") == told.count("drained") >= TIDES * (CEILING - FLOOR)
        assert turns(up, BACK) <= 1
        assert any(move["reason"].startswith("drain: ") for move in overview(up)["relocations"])
        assert not raised(up.lines)
        url, folder, pids = httpx.URL(up.url), up.folder, gauge.pids | set(up.pids().values())
        memory = pool_inodes(up.pids()["kv-pool"])
        assert memory
        assert up.stop() == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not folder.exists()
    socket.create_server((url.host, url.port)).close()
    assert not [path for path in Path("/proc").glob("[0-9]*") if memory & pool_inodes(int(path.name))]


def _rise(up, pool, expected):
    """Load until the ceiling is reached, and then streams that are still there when it has gone."""
    ebb = threading.Event()

    def wave():
        while not ebb.is_set():
            assert complete(up.url, max_tokens=SHORT, ignore_eos=True) == expected[SHORT]

    waves = [pool.submit(wave) for _ in range(30)]
    try:
        held = f"budget: {CEILING} of {CEILING} devices are taken"
        eventually(lambda: held in "".join(scaling_lines(overview(up))), 60, up.log)
        eventually(lambda: list(states(up).values()) == ["ready"] * CEILING, 60, up.log)
    finally:
        ebb.set()
    for one in waves:
        one.result()
    return [pool.submit(complete, up.url, max_tokens=LONG, ignore_eos=True) for _ in range(CEILING)]


def _fall(up):
    """Until the floor is reached."""
    eventually(lambda: len(engines(up)) == len(states(up)) == FLOOR, 90, up.log)


def overview(up):
    return json.loads(up.get("/overview"))["master"]


def engines(up):
    return {name for name in up.pids() if name.startswith("engine")}


def belongings(up):
    """How many files and sockets the processes that stay have open, and how many are in their folder."""
    there = {"launcher": up.process.pid} | up.pids()
    files = Counter({name: open_files(pid) for name, pid in there.items() if not name.startswith("engine")})
    return files + Counter({"folder": len(list(up.folder.iterdir()))})


def changes(up):
    """When instances were started and stopped, and which of both, as the master decided."""
    found = filter(None, map(CHANGE.search, up.lines))
    return [(datetime.fromisoformat(line[1]).timestamp(), line[2]) for line in found]


def turns(up, cooldown):
    """The most changes in the other direction in any time of so many seconds."""
    found = changes(up)
    spans = [[way for at, way in found[first:] if at < begin + cooldown] for first, (begin, _) in enumerate(found)]
    return max(sum(way != other for way, other in pairwise(span)) for span in spans)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_engine_that_has_become_slow_is_drained_and_started_again():
    """It is stopped for most of the time, until it is another process; no request fails or waits for the others."""
    restart = {"slow-after": 3, "heartbeat-timeout": 10}
    content = colocated(3, engine=PACED | {"slowdown": 4}, policy="round_robin", restart=restart)
    over = threading.Event()

    def slow_down(pid):
        while not over.is_set():
            for number, seconds in ((signal.SIGSTOP, 0.17), (signal.SIGCONT, 0.03)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                over.wait(seconds)

    def keep_asking(url):
        texts = set()
        while not over.is_set():
            texts.add(complete(url, max_tokens=100))
        return texts

    with deployed(content) as up, ThreadPoolExecutor(7) as pool:
        asked = [pool.submit(keep_asking, up.url) for _ in range(6)]
        before = up.pids()["engine-1"]
        slowing = pool.submit(slow_down, before)
        try:
            up.wait_for("engine-1 is drained: slow: 0.", 120)
            up.wait_restarted("engine-1", before, 60)
            eventually(lambda: set(states(up).values()) == {"ready"}, 60)
            eventually(lambda: up.metric("instance_changes_total", what="restart") == 1)
        finally:
            over.set()
        slowing.result()
        (text,) = set.union(*(each.result() for each in asked))
        assert text
        assert "engine-1 was stopped, and starts again" in up.log()
        assert up.metric("instance_lost_total", engine="engine-1") == 0, "that was planned"
        moves = json.loads(up.get("/overview"))["master"]["moves"]
        assert [(move["what"], move["instance"]) for move in moves] == [("restart", "engine-1")]
        assert up.stop() == 0
