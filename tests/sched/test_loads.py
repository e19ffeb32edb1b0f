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


def decide(name, instances, hits=(), loads=()):
    """Who prefills a prompt, with a hit on some of which some have it below the device."""
    one = demand(
        "r",
        PROMPT,
        arrived=NOW,
        ttft=5.0,
        tpot=0.05,
        hits=dict.fromkeys(hits, HIT),
        loads=dict.fromkeys(loads, HIT),
    )
    view = ClusterView(now=NOW, instances=instances, queue=(one,), rates=Rates(output_tokens=30.0))
    return POLICIES[name]().decide(view, random.Random(0)), view


def test_what_there_is_to_load():
    one = demand("r", 100, hits={"a": 64, "b": 64}, loads={"a": 64})
    assert [one.to_load(name) for name in "abc"] == [64, 0, 0]
    assert instance("a").load_seconds(64) == pytest.approx(TIMES.load_ms(64) / 1e3)


@pytest.mark.parametrize("name", POLICIES)
def test_a_device_goes_before_what_is_below_it_and_that_before_computing(name):
    names = ["none", "below", "device"]
    instances = [instance(n) for n in names]
    decision, view = decide(name, instances, hits=["below", "device"], loads=["below"])
    assert decision.prefill == "device"
    costs, loading = decision.costs["prefill"], instances[0].load_seconds(HIT) * 1e3
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
    assert below - there == pytest.approx(busy.load_seconds(HIT))
