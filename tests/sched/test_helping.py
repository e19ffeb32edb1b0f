"""Which parts of its sequences a data-parallel group has others help with."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.sched.parallel.groups import SPLIT
from penstock.sched.parallel.helping import Helping

AHEAD = 3


def test_a_long_context_is_helped_with_until_it_ends():
    helping = Helping(group=1, groups=2, room=8, ahead=AHEAD)
    (part,) = helping.look({"a": (20_000, 19_000), "b": (500, 500)}, 20_500, [500, 20_500], 1e-3)
    assert (part.request_id, part.group, part.tokens) == ("a", 0, 8 * SPLIT), "as many pieces as there is room for"
    assert helping.planned([]) == [], "its copies are not there"
    part.copying = False
    (helped,) = helping.planned([])
    assert (helped.request_id, helped.group, helped.first) == ("a", 0, 0)
    assert sorted(helped.blocks) == list(range(8 * 16))
    assert helping.look({"a": (20_100, 19_000)}, 20_600, [8692, 12_408], 1e-3) == [], "it moves once"
    assert helping.planned(["a"]) == []
    for _ in range(AHEAD + 1):
        assert not helping.parts
        assert helping.look({"c": (20_000, 19_000)}, 20_000, [500, 20_000], 1e-3) == [], "a step may still read them"
        helping.planned([])
    assert len(helping.look({"c": (20_000, 19_000)}, 20_000, [500, 20_000], 1e-3)) == 1


def test_what_does_not_pay_or_may_still_change_is_not_helped_with():
    for sequences, loads, token_ms in (
        ({"a": (20_000, 19_000)}, [20_000, 19_000], 1e-3),
        ({"a": (20_000, 19_000)}, [20_000, 0], 5e-5),
        ({"a": (20_000, SPLIT - 1)}, [20_000, 0], 1e-3),
        ({"a": (300, 300)}, [300, 0], 1.0),
    ):
        helping = Helping(group=0, groups=2, room=64, ahead=AHEAD)
        assert helping.look(sequences, loads[0], loads, token_ms) == []
    helping = Helping(group=0, groups=2, room=64, ahead=AHEAD)
    (part,) = helping.look({"a": (20_000, 2 * SPLIT)}, 20_000, [20_000, 0], 1e-3)
    assert part.tokens == 2 * SPLIT


def test_a_part_ends_when_the_other_one_has_more_to_do():
    for alone, loads in ((9000, [9000, 9000]), (30_000, [12_000, 27_000])):
        helping = Helping(group=0, groups=2, room=64, ahead=AHEAD)
        (part,) = helping.look({"a": (30_000, 30_000)}, 30_000, [30_000, 0], 1e-3)
        helping.look({"a": (30_000, 30_000)}, alone, loads, 1e-3)
        assert not helping.parts
        assert part.ended


class SomeGroups(RuleBasedStateMachine):
    """One of three groups, and how its places go."""

    def __init__(self):
        super().__init__()
        self.helping = Helping(group=1, groups=3, room=12, ahead=AHEAD)
        self.sequences, self.next = {}, 0
        self.in_flight = []  # of the plans that may not have run, the places

    @rule(length=st.integers(1, 40_000))
    def begins(self, length):
        self.sequences[f"{self.next}"] = (length, length - length % 64)
        self.next += 1

    @rule(others=st.lists(st.integers(0, 50_000), min_size=2, max_size=2))
    def looks(self, others):
        own = sum(tokens for tokens, _ in self.sequences.values())
        lent = sum(part.tokens for part in self.helping.parts.values())
        loads = [others[0], max(0, own - lent), others[1]]
        for part in self.helping.look(self.sequences, own, loads, 1e-3):
            assert part.tokens <= self.sequences[part.request_id][1]
            assert not {(part.group, place) for place in part.places} & {at for plan in self.in_flight for at in plan}
            assert set(part.places) <= set(range(6) if part.group == 0 else range(6, 12)), "its share"

    @precondition(lambda self: any(part.copying for part in self.helping.parts.values()))
    @rule()
    def copied(self):
        next(part for part in self.helping.parts.values() if part.copying).copying = False

    @rule(data=st.data())
    def plans(self, data):
        names = sorted(self.sequences)
        released = data.draw(st.lists(st.sampled_from(names), max_size=2, unique=True)) if names else []
        for name in released:
            del self.sequences[name]
        ended = [part for part in self.helping.parts.values() if part.request_id in released and part.copying]
        helped = self.helping.planned(released)
        for part in ended:
            part.copying = False  # whoever copies has seen it
        assert {part.request_id for part in helped} <= self.sequences.keys()
        places = {(part.group, block // 16) for part in helped for block in part.blocks}
        self.in_flight = [*self.in_flight, places][-AHEAD:]

    @invariant()
    def all_is_accounted_for(self):
        self.helping.check()


TestSomeGroups = SomeGroups.TestCase
