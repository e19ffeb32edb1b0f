"""Which instance has which prefix: the cluster's caches as one map, kept up to date by what instances tell."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from penstock.core.wire.engine import CacheDelta

_NOBODY: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Told:
    """What one life of an instance has told: its keys, and the sequence number of the newest delta."""

    incarnation: int
    sequence: int
    keys: set[bytes] = field(default_factory=set)


class ClusterIndex:
    """Prefix key -> instances. An instance counts only after it has told everything once; and it counts for what it was
    just given to compute."""

    def __init__(self) -> None:
        self._instances: dict[bytes, set[str]] = {}
        self._told: dict[str, _Told] = {}
        # key -> instance -> prompts under way that will leave it there
        self._expected: dict[bytes, dict[str, int]] = {}

    def apply(self, instance: str, delta: CacheDelta) -> bool:
        """Take over what an instance tells. False: something before it is missing, so ask for the whole.

        A message from another life than the one before replaces what that one had.
        """
        told = self._told.get(instance)
        if delta.whole:
            self.forget(instance)
            told = self._told[instance] = _Told(delta.incarnation, delta.sequence)
        elif told is None or delta.incarnation != told.incarnation:
            self.forget(instance)
            return False
        elif delta.sequence <= told.sequence:
            return True  # known already
        elif delta.sequence != told.sequence + 1:
            self.forget(instance)
            return False
        told.sequence = delta.sequence
        for key in delta.removed:
            if key in told.keys:
                told.keys.remove(key)
                self._remove(instance, key)
        for key in delta.added:
            told.keys.add(key)
            self._instances.setdefault(key, set()).add(instance)
        return True

    def forget(self, instance: str) -> None:
        """An instance has gone, or what is known of it is void."""
        told = self._told.pop(instance, None)
        for key in told.keys if told is not None else ():
            self._remove(instance, key)

    def expect(self, instance: str, keys: Sequence[bytes]) -> None:
        """A prompt with these keys is under way to an instance: whoever follows it there will find them."""
        for key in keys:
            expected = self._expected.setdefault(key, {})
            expected[instance] = expected.get(instance, 0) + 1

    def unexpect(self, instance: str, keys: Sequence[bytes]) -> None:
        """That prompt is over; what it left was told by now."""
        for key in keys:
            expected = self._expected[key]
            expected[instance] -= 1
            if not expected[instance]:
                del expected[instance]
            if not expected:
                del self._expected[key]

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of a prompt each instance has, for those that have any.

        A block counts only where every block before it is.
        """
        found: dict[str, int] = {}
        live = self._holders(keys[0]) if keys else frozenset()
        for count, key in enumerate(keys):
            holders = self._holders(key)
            found.update(dict.fromkeys(live - holders, count))
            live = live & holders
            if not live:
                break
        found.update(dict.fromkeys(live, len(keys)))
        return found

    def _holders(self, key: bytes) -> Set[str]:
        told, expected = self._instances.get(key, _NOBODY), self._expected.get(key)
        return told if expected is None else told | expected.keys()

    def count(self, instance: str) -> int:
        """Keys that are known of an instance."""
        told = self._told.get(instance)
        return len(told.keys) if told is not None else 0

    def _remove(self, instance: str, key: bytes) -> None:
        holders = self._instances[key]
        holders.discard(instance)
        if not holders:
            del self._instances[key]

    def check(self) -> None:
        """Raise AssertionError unless both views say the same."""
        by_key = {(key, name) for key, names in self._instances.items() for name in names}
        by_name = {(key, name) for name, told in self._told.items() for key in told.keys}
        assert by_key == by_name, "the index and what instances told differ"
        assert all(self._instances.values()), "a key that nobody has"
        assert all(n > 0 for counts in self._expected.values() for n in counts.values()), "a key that nobody expects"
        assert all(self._expected.values()), "a key that nobody expects"
