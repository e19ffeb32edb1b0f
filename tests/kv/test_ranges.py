"""Ranges: every slot that is told to change does, and what a sequence reads is what it was promised."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.kv.ranges import Change, Ranges

OWNERS = st.sampled_from("abcdef")
BLOCKS = st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True)


class Mapped(RuleBasedStateMachine):
    """Plays the machine: applies changes to slots, and looks whether they show what was asked for."""

    @initialize(num_ranges=st.integers(1, 5), range_blocks=st.integers(1, 6), budget=st.integers(1, 20))
    def start(self, num_ranges, range_blocks, budget):
        self.ranges = Ranges(num_ranges, range_blocks, budget, base=1000)
        self.slots: dict[int, int] = {}
        self.owned: dict[str, tuple[int, list[int]]] = {}

    def apply(self, changes: list[Change]) -> None:
        for slot, block in changes:
            if block is None:
                del self.slots[slot]  # only what is mapped is unmapped
            else:
                assert self.slots.get(slot) != block, "a slot is mapped again to what it has"
                self.slots[slot] = block
            assert len(self.slots) <= self.ranges.budget, "over budget half-way"

    @rule(owner=OWNERS, blocks=BLOCKS)
    def place(self, owner, blocks):
        blocks = blocks[: self.ranges.range_blocks]
        first, changes = self.ranges.place(owner, blocks)
        self.apply(changes)
        others = [o for o in self.owned if o != owner]
        live = sum(len(self.owned[o][1]) for o in others)
        if first is None:
            assert not changes
            self.owned.pop(owner, None)
            assert len(others) == self.ranges.num_ranges or live + len(blocks) > self.ranges.budget
            return
        assert live + len(blocks) <= self.ranges.budget
        if owner in self.owned:
            assert first == self.owned[owner][0], "a sequence moved"
        self.owned[owner] = first, blocks

    @rule(owner=OWNERS, blocks=BLOCKS)
    def extend(self, owner, blocks):
        before = self.ranges.blocks(owner)
        self.apply(self.ranges.extend(owner, blocks))
        after = self.ranges.blocks(owner)
        assert after[: len(before)] == before
        assert after[len(before) :] == blocks[: len(after) - len(before)]
        if owner in self.owned:
            self.owned[owner] = self.owned[owner][0], after
        else:
            assert not after

    @rule(owner=OWNERS)
    def release(self, owner):
        self.ranges.release(owner)
        self.owned.pop(owner, None)
        assert self.ranges.blocks(owner) == []

    @invariant()
    def everything_is_accounted_for(self):
        self.ranges.check()
        counts = self.ranges.counts()
        assert counts["used"] == len(self.owned)
        assert counts["mapped"] == len(self.slots)
        assert counts["live"] == sum(len(blocks) for _, blocks in self.owned.values())
        for first, blocks in self.owned.values():
            assert (first - 1000) % self.ranges.range_blocks == 0
            assert [self.slots[first + i] for i in range(len(blocks))] == blocks


TestMapped = Mapped.TestCase
TestMapped.settings = settings(max_examples=150, stateful_step_count=40)


def test_a_sequence_that_grows_maps_only_what_is_new():
    ranges = Ranges(2, 8, 100)
    assert ranges.place("a", [5, 6]) == (0, [(0, 5), (1, 6)])
    assert ranges.extend("a", [7]) == [(2, 7)]
    assert ranges.place("a", [5, 6, 7]) == (0, [])
    assert ranges.place("a", [5, 9, 7]) == (0, [(1, 9)])  # swapped for its twin


def test_a_finished_range_goes_to_whom_it_fits_best():
    ranges = Ranges(3, 8, 100)
    for owner, blocks in (("a", [1, 2, 3]), ("b", [4, 5, 6]), ("c", [7, 8, 9, 10])):
        ranges.place(owner, blocks)
        ranges.release(owner)
    assert ranges.place("d", [4, 5, 11]) == (8, [(10, 11)])
    assert ranges.place("e", [20, 21, 22, 23])[0] == 16  # as long as c's
    assert ranges.counts() == {"free": 0, "used": 2, "reusable": 1, "mapped": 10, "live": 7}


def test_a_free_range_is_taken_before_one_whose_blocks_do_not_fit():
    ranges = Ranges(2, 4, 100)
    ranges.place("a", [1, 2])
    ranges.release("a")
    assert ranges.place("b", [3, 4])[0] == 4
    ranges.release("b")
    assert ranges.place("c", [1, 2]) == (0, [])


def test_over_budget_the_oldest_goes_first_and_then_the_stale():
    ranges = Ranges(4, 4, 8)
    ranges.place("old", [1, 2, 3])
    ranges.place("new", [4, 5])
    ranges.release("old")
    ranges.release("new")
    assert ranges.place("a", [6, 7, 8, 9]) == (8, [(2, None), (8, 6), (9, 7), (10, 8), (11, 9)])
    assert ranges.place("b", [4, 9])[1] == [(5, 9)]  # what new had left
    assert ranges.place("a", [6]) == (8, [])
    mapped = [(12, 10), (13, 11), (14, 12)]
    assert ranges.place("c", [10, 11, 12]) == (12, [(0, None), (1, None), (11, None), *mapped])
    assert ranges.place("c", [10, 11, 12, 13]) == (12, [(10, None), (15, 13)])  # a's last were stale, b's are live
    ranges.check()


@pytest.mark.parametrize("budget", [5, 6])
def test_who_fits_in_no_budget_is_left_to_its_table(budget):
    ranges = Ranges(3, 4, budget)
    assert ranges.place("a", [1, 2, 3])[0] == 0
    first, changes = ranges.place("b", [1, 2, 4])
    assert (first is None) == (budget == 5)
    assert len(changes) == (0 if budget == 5 else 3)
    ranges.check()
