"""Instances that join, leave, and are started and stopped, with real processes."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.helpers.deployments import PACED, colocated, deployed
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
