"""What an engine knows of a tier that others use too."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.kv.shared_tier import ABSENT, SharedTier

KEYS = [bytes([i]) for i in range(6)]


def test_what_is_known_not_to_be_there_ends_the_question_and_is_asked_for_again_later():
    tier = SharedTier()
    assert tier.unknown(KEYS) == KEYS
    tier.answered(KEYS, 2)
    assert [tier.slot(key) for key in KEYS] == [0, 0, None, None, None, None]
    assert not tier.unknown(KEYS), "nothing is found behind what is not there"
    assert tier.unknown(KEYS[3:]) == KEYS[3:]
    tier.now += ABSENT
    assert tier.unknown(KEYS) == KEYS[2:]
    assert tier.take_changes() == ([], []), "others have put it there"
    tier.claim(KEYS[2], None)
    assert tier.slot(KEYS[2]) is None
    assert tier.has(KEYS[2])
    tier.written(KEYS[2], whole=True)
    assert tier.take_changes() == ([KEYS[2]], [])
    assert tier.unknown(KEYS) == KEYS[3:]
    tier.spoil(KEYS[2])
    tier.doubt(KEYS[3:])
    assert tier.take_changes() == ([], [KEYS[2]])
    assert not tier.unknown(KEYS)


class SharedTiers(RuleBasedStateMachine):
    """Random uses of one that knows few keys: `check` holds, and changes add up to what it says it has put there."""

    @initialize(most=st.integers(1, 6))
    def begin(self, most):
        self.tier, self.told, self.coming = SharedTier(most=most), set(), []

    @rule(key=st.sampled_from(KEYS), told=st.booleans())
    def claim(self, key, told):
        if not self.tier.has(key):
            assert self.tier.claim(key, None, told=told) == 0
            self.coming.append(key)

    @rule(pick=st.integers(0), whole=st.booleans())
    def written(self, pick, whole):
        if self.coming:
            key = self.coming.pop(pick % len(self.coming))
            self.tier.written(key, whole=whole)
            assert (self.tier.slot(key) is not None) == whole

    @rule(first=st.integers(0, 5), found=st.integers(0, 6))
    def ask(self, first, found):
        unknown = list(self.tier.unknown(KEYS[first:]))
        assert unknown == KEYS[len(KEYS) - len(unknown) :]
        self.tier.answered(unknown, min(found, len(unknown)))

    @rule(key=st.sampled_from(KEYS))
    def spoil(self, key):
        self.tier.spoil(key)
        assert self.tier.slot(key) is None

    @rule(keys=st.lists(st.sampled_from(KEYS)))
    def doubt(self, keys):
        self.tier.use(keys)
        self.tier.doubt(keys)

    @rule(seconds=st.floats(0, 2 * ABSENT))
    def wait(self, seconds):
        self.tier.now += seconds

    @rule()
    def tell(self):
        added, removed = self.tier.take_changes()
        self.told = self.told - set(removed) | set(added)
        assert self.told == set(self.tier.keys())

    @invariant()
    def sound(self):
        if hasattr(self, "tier"):
            self.tier.check()
            assert self.tier.used == len(self.tier.keys())


SharedTiers.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestSharedTiers = SharedTiers.TestCase
