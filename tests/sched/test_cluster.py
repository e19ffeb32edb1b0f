"""Dispatch policies over made-up clusters."""

import random
from collections import Counter
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sched.cluster import DISPATCH, ClusterView, Demand, InstanceLoad, Instances, Later, hands_over
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from tests.helpers.policies import SUBJECTS

DEMAND = Demand(key="r", prompt_tokens=10, max_tokens=10)
MAKERS = DISPATCH | {name: subject.make for name, subject in SUBJECTS.items()}
IMMEDIATE = ["round-robin", "least-loaded"]
TIMES = StepTime(DEVICES["h200"], GEOMETRIES["llama-3.1-8b"])


def cluster(*instances: InstanceLoad, unlinked: set[tuple[str, str]] = frozenset()) -> list[InstanceLoad]:
    """With links wherever there should be one."""

    def peers(i):
        return frozenset(o.name for o in instances if hands_over(i.role, o.role) and (i.name, o.name) not in unlinked)

    return [InstanceLoad(**{**fields(i), "peers": peers(i)}) for i in instances]


def fields(instance: InstanceLoad) -> dict:
    return {name: getattr(instance, name) for name in InstanceLoad.__struct_fields__}


def load(name, role="any", **values) -> InstanceLoad:
    return InstanceLoad(name=name, role=role, times=TIMES, max_model_len=100, **values)


def place(policy, instances, demand=DEMAND, seed=0):
    return decide(DISPATCH[policy](), instances, demand, random.Random(seed))


def decide(policy, instances, demand, rng):
    """None when nobody can take it."""
    decision = policy.decide(ClusterView(now=0.0, instances=instances, queue=[demand]), rng)
    return None if isinstance(decision, Later) else decision


def test_round_robin_takes_turns_also_when_the_cluster_changes():
    policy, rng = DISPATCH["round-robin"](), random.Random(0)
    four = cluster(*(load(name) for name in "abcd"))
    assert [decide(policy, four, DEMAND, rng).prefill for _ in range(5)] == ["a", "b", "c", "d", "a"]
    assert [decide(policy, four[2:], DEMAND, rng).prefill for _ in range(3)] == ["c", "d", "c"]
    assert decide(policy, four, DEMAND, rng).prefill == "d"


def test_least_loaded_counts_tokens_then_requests_then_draws_lots():
    busy, light = load("a", pending_tokens=50, held_tokens=50), load("b", pending_tokens=10, held_tokens=60, requests=9)
    decision = place("least-loaded", cluster(busy, light))
    assert decision.prefill == "b"
    assert decision.costs["prefill"] == {"a": 100.0, "b": 70.0}
    assert place("least-loaded", cluster(load("a", requests=2), load("b", requests=1))).prefill == "b"
    equal = cluster(load("a"), load("b"), load("c"))
    sampled = Counter(place("least-loaded", equal, seed=i).prefill for i in range(60))
    assert set(sampled) == {"a", "b", "c"}
    assert place("least-loaded", equal, seed=7) == place("least-loaded", equal, seed=7)


@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_of_a_policy_that_was_asked_decides_alike(name):
    policy, rng, now = MAKERS[name](), random.Random(0), 20.0
    loads = [load(f"e{i}", num_blocks=64, free_blocks=64, free_at=20.0 + i, requests=i) for i in range(3)]
    instances = Instances(cluster(*loads), [])
    hits = {"e1": 5}
    queue = [
        Demand(key=("f", f"{n}"), prompt_tokens=10, max_tokens=10, arrived=2.0 * n, ttft=1.0 + n, hits=hits)
        for n in range(9)
    ]
    decided = 0
    while queue:
        view = ClusterView(now=now, instances=instances, queue=queue)
        copied, lots = deepcopy((policy, rng))
        verdict = policy.decide(view, rng)
        assert copied.decide(view, lots) == verdict
        if isinstance(verdict, Later):
            break
        decided += 1
        queue = [d for d in queue if d.key != verdict.key]
    assert decided


@pytest.mark.parametrize("policy", IMMEDIATE)
def test_a_request_gets_one_of_each_role(policy):
    instances = cluster(*(load(f"p{i}", "prefill") for i in range(2)), *(load(f"d{i}", "decode") for i in range(2)))
    decision = place(policy, instances)
    assert (decision.prefill[0], decision.decode[0], decision.reason) == ("p", "d", "hand-off")
    assert set(decision.costs["prefill"]) == {"p0", "p1"}
    assert set(decision.costs["decode"]) == {"d0", "d1"}


@pytest.mark.parametrize("policy", IMMEDIATE)
def test_a_role_without_instances_is_made_up_for_and_said(policy):
    only_prefill = place(policy, cluster(load("p", "prefill")))
    assert (only_prefill.prefill, only_prefill.decode) == ("p", None)
    assert only_prefill.reason.startswith("no-decode: ")
    only_decode = place(policy, cluster(load("d", "decode")))
    assert (only_decode.prefill, only_decode.decode) == ("d", None)
    assert only_decode.reason.startswith("no-prefill: ")
    colocated = place(policy, cluster(load("a"), load("b")))
    assert (colocated.decode, colocated.reason) == (None, "colocated")
    assert place(policy, cluster(load("p", "prefill"), load("a"), unlinked={("p", "a")})).decode is None
    assert place(policy, []) is None
    assert place(policy, cluster(load("a")), Demand(key="r", prompt_tokens=60, max_tokens=60)) is None


def test_a_pair_without_a_link_is_never_chosen_and_the_reason_says_why():
    source = load("p", "prefill", unlinked={"d0": "order: block here, token there"})
    instances = cluster(source, load("d0", "decode"), unlinked={("p", "d0")})
    decision = place("least-loaded", instances)
    assert decision.decode is None
    assert decision.reason == "no-decode: d0: order: block here, token there"


LOADS = st.builds(
    load,
    st.sampled_from("abcdefgh"),
    st.sampled_from(["any", "prefill", "decode"]),
    pending_tokens=st.integers(0, 50),
    held_tokens=st.integers(0, 50),
    requests=st.integers(0, 3),
)


@given(
    loads=st.lists(LOADS, min_size=1, unique_by=lambda i: i.name),
    unlinked=st.sets(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh"))),
    policy=st.sampled_from(IMMEDIATE),
)
def test_every_decision_can_be_carried_out(loads, unlinked, policy):
    instances = cluster(*loads, unlinked=unlinked)
    by_name = {i.name: i for i in instances}
    decision = place(policy, instances)
    prefill = by_name[decision.prefill]
    assert prefill.role != "decode" or all(i.role == "decode" for i in instances)
    if decision.decode is not None:
        decode = by_name[decision.decode]
        assert decision.decode in prefill.peers
        assert hands_over(prefill.role, decode.role)
    assert decision.prefill in decision.costs["prefill"]
    assert decision.policy == policy
