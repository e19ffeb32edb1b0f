"""The cluster's caches as one map."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.core.wire.engine import CacheDelta
from penstock.kv.index import ClusterIndex

KEYS = [bytes([i]) * 16 for i in range(6)]
NAMES = st.sampled_from(["a", "b", "c"])
TIERS = st.sampled_from(["device", "host", "disk"])
SOME = st.sets(st.sampled_from(KEYS))


def whole(*keys, life=1, sequence=0, tier="device"):
    return CacheDelta(life, sequence, list(keys), [], tier, whole=True)


def test_only_leading_blocks_count():
    index = ClusterIndex()
    index.apply("a", whole(*KEYS[:3]))
    index.apply("b", whole(KEYS[0], KEYS[2], KEYS[3]))  # lacks the second, so the third is worth nothing
    index.apply("c", whole(KEYS[1]))
    assert index.match(KEYS[:5]) == {"a": 3, "b": 1}
    assert index.match(KEYS[4:]) == {}
    assert index.match([]) == {}


def test_a_gap_asks_for_the_whole_and_forgets_what_is_doubtful():
    index = ClusterIndex()
    assert not index.apply("a", CacheDelta(1, 4, [KEYS[0]], []))  # its beginning was not heard
    assert index.apply("a", whole(KEYS[0], sequence=4))
    assert index.apply("a", CacheDelta(1, 5, [KEYS[1]], []))
    assert index.apply("a", CacheDelta(1, 5, [KEYS[2]], []))  # told twice
    assert index.match(KEYS) == {"a": 2}
    assert not index.apply("a", CacheDelta(1, 7, [KEYS[2]], []))
    assert index.match(KEYS) == {}


def test_another_incarnation_has_nothing_of_the_one_before():
    index = ClusterIndex()
    index.apply("a", whole(*KEYS))
    assert not index.apply("a", CacheDelta(2, 1, [KEYS[0]], []))
    assert index.match(KEYS) == {}
    index.check()


def loads(index, keys):
    return index.loads(keys, index.match(keys))


def test_a_block_counts_in_whichever_tier_and_is_loaded_unless_it_is_on_the_device():
    index = ClusterIndex()
    index.apply("a", whole(KEYS[0], KEYS[2]))
    index.apply("a", whole(*KEYS[:4], tier="host"))
    index.apply("b", whole(*KEYS[:2]))
    index.apply("c", whole(*KEYS[1:], tier="host"))  # lacks the first
    assert index.match(KEYS) == {"a": 4, "b": 2}
    assert loads(index, KEYS) == {"a": 2}
    assert loads(index, KEYS[:1]) == {}
    index.expect("a", KEYS[:2])
    assert loads(index, KEYS) == {"a": 1}
    index.unexpect("a", KEYS[:2])
    index.apply("a", CacheDelta(1, 1, [], [KEYS[0], KEYS[1]], "host"))
    assert index.match(KEYS) == {"a": 1, "b": 2}
    assert loads(index, KEYS) == {}
    assert (index.count("a"), index.count("a", "host"), index.count("a", "disk")) == (2, 2, 0)


def test_a_tier_is_numbered_told_and_doubted_by_itself():
    index = ClusterIndex()
    index.apply("a", whole(KEYS[0], sequence=7))
    assert not index.apply("a", CacheDelta(1, 1, [KEYS[1]], [], "host"))  # of this tier nothing was heard
    assert index.apply("a", whole(KEYS[1], sequence=1, tier="host"))
    assert index.apply("a", CacheDelta(1, 8, [KEYS[2]], []))
    assert index.apply("a", CacheDelta(1, 2, [KEYS[3]], [], "host"))
    assert (index.match(KEYS), loads(index, KEYS)) == ({"a": 4}, {"a": 2})
    assert not index.apply("a", CacheDelta(1, 4, [], [], "host"))
    assert (index.match(KEYS), loads(index, KEYS)) == ({"a": 1}, {})
    assert not index.apply("a", CacheDelta(1, 5, [KEYS[1]], [], "host"))  # still
    assert index.apply("a", CacheDelta(1, 9, [KEYS[1]], []))
    assert index.match(KEYS) == {"a": 3}


def test_another_incarnation_has_nothing_of_the_one_before_in_any_tier():
    index = ClusterIndex()
    index.apply("a", whole(*KEYS[:1]))
    index.apply("a", whole(*KEYS, tier="host"))
    assert index.apply("a", whole(KEYS[0], life=2, tier="host"))
    assert (index.match(KEYS), loads(index, KEYS)) == ({"a": 1}, {"a": 1})
    assert not index.apply("a", CacheDelta(2, 1, [KEYS[1]], []))  # of the device's tier nothing was heard
    index.forget("a")
    assert index.match(KEYS) == {}
    index.check()


class Index(RuleBasedStateMachine):
    """Against sets of keys per instance and tier."""

    def __init__(self):
        super().__init__()
        self.index, self.lives, self.sequence, self.have = ClusterIndex(), {}, {}, {}
        self.under_way = []

    @rule(name=NAMES, tier=TIERS, keys=SOME, life=st.integers(1, 2), sequence=st.integers(0, 9))
    def tell_all(self, name, tier, keys, life, sequence):
        if self.lives.get(name) != life:
            self.forget(name)
        self.lives[name], self.sequence[name, tier], self.have[name, tier] = life, sequence, set(keys)
        assert self.index.apply(name, whole(*keys, life=life, sequence=sequence, tier=tier))

    @rule(name=NAMES, tier=TIERS, added=SOME, removed=SOME)
    def tell_changes(self, name, tier, added, removed):
        life, sequence = self.lives.get(name, 1), self.sequence.get((name, tier))
        delta = CacheDelta(life, (sequence or 0) + 1, list(added), list(removed), tier)
        assert self.index.apply(name, delta) == (sequence is not None)
        if sequence is not None:
            self.sequence[name, tier] = sequence + 1
            self.have[name, tier] = (self.have[name, tier] - removed) | added

    @rule(name=NAMES, tier=TIERS, added=SOME)
    def lose_a_message(self, name, tier, added):
        sequence = self.sequence.pop((name, tier), 0)
        self.have.pop((name, tier), None)
        assert not self.index.apply(name, CacheDelta(self.lives.get(name, 1), sequence + 2, list(added), [], tier))

    @rule(name=NAMES)
    def forget(self, name):
        self.lives.pop(name, None)
        for known in (self.sequence, self.have):
            for key in [key for key in known if key[0] == name]:
                del known[key]
        self.index.forget(name)

    @rule(name=NAMES, count=st.integers(0, len(KEYS)))
    def expect(self, name, count):
        self.under_way.append((name, KEYS[:count]))
        self.index.expect(name, KEYS[:count])

    @rule()
    def unexpect(self):
        if self.under_way:
            self.index.unexpect(*self.under_way.pop(0))

    def tiers(self, name, key):
        """Where an instance has a block."""
        told = {tier for (whose, tier), keys in self.have.items() if whose == name and key in keys}
        return told | {"device" for whose, keys in self.under_way if whose == name and key in keys}

    @invariant()
    def matches(self):
        self.index.check()
        for keys in (KEYS, KEYS[::-1], KEYS[:3], []):
            found, loads = {}, {}
            for name in "abc":
                places = [self.tiers(name, key) for key in keys]
                count = next((i for i, tiers in enumerate(places) if not tiers), len(keys))
                below = sum("device" not in tiers for tiers in places[:count])
                found |= {name: count} if count else {}
                loads |= {name: below} if below else {}
            assert self.index.match(keys) == found
            assert self.index.loads(keys, found) == loads
        for (name, tier), keys in self.have.items():
            assert self.index.count(name, tier) == len(keys)


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=20)
