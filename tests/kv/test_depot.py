"""A pool that many instances share: nothing is lost, whoever dies when."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.errors import ConfigError
from penstock.kv.depot import Depot, DepotSource

NAMES = ["a", "b", "c"]
BLOCKS = 24


def test_leases_are_runs_where_there_is_one():
    depot = Depot(32)
    depot.attach("a", 1, 20)
    assert depot.lease("a", 8) == list(range(8))
    depot.drop("a", [1, 3, 4])
    assert depot.lease("a", 2) == [3, 4]
    assert depot.lease("a", 3) == [8, 9, 10]
    depot.drop("a", [0, 5])
    assert depot.lease("a", 11) == [0, 1, 5, *range(11, 19)]  # none is long enough: the lowest ones
    depot.check()


def test_what_is_refused_names_the_values():
    depot = Depot(10)
    depot.attach("a", 1, 6)
    with pytest.raises(ConfigError, match="a is attached already, as incarnation 1"):
        depot.attach("a", 2, 6)
    with pytest.raises(ConfigError, match="5 blocks, from 1 to 4 of 10"):
        depot.attach("b", 1, 5)
    with pytest.raises(ConfigError, match="quota: 0 blocks"):
        depot.attach("b", 1, 0)
    depot.detach("a", [])
    with pytest.raises(ConfigError):
        depot.attach("b", 1, 5)  # the dead one's promise stands until it expires
    depot.expire("a")
    depot.attach("b", 1, 10)
    depot.check()


def test_an_incarnation_inherits_what_the_last_one_kept():
    depot = Depot(10)
    depot.attach("a", 1, 5)
    blocks = depot.lease("a", 5)
    before = {block: depot.generation(block) for block in blocks}
    depot.detach("a", blocks[:3])
    assert depot.counts() == {"free": 7, "orphaned": 3}
    assert depot.attach("a", 2, 5) == blocks[:3]
    assert depot.counts() == {"free": 7, "orphaned": 0, "held:a": 3}
    assert all(depot.generation(b) == before[b] + 1 for b in blocks[:3])
    assert depot.room("a") == 2
    depot.check()


def test_an_incarnation_with_less_room_inherits_less():
    depot = Depot(10)
    depot.attach("a", 1, 5)
    depot.detach("a", depot.lease("a", 5))
    assert depot.attach("a", 2, 2) == [0, 1]
    assert depot.take_surplus() == [range(2, 3), range(3, 4), range(4, 5)]
    depot.check()


def test_shared_blocks_stay_with_the_others():
    depot = Depot(10)
    depot.attach("a", 1, 4)
    depot.attach("b", 1, 4)
    one, two = depot.lease("a", 2)
    assert depot.hold("b", [(one, depot.generation(one))])
    depot.detach("a", [one, two])
    assert depot.counts() == {"free": 8, "orphaned": 1, "held:b": 1}
    assert depot.attach("a", 2, 4) == [two]
    depot.drop("b", [one])
    assert depot.counts()["free"] == 9
    depot.check()


def test_an_orphan_can_be_held_until_it_is_inherited():
    depot = Depot(10)
    depot.attach("a", 1, 4)
    depot.attach("b", 1, 4)
    one, two = depot.lease("a", 2)
    known = [(block, depot.generation(block)) for block in (one, two)]
    depot.detach("a", [one, two])
    assert depot.hold("b", known[:1])
    assert depot.attach("a", 2, 4) == [two]
    assert not depot.hold("b", known[1:])  # the old life spoke of it, the new one never did
    depot.check()


def test_holding_is_all_or_nothing():
    depot = Depot(10)
    depot.attach("a", 1, 4)
    depot.attach("b", 1, 2)
    one, two = depot.lease("a", 2)
    own = depot.lease("b", 2)
    good = [(one, depot.generation(one)), (two, depot.generation(two))]
    stale, free, mine = (two, depot.generation(two) - 1), (9, 0), (own[0], depot.generation(own[0]))
    for bad in (stale, free, mine, good[0]):
        assert not depot.hold("b", [good[0], bad], own)
        assert depot.held("b") == own
    assert depot.hold("b", good, own)
    assert depot.held("b") == [one, two]
    assert depot.counts() == {"free": 8, "orphaned": 0, "held:a": 2, "held:b": 2}
    depot.check()


def test_a_block_used_again_is_another_generation():
    depot = Depot(4)
    depot.attach("a", 1, 1)
    depot.attach("b", 1, 1)
    [block] = depot.lease("a", 1)
    seen = depot.generation(block)
    source = DepotSource(depot, "a")
    assert source.exchange([block], 1) == [block]
    assert not DepotSource(depot, "b").hold([(block, seen)], [])
    assert DepotSource(depot, "b").hold([(block, seen + 1)], [])


def test_only_what_was_promised_is_ever_touched():
    depot = Depot(1000)
    depot.attach("a", 1, 10)
    depot.attach("b", 1, 10)
    high = depot.lease("a", 10)[-1]
    touched = depot.lease("b", 10)
    assert max(high, *touched) < depot.limit == 20
    depot.detach("a", [])
    assert depot.take_surplus() == []
    depot.expire("a")
    assert depot.limit == 10
    assert depot.take_surplus() == [range(10)]  # b holds everything above
    depot.drop("b", touched[:2])
    assert [list(run) for run in depot.take_surplus()] == [[10], [11]]
    assert depot.lease("b", 2) == [0, 1]
    depot.detach("b", [])
    depot.expire("b")
    assert sorted(b for run in depot.take_surplus() for b in run) == [*range(10), *range(12, 20)]
    depot.check()


class DepotMachine(RuleBasedStateMachine):
    """The depot against the plainest model: sets of holders, living and dead."""

    def __init__(self):
        super().__init__()
        self.depot = Depot(BLOCKS)
        self.lives = 0
        self.quota = {}  # name -> quota, dead or alive
        self.alive = set()
        self.held = {name: set() for name in NAMES}
        self.uses = dict.fromkeys(range(BLOCKS), 0)
        self.touched = set()  # blocks whose memory nobody gave back

    def living(self, data):
        return data.draw(st.sampled_from(sorted(self.alive)))

    def used(self):
        return set().union(*self.held.values())

    @rule(name=st.sampled_from(NAMES), quota=st.integers(-1, BLOCKS))
    def attach(self, name, quota):
        self.lives += 1
        others = sum(q for other, q in self.quota.items() if other != name)
        if name in self.alive or not 0 < quota <= BLOCKS - others:
            with pytest.raises(ConfigError):
                self.depot.attach(name, self.lives, quota)
            return
        orphans = self.held[name]
        inherited = self.depot.attach(name, self.lives, quota)
        assert len(inherited) == min(len(orphans), quota)
        assert set(inherited) <= orphans
        for block in inherited:
            self.uses[block] += 1
        self.held[name] = set(inherited)
        self.quota[name] = quota
        self.alive.add(name)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def exchange(self, data):
        name = self.living(data)
        give = data.draw(st.lists(st.sampled_from(sorted(self.held[name])), unique=True)) if self.held[name] else []
        self.held[name] -= set(give)
        want = data.draw(st.integers(0, self.quota[name] - len(self.held[name])))
        got = DepotSource(self.depot, name).exchange(give, want)
        assert len(got) == len(set(got)) == want
        assert not set(got) & self.used()
        assert all(block < sum(self.quota.values()) for block in got)
        for block in got:
            self.uses[block] += 1
        self.held[name] |= set(got)
        self.touched |= set(got)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def hold(self, data):
        name = self.living(data)
        room = self.quota[name] - len(self.held[name])
        blocks = data.draw(st.lists(st.sampled_from(range(BLOCKS)), max_size=room))
        stale = data.draw(st.sampled_from([0, 0, 0, 1]))
        good = (
            len(set(blocks)) == len(blocks) and set(blocks) <= self.used() - self.held[name] and not (stale and blocks)
        )
        assert self.depot.hold(name, [(block, self.uses[block] - stale) for block in blocks]) == good
        if good:
            for other in set(NAMES) - self.alive:
                self.held[other] -= set(blocks)
            self.held[name] |= set(blocks)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def die(self, data):
        name = self.living(data)
        keep = data.draw(st.sets(st.sampled_from(range(BLOCKS))))
        self.depot.detach(name, keep)
        others = set().union(*(self.held[other] for other in NAMES if other != name))
        self.held[name] &= keep - others
        self.alive.remove(name)

    @precondition(lambda self: set(self.quota) - self.alive)
    @rule(data=st.data())
    def expire(self, data):
        name = data.draw(st.sampled_from(sorted(set(self.quota) - self.alive)))
        self.depot.expire(name)
        self.held[name] = set()
        del self.quota[name]

    @invariant()
    def agrees(self):
        self.depot.check()
        assert self.depot.limit == sum(self.quota.values())
        counts = self.depot.counts()
        assert counts.pop("free") == BLOCKS - len(self.used())
        assert counts.pop("orphaned") == sum(len(self.held[name]) for name in set(NAMES) - self.alive)
        assert counts == {f"held:{name}": len(self.held[name]) for name in self.alive}
        assert {block: self.depot.generation(block) for block in range(BLOCKS)} == self.uses

    @invariant()
    def memory_is_bounded_by_what_is_promised_or_held(self):
        surplus = {block for run in self.depot.take_surplus() for block in run}
        assert not surplus & self.used()
        self.touched -= surplus
        assert all(block < self.depot.limit for block in self.touched - self.used())


TestDepot = DepotMachine.TestCase
TestDepot.settings = settings(max_examples=120, stateful_step_count=40)
