"""Roles that switch every second, and sequences that move again and again, over real processes: nobody notices."""

import asyncio
import os
import re
from pathlib import Path

import httpx
import pytest
import yaml

from tests.helpers.chaos import BLOCKS, PATIENCE, Chaos, Load, bodies, paced, served_model
from tests.helpers.deployments import PACED, deployed, disaggregated
from tests.helpers.restless import restless_masters
from tests.helpers.waiting import eventually

PACED_16 = Path(__file__).parents[2] / "recipes" / "paced-16.yaml"


@pytest.fixture
def no_rest(tmp_path, monkeypatch):
    for name, value in restless_masters(tmp_path, os.environ).items():
        monkeypatch.setenv(name, value)


def switched(up, seconds):
    """Instances have had another role in every second, and have said so."""
    said = [line for line in up.lines if " has role " in line and " after the decision" in line]
    assert len(said) > 0.5 * seconds * len(up.pids()), "".join(up.lines[-60:])


def routes(lines):
    """Of requests, where each of them ran: "p0>d1>p1"."""
    return [found[1] for line in lines if (found := re.search(r" instance=(\S+) model=", line))]


def unnoticed(chaos, made, at_once, patience):
    """All get their whole text, none is recovered, each moves twice and more on average, and nothing is left."""
    up = chaos.up
    mark = len(up.lines)
    load = Load(up.urls, made, at_once, patience)
    records = load.wait()
    failed = [record.detail for record in records if record.error]
    assert not failed, f"{len(failed)}: {failed[:5]}{up.log()}"
    assert chaos.verify(load).checked == len(made)
    assert up.metric("recoveries_total") == 0, up.log()
    twice = sum(route.count(">") >= 2 for route in routes(up.lines[mark:]))
    print("TWICE", twice, len(made), up.metric("handoffs_total"), max(r.end for r in records) - min(r.sent for r in records))
    assert twice > 0.9 * len(made)
    chaos.settle()
    assert up.metric("num_requests_running") == up.metric("num_requests_waiting") == 0
    seconds = max(r.end for r in records) - min(r.sent for r in records)
    switched(up, seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "kind", "requests"), [("unified", "shared", int(__import__("os").environ.get("N","5000"))), ("xllm", "tcp", 1000)])
def test_sixteen_engines_without_any_rest_lose_nothing(policy, kind, requests, no_rest):
    content = yaml.safe_load(PACED_16.read_text())
    content |= {"policy": policy, "kv-pool": {"orphans": 3}, "transport": {"kind": kind}}
    content["engine"] |= {"kv-blocks": BLOCKS}
    with deployed(content) as up:
        chaos = Chaos(up)
        made = chaos.bodies(requests, seed=1, prompts=(20, 600), tokens=60)
        unnoticed(chaos, made, at_once=48, patience=1200)
        chaos.stop()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_a_frontend_that_dies_while_its_sequences_move_leaves_nothing(kind, no_rest):
    """And the other one's clients notice nothing; prompts are embedded meanwhile."""
    with paced(kind, 2, 2, frontends=2, policy="unified") as chaos:
        up = chaos.up
        ask = {"model": "demo", "input": [f"{word} " * 200 for word in ("one", "two", "three")]}

        def embedded():
            answer = httpx.post(up.urls[1] + "/v1/embeddings", json=ask, timeout=PATIENCE)
            return [row["embedding"] for row in answer.raise_for_status().json()["data"]]

        right = embedded()
        for seed in range(4):
            made = chaos.bodies(40, seed, prompts=(20, 600), tokens=100)
            load = Load(up.urls, made)
            begun = up.metric("handoffs_total", 0)
            eventually(lambda begun=begun: up.metric("handoffs_total", 0) > begun + 10, what=up.log)
            earlier = up.kill("frontend-0")
            while not load.ended:
                assert embedded() == right
            records = load.wait()
            assert not [r.detail for r in records[1::2] if r.error], up.log()
            assert any(r.error for r in records[::2]), "it died too late"
            up.wait_restarted("frontend-0", earlier)
            chaos.settle()
            chaos.verify(load)
