"""Planning: which deployments there are, what is expected of them, and which are tried."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.plan_report import explain
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.sim.plan import Kind, Search, Verdict, candidates, demands, estimate
from penstock.workload.requests import WorkRequest
from tests.sim.scenarios import group

PRICES = {"h200": 3.5, "l4": 0.5}


def kind(device, size=1):
    model, shape = DEVICES[device], GEOMETRIES["llama-3.1-8b"]
    times = StepTime(model.parallel(size) if size > 1 else model, shape)
    room = int(0.9 * size * model.memory) - shape.weight_bytes
    blocks = room // (64 * shape.kv_bytes_per_token)
    return Kind(device=device, size=size, price=PRICES[device], group=group(device, times, num_blocks=blocks))


def chats(rate, ttft=1.0, tpot=0.05, count=500, output=100):
    rng = np.random.default_rng(1)
    at = np.cumsum(rng.exponential(1 / rate, count))
    prompts, outputs = rng.integers(100, 2000, count), rng.integers(1, 2 * output, count)
    requests = [
        WorkRequest(number=i, at=float(t), prompt_tokens=int(p), output_tokens=int(o), ttft=ttft, tpot=tpot)
        for i, (t, p, o) in enumerate(zip(at, prompts, outputs, strict=True))
    ]
    return demands(requests, rate, 4096)


# --- candidates


def test_candidates_are_all_deployments_that_the_devices_allow():
    found = candidates([kind("h200"), kind("l4")], {"h200": 2, "l4": 1})
    titles = [c.title for c in found]
    assert sorted(titles) == sorted(
        [
            *("1 x h200", "2 x h200", "1 x l4", "1 x h200 + 1 x l4", "2 x h200 + 1 x l4"),
            *("prefill 1 x h200 + decode 1 x h200", "prefill 1 x h200 + decode 1 x l4"),
            *("prefill 2 x h200 + decode 1 x l4", "prefill 1 x l4 + decode 1 x h200"),
            "prefill 1 x l4 + decode 2 x h200",
        ]
    )
    assert titles[0] == "1 x l4"
    assert [c.cost for c in found] == sorted(c.cost for c in found)
    assert {c.title: c.cost for c in found}["prefill 2 x h200 + decode 1 x l4"] == 7.5


def test_spread_instances_take_several_devices_and_are_not_mixed_with_single_ones_of_the_same():
    found = candidates([kind("h200"), kind("h200", 2)], {"h200": 4})
    titles = {c.title: c for c in found}
    assert titles["2 x h200 tp2"].devices == {"h200": 4}
    assert titles["prefill 1 x h200 tp2 + decode 2 x h200"].devices == {"h200": 4}
    assert "1 x h200 + 1 x h200 tp2" not in titles
    assert all(c.devices["h200"] <= 4 for c in found)


def test_groups_of_a_candidate_have_names_of_their_own():
    for candidate in candidates([kind("h200"), kind("l4")], {"h200": 1, "l4": 1}):
        names = [each.name for each in candidate.groups]
        assert len(set(names)) == len(names)
        assert sum(each.count for each in candidate.groups) == sum(part.count for part in candidate.parts)


# --- estimates


def test_more_instances_are_expected_to_keep_more():
    for shape in (lambda c: not c.disaggregated, lambda c: c.disaggregated):
        found = [c for c in candidates([kind("h200")], {"h200": 8}) if shape(c)]
        asked = chats(150.0)
        guesses = {c: estimate(c, asked, {}) for c in found}
        for small in found:
            for large in found:
                if small.within(large):
                    assert guesses[small].attainment <= guesses[large].attainment + 1e-9
        shares = [guess.attainment for guess in guesses.values()]
        assert min(shares) < 0.3
        assert max(shares) > 0.95


def test_an_idle_instance_takes_what_the_step_time_model_says():
    (one,) = candidates([kind("h200")], {"h200": 1})
    asked = chats(0.01)
    guess, times = estimate(one, asked, {}), kind("h200").group.times
    prompts = [times.prefill_ms(int(new), budget=2048) for new in asked.new]
    assert guess.ttft_p50 == pytest.approx(np.percentile(prompts, 50))
    assert guess.tpot_p50 == pytest.approx(times.step_ms(decodes=1, kv_tokens=int(asked.context)), rel=0.02)
    assert guess.attainment == pytest.approx(1.0)
    late = estimate(one, chats(0.01, ttft=1e-4), {})
    slow = estimate(one, chats(0.01, tpot=1e-4), {})
    assert late.attainment == slow.attainment == 0.0


def test_what_limits_is_named():
    def why(candidate, asked):
        return explain(estimate(candidate, asked, {}), None, 1000, 50)

    cheap, *_ = candidates([kind("l4")], {"l4": 1})
    assert "memory has room for" in why(cheap, chats(8.0, output=500))
    (one,) = candidates([kind("h200")], {"h200": 1})
    assert "max-num-seqs leaves room for 128 sequences" in why(one, chats(80.0, output=300))
    assert "TTFT p90 is" in why(one, chats(70.0, output=1))
    assert "TPOT p90 is" in why(one, chats(1.0))
    guess = estimate(one, chats(1.0), {})
    assert explain(guess, Verdict(False, 0.42, None), 1000, 50) == (
        "no scheduler could keep more than 42% of the requests"
    )
    result = {"ttft_p90_ms": 2000.0, "tpot_p90_ms": 10.0}
    assert explain(guess, Verdict(False, 1.0, result), 1000, 50).startswith("missed: TTFT p90 is 200% of its target")


# --- the search


def solve(search, keeps, lag=1):
    """Answer with up to `lag` questions open; returns what was asked in order."""
    asked, waiting = [], []
    while True:
        while len(waiting) < lag and (candidate := search.next()) is not None:
            asked.append(candidate)
            waiting.append(candidate)
        if not waiting:
            return asked
        candidate = waiting.pop(0)
        search.tell(candidate, Verdict(keeps(candidate), 1.0, {}))


@settings(max_examples=50)
@given(st.integers(1, 60), st.integers(1, 3), st.floats(0.5, 2.0), st.integers(0, 100))
def test_with_enough_tries_the_cheapest_that_keeps_the_target_is_found(need, lag, error, seed):
    """Each device does so much; what is expected is off by a factor, and a bit more."""
    rng = np.random.default_rng(seed)
    found = candidates([kind("h200"), kind("l4")], {"h200": 4, "l4": 4})
    power = {"h200": 12.0, "l4": 3.0}

    def strength(candidate):
        return sum(power[device] * count for device, count in candidate.devices.items()) - 2 * candidate.disaggregated

    (one,) = candidates([kind("h200")], {"h200": 1})
    guess = estimate(one, chats(1.0, count=5), {})
    guesses = {
        c: replace(guess, attainment=float(np.clip(error * strength(c) / need * rng.uniform(0.9, 1.1), 0.5, 1.0)))
        for c in found
    }
    search = Search(found, guesses, 0.9, tries=1000)
    asked = solve(search, lambda c: strength(c) >= need, lag)
    assert len(asked) == len(set(asked))
    kept = [c.cost for c in found if strength(c) >= need]
    assert (search.winner and search.winner.cost) == min(kept, default=None)
    assert not search.untried()


def test_few_tries_are_kept_to_and_begin_with_the_cheapest_that_should_do():
    found = candidates([kind("h200")], {"h200": 8})
    asked = chats(60.0)
    guesses = {c: estimate(c, asked, {}) for c in found}
    search = Search(found, guesses, 0.9, tries=3)
    tried = solve(search, lambda c: False)
    assert len(tried) == 3
    assert tried[0] is next(c for c in found if guesses[c].attainment >= 0.92)
    assert search.winner is None
    again = Search(found, guesses, 0.9, tries=3)
    solve(again, lambda c: True)
    assert again.winner is not None
    assert again.winner.cost <= tried[0].cost
