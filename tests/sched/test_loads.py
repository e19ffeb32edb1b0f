"""What lies below a device is dearer to policies than what is on it, and cheaper than what is computed."""

import random
from dataclasses import replace

import pytest

from penstock.sched.cluster import ClusterView, Rates
from penstock.sched.cluster.rtp_llm import make_rtp_llm
from penstock.sched.cluster.unified import Unified
from penstock.sched.cluster.xllm import make_xllm
from penstock.sched.steptime import StepTime
from penstock.service.history import first_token
from tests.helpers.policies import TIMES, demand, instance

POLICIES = {"unified": Unified, "rtp_llm": make_rtp_llm, "xllm": lambda: make_xllm()[0]}
NOW = 10.0
PROMPT, HIT = 32768, 32704  # tokens; they take 0.6 s to compute and 0.09 s to load
SLOW = StepTime(replace(TIMES.device, host_bandwidth=TIMES.device.host_bandwidth / 40), TIMES.shape)


def decide(name, instances, hits=(), loads=(), tier="host"):
    """Who prefills a prompt, with a hit on some of which some have it below the device."""
    one = demand(
        "r",
        PROMPT,
        arrived=NOW,
        ttft=5.0,
        tpot=0.05,
        hits=dict.fromkeys(hits, HIT),
        loads={key: {tier: HIT} for key in loads},
    )
    view = ClusterView(now=NOW, instances=instances, queue=(one,), rates=Rates(output_tokens=30.0))
    return POLICIES[name]().decide(view, random.Random(0)), view


def test_what_there_is_to_load():
    one = demand("r", 300, hits={"a": 256, "b": 64}, loads={"a": {"host": 64, "disk": 128}})
    assert [one.to_load(name) for name in "abc"] == [192, 0, 0]
    assert instance("b").load_seconds(one) == 0.0
    assert instance("a").load_seconds(one) == pytest.approx(TIMES.load_ms(192) / 1e3), "nothing is measured"
    slower = instance("a", load_ms={"host": 1.0, "disk": 8.0, "remote": 100.0})
    assert slower.load_seconds(one) == pytest.approx(1.0e-3 + 2 * 8.0e-3)


@pytest.mark.parametrize("name", POLICIES)
def test_a_tier_costs_what_its_instance_measures_of_it(name):
    measured = {"host": 64 * 1e3 / HIT * 0.05, "disk": 64 * 1e3 / HIT * 0.2, "remote": 64 * 1e3 / HIT * 2.0}
    instances = [instance("below", load_ms=measured), instance("none")]
    costs = {}
    for tier, seconds in (("host", 0.05), ("disk", 0.2)):
        decision, view = decide(name, instances, hits=["below"], loads=["below"], tier=tier)
        assert instances[0].load_seconds(view.queue[0]) == pytest.approx(seconds)
        assert decision.prefill == "below"
        costs[tier] = decision.costs["prefill"]["below"]
    assert costs["disk"] - costs["host"] == pytest.approx(150, abs=1)
    assert decide(name, instances, hits=["below"], loads=["below"], tier="remote")[0].prefill == "none"


@pytest.mark.parametrize("name", POLICIES)
def test_a_device_goes_before_what_is_below_it_and_that_before_computing(name):
    names = ["none", "below", "device"]
    instances = [instance(n) for n in names]
    decision, view = decide(name, instances, hits=["below", "device"], loads=["below"])
    assert decision.prefill == "device"
    costs, loading = decision.costs["prefill"], TIMES.load_ms(HIT)
    assert loading > 50
    assert costs["below"] == pytest.approx(costs["device"] + loading)
    assert costs["below"] < costs["none"] / 2
    judged = [first_token(view, view.queue[0], i) for i in instances]
    assert judged[1] == pytest.approx(judged[2] + loading / 1e3)

    decision, _ = decide(name, instances[:2], hits=["below"], loads=["below"])
    assert decision.prefill == "below"
    assert decision.predicted_ttft == pytest.approx(costs["below"] / 1e3)


@pytest.mark.parametrize("name", POLICIES)
def test_who_would_load_for_longer_than_another_computes_is_passed_over(name):
    instances = [instance("below", times=SLOW), instance("none")]
    assert decide(name, instances, hits=["below"], loads=["below"])[0].prefill == "none"
    assert decide(name, instances, hits=["below"])[0].prefill == "below"


def test_decodes_do_not_slow_a_load_down():
    """As they do a prompt that is prefilled."""
    busy = instance("busy", requests=60, decoding=60, held_tokens=20_000, tpot=0.02)
    there, below = (decide("unified", [busy], ["busy"], loads)[0].predicted_ttft for loads in ((), ["busy"]))
    assert below - there == pytest.approx(TIMES.load_ms(HIT) / 1e3)
