"""Computed, fetched or remapped: whichever brings the next token first, in ms."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster import ClusterView, Decision, Rates
from penstock.sched.cluster.base import Holder
from penstock.sched.cluster.reuse import ROUND_TRIPS_MS, WORTH, bring, cheapest, fetched, recompute
from penstock.sched.cluster.rtp_llm import _fetching, _offer, by_score, make_rtp_llm
from penstock.sched.cluster.unified import Unified
from penstock.sched.cluster.xllm import make_xllm
from penstock.sched.steptime import StepTime
from tests.helpers.policies import TIMES, demand, instance

NOW = 10.0
SLOW = StepTime(replace(TIMES.device, host_bandwidth=TIMES.device.host_bandwidth / 1e4), TIMES.shape)
POLICIES = pytest.mark.parametrize(
    "make", [Unified, make_rtp_llm, lambda: make_xllm()[0]], ids=["unified", "rtp_llm", "xllm"]
)
tokens = st.integers(0, 600).map(lambda blocks: blocks * BLOCK_TOKENS)


@given(
    prompt=st.integers(1, 40_000),
    hit=tokens,
    holders=st.lists(st.tuples(st.sampled_from(["", "b", "c"]), tokens), max_size=3),
    queue=st.sampled_from([0.0, 0.01, 2.0]),
    offline=st.booleans(),
    fetch_ms=st.sampled_from([None, 0.01, 5.0, 1e4]),
    times=st.sampled_from([TIMES, SLOW]),
)
def test_the_cheapest_way(prompt, hit, holders, queue, offline, fetch_ms, times):
    """Against the formula, way by way."""
    load = instance("a", times=times, fetch_ms=fetch_ms, free_at=NOW + queue, idle_at=NOW + 2 * queue)
    one = demand("r", prompt, arrived=NOW, hits={"a": min(hit, prompt)}, offline=offline)
    holders = [Holder(*holder) for holder in holders]
    best, computed = cheapest(load, NOW, one, holders), recompute(load, NOW, one)
    there = min(hit, prompt - 1)
    wait = queue * (2 if offline else 1)
    assert computed.ms == pytest.approx((wait + load.prefill_seconds(prompt - there, there)) * 1e3)
    ways = {}
    for holder in holders:
        reached = min(holder.tokens, (prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        if holder.tokens > there:
            each = fetch_ms if holder.name and fetch_ms is not None else times.load_ms(BLOCK_TOKENS)
            takes = ROUND_TRIPS_MS + max(0, reached - there) // BLOCK_TOKENS * each
            kept = max(reached, there)
            rest = load.prefill_seconds(prompt - kept, kept) * 1e3
            ms = max(takes, wait * 1e3) + rest
            ways[holder] = ms, max(0.0, takes - wait * 1e3), computed.ms - wait * 1e3 - rest
            assert bring(load, NOW, one, holder, computed).ms == pytest.approx(ms)
    least, waits, saved = min(ways.values(), default=(computed.ms, 0.0, 0.0))
    if best.how == "recompute":
        assert best == computed
        assert waits >= WORTH * saved - 1e-6
    else:
        assert best.ms == pytest.approx(least)
        assert waits < WORTH * saved + 1e-6
        assert best.recompute_ms == computed.ms
        assert best.how == ("fetch" if best.source else "remap")
        assert there < best.tokens < prompt
        assert best.tokens % BLOCK_TOKENS == 0


def test_a_slow_link_and_a_short_prompt_are_not_worth_it():
    for times, length, how in ((TIMES, 20_000, "fetch"), (SLOW, 20_000, "recompute"), (TIMES, 100, "recompute")):
        one = demand("r", length, arrived=NOW)
        assert cheapest(instance("a", times=times), NOW, one, [Holder("b", length)]).how == how
    measured = instance("a", times=SLOW, fetch_ms=0.1)
    assert cheapest(measured, NOW, demand("r", 20_000, arrived=NOW), [Holder("b", 20_000)]).how == "fetch"


@POLICIES
def test_policies_see_what_an_interrupted_request_could_bring(make):
    """It goes where it ends first: to the one that can have what was lost, though another would be free as soon."""
    one = demand("r", 20_000, arrived=NOW, ttft=5.0, tpot=0.05, interrupted=True)
    free, able = instance("free"), instance("able")
    view = ClusterView(now=NOW, instances=[free, able], queue=(one,), rates=Rates(output_tokens=30.0))
    way = cheapest(able, NOW, one, [Holder("", 19_968)])
    brings = {"brought": {"able": way.tokens}, "brought_in": {"able": way.bring_ms / 1e3}}
    for _ in range(4):
        known = demand("r", 20_000, arrived=NOW, ttft=5.0, tpot=0.05, interrupted=True, **brings)
        decision = make().decide(
            ClusterView(now=NOW, instances=view.instances, queue=(known,), rates=view.rates), random.Random(0)
        )
        assert decision.prefill == "able"
    assert able.begins_at(NOW, known) == NOW + way.bring_ms / 1e3
    assert known.to_compute("able") == 32


HELD = 19_968


def places(make, one, *instances):
    """Where it goes; None where it waits."""
    view = ClusterView(now=NOW, instances=instances, queue=(one,), rates=Rates(output_tokens=30.0))
    decision = make().decide(view, random.Random(0))
    return decision.prefill if isinstance(decision, Decision) else None


def asked(lender_free_at=NOW, **more):
    """A new prompt, most of which "holder" has."""
    lenders = [Holder("holder", HELD, lender_free_at)]
    values = {"arrived": NOW, "ttft": 5.0, "tpot": 0.05, "hits": {"holder": HELD}, "lenders": lenders}
    return demand("r", 20_000, **(values | more))


@POLICIES
def test_a_free_instance_fetches_from_a_healthy_one_that_is_busy(make):
    busy = {"free_at": NOW + 3.0, "idle_at": NOW + 3.0, "prefilling": 1, "requests": 1, "available_at": NOW + 3.0}
    holder = instance("holder", fetches=True, **busy)
    able, far = instance("able", fetches=True), instance("far")
    assert places(make, asked(), holder, far, able) == "able"
    slow = instance("able", fetches=True, fetch_ms=1e3)
    for other in (slow, instance("able", fetches=True, unlinked={"holder": "refused"})):
        assert places(make, asked(), holder, far, other) in ("far", "able", None), "it computes"
        assert fetched(other, NOW, asked()) is None
    assert fetched(able, NOW, asked(NOW + 30.0)) is None, "others fetch from there until then"
    assert fetched(far, NOW, asked()) is None
    assert fetched(holder, NOW, asked()) is None
    assert fetched(able, NOW, asked()).tokens == HELD


@POLICIES
def test_the_holder_is_as_good_as_ever_while_it_is_free(make):
    holder, able = instance("holder", fetches=True), instance("able", fetches=True, fetch_ms=2.0)
    assert places(make, asked(), able, holder) == "holder"


def test_a_chat_that_others_can_fetch_does_not_wait_for_its_holder():
    wait = {"free_at": NOW + 0.3, "idle_at": NOW + 0.3, "prefilling": 1, "requests": 1}
    holder, computes = instance("holder", fetches=True, **wait), instance("other")
    assert places(Unified, asked(chat="c"), holder, computes) is None, "it waits"
    assert places(Unified, asked(chat="c"), holder, instance("other", fetches=True)) == "other"


@given(
    prompt=st.integers(65, 40_000),
    held=tokens,
    hit=tokens,
    queue=st.sampled_from([0.0, 0.01, 2.0]),
    fetch_ms=st.sampled_from([None, 0.01, 5.0, 1e4]),
)
def test_what_is_fetched_is_worth_it(prompt, held, hit, queue, fetch_ms):
    load = instance("a", fetches=True, fetch_ms=fetch_ms, free_at=NOW + queue, idle_at=NOW + queue)
    one = demand("r", prompt, arrived=NOW, hits={"a": min(hit, prompt)}, lenders=[Holder("b", held)])
    way = fetched(load, NOW, one)
    best = cheapest(load, NOW, one, one.lenders)
    assert way == (best if best.how == "fetch" else None)
    if way is not None:
        assert way.ms < way.recompute_ms
        assert min(hit, prompt) + BLOCK_TOKENS <= way.tokens <= min(held, prompt - 1)


def test_what_is_remote_in_the_score_is_what_would_be_fetched_or_loaded():
    """RTP-LLM, equation (2)."""
    view = ClusterView(now=NOW, instances=[], queue=())
    one = asked(loads={"holder": {"host": 6400}})
    offers = {
        i.name: _fetching(view, one, _offer(view, one, i))
        for i in (
            instance("holder", fetches=True),
            instance("able", fetches=True),
            instance("slow", fetches=True, fetch_ms=1e3),
            instance("far"),
        )
    }
    assert {name: (o.local, o.remote) for name, o in offers.items()} == {
        "holder": (HELD - 6400, 6400),
        "able": (0, HELD),
        "slow": (0, 0),
        "far": (0, 0),
    }
    (costs, _), names = by_score(list(offers.values()), one.prompt_tokens), list(offers)
    assert min(zip(costs, names, strict=True))[1] == "holder"
    assert costs[names.index("able")] < costs[names.index("slow")]
