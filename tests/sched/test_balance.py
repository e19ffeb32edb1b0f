"""Who moves while it runs: only from where something is lost, to where nothing is, and nothing swings."""

from msgspec.structs import replace

from penstock.sched.cluster import ClusterView, Rates, Resident
from penstock.sched.cluster.balance import DWELL, LASTS, REST, Balance
from tests.helpers.policies import demand, instance

SLOW = {"requests": 60, "decoding": 60, "held_tokens": 60_000, "interval": 0.06, "tpot": 0.05}
IDLE = {"requests": 2, "decoding": 2, "held_tokens": 2_000, "interval": 0.01, "tpot": 0.05}


def cluster(**loads):
    peers = {name: frozenset(loads) - {name} for name in loads}
    return [
        instance(name, peers=peers[name], num_blocks=2048, **({"free_blocks": 500} | v)) for name, v in loads.items()
    ]


def residents(*named):
    return {at: [Resident(demand=one, at=at, since=0.0) for one in there] for at, *there in named}


HERE = residents(("a", demand("short", 100), demand("long", 3000), demand("calm", 200, priority=3)))


def look(policy, instances, now, there=HERE):
    view = ClusterView(now=now, instances=instances, rates=Rates(output_tokens=100.0))
    return [
        (m.key[1], m.to, m.reason.partition(":")[0]) for m in policy.balance(view, lambda name: there.get(name, []))
    ]


def test_trouble_that_lasts_moves_one_at_a_time_the_least_important_first():
    policy, loads = Balance(), cluster(a=SLOW, b=IDLE)
    assert look(policy, loads, 10.0) == []
    assert look(policy, loads, 10.0 + LASTS) == [("calm", "b", "slow")]
    assert look(policy, loads, 10.1 + LASTS) == [], "it rests"
    assert look(policy, loads, 10.1 + LASTS + REST) == [("long", "b", "slow")], "calm has moved"
    assert look(policy, loads, 10.3 + LASTS + 2 * REST) == [("short", "b", "slow")]
    assert look(policy, loads, 10.5 + LASTS + 3 * REST) == []
    assert look(policy, loads, 11.0 + LASTS + DWELL) == [("calm", "b", "slow")]


def test_trouble_that_passes_is_forgotten():
    policy, loads, calm = Balance(), cluster(a=SLOW, b=IDLE), cluster(a=SLOW | {"interval": 0.04}, b=IDLE)
    assert look(policy, loads, 10.0) == look(policy, calm, 10.2) == look(policy, loads, 10.4) == []
    assert look(policy, loads, 10.4 + LASTS)


def test_blocks_that_run_out_are_trouble_before_they_have():
    short = {"requests": 40, "decoding": 40, "held_tokens": 120_000, "interval": 0.02, "free_blocks": 20}
    policy, loads = Balance(), cluster(a=short, b=IDLE)
    look(policy, loads, 10.0)
    assert look(policy, loads, 10.0 + LASTS) == [("calm", "b", "short")]
    alone = short | {"requests": 1, "decoding": 1}
    policy, loads = Balance(), cluster(a=alone, b=IDLE)
    look(policy, loads, 10.0)
    assert look(policy, loads, 10.0 + LASTS) == [], "it has all there is"


def test_nothing_goes_where_it_would_be_no_better():
    for other in (SLOW, IDLE | {"free_blocks": 5}, IDLE | {"interval": 0.049}, IDLE | {"held_tokens": 130_000}):
        policy, loads = Balance(), cluster(a=SLOW, b=other)
        look(policy, loads, 10.0)
        assert look(policy, loads, 10.0 + LASTS) == []
    policy, loads = Balance(), [replace(i, peers=frozenset()) for i in cluster(a=SLOW, b=IDLE)]
    look(policy, loads, 10.0)
    assert look(policy, loads, 10.0 + LASTS) == [], "they are not linked"


def test_one_taker_gets_one_from_all_of_them_together():
    there = HERE | residents(("b", demand("other", 500)))
    policy, loads = Balance(), cluster(a=SLOW, b=SLOW, c=IDLE)
    look(policy, loads, 10.0, there)
    assert look(policy, loads, 10.0 + LASTS, there) == [("calm", "c", "slow")]
    assert look(policy, loads, 10.1 + LASTS, there) == [("other", "c", "slow")]
