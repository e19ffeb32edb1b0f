"""What decodes where prompts are prefilled from now on leaves, when that is worth it."""

from penstock.sched.cluster import ClusterView, Migration, Rates, Resident
from penstock.sched.cluster.balance import Together
from penstock.sched.cluster.conversion import AT_ONCE, Conversions
from tests.helpers.policies import demand, instance

BUSY = {"requests": 20, "decoding": 20, "held_tokens": 20_000, "tpot": 0.05}
PROMPTS = {"prefilling": 4, "pending_tokens": 20_000}
NOW = 100.0


def cluster(**loads):
    """By name and role: x is what changes, d... decode."""
    peers = {name: frozenset(loads) - {name} for name in loads}
    return [
        instance(name, load.pop("role", "decode"), peers=peers[name], num_blocks=4096, **load)
        for name, load in ((name, dict(load)) for name, load in loads.items())
    ]


def residents(count, since=NOW - 1.0, **more):
    here = [Resident(demand=demand(f"r{k}", 500, 400, **more), at="x", since=since) for k in range(count)]
    return lambda name: here if name == "x" else []


def look(policy, there, now=NOW, output=300.0, **loads):
    view = ClusterView(now=now, instances=cluster(**loads), rates=Rates(output_tokens=output))
    return [(m.key[1], m.to) for m in policy.balance(view, there)]


def converted(there, *others, x=PROMPTS, **more):
    policy = Conversions()
    loads = {f"d{k}": load for k, load in enumerate(others)}
    assert look(policy, there, x=BUSY, **loads) == []
    return look(policy, there, now=NOW + 0.1, x=BUSY | x | {"role": "prefill"}, **loads, **more)


def test_they_go_where_the_fewest_tokens_are_and_many_at_once():
    left = converted(residents(40), BUSY | {"held_tokens": 9_000}, BUSY)
    assert [key for key, _ in left] == [f"r{k}" for k in range(AT_ONCE)]
    assert {to for _, to in left} == {"d0"}


def test_who_has_not_changed_its_role_keeps_what_it_has():
    policy = Conversions()
    for now in (NOW, NOW + 1.0):
        assert look(policy, residents(3), now=now, x=BUSY | PROMPTS | {"role": "prefill"}, d0={}) == []


def test_those_stay_that_gain_nothing():
    assert converted(residents(3), {}), "else nothing below is said"
    assert converted(residents(3), {}, x={}) == [], "no prompt is in their way"
    assert converted(residents(3, since=NOW - 60.0), {}) == [], "they have had as much as others come to"
    assert converted(residents(3, since=NOW + 0.2), {}) == [], "they were prefilled there since"
    assert converted(residents(3), {}, output=1.0) == [], "they are nearly over"


def test_nobody_gets_what_it_cannot_bear():
    for taker in (BUSY | {"interval": 0.06}, BUSY | {"held_tokens": 250_000}, {"role": "prefill"}):
        assert converted(residents(3), taker) == []
    assert converted(residents(3, tpot=0.001), {}) == []
    room = (4096 * 64 * 9 // 10 - 1) - 600
    assert converted(residents(3), {"requests": 2, "decoding": 2, "held_tokens": room}) == [("r0", "d0")]


def test_together_the_first_that_moves_a_sequence_is_right():
    class Told:
        def __init__(self, name, *pairs):
            self.name, self.pairs = name, pairs

        def balance(self, view, residents):
            return [Migration(key=("f", key), to=to, reason=self.name) for key, to in self.pairs]

    both = Together(Told("one", ("r", "a")), Told("two", ("r", "b"), ("s", "b")))
    view = ClusterView(now=NOW, instances=[])
    assert both.name == "one+two"
    assert [(m.key[1], m.to) for m in both.balance(view, residents(0))] == [("r", "a"), ("s", "b")]
