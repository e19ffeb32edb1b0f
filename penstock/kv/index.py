"""Which instance has which prefix: the cluster's caches as one index, updated by the instances' deltas.

Blocks that follow one another in a prompt mostly have the same holders. So sets of holders are never changed but
replaced, and blocks that change together share one: a key costs no set of its own, and a walk along a prompt compares
identities where nothing changes from one block to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from penstock.core.wire.engine import CacheDelta

DEVICE = "device"  # the tier that blocks are computed with; from all others they are loaded into it
_Holders = frozenset[str]
_NOBODY: _Holders = frozenset()
_NOTHING: dict[str, int] = {}


@dataclass(slots=True)
class _Tier:
    """The keys in one tier, and the sequence number of its newest delta."""

    sequence: int
    keys: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Told:
    """The keys that one incarnation of an instance has reported.

    Attributes:
        alone: the holders of what it alone has.
    """

    incarnation: int
    alone: _Holders
    tiers: dict[str, _Tier] = field(default_factory=dict)


class ClusterIndex:
    """Prefix key -> instances. A tier of an instance counts only after a complete delta; prompts just sent to an
    instance count as cached there."""

    def __init__(self) -> None:
        self._device: dict[bytes, _Holders] = {}
        self._below: dict[bytes, _Holders] = {}  # in whichever of the other tiers
        self._told: dict[str, _Told] = {}
        self._left: dict[str, tuple[str, frozenset[bytes]]] = {}  # lost instance -> its KV pool, and what it had there
        # key -> instance -> prompts under way that will leave it there
        self._expected: dict[bytes, dict[str, int]] = {}

    def apply(self, instance: str, delta: CacheDelta) -> bool:
        """Apply an instance's delta. False: an earlier one is missing, so ask for a complete one.

        A delta from a new incarnation replaces everything of the previous one, in all tiers.
        """
        told = self._told.get(instance)
        if told is None or delta.incarnation != told.incarnation:
            self.forget(instance)
            told = self._told[instance] = _Told(delta.incarnation, frozenset((instance,)))
        tier = told.tiers.get(delta.tier)
        if delta.whole:
            self._void(told, delta.tier)
            tier = told.tiers[delta.tier] = _Tier(delta.sequence)
        elif tier is None:
            return False
        elif delta.sequence <= tier.sequence:
            return True  # known already
        elif delta.sequence != tier.sequence + 1:
            self._void(told, delta.tier)
            return False
        tier.sequence = delta.sequence
        removed = tier.keys.intersection(delta.removed)
        tier.keys -= removed
        self._remove(told, delta.tier, removed)
        tier.keys.update(delta.added)
        self._add(told, delta.tier, delta.added)
        return True

    def leave(self, instance: str, pool: str) -> None:
        """It was lost: what was on its device may be in the KV pool that it shared with others, if there is one."""
        told = self._told.get(instance)
        device = told.tiers.get(DEVICE) if told is not None else None
        self.forget(instance)
        if pool and device is not None:
            self._left[instance] = pool, frozenset(device.keys)

    def forget(self, instance: str) -> None:
        """Remove an instance's keys, and what it left."""
        self._left.pop(instance, None)
        told = self._told.pop(instance, None)
        if told is not None:
            for tier in list(told.tiers):
                self._void(told, tier)

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
        all_there: _Holders | None = None  # the holders of the block before, if all that are live were among them
        for count, key in enumerate(keys):
            there = self._device.get(key, _NOBODY)
            if there is all_there:
                continue
            gone = live - there
            all_there = None if gone else there
            if gone:
                gone = self._without(gone, key)
            if gone:
                found.update(dict.fromkeys(gone, count))
                live = live - gone
                if not live:
                    break
        found.update(dict.fromkeys(live, len(keys)))
        return found

    def on_devices(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of a prompt each instance has on its device now, for those that have any."""
        found: dict[str, int] = {}
        live: Set[str] = self._device.get(keys[0], _NOBODY) if keys else _NOBODY
        before: Set[str] | None = None
        for count, key in enumerate(keys):
            holders = self._device.get(key, _NOBODY)
            if holders is before:
                continue
            before = holders
            found.update(dict.fromkeys(live - holders, count))
            live = live & holders
            if not live:
                return found
        found.update(dict.fromkeys(live, len(keys)))
        return found

    def with_left(self, instance: str, pool: str, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt an instance has on its device, together with what lost instances have
        left in its KV pool."""
        left = [had for where, had in self._left.values() if where == pool]
        if not pool or not left:
            return 0
        for count, key in enumerate(keys):
            if not any(key in had for had in left) and instance not in self._device.get(key, _NOBODY):
                return count
        return len(keys)

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
        all_there: _Holders | None = None  # as in `match`
        for place, key in enumerate(keys[: max(ends)]):
            if place in ends:
                live = live - ends[place]
            there = self._device.get(key, _NOBODY)
            if there is all_there:
                continue
            lacking = live - there if key in self._below else _NOBODY
            all_there = None if lacking or key not in self._below else there
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

    def _void(self, told: _Told, tier: str) -> None:
        """What is known of one tier is not so any longer."""
        gone = told.tiers.pop(tier, None)
        if gone is not None:
            self._remove(told, tier, gone.keys)

    def _add(self, told: _Told, tier: str, keys: Iterable[bytes]) -> None:
        """These have come into one of its tiers."""
        index, alone = self._index(tier), told.alone
        after: dict[_Holders, _Holders] = {}  # a set's hash is computed once, and equal is first of all identical
        for key in keys:
            holders = index.setdefault(key, alone)
            if holders is not alone:
                more = after.get(holders)
                if more is None:
                    more = after[holders] = holders if alone <= holders else holders | alone
                index[key] = more

    def _remove(self, told: _Told, tier: str, keys: Iterable[bytes]) -> None:
        """These have left one of its tiers."""
        index, alone = self._index(tier), told.alone
        others = [] if tier == DEVICE else [each.keys for name, each in told.tiers.items() if name != DEVICE]
        after: dict[_Holders, _Holders] = {alone: _NOBODY}
        for key in keys:
            if any(key in other for other in others):
                continue
            holders = index[key]
            fewer = after.get(holders)
            if fewer is None:
                fewer = after[holders] = self._shared(holders - alone)
            if fewer:
                index[key] = fewer
            else:
                del index[key]

    def _shared(self, holders: _Holders) -> _Holders:
        """The same, as the one object that there is for a single holder."""
        return self._told[next(iter(holders))].alone if len(holders) == 1 else holders

    def _index(self, tier: str) -> dict[bytes, _Holders]:
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
            for holders in index.values():
                assert len(holders) > 1 or holders is self._shared(holders), "a block has a set of its own"
        assert all(n > 0 for counts in self._expected.values() for n in counts.values()), "a key that nobody expects"
        assert all(self._expected.values()), "a key that nobody expects"
