"""A strict instance pulls the running offline sequence that balances its steps; a relaxed one takes some back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster import ClusterView, Resident
from penstock.sched.cluster.colocation import OUTPUT, ROOM, SHARE, LatencyRoles
from penstock.sched.cluster.pull import DWELL, EVERY, QUIET, Pull, wanted
from tests.helpers.policies import TIMES, demand, instance

NOW = 100.0
TPOT = 0.05
ONLINE = {"requests": 20, "decoding": 20, "held_tokens": 20_000, "tpot": TPOT}
OFFLINE = {
    "requests": 5, "decoding": 5, "offline_requests": 5, "held_tokens": 15_000, "offline_tokens": 15_000
}  # fmt: skip
PROMPTS = {"prefilling": 2, "pending_tokens": 20_000}


def cluster(**loads):
    """ "p..." prefill, "d..." decode; all are linked with all."""
    return [
        instance(
            name,
            {"p": "prefill", "d": "decode"}[name[0]],
            peers=frozenset(loads) - {name},
            **({"num_blocks": 8192, "free_blocks": 8192} | load),
        )
        for name, load in loads.items()
    ]


def residents(at, *lengths, offline=True, **more):
    """That had their first tokens just now."""
    there = [Resident(demand=demand(f"{at}-{n}", n, 400, offline=offline, **more), at=at, since=NOW) for n in lengths]
    return {at: there}


def look(policy, instances, there, now=NOW, offline=()):
    view = ClusterView(now=now, instances=instances, offline=offline)
    migrations = policy.balance(view, lambda name: [replace(r, since=now) for r in there.get(name, [])])
    return [(m.key[1], m.to, m.reason.partition(":")[0]) for m in migrations]


def pull(instances, there):
    return look(Pull(LatencyRoles()), instances, there)


# --- lengths


@given(
    requests=st.integers(0, 255), held=st.integers(0, 300_000), tpot=st.floats(0.004, 0.1), blocks=st.integers(10, 9000)
)
def test_with_the_greatest_length_the_target_and_the_memory_just_hold(requests, held, tpot, blocks):
    load = instance("d", requests=requests, held_tokens=held, num_blocks=blocks, free_blocks=blocks)
    preferred, greatest = wanted(load, tpot)
    assert 0 <= preferred <= greatest

    def holds(length):
        fits = held + length + 256 * (requests + 1) <= int(ROOM * blocks * BLOCK_TOKENS)
        room = fits and length <= load.max_model_len and requests + 1 <= ROOM * load.max_sequences
        return room and TIMES.step_ms((), requests + 1, held + length + OUTPUT * (requests + 1)) <= SHARE * tpot * 1e3

    assert not greatest or holds(greatest)
    paced = not requests or load.decode_seconds <= SHARE * tpot
    assert not paced or not holds(greatest + 1)


def test_the_preferred_length_brings_arithmetic_and_memory_into_balance():
    few = instance("d", requests=20, held_tokens=20_000, num_blocks=8192, free_blocks=8192)
    assert wanted(few, 1.0) == (0, few.max_model_len), "memory is the bound: what adds as little as possible to it"
    large = {"num_blocks": 100_000, "free_blocks": 100_000, "max_sequences": 1024, "max_model_len": 300_000}
    many = instance("d", requests=450, held_tokens=450, **large)
    preferred, greatest = wanted(many, 1.0)
    assert 0 < preferred < greatest
    for length, leads in ((preferred - 2, False), (preferred, True)):
        compute, memory = TIMES.utilisation((), 451, 450 + length)
        assert (memory >= compute) == leads
    short = replace(many, max_model_len=1000)
    assert wanted(short, 1.0) == (1000, 1000), "even the greatest leaves arithmetic the bound"


# --- to strict instances


@pytest.mark.parametrize(("rows", "chosen"), [(20, "p0-300"), (450, "p0-9000")])
def test_the_running_sequence_nearest_to_the_preferred_length_is_pulled(rows, chosen):
    strict = {"requests": rows, "decoding": rows, "held_tokens": rows, "tpot": TPOT}
    instances = cluster(p0=OFFLINE | PROMPTS, d0=strict)
    instances = [replace(i, max_sequences=1024) for i in instances]
    assert pull(instances, residents("p0", 3000, 300, 9000)) == [(chosen, "d0", "pulled")]


def test_nothing_is_pulled_beyond_the_greatest_length():
    tight = ONLINE | {"tpot": 1e-3 * (TIMES.step_ms((), 21, 20_000 + 2000 + OUTPUT * 21)) / SHARE}
    there = residents("p0", 2500, 1500)
    assert pull(cluster(p0=OFFLINE | PROMPTS, d0=tight), there) == [("p0-1500", "d0", "pulled")]
    assert pull(cluster(p0=OFFLINE | PROMPTS, d0=tight), residents("p0", 2500)) == []
    assert pull(cluster(p0=OFFLINE | PROMPTS, d0=ONLINE | {"interval": TPOT}), there) == [], "as it is measured"
    assert pull(cluster(p0=OFFLINE | PROMPTS, d0=ONLINE | {"free_blocks": 100}), there) == []


def test_only_offline_sequences_are_pulled_and_only_from_where_prompts_are():
    strict = {"d0": ONLINE, "d1": ONLINE | {"held_tokens": 30_000}}
    there = residents("p0", 500, 600, 700)
    assert pull(cluster(p0=OFFLINE | PROMPTS, **strict), there) == [
        ("p0-500", "d0", "pulled"), ("p0-600", "d1", "pulled")
    ], "one for each"  # fmt: skip
    assert pull(cluster(p0=OFFLINE, **strict), there) == []
    assert pull(cluster(p0=OFFLINE | PROMPTS, **strict), residents("p0", 500, offline=False)) == []
    unlinked = [replace(i, peers=frozenset()) for i in cluster(p0=OFFLINE | PROMPTS, **strict)]
    assert pull(unlinked, there) == []


# --- and back


BUSY = ONLINE | {"requests": 60, "decoding": 60, "offline_requests": 40, "held_tokens": 150_000, "interval": 0.02}


def test_an_instance_without_prompts_takes_sequences_back_one_at_a_time():
    policy, instances, there = Pull(LatencyRoles()), cluster(p0={}, d0=BUSY), residents("d0", 200, 6000)
    assert look(policy, instances, there) == [], "it has to last"
    assert look(policy, instances, there, NOW + QUIET) == [("d0-6000", "p0", "given back")], "memory is the bound"
    assert look(policy, instances, there, NOW + QUIET + EVERY / 2) == []
    assert look(policy, instances, there, NOW + QUIET + EVERY) == [("d0-200", "p0", "given back")]
    assert look(policy, instances, there, NOW + QUIET + 2 * EVERY) == [], "both have just moved"
    prompts = cluster(p0=OFFLINE | PROMPTS, d0=ONLINE)
    back = {"p0": there["d0"]}
    assert look(policy, prompts, back, NOW + QUIET + 3 * EVERY) == [], "nothing swings"
    assert look(policy, prompts, back, NOW + QUIET + EVERY + DWELL) == [("d0-200", "d0", "pulled")]


def test_nothing_is_given_back_that_gains_nothing_or_while_there_are_offline_prompts():
    there = residents("d0", 6000)
    for p0, d0, offline in (
        ({}, BUSY, [demand("o", 100, offline=True)]),
        (PROMPTS, BUSY, ()),
        ({}, ONLINE, ()),
        ({"requests": 60, "decoding": 60, "held_tokens": 150_000, "interval": 0.018}, BUSY, ()),
        ({}, BUSY | {"interval": None, "held_tokens": 20_000}, ()),
    ):
        policy = Pull(LatencyRoles())
        for now in (NOW, NOW + QUIET):
            assert look(policy, cluster(p0=p0, d0=d0), there, now, offline) == []
