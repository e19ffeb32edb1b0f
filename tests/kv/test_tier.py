"""A tier below the device: what may go, and that nothing that stays becomes unreachable."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.kv.tier import Kept, Tier


def keys_of(name: str) -> list[bytes]:
    """Prefix keys of a prompt, one for each letter."""
    return [name[: i + 1].encode() for i in range(len(name))]


def write(tier: Tier, name: str) -> list[int | None]:
    """Copy what is missing of a prompt's blocks."""
    slots: list[int | None] = []
    keys = keys_of(name)
    for i, key in enumerate(keys):
        if not tier.has(key):
            slots.append(tier.claim(key, keys[i - 1] if i else None))
            if slots[-1] is not None:
                tier.written(key, whole=True)
    return slots


def found(tier: Tier, name: str) -> int:
    keys = keys_of(name)
    return next((i for i, key in enumerate(keys) if tier.slot(key) is None), len(keys))


def test_the_least_recently_used_leaf_goes_first():
    tier = Tier(5)
    write(tier, "ab")
    write(tier, "xyz")
    tier.use(keys_of("ab"))
    write(tier, "mn")
    assert (found(tier, "ab"), found(tier, "xyz"), found(tier, "mn")) == (2, 1, 2)
    tier.check()


def test_a_parent_stays_while_it_has_children():
    tier = Tier(3)
    write(tier, "abc")
    assert write(tier, "x") == [2]
    assert found(tier, "abc") == 2
    tier.check()


def test_the_last_leaf_does_not_make_room_for_its_own_child():
    tier = Tier(2)
    write(tier, "ab")
    assert write(tier, "abc") == [None]
    assert found(tier, "abc") == 2
    tier.check()


def test_a_copy_without_its_parent_is_not_made():
    tier = Tier(4)
    assert tier.claim(b"ab", b"a") is None
    tier.check()


def test_a_copy_is_not_found_before_it_is_whole_and_does_not_go_meanwhile():
    tier = Tier(1)
    assert tier.claim(b"a", None) == 0
    assert tier.slot(b"a") is None
    assert tier.has(b"a")
    assert tier.claim(b"b", None) is None
    tier.written(b"a", whole=True)
    assert tier.take_changes() == ([b"a"], [])
    assert tier.claim(b"b", None) == 0
    assert tier.take_changes() == ([], [b"a"])
    tier.check()


def test_what_is_read_stays():
    tier = Tier(2)
    write(tier, "ab")
    tier.begin_reading([b"a", b"ab"])
    assert write(tier, "x") == [None]
    tier.end_reading([b"a", b"ab"])
    assert write(tier, "x") == [1]
    tier.check()


def test_a_bad_copy_is_written_anew_in_its_place():
    tier = Tier(3)
    write(tier, "abc")
    tier.take_changes()
    tier.spoil(b"ab")
    assert found(tier, "abc") == 1
    assert tier.take_changes() == ([], [b"ab"])
    assert not tier.has(b"ab")
    assert write(tier, "abc") == [1]
    assert found(tier, "abc") == 3
    tier.check()


class Tiers(RuleBasedStateMachine):
    """Random uses of a small tier: `check` holds, changes add up to what can be found, and slots keep their content."""

    @initialize(slots=st.integers(1, 8))
    def begin(self, slots: int) -> None:
        self.tier = Tier(slots)
        self.cells: dict[int, bytes] = {}
        self.coming: list[bytes] = []
        self.reading: list[list[bytes]] = []
        self.told: set[bytes] = set()

    @rule(name=st.text("ab", min_size=1, max_size=5))
    def claim(self, name: str) -> None:
        keys = keys_of(name)
        self.tier.use(keys)
        for i, key in enumerate(keys):
            if self.tier.has(key):
                continue
            slot = self.tier.claim(key, keys[i - 1] if i else None)
            if slot is None:
                break
            read = [key for held in self.reading for key in held]
            assert self.cells.get(slot) not in read, "what is read was given away"
            self.cells[slot] = key
            self.coming.append(key)

    @rule(whole=st.booleans(), pick=st.integers(0))
    def written(self, whole: bool, pick: int) -> None:
        if self.coming:
            self.tier.written(self.coming.pop(pick % len(self.coming)), whole=whole)

    @rule(name=st.text("ab", min_size=1, max_size=5))
    def read(self, name: str) -> None:
        keys = keys_of(name)[: found(self.tier, name)]
        self.tier.begin_reading(keys)
        self.reading.append(keys)

    @rule(pick=st.integers(0), spoiled=st.booleans())
    def end_reading(self, pick: int, spoiled: bool) -> None:
        if self.reading:
            keys = self.reading.pop(pick % len(self.reading))
            self.tier.end_reading(keys)
            if keys and spoiled:
                self.tier.spoil(keys[-1])

    @rule(lost=st.sets(st.integers(0, 7)), order=st.randoms(use_true_random=False))
    def restart(self, lost: set[int], order: Random) -> None:
        """What is whole outlives it, but for some."""
        kept = [
            Kept(copy.used, copy.slot, key, copy.parent or b"")
            for key, copy in self.tier._copies.items()
            if copy.state == "whole" and copy.slot not in lost
        ]
        stale = [Kept(-1, slot, b"a", b"") for slot in self.tier._free[:1] if slot not in lost]  # of a former copy
        order.shuffle(kept)
        self.tier = Tier(self.tier.num_slots)
        self.tier.restore([*kept, *stale])
        self.coming, self.reading, self.told = [], [], set()
        self.cells = {copy.slot: key for key, copy in self.tier._copies.items()}
        there = {each.key for each in [*kept, *stale]}
        assert set(self.tier.keys()) == {key for key in there if there.issuperset(keys_of(key.decode()))}

    @rule()
    def tell(self) -> None:
        added, removed = self.tier.take_changes()
        self.told = self.told - set(removed) | set(added)
        assert self.told == set(self.tier.keys())

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "tier"):
            self.tier.check()
            whole = self.tier.keys()
            for key in whole:
                slot = self.tier.slot(key)
                assert slot is not None
                assert self.cells[slot] == key


Tiers.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestTiers = Tiers.TestCase
