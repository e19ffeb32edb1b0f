"""Chats, roles, and what they do to where a prompt goes under the default policy."""

import random
from math import inf

import pytest
from msgspec.structs import replace

from penstock.sched.cluster import ClusterView, Decision, Later, Rates, Resident, Unified
from penstock.sched.cluster.unified import AHEAD
from tests.helpers.policies import demand, instance

NOW = 100.0
BUSY = {"requests": 20, "decoding": 20, "held_tokens": 20_000, "ttft": 1.0, "tpot": 0.05}
RESTFUL = Rates(output_tokens=300.0)


def cluster(**loads):
    """By name; "p..." are of role prefill, "d..." decode, "a..." any. All are linked with all."""
    roles = {"p": "prefill", "d": "decode", "a": "any"}
    peers = {name: frozenset(loads) - {name} for name in loads}
    return [
        instance(name, roles[name[0]], peers=peers[name], num_blocks=8192, **({"free_blocks": 8192} | load))
        for name, load in loads.items()
    ]


def ask(prompt_tokens=2000, **more):
    return demand("r", prompt_tokens, 400, **({"arrived": NOW, "ttft": 2.0, "tpot": 0.05} | more))


def decide(one, rates=RESTFUL, **loads):
    view = ClusterView(now=NOW, instances=cluster(**loads), queue=[one], rates=rates)
    return Unified().decide(view, random.Random(0))


def settle(at, one=None, rates=RESTFUL, **loads):
    """Where one decodes whose prompt has ended at an instance, of which that is counted."""
    one = one or ask()
    there = [
        replace(i, requests=i.requests + 1, decoding=i.decoding + 1, held_tokens=i.held_tokens + one.prompt_tokens)
        if i.name == at
        else i
        for i in cluster(**loads)
    ]
    view = ClusterView(now=NOW, instances=there, rates=rates)
    return Unified().migrate(view, [Resident(demand=one, at=at, since=NOW)]).to


# --- chats


def has(seconds):
    """Prompts for so long."""
    return {"free_at": NOW + seconds, "idle_at": NOW + seconds, "prefilling": 1, "requests": 1}


def test_a_chat_goes_back_to_its_kv_where_others_would_not():
    hits = {"a1": 8000}
    # it does not begin there soon enough for this turn alone, and does with the next turn's reload
    prompt = ask(8200, hits=hits)
    holder = cluster(a1={})[0]
    reload = holder.prefill_seconds(8200) - holder.prefill_seconds(200, 8000)
    assert reload > AHEAD, "else nothing below is said"
    turn = replace(prompt, chat="c")
    assert decide(turn, a0={}, a1=has(AHEAD * 0.9)).prefill == "a1"
    # the instance is full: so a turn waits for it, as long as that is worth it
    wait = has(2.7 * reload)
    assert decide(prompt, a0={}, a1=wait).prefill == "a0"
    assert isinstance(decide(turn, a0={}, a1=wait), Later)
    assert decide(turn, a0={}, a1=has(3.5 * reload)).prefill == "a0"
    assert decide(replace(turn, ttft=2.0 * reload), a0={}, a1=wait).prefill == "a0", "it would be late"


def test_only_what_one_has_more_than_others_makes_it_a_chats():
    shared = ask(8200, hits={"a0": 4000, "a1": 4000}, chat="c")
    decision = decide(shared, a0={}, a1=has(0.05))
    assert decision.prefill == "a0"
    assert "chat" not in decision.reason


# --- roles


def test_a_prompt_goes_to_those_meant_for_prompts_until_they_are_behind():
    idle = {"p0": {}, "d0": {}, "d1": {}}
    assert decide(ask(), **idle).prefill == "p0"
    long = ask(8200)
    assert decide(long, **(idle | {"p0": has(0.05)})).prefill == "p0"
    assert decide(long, **(idle | {"p0": has(1.0)})).prefill in ("d0", "d1")
    assert decide(ask(8200, hits={"d1": 8000}), **idle).prefill == "d1", "nearly all is there"


@pytest.mark.parametrize("role", ["d", "a"])
def test_only_what_lasts_leaves_those_meant_for_prompts(role):
    loads = {f"{role}0": {}, f"{role}1": BUSY, "p0": {}}
    decision = decide(ask(), **loads)
    assert isinstance(decision, Decision)
    if role == "a":
        assert (decision.reason, settle("p0", **loads)) == ("stays", "p0")
        return
    assert (decision.prefill, decision.open) == ("p0", True)
    assert settle("p0", **loads) == "d0"
    brief = Rates(output_tokens=12.0)
    assert not decide(ask(), brief, **loads).open
    assert settle("p0", rates=brief, **loads) == "p0"


def test_it_stays_where_no_decoder_is_better():
    late = BUSY | {"requests": 250, "held_tokens": 400_000, "tpot": 0.005}
    assert settle("p0", p0={}, d0=late, d1=late) == "p0"
    full = BUSY | {"free_blocks": 3}
    assert settle("p0", p0={}, d0=full) == "p0"
    long_steps = {"interval": 0.04, "tpot": 0.05}
    assert settle("p0", p0={}, d0=long_steps) == "p0", "it would wait for one of them"
    assert settle("p0", p0={}, d0=long_steps, d1={"interval": 0.01}) == "d1"
    assert settle("d0", p0={}, d0={}, d1={}) == "d0", "it is meant to decode"
    # and where it is too slow anyone is better who is quicker
    slow = BUSY | {"requests": 250, "held_tokens": 450_000, "tpot": 0.005}
    assert settle("p0", p0=slow, d0={}) == "d0"


def test_without_targets_roles_are_kept_too():
    calm = ask(ttft=inf, tpot=inf)
    assert decide(calm, p0={}, d0={}).prefill == "p0"
    assert settle("p0", calm, p0={}, d0={}) == "d0"
