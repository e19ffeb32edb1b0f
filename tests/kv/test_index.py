"""The cluster's caches as one map."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.core.wire.engine import CacheDelta
from penstock.kv.index import ClusterIndex

KEYS = [bytes([i]) * 16 for i in range(6)]
NAMES = st.sampled_from(["a", "b", "c"])


def whole(*keys, life=1, sequence=0):
    return CacheDelta(life, sequence, list(keys), [], whole=True)


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


def test_another_life_has_nothing_of_the_one_before():
    index = ClusterIndex()
    index.apply("a", whole(*KEYS))
    assert not index.apply("a", CacheDelta(2, 1, [KEYS[0]], []))
    assert index.match(KEYS) == {}
    index.check()


class Index(RuleBasedStateMachine):
    """Against a set of keys per instance."""

    def __init__(self):
        super().__init__()
        self.index, self.have, self.sequence = ClusterIndex(), {}, {}

    @rule(name=NAMES, keys=st.sets(st.sampled_from(KEYS)), life=st.integers(1, 2))
    def tell_all(self, name, keys, life):
        self.have[name], self.sequence[name] = set(keys), (life, 0)
        assert self.index.apply(name, whole(*keys, life=life))

    @rule(name=NAMES, added=st.sets(st.sampled_from(KEYS)), removed=st.sets(st.sampled_from(KEYS)))
    def tell_changes(self, name, added, removed):
        if name in self.have:
            life, sequence = self.sequence[name]
            self.sequence[name] = life, sequence + 1
            self.have[name] = (self.have[name] - removed) | added
            assert self.index.apply(name, CacheDelta(life, sequence + 1, list(added), list(removed)))

    @rule(name=NAMES)
    def forget(self, name):
        self.have.pop(name, None)
        self.index.forget(name)

    @invariant()
    def matches(self):
        self.index.check()
        expected = {}
        for name, keys in self.have.items():
            count = next((i for i, key in enumerate(KEYS) if key not in keys), len(KEYS))
            if count:
                expected[name] = count
            assert self.index.count(name) == len(keys)
        assert self.index.match(KEYS) == expected


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
