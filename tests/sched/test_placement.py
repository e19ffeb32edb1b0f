"""Experts on ranks: what holds of every placement, and how even it is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.parallel import Placement
from penstock.sched.parallel.placement import _exchange, aligned, balanced, group_limited


@st.composite
def layers(draw):
    """(loads of experts, ranks, slots of each)."""
    experts, ranks = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    slots = draw(st.integers(-(-experts // ranks), min(experts, -(-experts // ranks) + 4)))
    loads = st.integers(0, 1000) | st.sampled_from([0, 1, 10**6])
    return draw(st.lists(loads, min_size=experts, max_size=experts)), ranks, slots


@given(layers())
def test_every_expert_is_somewhere_and_no_slot_is_wasted(layer):
    counts, ranks, slots = layer
    placement = balanced(counts, ranks, slots)
    placement.check()
    assert (placement.experts, len(placement.ranks)) == (len(counts), ranks)
    assert {len(rank) for rank in placement.ranks} == {slots}
    assert sum(placement.loads(counts)) == pytest.approx(sum(counts))
    assert placement.imbalance(counts) >= 1 - 1e-9
    Placement.even(len(counts), ranks).check()


@given(layers())
def test_what_is_busier_has_no_fewer_replicas(layer):
    counts, ranks, slots = layer
    replicas = [len(having) for having in balanced(counts, ranks, slots).ranks_of()]
    for busy in range(len(counts)):
        for idle in range(len(counts)):
            if counts[busy] > counts[idle]:
                assert replicas[busy] >= replicas[idle] or replicas[busy] == ranks


@given(layers(), st.data())
def test_a_placement_that_is_renamed_is_as_even_and_changes_no_more(layer, data):
    counts, ranks, slots = layer
    other = data.draw(st.lists(st.integers(0, 100), min_size=len(counts), max_size=len(counts)))
    old, new = balanced(other, ranks, slots), balanced(counts, ranks, slots)
    named = aligned(old, new)
    named.check()
    assert sorted(map(sorted, named.ranks)) == sorted(map(sorted, new.ranks))
    assert len(old.changes(named)) <= len(old.changes(new))
    assert old.changes(aligned(old, old)) == []


def test_room_is_made_for_a_replica_where_only_ranks_that_have_it_have_room():
    """No loads are known that lead there."""
    placed = [{0, 1, 2}, {3, 4, 5}, {0}]
    _exchange(placed, 3, 0)
    assert placed == [{0, 1, 2}, {0, 4, 5}, {0, 3}]


@st.composite
def grouped(draw):
    hosts, inside = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    groups, size = hosts * draw(st.integers(1, 3)), draw(st.integers(1, 6))
    own = groups // hosts * size
    slots = draw(st.integers(-(-own // inside), min(own, -(-own // inside) + 2)))
    counts = draw(st.lists(st.integers(0, 500), min_size=groups * size, max_size=groups * size))
    return counts, groups, hosts, hosts * inside, slots


@given(grouped())
def test_a_group_is_on_one_host(problem):
    counts, groups, hosts, ranks, slots = problem
    placement = group_limited(counts, groups, hosts, ranks, slots)
    placement.check()
    size, inside = len(counts) // groups, ranks // hosts
    for group in range(groups):
        having = placement.ranks_of()[group * size : (group + 1) * size]
        assert len({rank // inside for own in having for rank in own}) == 1
    again = aligned(Placement.even(len(counts), ranks), placement, inside)
    again.check()
    assert again.imbalance(counts) == pytest.approx(placement.imbalance(counts))


@pytest.mark.parametrize("skew", [0.5, 1.0, 1.2])
def test_a_zipf_of_256_experts_on_64_ranks_is_even_to_a_tenth(skew):
    """Two spare slots on each rank; DeepSeek-V3 decodes with as many experts on a rank and less."""
    loads = 1e6 / np.arange(1, 257) ** skew
    counts = np.random.default_rng(0).permutation(loads).tolist()
    assert Placement.even(256, 64).imbalance(counts) > 1.5
    assert balanced(counts, 64, 6).imbalance(counts) < 1.1


def test_loads_by_hand():
    placement = Placement(((0, 1), (0, 2)))
    assert placement.loads([10, 3, 1]) == [8, 6]
    assert placement.imbalance([10, 3, 1]) == pytest.approx(8 / 7)
    assert placement.imbalance([0, 0, 0]) == 1
    assert placement.changes(Placement(((0, 2), (0, 1)))) == [(0, 2), (1, 1)]
    assert aligned(placement, Placement(((2, 0), (1, 0)))) == Placement(((1, 0), (2, 0)))
