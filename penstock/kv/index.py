"""Which instance has which prefix: the cluster's caches as one index, updated by the instances' deltas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from penstock.core.wire.engine import CacheDelta

DEVICE = "device"  # the tier that blocks are computed with; from all others they are loaded into it
_NOBODY: frozenset[str] = frozenset()
_NOTHING: dict[str, int] = {}


@dataclass(slots=True)
class _Tier:
    """The keys in one tier, and the sequence number of its newest delta."""

    sequence: int
    keys: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Told:
    """The keys that one incarnation of an instance has reported."""

    incarnation: int
    tiers: dict[str, _Tier] = field(default_factory=dict)


class ClusterIndex:
    """Prefix key -> instances. A tier of an instance counts only after a complete delta; prompts just sent to an
    instance count as cached there."""

    def __init__(self) -> None:
        self._device: dict[bytes, set[str]] = {}
        self._below: dict[bytes, set[str]] = {}  # in whichever of the other tiers
        self._told: dict[str, _Told] = {}
        # key -> instance -> prompts under way that will leave it there
        self._expected: dict[bytes, dict[str, int]] = {}

    def apply(self, instance: str, delta: CacheDelta) -> bool:
        """Apply an instance's delta. False: an earlier one is missing, so ask for a complete one.

        A delta from a new incarnation replaces everything of the previous one, in all tiers.
        """
        told = self._told.get(instance)
        if told is None or delta.incarnation != told.incarnation:
            self.forget(instance)
            told = self._told[instance] = _Told(delta.incarnation)
        tier = told.tiers.get(delta.tier)
        if delta.whole:
            self._void(instance, told, delta.tier)
            tier = told.tiers[delta.tier] = _Tier(delta.sequence)
        elif tier is None:
            return False
        elif delta.sequence <= tier.sequence:
            return True  # known already
        elif delta.sequence != tier.sequence + 1:
            self._void(instance, told, delta.tier)
            return False
        tier.sequence = delta.sequence
        for key in delta.removed:
            if key in tier.keys:
                tier.keys.remove(key)
                self._remove(instance, told, delta.tier, key)
        index = self._index(delta.tier)
        for key in delta.added:
            tier.keys.add(key)
            index.setdefault(key, set()).add(instance)
        return True

    def forget(self, instance: str) -> None:
        """Remove an instance's keys."""
        told = self._told.pop(instance, None)
        if told is not None:
            for tier in list(told.tiers):
                self._void(instance, told, tier)

    def expect(self, instance: str, keys: Sequence[bytes]) -> None:
        """A prompt with these keys was sent to an instance: later prompts will find them there."""
        for key in keys:
            expected = self._expected.setdefault(key, {})
            expected[instance] = expected.get(instance, 0) + 1

    def unexpect(self, instance: str, keys: Sequence[bytes]) -> None:
        """That prompt has ended; the keys it left have been reported."""
        for key in keys:
            expected = self._expected[key]
            expected[instance] -= 1
            if not expected[instance]:
                del expected[instance]
            if not expected:
                del self._expected[key]

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of a prompt each instance has in any tier, for those that have any.

        A block counts only where every block before it is.
        """
        found: dict[str, int] = {}
        live = self._holders(keys[0]) if keys else _NOBODY
        for count, key in enumerate(keys):
            gone = live - self._device.get(key, _NOBODY)
            if gone:
                gone = self._without(gone, key)
            if gone:
                found.update(dict.fromkeys(gone, count))
                live = live - gone
                if not live:
                    break
        found.update(dict.fromkeys(live, len(keys)))
        return found

    def loads(self, keys: Sequence[bytes], found: Mapping[str, int]) -> dict[str, int]:
        """How many of its leading blocks each instance must load first, for those that must any: they are not on its
        device, and nothing is under way that leaves them there.

        Args:
            found: what `match` says of these keys.
        """
        if not self._below or not found:
            return {}
        loads: dict[str, int] = {}
        ends: dict[int, set[str]] = {}
        for name, count in found.items():
            ends.setdefault(count, set()).add(name)
        live = frozenset(found)
        for place, key in enumerate(keys[: max(ends)]):
            if place in ends:
                live = live - ends[place]
            lacking = live - self._device.get(key, _NOBODY) if key in self._below else _NOBODY
            if lacking and (expected := self._expected.get(key)) is not None:
                lacking = lacking - expected.keys()
            for name in lacking:
                loads[name] = loads.get(name, 0) + 1
        return loads

    def _holders(self, key: bytes) -> Set[str]:
        told = self._device.get(key, _NOBODY) | self._below.get(key, _NOBODY)
        return told | self._expected.get(key, _NOTHING).keys()

    def _without(self, names: Set[str], key: bytes) -> Set[str]:
        """Of instances that do not have a block on the device, those that have it nowhere."""
        expected, below = self._expected.get(key), self._below.get(key)
        if expected is not None:
            names = names - expected.keys()
        return names if below is None else names - below

    def count(self, instance: str, tier: str = DEVICE) -> int:
        """Keys that are known of a tier of an instance."""
        told = self._told.get(instance)
        return len(told.tiers[tier].keys) if told is not None and tier in told.tiers else 0

    def _void(self, instance: str, told: _Told, tier: str) -> None:
        """What is known of one tier is not so any longer."""
        gone = told.tiers.pop(tier, None)
        for key in gone.keys if gone is not None else ():
            self._remove(instance, told, tier, key)

    def _remove(self, instance: str, told: _Told, tier: str, key: bytes) -> None:
        """It has left a tier's keys."""
        if tier != DEVICE and any(key in other.keys for name, other in told.tiers.items() if name != DEVICE):
            return
        index = self._index(tier)
        holders = index[key]
        holders.discard(instance)
        if not holders:
            del index[key]

    def _index(self, tier: str) -> dict[bytes, set[str]]:
        return self._device if tier == DEVICE else self._below

    def check(self) -> None:
        """Raise AssertionError unless both maps agree."""
        for index in (self._device, self._below):
            by_key = {(key, name) for key, names in index.items() for name in names}
            by_name = {
                (key, name)
                for name, told in self._told.items()
                for tier, known in told.tiers.items()
                if self._index(tier) is index
                for key in known.keys
            }
            assert by_key == by_name, "the index and what instances told differ"
            assert all(index.values()), "a key that nobody has"
        assert all(n > 0 for counts in self._expected.values() for n in counts.values()), "a key that nobody expects"
        assert all(self._expected.values()), "a key that nobody expects"
