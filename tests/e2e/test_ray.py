"""Engines as Ray actors, on two Ray nodes of this machine."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import yaml

from tests.helpers.deployments import PACED, deployed
from tests.helpers.ray_nodes import ray_nodes
from tests.helpers.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (penstock[ray])"),
]
SLOW = PACED | {"slowdown": 3}
NAMES = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
PROMPT, TOKENS = "import os\n" * 100, 300  # of several blocks, and 4 s


@pytest.fixture(scope="module")
def cluster():
    with ray_nodes(2, 2) as nodes:
        yield nodes


def content(cluster, **more):
    groups = [{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}]
    ray = {"launcher": "ray", "ray": {"address": cluster.head}}
    return {"model": "demo", "engine": SLOW, "instances": groups, "policy": "least_loaded"} | ray | more


def ask(up):
    client = openai.OpenAI(base_url=up.url + "/v1", api_key="none", max_retries=0, timeout=120)
    chunks = client.completions.create(
        model="demo", prompt=PROMPT, temperature=0, max_tokens=TOKENS, stream=True, extra_body={"ignore_eos": True}
    )
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def places(up):
    """Instance -> process id and Ray node of its last incarnation."""
    found = [re.search(r"(\S+) is process (\d+) on Ray node (\S+)", line) for line in up.lines]
    return {match[1]: (int(match[2]), match[3]) for match in found if match}


def ready(up):
    said = json.loads(up.get("/health"))["instances"]
    return {i["name"] for i in said if i["state"] == "ready" and not i["trouble"]}


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def runs(pid):
    return Path(f"/proc/{pid}").exists()


def test_no_token_is_lost_when_an_engine_an_actor_or_a_node_dies(cluster):
    with deployed(content(cluster)) as up:
        assert {node for _, node in places(up).values()} == {node.address for node in cluster.nodes}
        left = cluster.left()
        assert {name.rpartition(".")[0] for name in left["actors"]} == set(left["groups"]) == NAMES
        expected = ask(up)
        assert up.metric("handoffs_total") == 1, "over TCP, between engines of Ray"

        def all_right(trouble):
            """Eight streams, with some trouble in their middle; seconds from then until all is well again."""
            with ThreadPoolExecutor(8) as pool:
                texts = [pool.submit(ask, up) for _ in range(8)]
                eventually(lambda: up.metric("num_requests_running") >= 4, 30, up.log)
                time.sleep(0.5)  # some way into the answers
                began = time.monotonic()
                trouble()
                assert {text.result() for text in texts} == {expected}
            return began

        def seconds_until_back(began, victims, before):
            eventually(lambda: all(places(up)[name] != before[name] for name in victims), 120, up.log)
            eventually(lambda: ready(up) == NAMES, 60, up.log)
            return round(time.monotonic() - began, 1)

        took = {}
        before = places(up)
        began = all_right(lambda: os.kill(before["decode-0"][0], signal.SIGKILL))
        took["engine"] = seconds_until_back(began, ["decode-0"], before)
        assert places(up)["decode-0"][1] == before["decode-0"][1], "the actor is the same"

        before = places(up)
        began = all_right(lambda: os.kill(parent(before["prefill-1"][0]), signal.SIGKILL))
        took["actor"] = seconds_until_back(began, ["prefill-1"], before)
        assert any("prefill-1 is lost: Ray has started its actor again" in line for line in up.lines)

        before = places(up)
        second = cluster.nodes[1]
        victims = [name for name, (_, node) in before.items() if node == second.address]
        assert victims
        began = all_right(second.kill)
        eventually(lambda: not any(runs(before[name][0]) for name in victims), 30)
        eventually(lambda: sum("waits for a Ray node that has 1 CPU" in line for line in up.lines) >= 1, 60, up.log)
        assert ready(up) == NAMES - set(victims)
        third = cluster.start(2)
        took["node, with a new one"] = seconds_until_back(began, victims, before)
        assert {places(up)[name][1] for name in victims} == {third.address}
        assert ask(up) == expected
        print(took)

        pids = [pid for pid, _ in places(up).values()]
        actors = [parent(pid) for pid in pids]
        assert up.stop() == 0
        eventually(lambda: not any(map(runs, [*pids, *actors])), 20)
        assert cluster.left() == {"actors": [], "groups": []}
        assert not any("Traceback" in line for line in up.lines), up.log()


def test_an_engine_that_starts_again_has_its_weights_from_another(cluster):
    real = {"weight-cache": False, "kv-cache-memory": "64M", "max-model-len": 512, "max-num-batched-tokens": 128}
    with deployed(content(cluster, engine=real, instances=[{"count": 2}], policy="round_robin")) as up:
        eventually(lambda: ready(up) == {"engine-0", "engine-1"}, 90, up.log)
        os.kill(places(up)["engine-1"][0], signal.SIGKILL)
        came = 'engine="engine-1",model_name="demo",source="map"'  # these nodes are one machine
        eventually(lambda: came in up.get("/metrics"), 90, up.log)


def test_a_warm_actor_becomes_an_instance_and_is_replaced(cluster):
    real = {"weight-cache": False, "kv-cache-memory": "64M", "max-model-len": 1024, "max-num-batched-tokens": 128}
    more = {"engine": real, "instances": [{"count": 2}], "policy": "round_robin", "warm-pool": 1}
    with deployed(content(cluster, **more)) as up:

        def warm(number):
            """Process ids of those that were warm so far, when there are as many."""

            def found():
                lines = (re.search(r"process (\d+) is warm on Ray node", line) for line in up.lines)
                return [int(match[1]) for match in lines if match]

            eventually(lambda: len(found()) >= number, 60, up.log)
            return found()

        def started_from_pool(name):
            pid, node = places(up)[name]
            return (
                pid
                if any(f"{name} is process {pid} on Ray node {node} (of the warm pool)" in x for x in up.lines)
                else 0
            )

        eventually(lambda: ready(up) == {"engine-0", "engine-1"}, 90, up.log)
        (first,) = warm(1)
        expected = ask(up)
        os.kill(places(up)["engine-1"][0], signal.SIGKILL)
        eventually(lambda: started_from_pool("engine-1") == first, 60, up.log)
        eventually(lambda: ready(up) == {"engine-0", "engine-1"}, 60, up.log)
        came = 'engine="engine-1",model_name="demo",source="warm"'
        eventually(lambda: came in up.get("/metrics"), 60, up.log)
        assert {ask(up) for _ in range(2)} == {expected}

        second = warm(2)[1]
        os.kill(second, signal.SIGKILL)
        eventually(lambda: any("a warm actor of Ray's has ended, and is replaced" in x for x in up.lines), 60, up.log)
        third = warm(3)[2]
        os.kill(parent(places(up)["engine-0"][0]), signal.SIGKILL)
        eventually(lambda: started_from_pool("engine-0") == third, 60, up.log)
        eventually(lambda: ready(up) == {"engine-0", "engine-1"}, 60, up.log)
        for path in ("map", "warm"):  # seconds until they served
            starts = up.metric("instance_starts_total", path=path)
            print(path, starts and up.metric("instance_start_seconds_total", path=path) / starts)
        left = warm(4)
        actors = cluster.left()["actors"]
        assert len(actors) == 3, "two instances, and who waits"
        assert up.stop() == 0
        eventually(lambda: not any(map(runs, left)), 20)
        assert cluster.left() == {"actors": [], "groups": []}


def apply(up, file, wanted, *more):
    file.write_text(yaml.safe_dump(wanted))
    command = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "up",
        "--apply",
        str(file),
        "--port",
        up.url.rpartition(":")[2],
        *more,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_it_changes_while_requests_run_or_goes_back(cluster, tmp_path):
    file = tmp_path / "wanted.yaml"
    with deployed(content(cluster, engine=PACED, instances=[{}], policy="round_robin")) as up:
        wanted = content(cluster, engine=PACED | {"max-num-seqs": 16}, instances=[{"count": 2}], policy="round_robin")
        with ThreadPoolExecutor(2) as pool:
            over, expected = threading.Event(), ask(up)

            def ask_again_and_again():
                texts = [ask(up)]
                while not over.is_set():
                    texts.append(ask(up))
                return texts

            asked = [pool.submit(ask_again_and_again) for _ in range(2)]
            try:
                done = apply(up, file, wanted)
                assert done.returncode == 0, done.stderr + up.log()
                assert "engine-0 is replaced: max-num-seqs" in done.stdout
                assert ready(up) == {"engine-0.1", "engine-1"}
                without_room = wanted | {"instances": [{"count": 2, "cpus": 64}]}
                done = apply(up, file, without_room, "--start-timeout", "3")
                assert done.returncode == 1, done.stdout + done.stderr + up.log()
                assert ready(up) == {"engine-0.1", "engine-1"}
            finally:
                over.set()
            assert {text for texts in asked for text in texts.result()} == {expected}
        assert up.stop() == 0
    assert cluster.left() == {"actors": [], "groups": []}


def test_nobody_outlives_a_killed_launcher(cluster):
    with deployed(content(cluster, engine=PACED, instances=[{}])) as up:
        ((pid, _),) = places(up).values()
        up.process.kill()
        eventually(lambda: not runs(pid), 30)
        eventually(lambda: cluster.left() == {"actors": [], "groups": []}, 30)


def test_an_engine_that_cannot_be_served_says_why(cluster, tmp_path):
    file = tmp_path / "up.yaml"
    engine = PACED | {"max-model-len": 99999999}
    file.write_text(yaml.safe_dump(content(cluster, engine=engine, instances=[{}], port=0)))
    command = [sys.executable, "-m", "penstock.cli.main", "up", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 2, done.stderr
    assert "[engine-0]: max-model-len: 99999999, " in done.stderr
    assert "engine-0 ended with exit code 2: it cannot be served" in done.stderr
    assert cluster.left() == {"actors": [], "groups": []}


def test_without_a_cluster_it_says_what_to_do(tmp_path):
    file = tmp_path / "up.yaml"
    ray = {"launcher": "ray", "ray": {"address": "127.0.0.1:1"}}
    file.write_text(yaml.safe_dump({"model": "demo", "engine": PACED, "instances": [{}], "port": 0} | ray))
    command = [sys.executable, "-m", "penstock.cli.main", "up", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 2
    assert (
        "ray.address: no Ray cluster at 127.0.0.1:1 of which this machine is a node, `ray start` makes" in done.stderr
    )
    assert "Traceback" not in done.stderr
