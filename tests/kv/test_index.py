"""The cluster's caches as one map."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.core.wire.engine import CacheDelta
from penstock.kv.index import ClusterIndex

KEYS = [bytes([i]) * 16 for i in range(6)]
NAMES = st.sampled_from(["a", "b", "c"])
ORDER = ("device", "host", "disk", "remote")
TIERS = st.sampled_from(ORDER)
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
    assert loads(index, KEYS) == {"a": {"host": 2}}
    assert loads(index, KEYS[:1]) == {}
    index.apply("a", whole(*KEYS[3:5], tier="disk"))
    assert index.match(KEYS)["a"] == 5
    assert loads(index, KEYS) == {"a": {"host": 2, "disk": 1}}, "from the quicker one where both have it"
    index.apply("a", whole(tier="disk"))
    index.expect("a", KEYS[:2])
    assert loads(index, KEYS) == {"a": {"host": 1}}
    index.unexpect("a", KEYS[:2])
    index.apply("a", CacheDelta(1, 1, [], [KEYS[0], KEYS[1]], "host"))
    assert index.match(KEYS) == {"a": 1, "b": 2}
    assert loads(index, KEYS) == {}
    assert (index.count("a"), index.count("a", "host"), index.count("a", "disk")) == (2, 2, 0)


def test_what_one_has_put_in_a_store_all_load_who_share_it():
    index = ClusterIndex()
    for name, store in (("a", "s"), ("b", "s"), ("c", "other")):
        index.share(name, store)
    index.apply("a", whole(*KEYS[:3], tier="remote"))
    index.apply("b", whole(*KEYS[:1]))
    index.apply("c", whole(*KEYS[:2]))
    index.apply("d", whole(*KEYS[:1], tier="disk"))
    assert index.match(KEYS) == {"a": 3, "b": 3, "c": 2, "d": 1}
    assert loads(index, KEYS) == {"a": {"remote": 3}, "b": {"remote": 2}, "d": {"disk": 1}}
    index.apply("b", whole(*KEYS[2:4], tier="remote"))
    index.check()
    index.apply("a", CacheDelta(1, 1, [], [KEYS[2]], "remote"))  # b has put it there too
    assert index.match(KEYS) == {"a": 4, "b": 4, "c": 2, "d": 1}
    index.forget("a")
    assert index.match(KEYS) == {"b": 1, "c": 2, "d": 1}, "it is gone, and nobody else has told of what it put there"
    index.share("a", "s")
    assert index.match(KEYS[2:]) == {"a": 2, "b": 2}
    index.apply("x", whole(*KEYS, tier="remote"))  # which shares none
    assert index.match(KEYS[4:]) == {}
    index.check()


def test_a_tier_is_numbered_told_and_doubted_by_itself():
    index = ClusterIndex()
    index.apply("a", whole(KEYS[0], sequence=7))
    assert not index.apply("a", CacheDelta(1, 1, [KEYS[1]], [], "host"))  # of this tier nothing was heard
    assert index.apply("a", whole(KEYS[1], sequence=1, tier="host"))
    assert index.apply("a", CacheDelta(1, 8, [KEYS[2]], []))
    assert index.apply("a", CacheDelta(1, 2, [KEYS[3]], [], "host"))
    assert (index.match(KEYS), loads(index, KEYS)) == ({"a": 4}, {"a": {"host": 2}})
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
    assert (index.match(KEYS), loads(index, KEYS)) == ({"a": 1}, {"a": {"host": 1}})
    assert not index.apply("a", CacheDelta(2, 1, [KEYS[1]], []))  # of the device's tier nothing was heard
    index.forget("a")
    assert index.match(KEYS) == {}
    index.check()


STORES = {"a": "s", "b": "s", "c": "t"}


class Index(RuleBasedStateMachine):
    """Against sets of keys per instance and tier; of "a" and "b", who share a store, that of both."""

    def __init__(self):
        super().__init__()
        self.index, self.lives, self.sequence, self.have = ClusterIndex(), {}, {}, {}
        self.under_way = []
        for name, store in STORES.items():
            self.index.share(name, store)

    @rule(name=NAMES, tier=TIERS, keys=SOME, life=st.integers(1, 2), sequence=st.integers(0, 9))
    def tell_all(self, name, tier, keys, life, sequence):
        if self.lives.get(name) != life:
            self._forget(name)
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
        self._forget(name)
        self.index.forget(name)
        self.index.share(name, STORES[name])

    def _forget(self, name):
        self.lives.pop(name, None)
        for known in (self.sequence, self.have):
            for key in [key for key in known if key[0] == name]:
                del known[key]

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
        told = {tier for (whose, tier), keys in self.have.items() if whose == name and key in keys} - {"remote"}
        for (whose, tier), keys in self.have.items():
            told |= {"remote"} if tier == "remote" and STORES[whose] == STORES[name] and key in keys else set()
        return told | {"device" for whose, keys in self.under_way if whose == name and key in keys}

    @invariant()
    def matches(self):
        self.index.check()
        for keys in (KEYS, KEYS[::-1], KEYS[:3], []):
            found, loads = {}, {}
            for name in "abc":
                places = [self.tiers(name, key) for key in keys]
                count = next((i for i, tiers in enumerate(places) if not tiers), len(keys))
                nearest = Counter(min(tiers, key=ORDER.index) for tiers in places[:count])
                del nearest["device"]
                found |= {name: count} if count else {}
                loads |= {name: nearest} if nearest else {}
            assert self.index.match(keys) == found
            assert self.index.loads(keys, found) == loads
        for (name, tier), keys in self.have.items():
            assert self.index.count(name, tier) == len(keys)


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=20)
