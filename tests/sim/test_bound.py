"""The clairvoyant bound: nobody does better, and it is not far off where one can compute what is possible."""

from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.sim.bound import bound_attainment, bound_scale, reusable_by_request
from penstock.sim.simulate import TRAFFIC_STREAM
from penstock.sim.traffic import make_traffic
from penstock.workload.requests import WorkRequest, reusable_tokens
from tests.sim import scenarios
from tests.sim.scenarios import COLOCATED, SPLIT, WORKLOAD, read, run

PREFIX = 128  # tokens of a shared block


def group(count=1, device="l4", *, sequences=64, slowdown=1.0, **changes):
    times = StepTime(DEVICES[device].slowed(slowdown), GEOMETRIES["llama-3.1-8b"])
    return scenarios.group(device, times, count, max_num_seqs=sequences, **changes)


def request(number, at, prompt, output, ttft=1.0, tpot=0.1, shared=False, offline=False):
    prefix = {"prefix": (7,), "block_tokens": PREFIX} if shared else {}
    return WorkRequest(
        number=number,
        at=at,
        prompt_tokens=prompt,
        output_tokens=output,
        ttft=ttft,
        tpot=tpot,
        offline=offline,
        **prefix,
    )


# --- against everything that could be done


def best_alone(times, requests):
    """How many of these one instance can keep: every choice of what runs in every step is tried. Prompts are read
    whole or in two halves; nothing else is left out."""
    best = 0

    def explore(now, states):
        """`states`: of each request (computed, drawn, time of the first token), or None once it is kept or given up."""
        nonlocal best
        kept = sum(state == "kept" for state in states)
        best = max(best, kept)
        if kept + sum(isinstance(state, tuple) for state in states) <= best:
            return
        choices = [options(r, state, now, states) for r, state in zip(requests, states, strict=True)]
        for step in product(*choices):
            if any(step):
                explore(*advance(now, states, step))
        later = [r.at for r, state in zip(requests, states, strict=True) if isinstance(state, tuple) and r.at > now]
        if later:
            explore(min(later), states)

    def options(r, state, now, states):
        """Tokens that it may compute in a step that begins now."""
        if not isinstance(state, tuple) or r.at > now:
            return [0]
        computed, drawn, _ = state
        if drawn:
            return [0, 1]
        if not computed and r.prefix:
            cached = any(
                other.prefix and (s == "kept" or (isinstance(s, tuple) and s[0] >= PREFIX))
                for other, s in zip(requests, states, strict=True)
            )
            computed = PREFIX if cached else 0
        rest = r.prompt_tokens - computed
        return [0, rest, -(-rest // 2)] if rest > 1 else [0, rest]

    def advance(now, states, step):
        prefills, kv, decodes, rows = [], 0, 0, 0
        after = list(states)
        for i, (r, tokens) in enumerate(zip(requests, step, strict=True)):
            if not tokens:
                continue
            computed, drawn, first = states[i]
            if not drawn and not computed:
                computed = r.prompt_tokens - options(r, states[i], now, states)[1]
            if drawn:
                decodes, kv = decodes + 1, kv + r.prompt_tokens + drawn
            else:
                prefills.append((tokens, computed))
            ends = drawn or computed + tokens == r.prompt_tokens
            rows += bool(ends)
            after[i] = (computed + tokens, drawn + bool(ends), first)
        now += times.step_ms(prefills, decodes, kv, rows) / 1e3
        for i, tokens in enumerate(step):
            if tokens and after[i][1] == 1 and after[i][2] is None:
                after[i] = (*after[i][:2], now)
        return now, [judge(r, state, now) for r, state in zip(requests, after, strict=True)]

    def judge(r, state, now):
        if not isinstance(state, tuple):
            return state
        _, drawn, first = state
        if (r.at + r.ttft < now) if first is None else (first > r.at + r.ttft):
            return None
        if drawn and now > first + r.tpot * (r.output_tokens - 1) + 1e-12:
            return "kept" if drawn == r.output_tokens and first == now else None
        return "kept" if drawn == r.output_tokens else state

    explore(min(r.at for r in requests), [(0, 0, None)] * len(requests))
    return best


def best_of_all(times, requests, instances):
    return max(
        sum(
            best_alone(times, own)
            for i in range(instances)
            if (own := [r for r, p in pairs(requests, places) if p == i])
        )
        for places in product(range(instances), repeat=len(requests))
    )


def pairs(requests, places):
    return list(zip(requests, places, strict=True))


@st.composite
def tiny(draw):
    """Three requests of which rarely all can be kept."""
    arrivals = sorted(draw(st.lists(st.sampled_from([0.0, 0.02, 0.1, 0.2]), min_size=3, max_size=3)))
    return [
        request(
            number,
            at,
            draw(st.sampled_from([200, 600, 1100])),
            draw(st.sampled_from([1, 2, 3])),
            ttft=draw(st.sampled_from([0.1, 0.15, 0.25, 0.4])),
            tpot=draw(st.sampled_from([0.052, 0.06, 0.1])),
            shared=draw(st.booleans()),
        )
        for number, at in enumerate(arrivals)
    ]


@settings(max_examples=60)
@given(tiny(), st.sampled_from([1, 2]))
def test_nothing_that_can_be_done_is_above_the_bound(requests, instances):
    best = best_of_all(group().times, requests, instances)
    assert bound_attainment(requests, [group(instances)]) >= best / len(requests) - 1e-9


@pytest.mark.parametrize("shape", [COLOCATED, SPLIT])
@pytest.mark.parametrize("scale", [1.0, 3.0, 8.0])
def test_no_policy_is_above_the_bound(shape, scale):
    scenario = read(WORKLOAD.replace("noise: 0.1", "noise: 0"), shape)
    (groups,) = scenario.layouts.values()
    rng = np.random.default_rng((1, TRAFFIC_STREAM))
    requests = make_traffic(scenario.workload, None, rng, scale=scale, max_model_len=4096).requests
    for policy in ("round_robin", "least_loaded"):
        result, _ = run(scenario, policy, scale=scale, seed=1)
        bound = bound_attainment(requests, groups, max_tokens=scenario.workload.max_tokens)
        assert result["attainment"] <= bound + 1e-9


# --- where what is possible is known


def test_prompts_that_all_come_at_once_are_kept_as_long_as_there_is_time():
    count = 400
    requests = [request(i, 0.0, 512, 1, ttft=5.0) for i in range(count)]
    fitting = 5.0 / (group().times.step_ms([(512, 0)] * 4) / 4e3)  # the budget is four prompts
    assert bound_attainment(requests, [group()]) == pytest.approx(fitting / count, rel=0.08)
    assert bound_attainment(requests, [group(2)]) == pytest.approx(2 * fitting / count, rel=0.08)
    assert bound_attainment(requests, [group(slowdown=2.0)]) == pytest.approx(fitting / count / 2, rel=0.08)


def test_decodes_are_limited_by_sequences_and_by_memory():
    """2,000 answers of 100 tokens within 60 s. As many steps as it takes."""
    requests = [request(i, i * 0.03, 64, 100, ttft=10.0, tpot=1.0) for i in range(2000)]
    few = bound_attainment(requests, [group(4, sequences=8)])
    more = bound_attainment(requests, [group(4, sequences=16)])
    tight = bound_attainment(requests, [group(4, num_blocks=16)])
    # the last one comes at 60 s and is to end within 109 s more; until then four instances decode eight at a time
    seconds = group().times.step_ms(decodes=8, kv_tokens=8 * 114) / 1e3
    assert few == pytest.approx((60 + 109) / seconds * 4 * 8 / 99 / 2000, rel=0.05)
    assert 1.7 * few < more <= 1.0
    assert tight == pytest.approx(few, rel=0.3)  # 16 blocks of 64 tokens hold nine sequences of 114


def test_a_strict_time_per_token_costs_batch():
    loose = [request(i, i * 0.001, 64, 50, ttft=2.0, tpot=0.5) for i in range(3000)]
    strict = [request(i, i * 0.001, 64, 50, ttft=2.0, tpot=0.05) for i in range(3000)]
    impossible = [request(i, i * 0.001, 64, 50, ttft=2.0, tpot=0.04) for i in range(3000)]
    groups = [group(4, sequences=512)]
    assert bound_attainment(strict, groups) < 0.6 * bound_attainment(loose, groups)
    assert bound_attainment(impossible, groups) == 0.0


def test_requests_without_targets_are_kept_and_offline_ones_not_counted():
    inf = float("inf")
    online = [request(i, 0.0, 4000, 1, ttft=1.0) for i in range(50)]
    free = [request(50 + i, 0.0, 4000, 100, ttft=inf, tpot=inf) for i in range(50)]
    offline = [request(100 + i, 0.0, 4000, 100, ttft=inf, tpot=inf, offline=True) for i in range(50)]
    share = bound_attainment(online, [group()])
    assert 0.0 < share < 0.1
    assert bound_attainment(online + offline, [group()]) == pytest.approx(share)
    assert bound_attainment(online + free, [group()]) == pytest.approx((share + 1) / 2, abs=0.01)
    assert bound_attainment(offline, [group()]) == 1.0


def test_cached_prompts_cost_nothing_and_only_where_there_is_a_cache():
    requests = [
        WorkRequest(
            number=i, at=0.0, prompt_tokens=1024, output_tokens=1, ttft=1.0, tpot=1.0, prefix=(1, 2), block_tokens=511
        )
        for i in range(100)
    ]
    assert bound_attainment(requests, [group()]) == 1.0
    assert bound_attainment(requests, [group(prefix_cache=False)]) < 0.3


def test_reuse_adds_up_to_what_a_cache_without_limits_reuses():
    rng = np.random.default_rng(0)
    requests = [
        WorkRequest(
            number=i,
            at=float(i),
            prompt_tokens=int(rng.integers(1, 400)),
            output_tokens=1,
            prefix=tuple(rng.integers(0, 3, int(rng.integers(0, 5))).tolist()),
            block_tokens=100,
        )
        for i in range(300)
    ]
    assert sum(reusable_by_request(requests)) == reusable_tokens(requests) > 0


# --- how it changes


def steady(scale):
    rng = np.random.default_rng(3)
    at = np.cumsum(rng.exponential(0.05 / scale, 600))
    prompts, outputs = rng.integers(50, 1500, 600), rng.integers(1, 60, 600)
    return [
        request(i, float(t), int(p), int(o), ttft=0.6, tpot=0.1)
        for i, (t, p, o) in enumerate(zip(at, prompts, outputs, strict=True))
    ]


def test_more_instances_keep_more_and_more_traffic_less():
    by_count = [bound_attainment(steady(1.0), [group(n)]) for n in (1, 2, 4, 8)]
    by_rate = [bound_attainment(steady(scale), [group(2)]) for scale in (0.5, 1.0, 2.0, 4.0)]
    assert all(b >= a - 0.005 for a, b in pairwise(by_count))
    assert all(b <= a + 0.005 for a, b in pairwise(by_rate))
    assert by_count[0] < 0.8 < by_count[-1]
    mixed = bound_attainment(steady(4.0), [group(2), group(1, "h200")])
    assert mixed > by_rate[-1] + 0.1


def test_the_greatest_scale_is_where_the_target_is_crossed():
    groups = [group(2)]
    scale = bound_scale(steady, groups)
    assert bound_attainment(steady(scale * 1.05), groups) < 0.9
    assert bound_attainment(steady(scale / 1.05), groups) >= 0.9
    assert bound_scale(steady, [group(4)]) > 1.6 * scale
    late = partial(request, prompt=8000, output=1, ttft=0.1)
    assert bound_scale(lambda scale: [late(0, 0.0), late(1, 1.0 / scale)], groups) == 0.0
    assert bound_scale(lambda scale: [], groups) == float("inf")
