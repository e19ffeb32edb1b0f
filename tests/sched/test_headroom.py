"""How much more an instance has room for, and who goes where there is none."""

import random
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster import ClusterView, Later, Rates
from penstock.sched.cluster.foresight import has_room, most_tokens
from penstock.sched.cluster.headroom import Headrooms, headroom
from penstock.sched.cluster.unified import COMPARED, Unified
from tests.helpers.policies import demand, instance

BLOCKS = 100
TOKENS = BLOCKS * BLOCK_TOKENS
loads = st.builds(
    lambda number, **values: instance(f"i{number}", num_blocks=BLOCKS, max_sequences=4, **values),
    st.integers(0, 999),
    requests=st.integers(2, 6),
    offline_requests=st.integers(0, 2),
    held_tokens=st.integers(0, 2 * TOKENS),
    offline_tokens=st.integers(0, TOKENS),
    free_blocks=st.integers(0, BLOCKS),
)


@given(st.lists(loads, max_size=5), st.sampled_from([0.0, 80.0, 1e5]))
def test_of_many_it_is_that_of_each_and_never_less_than_without_sharing(instances, output):
    rooms = [headroom(load, output) for load in instances]
    assert Headrooms().of(instances, output).tolist() == rooms
    assert all(room >= most_tokens(load, output) for load, room in zip(instances, rooms, strict=True))


def test_a_shared_beginning_is_held_once():
    alike = {"requests": 3, "held_tokens": 3 * TOKENS // 2, "num_blocks": BLOCKS}
    assert headroom(instance("i", free_blocks=40, **alike), 100.0) == 40 * BLOCK_TOKENS - 150
    assert headroom(instance("i", free_blocks=0, **alike), 100.0) < 0


def test_nothing_and_too_much():
    assert headroom(instance("i"), 100.0) == inf
    assert headroom(instance("i", requests=2, offline_requests=2), 100.0) == inf
    assert headroom(instance("i", requests=2, max_sequences=2), 100.0) == -inf


def test_offline_work_makes_way_for_online():
    full = instance(
        "i", num_blocks=BLOCKS, requests=3, offline_requests=2, held_tokens=TOKENS, offline_tokens=TOKENS - 640
    )
    assert most_tokens(full, 100.0) == TOKENS - 640 - 50
    assert has_room(full, demand("r", 3000), 100.0)
    assert not has_room(full, demand("r", TOKENS - 640), 100.0)


def decide(policy, now, *queue, **shared):
    instances = [instance(f"i{k}", **shared) for k in range(COMPARED + 1)]
    for some in (instances[:2], instances):
        view = ClusterView(now=now, instances=some, queue=queue, rates=Rates(output_tokens=64.0))
        yield policy.decide(view, random.Random(0))


def test_unified_lets_wait_whoever_no_instance_has_room_for():
    full = {"requests": 3, "held_tokens": TOKENS, "num_blocks": BLOCKS, "free_blocks": 0}
    for shared in (full, {"requests": 4, "max_sequences": 4, "held_tokens": 64}):
        assert all(isinstance(verdict, Later) for verdict in decide(Unified(), 0.0, demand("r", ttft=9.0), **shared))
    shared = full | {"held_tokens": 2 * TOKENS, "free_blocks": 40}
    assert all(verdict.key[1] == "r" for verdict in decide(Unified(), 0.0, demand("r", ttft=9.0), **shared))


def test_unified_keeps_the_roomiest_for_the_first_in_order():
    policy = Unified()
    busy = {"num_blocks": BLOCKS, "requests": 2, "offline_requests": 0}

    def view(now, first, second, *queue):
        instances = [
            instance("a", held_tokens=TOKENS - first, free_blocks=first // BLOCK_TOKENS, **busy),
            instance("b", held_tokens=TOKENS - second, free_blocks=second // BLOCK_TOKENS, **busy),
        ]
        return ClusterView(now=now, instances=instances, queue=queue)

    large = demand("large", 3000, arrived=19.9, ttft=1.0)
    small = demand("small", 500, arrived=20.0, ttft=1.0)
    assert isinstance(policy.decide(view(20.0, 1500, 1000, large), random.Random(0)), Later)
    # the other one is the roomiest by now, but what is kept stays kept, and the rest is for others
    assert policy.decide(view(20.1, 1500, 2000, large, small), random.Random(0)).prefill == "b"
    assert isinstance(policy.decide(view(20.2, 1500, 200, large, small), random.Random(0)), Later)
    verdict = policy.decide(view(20.3, 3500, 200, large, small), random.Random(0))
    assert (verdict.key[1], verdict.prefill) == ("large", "a")
