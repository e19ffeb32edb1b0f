"""RTP-LLM's dispatch: costs in milliseconds, conversations, and admission by blocks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster import ClusterView, Decision, Later, Rates, fitting
from penstock.sched.cluster.base import Holder
from penstock.sched.cluster.rtp_llm import (
    BAND_MS,
    BETA,
    PASSED,
    ChatAffinity,
    make_rtp_llm,
    make_rtp_llm_score,
    returns,
)
from penstock.service.queue import Tracked, WaitQueue
from tests.helpers.policies import Subject, ToyMaster, clusters, demand, instance, linked, workloads

POLICIES = {"rtp_llm": make_rtp_llm, "rtp_llm_score": make_rtp_llm_score}
NOW = 10.0


def view(instances, queue=(), offline=(), **rates):
    return ClusterView(now=NOW, instances=instances, queue=queue, offline=offline, rates=Rates(**rates))


def decide(instances, *queue, policy=None, seed=0, **rates):
    return (policy or make_rtp_llm()).decide(view(instances, queue, **rates), random.Random(seed))


def busy(name, seconds, **values):
    """It has prompts to prefill for so long."""
    tokens = int(seconds * 60_000)
    ends = dict.fromkeys(("free_at", "idle_at", "available_at"), NOW + seconds)
    return instance(name, **ends, pending_tokens=tokens, prefilling=1, **values)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=30)
@given(data=st.data())
def test_places_everything_once_where_it_fits(name, data):
    instances = data.draw(clusters())
    names = [i.name for i in instances]
    demands = [
        replace(
            one,
            chat=data.draw(st.sampled_from(["", "a", "b"])),
            hits=dict.fromkeys(data.draw(st.sets(st.sampled_from(names))), one.prompt_tokens // 2),
        )
        for one in data.draw(workloads(names))
        if fitting(view(instances), one)
    ]
    master = ToyMaster(instances, Subject(POLICIES[name]))
    assert master.run(demands).keys() == {one.key for one in demands}
    again, rng = POLICIES[name](), random.Random(0)
    assert [again.decide(seen, rng) for seen, _ in master.asked] == [answer for _, answer in master.asked]


def test_a_hit_is_worth_what_it_saves():
    instances = [busy("holder", 0.1), instance("idle")]
    # prefilling 8192 tokens takes some 130 ms
    assert decide(instances, demand("r", 8192, hits={"holder": 8128})).prefill == "holder"
    assert decide(instances, demand("r", 8192, hits={"holder": 2048})).prefill == "idle"
    costs = decide(instances, demand("r", 8192, hits={"holder": 8128})).costs["prefill"]
    assert 100 < costs["holder"] < 120 < costs["idle"]


def test_of_many_with_the_same_hit_those_that_have_it_on_the_device_are_compared():
    names = [f"i{number:02}" for number in range(60)]
    hits = dict.fromkeys(names[-40:], 8128)
    one = demand("r", 8192, hits=hits, loads={key: {"host": 8128} for key in names[-40:-1]})
    assert decide([instance(name) for name in names], one).prefill == names[-1]


def test_the_predicted_first_token_counts_from_the_arrival():
    instances = [busy("one", 0.5)]
    decision = decide(instances, demand("r", 1000, arrived=NOW - 2.0))
    assert decision.predicted_ttft == pytest.approx(2.5 + instances[0].prefill_seconds(1000))


def test_the_lot_decides_among_those_near_the_best():
    instances = [busy("a", 0.100), busy("b", 0.110), busy("c", 0.100 + 2.5 * BAND_MS / 1e3)]
    chosen = {decide(instances, demand("r", 64), seed=seed).prefill for seed in range(30)}
    assert chosen == {"a", "b"}


def test_who_waits_far_longer_than_the_others_is_not_even_compared():
    instances = [*(busy(f"cool{i}", 0.05) for i in range(9)), busy("hot", 1.0)]
    assert "hot" not in decide(instances, demand("r", 64)).costs["prefill"]
    # but for what it saves it would not be too hot
    assert "hot" in decide(instances, demand("r", 65000, max_tokens=1, hits={"hot": 64000})).costs["prefill"]


def test_when_all_are_hot_none_is():
    assert decide([busy("one", 9.0)], demand("r")).prefill == "one"


def talk(policy, instances, first, **values):
    """A turn of a conversation that went to `first`."""
    only = [i for i in instances if i.name == first]
    assert decide(only, demand("turn", chat="c"), policy=policy).prefill == first


@pytest.mark.parametrize(("wait", "holder"), [(0.1, "home"), (0.3, "home"), (0.6, "other")])
def test_a_conversation_returns_while_that_pays(wait, holder):
    policy, instances = make_rtp_llm(), [instance("home"), instance("other")]
    talk(policy, instances, "home")
    # what is computed again elsewhere takes 130 ms, twice, and prefilling it there as long again
    turn = demand("next", 8192, chat="c", hits={"home": 8000})
    decision = decide([busy("home", wait), busy("other", 0.0)], turn, policy=policy)
    assert decision.prefill == holder
    assert decision.reason.startswith("chat") is (holder == "home")


def test_a_conversation_whose_kv_has_gone_goes_anywhere():
    policy = make_rtp_llm()
    talk(policy, [instance("home"), instance("other")], "home")
    turn = demand("next", 8192, chat="c")
    assert decide([busy("home", 0.2), instance("other")], turn, policy=policy).prefill == "other"


def test_returns_weighs_the_wait_against_two_reloads():
    assert returns(wait=100, best=50, reload=25)
    assert not returns(wait=101, best=50, reload=25)


def test_the_longest_silent_conversation_is_forgotten():
    chats = ChatAffinity(kept=2)
    for name in ("a", "b", "a", "c", ""):
        chats.remember(name, "p", "d")
    assert chats.homes("a")
    assert chats.homes("c")
    assert chats.homes("b") is None
    assert chats.homes("") is None


def pairs(**decoders):
    """One that prefills for the named decoders."""
    return linked(instance("p", "prefill"), *(instance(n, "decode", **values) for n, values in decoders.items()))


def test_a_conversation_decodes_where_it_did_before_if_there_is_room():
    policy = make_rtp_llm()
    assert decide(pairs(d0={}), demand("first", chat="c"), policy=policy).decode == "d0"
    loaded = {"requests": 9, "decoding": 9, "held_tokens": 20_000}
    second = decide(pairs(d0=loaded, d1={}), demand("second", chat="c"), policy=policy)
    assert second.decode == "d0"
    full = {"requests": 90, "decoding": 90, "held_tokens": 64_000}
    assert decide(pairs(d0=full, d1={}), demand("third", chat="c"), policy=policy).decode == "d1"


def test_a_decoder_with_shorter_steps_is_preferred():
    decision = decide(
        pairs(d0={"requests": 40, "held_tokens": 9_000}, d1={"requests": 2, "held_tokens": 8_000}), demand("r")
    )
    assert decision.decode == "d1"
    assert decision.costs["decode"]["d1"] < decision.costs["decode"]["d0"]


@pytest.mark.parametrize("offline_tokens", [0, 30_000])
def test_nobody_is_sent_before_there_is_room_for_what_it_comes_to(offline_tokens):
    capacity = 1024 * BLOCK_TOKENS
    values = {"requests": 20, "decoding": 20, "held_tokens": capacity - 4_000, "offline_tokens": offline_tokens}
    values["offline_requests"] = 10 if offline_tokens else 0
    verdict = decide(pairs(d0=values), demand("r", 2_000, 500), output_tokens=400.0)
    # offline sequences make room
    assert isinstance(verdict, Decision if offline_tokens else Later)


def test_blocks_of_the_newest_report_count_too():
    values = {"requests": 20, "decoding": 20, "held_tokens": 100, "free_blocks": 3}
    assert isinstance(decide([instance("a", **values)], demand("r", 2_000)), Later)
    assert decide([instance("a", **values), instance("b")], demand("r", 2_000)).prefill == "b"


def test_a_long_one_without_room_is_passed_over_but_not_for_ever():
    capacity = 1024 * BLOCK_TOKENS
    crowded = instance("a", requests=1, decoding=1, held_tokens=capacity // 2, free_blocks=512)
    policy, passed = make_rtp_llm(), 0
    long = demand("long", capacity // 2)
    while isinstance(decision := decide([crowded], long, demand(f"short{passed}", 10), policy=policy), Decision):
        assert decision.key == ("f", f"short{passed}")
        passed += 1
    assert passed == PASSED
    assert decide([instance("a")], long, demand("short", 10), policy=policy).key == long.key


def test_similar_lengths_go_together():
    policy = make_rtp_llm()
    queue = [demand(name, tokens) for name, tokens in (("a", 100), ("B", 5000), ("c", 120), ("D", 6000), ("e", 70))]
    order = []
    while queue:
        decision = decide([instance("one", num_blocks=100_000, free_blocks=100_000)], *queue, policy=policy)
        order.append(decision.key[1])
        queue = [one for one in queue if one.key != decision.key]
    assert order == ["a", "c", "e", "B", "D"]


def test_newcomers_of_a_length_do_not_keep_another_length_waiting():
    policy = make_rtp_llm()
    queue, order = [demand("a", 100), demand("B", 5000)], []
    for number in range(4):
        decision = decide([instance("one", num_blocks=100_000, free_blocks=100_000)], *queue, policy=policy)
        order.append(decision.key[1])
        queue = [one for one in queue if one.key != decision.key] + [demand(f"late{number}", 100)]
    assert order[:2] == ["a", "B"]


def sent(policy, instances, *lengths, seed=0):
    """Where each goes, all at one moment."""
    queue = WaitQueue()
    for number, length in enumerate(lengths):
        one = demand(f"{number}", length)
        queue[one.key] = Tracked(one, None, 0.0)
    placed, rng = {}, random.Random(seed)
    while queue:
        decision = policy.decide(view(instances, queue.demands), rng)
        placed[decision.key[1]] = decision.prefill
        queue.pop(decision.key)
    return placed


def test_the_window_is_all_that_waits():
    lengths = [*([100, 1000] * 300), 90]
    placed = sent(make_rtp_llm(), [instance("one", num_blocks=10**6, free_blocks=10**6, max_sequences=9999)], *lengths)
    short = [number for number, length in enumerate(lengths) if length <= 100]
    assert [int(name) for name in placed][: len(short)] == short


def test_a_batch_goes_to_one_instance_as_long_as_it_fits_in_a_step():
    instances = [instance(f"i{k}", token_budget=1000) for k in range(4)]
    first, second, third = sent(make_rtp_llm(), instances, 400, 300, 280).values()
    assert first == second == third
    places = [set(sent(make_rtp_llm(), instances, *[400] * 4, seed=seed).values()) for seed in range(20)]
    assert {len(these) for these in places} <= {1, 2}, "two to a step"
    assert any(len(these) == 2 for these in places)


def test_a_batch_takes_nobody_from_a_better_place():
    instances = [instance("cold"), instance("holder")]
    queue = [demand("a", 8192, hits={"cold": 8128}), demand("b", 8192, hits={"holder": 8128})]
    policy, rng, placed = make_rtp_llm(), random.Random(0), {}
    while queue:
        decision = policy.decide(view(instances, queue), rng)
        placed[decision.key[1]] = decision.prefill
        queue = [one for one in queue if one.key != decision.key]
    assert placed == {"a": "cold", "b": "holder"}


def test_a_batch_ends_with_its_moment():
    policy, rng = make_rtp_llm(), random.Random(0)
    instances = [instance(f"i{k}") for k in range(8)]
    chosen = {
        policy.decide(replace(view(instances, [demand(str(k), 100)]), now=NOW + k), rng).prefill for k in range(20)
    }
    assert len(chosen) > 1


def test_offline_goes_when_nobody_else_waits():
    policy, offline = make_rtp_llm(), [demand("later", offline=True)]
    seen = view([instance("one")], [demand("now")], offline)
    assert policy.decide(seen, random.Random(0)).key == ("f", "now")
    assert policy.decide(replace(seen, queue=()), random.Random(0)).key == ("f", "later")


def test_the_score_weighs_shares_and_not_milliseconds():
    # a hit of most of a short prompt saves few ms, but is a large share
    instances, one = [busy("holder", 0.1), instance("idle")], demand("r", 200, hits={"holder": 190})
    assert decide(instances, one, policy=make_rtp_llm()).prefill == "idle"
    decision = decide([*instances, busy("slow", 0.3)], one, policy=make_rtp_llm_score())
    assert decision.prefill == "holder"
    assert min(decision.costs["prefill"], key=decision.costs["prefill"].get) == "holder"


@pytest.mark.parametrize(("hits", "loads", "goes"), [(60, 0, "holder"), (60, 60, "idle"), (10, 0, "idle")])
def test_what_is_elsewhere_counts_for_who_would_fetch_it_but_less(hits, loads, goes):
    """What the holder gains by it is (alpha - beta) times its share."""
    hits, loads = 64 * hits, 64 * loads
    known = {"hits": {"holder": hits}, "lenders": [Holder("holder", hits)]}
    known |= {"loads": {"holder": {"host": loads}}} if loads else {}
    one, idle = demand("r", 6400, **known), instance("idle", fetches=True, fetch_ms=0.01)
    instances = [busy("holder", 0.04), idle, busy("slow", 0.1)]
    decision = decide(instances, one, policy=make_rtp_llm_score())
    assert decision.prefill == goes
    costs = decide([idle, instance("holder")], one, policy=make_rtp_llm_score()).costs["prefill"]
    nothing = decide([idle], demand("r", 6400), policy=make_rtp_llm_score()).costs["prefill"]
    if not loads:  # else the holder takes longest
        assert costs["idle"] == pytest.approx(nothing["idle"] - BETA * hits / 6400, abs=0.05)
    slow = instance("idle", fetches=True, fetch_ms=1e3)
    costs = decide([slow, instance("holder")], one, policy=make_rtp_llm_score()).costs["prefill"]
    assert costs["idle"] == pytest.approx(nothing["idle"])
