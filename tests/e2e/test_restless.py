"""Roles that switch every second, and sequences that move again and again, over real processes: nobody notices."""

import os
import random
import re
from pathlib import Path

import httpx
import pytest
import yaml

from tests.helpers.chaos import BLOCKS, PATIENCE, Chaos, Load, paced
from tests.helpers.deployments import DEMO, colocated, deployed, disaggregated
from tests.helpers.restless import restless_masters
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow

PACED_16 = Path(__file__).parents[2] / "recipes" / "paced-16.yaml"


@pytest.fixture
def disturb(tmp_path, monkeypatch):
    """To be called before a deployment whose master is to give no rest."""
    return lambda: [monkeypatch.setenv(*one) for one in restless_masters(tmp_path, os.environ).items()]


def answers(up, made, at_once):
    """Of requests that all have to be answered, by instances without rest, and without one that goes on by recovery.
    Nearly every sequence moves twice and more."""
    mark, begun = len(up.lines), up.metric("recoveries_total")
    load = Load(up.urls, made, at_once, patience=1800)
    records = load.wait()
    failed = [record.detail for record in records if record.error]
    assert not failed, f"{len(failed)}: {failed[:5]}{up.log()}"
    assert up.metric("recoveries_total") == begun, up.log()
    lines = up.lines[mark:]
    routes = [found[1] for line in lines if (found := re.search(r" instance=(\S+) model=", line))]
    twice = sum(route.count(">") >= 2 for route in routes)
    assert twice > 0.9 * len(made), f"{twice} of {len(made)}"
    switched = sum(" has role " in line and " after the decision" in line for line in lines)
    seconds = max(r.end for r in records) - min(r.sent for r in records)
    instances = sum(name.startswith(("prefill-", "decode-")) for name in up.pids())
    assert switched > 0.5 * instances * seconds, f"{switched} switches of {instances} instances in {seconds:.0f} s"
    return load


@pytest.mark.parametrize(("policy", "kind", "requests"), [("unified", "shared", 5000), ("xllm", "tcp", 1000)])
def test_sixteen_engines_without_any_rest_lose_nothing(policy, kind, requests, disturb):
    content = yaml.safe_load(PACED_16.read_text())
    content |= {"policy": policy, "kv-pool": {"orphans": 3}, "transport": {"kind": kind}}
    content["engine"] |= {"kv-blocks": BLOCKS}
    disturb()
    with deployed(content) as up:
        chaos = Chaos(up, links=len(up.pids()))  # all may have to hand over to all
        load = answers(up, chaos.bodies(requests, seed=1, prompts=(20, 600)), at_once=48)
        assert chaos.verify(load).checked == requests
        chaos.settle()
        chaos.stop()


def demo_bodies(count):
    """Requests of the demo model, greedy and sampled, some of which begin alike."""
    rng = random.Random(count)
    common = [rng.randrange(10, 4000) for _ in range(200)]
    for i in range(count):
        own = [rng.randrange(10, 4000) for _ in range(rng.randint(5, 200))]
        yield {
            "model": "demo",
            "prompt": common[: rng.choice([0, 64, 200])] + own,
            "max_tokens": rng.randint(100, 200),
            "temperature": 0.8 * (i % 2),
            "repetition_penalty": 1.0 + 0.3 * (i % 3 == 1),
            "seed": i,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_the_models_tokens_are_those_of_an_engine_that_has_rest(kind, disturb):
    made = list(demo_bodies(200))
    with deployed(colocated(1)) as up:
        undisturbed = Load(up.urls, made, at_once=32, patience=1800).wait()
        assert up.stop() == 0
    disturb()
    with deployed(disaggregated(2, 2, kind, policy="unified", engine=DEMO | {"kv-cache-memory": "128M"})) as up:
        moved = answers(up, made, at_once=32).records
        eventually(lambda: up.metric("kv_cache_usage_perc") == 0)
        assert up.metric("num_requests_running") == up.metric("num_requests_waiting") == 0
        assert up.stop() == 0
        assert not any("Traceback" in line for line in up.lines), up.log()
    right = [record.answer.token_ids for record in undisturbed]
    assert [len(tokens) for tokens in right] == [body["max_tokens"] for body in made]
    assert [record.answer.token_ids for record in moved] == right


@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_a_frontend_that_dies_while_its_sequences_move_leaves_nothing(kind, disturb):
    """And the other one's clients notice nothing; prompts are embedded meanwhile."""
    disturb()
    with paced(kind, 2, 2, frontends=2, policy="unified") as chaos:
        up = chaos.up
        ask = {"model": "demo", "input": [f"{word} " * 200 for word in ("one", "two", "three")]}

        def embedded():
            answer = httpx.post(up.urls[1] + "/v1/embeddings", json=ask, timeout=PATIENCE)
            return [row["embedding"] for row in answer.raise_for_status().json()["data"]]

        right = embedded()
        for seed in range(4):
            load = chaos.start(chaos.bodies(40, seed, prompts=(20, 600), tokens=100))
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
