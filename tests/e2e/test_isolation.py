"""Requests that break engines are refused, with everything else in flight; whoever only was there goes on."""

import re

import httpx
import pytest

from tests.helpers.chaos import PATIENCE, UNHURRIED, paced
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow

POISON = 0  # a token that no other prompt has, and that modelled engines never draw


def engines(count, how):
    """A deployment of these; a step that computes POISON breaks them."""
    return paced(instances=[{"count": count}], engine=UNHURRIED | {"poison": f"{POISON}:{how}"})


def isolated(up, verdict):
    return up.metric("isolated_requests_total", verdict=verdict)


@pytest.mark.parametrize(("count", "how"), [(3, "SIGSEGV"), (3, "error"), (1, "SIGSEGV")])
def test_a_request_that_breaks_two_engines_is_refused_and_no_other(count, how):
    """Its poison comes in the third step that computes of its prompt. A single engine is broken twice."""
    with engines(count, how) as chaos:
        chaos.expected += (f"RuntimeError: token {POISON} breaks this engine",)
        up, lost = chaos.up, chaos.up.metric("instance_lost_total")
        mark, load = len(up.lines), chaos.start(chaos.bodies(4 * count, seed=3, prompts=(100, 600), tokens=200))
        chaos.reach("decode", mark)
        ask = {"model": "demo", "prompt": [*range(10, 310), POISON], "max_tokens": 10, "ignore_eos": True}
        refused = httpx.post(
            up.url + "/v1/completions", json=ask, headers={"x-request-id": "poisoned"}, timeout=PATIENCE
        )
        assert not load.ended, "there was nothing beside it"
        assert refused.status_code == 500, refused.text
        assert refused.headers["x-should-retry"] == "false"
        assert refused.json()["error"]["code"] == "request_breaks_engines"
        says = re.compile(r"request \S*poisoned\S* is refused: it has broken ")
        eventually(lambda: any(says.search(line) for line in up.lines[mark:]), what=up.log)
        records = load.wait()
        chaos.settle()
        assert not [record.detail for record in records if record.error], up.log()
        assert chaos.verify(load).checked == 4 * count
        assert up.metric("instance_lost_total") == lost + 2
        assert isolated(up, "refused") == 1
        assert isolated(up, "suspected") > 1, "nothing ran beside it"


def test_engines_that_are_killed_convict_nobody():
    """However often, with the same requests."""
    with engines(3, "SIGSEGV") as chaos:
        up = chaos.up
        mark, load = len(up.lines), chaos.start(chaos.bodies(12, seed=4, prompts=(100, 600), tokens=400))
        for victim in 2 * chaos.engines:
            chaos.reach("decode", mark)
            earlier = up.kill(victim)
            up.wait_restarted(victim, earlier)
            eventually(lambda victim=victim: chaos.inspect(victim), what=up.log)
        assert not load.ended, "it was over too soon"
        records = load.wait()
        chaos.settle()
        assert not [record.detail for record in records if record.error], up.log()
        assert chaos.verify(load).checked == 12
        assert up.metric("recoveries_total") >= 12
        assert isolated(up, "suspected") == isolated(up, "refused") == 0
