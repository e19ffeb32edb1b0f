"""Sequences move between groups that wait for each other: from the one that takes longest, as far as that makes all
shorter, and nothing swings."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.sched.cluster import ClusterView, Rates, Resident
from penstock.sched.cluster.group_balance import DWELL, LASTS, REST, GroupBalance
from tests.helpers.policies import demand, instance

ROOM = {"num_blocks": 20_000, "free_blocks": 18_000, "max_model_len": 1 << 20}


def group(name, *lengths, meets="here", peers="abcd", **values):
    """And what decodes there. A million tokens take 27 ms."""
    there = [Resident(demand=demand(f"{name}{i}", tokens), at=name, since=0.0) for i, tokens in enumerate(lengths)]
    counts = {"requests": len(lengths), "decoding": len(lengths), "held_tokens": sum(lengths)}
    load = instance(name, meets=meets, peers=frozenset(peers) - {name}, **(ROOM | counts | values))
    return load, there


def look(policy, groups, now):
    view = ClusterView(now=now, instances=[load for load, _ in groups], rates=Rates(output_tokens=1000.0))
    there = {load.name: [replace(r, since=now - r.since) for r in residents] for load, residents in groups}
    moved = policy.balance(view, there.__getitem__)
    return [(m.key[1], m.to, m.reason.partition(":")[0]) for m in moved]


def found(*groups):
    """What it moves at once where groups have been like this for long."""
    policy = GroupBalance()
    assert look(policy, groups, 0.0) == []
    return look(policy, groups, LASTS)


LONG = group("a", 200_000, 190_000), group("b", 1000, 2000)


def test_a_sequence_leaves_the_group_that_takes_longest():
    assert found(*LONG) == [("a1", "b", "sequence")]


def test_a_batch_leaves_a_group_that_takes_long_by_what_cannot_move():
    load, there = group("a", 50_000, 60_000, held_tokens=600_000, decoding=2)
    assert found((load, there), group("b", 1000)) == [("a0", "b", "batch"), ("a1", "b", "batch")]


def test_groups_that_are_even_or_wait_for_nobody_are_left_alone():
    assert found(group("a", 100_000), group("b", 90_000)) == []
    assert found(group("a", 400_000), group("b", 1000)) == [], "it would only be long elsewhere"
    assert found(*(group(load.name, 200_000 if load.name == "a" else 10, 190_000, meets="") for load, _ in LONG)) == []
    (load, there), other = LONG
    assert found((replace(load, meets="there"), there), other) == [], "they do not meet"
    assert found(group("a")) == found(group("a"), group("b")) == []


def test_only_where_it_is_linked_and_has_room():
    one, (load, there) = LONG
    assert found(one, (replace(load, peers=frozenset()), there)) == []
    assert found(one, (replace(load, num_blocks=1000, free_blocks=900), there)) == []
    assert found(one, (replace(load, max_sequences=2), there)) == []
    tight = replace(load, max_sequences=3)
    many = group("a", *[40_000] * 10)
    assert [to for _, to, _ in found(many, (tight, there))] == ["b"], "there is one place"


def test_who_excludes_a_group_or_is_about_to_end_stays():
    (load, there), other = LONG
    for stays in ({"exclude": frozenset("b")}, {"max_tokens": 1}):
        kept = [replace(r, demand=replace(r.demand, **stays)) for r in there]
        assert found((load, kept), other) == []
    brief = [replace(r, demand=replace(r.demand, max_tokens=2)) for r in there]
    assert found((load, brief), other) == [], "the pause would be longer than what all gain by it"


def test_what_a_group_holds_beside_prompts_the_oldest_have_generated():
    load, there = group("a", 50_000, 50_000, held_tokens=160_000)
    for old, moved in ((0, "a1"), (1, "a0")):
        aged = [replace(r, since=100.0 * (i == old)) for i, r in enumerate(there)]  # seconds ago
        aged = [replace(r, demand=replace(r.demand, max_tokens=100_000)) for r in aged]
        assert found((load, aged), group("b", 50_000)) == [(moved, "b", "sequence")]


def test_nothing_swings():
    policy, now = GroupBalance(), 10.0
    assert look(policy, LONG, now) == []
    assert look(policy, [LONG[1]], now + LASTS / 2) == [], "it has passed"
    now += 1.0
    assert look(policy, LONG, now) == []
    now += 2 * LASTS
    assert look(policy, LONG, now) == [("a1", "b", "sequence")]
    (load, there), (to, there_now) = LONG
    moving = (load, there[:1]), (replace(to, decoding=3, requests=3, held_tokens=to.held_tokens + 190_000), there_now)
    assert look(policy, moving, now + 2 * REST) == [], "it has not arrived yet"
    now += 2 * REST
    more = [Resident(demand=demand("long", 200_000), at="b", since=0.0), there[1]]
    back = group("a", 10), (replace(to, decoding=2, requests=2, held_tokens=390_000), more)
    assert look(policy, back, now) == [("long", "a", "sequence")], "not the one that has just moved"
    assert look(policy, back, now + REST / 2) == [], "it rests"
    assert look(policy, back, now + REST) == [], "both have just moved"
    assert look(policy, back, now + DWELL) == [("a1", "a", "sequence")], "it has been there for long"


@given(
    st.lists(st.lists(st.integers(1, 300_000), max_size=6), min_size=2, max_size=4),
    st.integers(500, 20_000),
)
def test_every_move_makes_the_longest_shorter_and_fits(lengths, free):
    groups = [group("abcd"[i], *own, free_blocks=free) for i, own in enumerate(lengths)]
    moves = found(*groups)
    assert len({name for name, _, _ in moves}) == len(moves)
    numbered = [(load.name, i, n) for (load, _), own in zip(groups, lengths, strict=True) for i, n in enumerate(own)]
    where = {f"{name}{i}": (name, n) for name, i, n in numbered}
    held = {load.name: load.held_tokens for load, _ in groups}
    before = max(held.values())
    for name, to, _ in moves:
        source, tokens = where[name]
        assert to != source
        held[source] -= tokens
        held[to] += tokens
    assert not moves or max(held.values()) < before
    assert moves == found(*groups)
