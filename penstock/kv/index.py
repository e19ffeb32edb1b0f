"""Which instance has which prefix: the cluster's caches as one index, updated by the instances' deltas.

Blocks that follow one another in a prompt mostly have the same holders. So sets of holders are never changed but
replaced, and blocks that change together share one: a key costs no set of its own, and a walk along a prompt compares
identities where nothing changes from one block to the next.

What one instance has put into a store all that share the store can load, perhaps a thousand: they are holders of none
of it one by one, but members of the store. Who loads from the same store, or from none, is walked along together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from penstock.core.wire.engine import CacheDelta

DEVICE = "device"  # the tier that blocks are computed with; from all others they are loaded into it
OWN = "host", "disk"  # below it, and of one instance alone, the quickest first
STORE = "remote"
_Holders = frozenset[str]
_NOBODY: _Holders = frozenset()
_NOTHING: dict[str, int] = {}


@dataclass(slots=True)
class _Told:
    """The keys in one tier, and the sequence number of its newest delta."""

    sequence: int
    keys: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Life:
    """The keys that one incarnation of an instance has reported.

    Attributes:
        alone: the holders of what it alone has.
    """

    incarnation: int
    alone: _Holders
    tiers: dict[str, _Told] = field(default_factory=dict)


@dataclass(slots=True)
class _Store:
    """A remote store.

    Attributes:
        members: instances that load from it.
        keys: that are in it -> how many have told so.
    """

    members: _Holders = _NOBODY
    keys: dict[bytes, int] = field(default_factory=dict)


_NO_STORE = _Store()
_Places = tuple[_Holders, _Holders, _Holders, Set[str]]  # who has a block on the device, host, disk; and soon will


class ClusterIndex:
    """Prefix key -> instances. A tier of an instance counts only after a complete delta; prompts just sent to an
    instance count as cached there."""

    def __init__(self) -> None:
        self._device: dict[bytes, _Holders] = {}
        self._own: dict[str, dict[bytes, _Holders]] = {tier: {} for tier in OWN}
        self._stores: dict[str, _Store] = {}
        self._store_of: dict[str, str] = {}  # instance -> the store that it loads from
        self._lives: dict[str, _Life] = {}
        self._left: dict[str, tuple[str, frozenset[bytes]]] = {}  # lost instance -> its KV pool, and what it had there
        # key -> instance -> prompts under way that will leave it there
        self._expected: dict[bytes, dict[str, int]] = {}

    def share(self, instance: str, store: str) -> None:
        """It loads from this store what any other that shares it has put there, until it is forgotten."""
        assert instance not in self._lives
        self._unshare(instance)
        known = self._stores.setdefault(store, _Store())
        known.members |= {instance}
        self._store_of[instance] = store

    def apply(self, instance: str, delta: CacheDelta) -> bool:
        """Apply an instance's delta. False: an earlier one is missing, so ask for a complete one.

        A delta from a new incarnation replaces everything of the previous one, in all tiers. Nothing is noted of tiers
        with other names, or of a store that the instance does not share.
        """
        if delta.tier not in (DEVICE, *OWN, STORE):
            return True
        life = self._lives.get(instance)
        if life is None or delta.incarnation != life.incarnation:
            self._end(instance)
            life = self._lives[instance] = _Life(delta.incarnation, frozenset((instance,)))
        told = life.tiers.get(delta.tier)
        if delta.whole:
            self._void(life, delta.tier)
            told = life.tiers[delta.tier] = _Told(delta.sequence)
        elif told is None:
            return False
        elif delta.sequence <= told.sequence:
            return True  # known already
        elif delta.sequence != told.sequence + 1:
            self._void(life, delta.tier)
            return False
        told.sequence = delta.sequence
        removed = told.keys.intersection(delta.removed)
        told.keys -= removed
        self._remove(life, delta.tier, removed)
        added = delta.added if delta.tier != STORE else set(delta.added) - told.keys
        told.keys.update(added)
        self._add(life, delta.tier, added)
        return True

    def leave(self, instance: str, pool: str) -> None:
        """It was lost: what was on its device may be in the KV pool that it shared with others, if there is one."""
        life = self._lives.get(instance)
        device = life.tiers.get(DEVICE) if life is not None else None
        self.forget(instance)
        if pool and device is not None:
            self._left[instance] = pool, frozenset(device.keys)

    def forget(self, instance: str) -> None:
        """Remove an instance's keys, what it left, and its share of a store."""
        self._end(instance)
        self._unshare(instance)

    def _end(self, instance: str) -> None:
        """Its incarnation has ended."""
        self._left.pop(instance, None)
        life = self._lives.get(instance)
        if life is not None:
            for tier in list(life.tiers):
                self._void(life, tier)
            del self._lives[instance]

    def _unshare(self, instance: str) -> None:
        name = self._store_of.pop(instance, None)
        if name is not None:
            store = self._stores[name]
            store.members -= {instance}
            if not store.members:
                del self._stores[name]

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
        if keys:
            for live, store in self._by_store(self._holders(keys[0])):
                self._match(keys, store.members if keys[0] in store.keys else live, store.keys, found)
        return found

    def _by_store(self, names: Set[str]) -> Iterator[tuple[Set[str], _Store]]:
        """Parts of these that load from the same store, or from none, and of each store that."""
        for store in self._stores.values():
            yield names & store.members, store
            names = names - store.members
        yield names, _NO_STORE

    def _match(self, keys: Sequence[bytes], live: Set[str], stored: Container[bytes], found: dict[str, int]) -> None:
        """Add to `found` how many each of these has, who all load what is in `stored`."""
        if not live:
            return
        host, disk = self._own.values()
        all_there: _Holders | None = None  # the holders of a block before, if all that are live were among them
        there_before = host_before = disk_before = all_there  # of a block that all have who are live, in either of them
        for count, key in enumerate(keys):
            there = self._device.get(key, _NOBODY)
            if there is all_there or key in stored:
                continue
            on_host, on_disk = host.get(key, _NOBODY), disk.get(key, _NOBODY)
            if there is there_before and on_host is host_before and on_disk is disk_before:
                continue
            gone = live - there
            all_there = None if gone else there
            if not gone:
                continue
            gone = gone - on_host - on_disk
            expected = self._expected.get(key) if gone else None
            if expected is None:
                there_before, host_before, disk_before = there, on_host, on_disk
            else:
                gone = gone - expected.keys()
                there_before = None
            if gone:
                found.update(dict.fromkeys(gone, count))
                live = live - gone
                if not live:
                    break
        found.update(dict.fromkeys(live, len(keys)))

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

    def loads(self, keys: Sequence[bytes], found: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """How many of its leading blocks each instance must load first, and from which tier, the quickest that has
        them; for those that must any. They are not on its device, and nothing is under way that leaves them there.

        Args:
            found: what `match` says of these keys.
        """
        loads: dict[str, dict[str, int]] = {}
        if not found or not (self._stores or any(self._own.values())):
            return loads
        host, disk = self._own.values()
        tiers: dict[str, str] = {}  # instance -> from where it loads the blocks since `since`; "" needs to load none
        since = dict.fromkeys(found, 0)
        all_there: _Holders | None = None  # the holders of a block before, if all were among them
        before: _Places = (_NOBODY, _NOBODY, _NOBODY, _NOBODY)
        moved: Iterable[str] = found  # who has this block in another tier than the one before
        for place, key in enumerate(keys[: max(found.values())]):
            there = self._device.get(key, _NOBODY)
            if there is all_there:
                continue
            now = there, host.get(key, _NOBODY), disk.get(key, _NOBODY), self._expected.get(key, _NOTHING).keys()
            if place:
                if now[0] is before[0] and now[1] is before[1] and now[2] is before[2] and now[3] == before[3]:
                    continue
                moved = [name for name in _differing(before, now) if name in since]
            before = now
            all_there = there if len(since) <= len(there) and since.keys() <= there else None
            for name in moved:
                _add(loads, name, tiers.get(name), min(place, found[name]) - since[name])
                if place < found[name]:
                    tiers[name], since[name] = _nearest(name, now), place
                else:
                    del tiers[name], since[name]
        for name, place in since.items():
            _add(loads, name, tiers[name], found[name] - place)
        return loads

    def _holders(self, key: bytes) -> Set[str]:
        told = self._device.get(key, _NOBODY).union(*(own.get(key, _NOBODY) for own in self._own.values()))
        return told | self._expected.get(key, _NOTHING).keys()

    def count(self, instance: str, tier: str = DEVICE) -> int:
        """Keys that are known of a tier of an instance."""
        life = self._lives.get(instance)
        return len(life.tiers[tier].keys) if life is not None and tier in life.tiers else 0

    def _void(self, life: _Life, tier: str) -> None:
        """What is known of one tier is not so any longer."""
        gone = life.tiers.pop(tier, None)
        if gone is not None:
            self._remove(life, tier, gone.keys)

    def _add(self, life: _Life, tier: str, keys: Iterable[bytes]) -> None:
        """These have come into one of its tiers."""
        if tier == STORE:
            if (store := self._store(life)) is not None:
                for key in keys:
                    store.keys[key] = store.keys.get(key, 0) + 1
            return
        index, alone = self._index(tier), life.alone
        after: dict[_Holders, _Holders] = {}  # a set's hash is computed once, and equal is first of all identical
        for key in keys:
            holders = index.setdefault(key, alone)
            if holders is not alone:
                more = after.get(holders)
                if more is None:
                    more = after[holders] = holders if alone <= holders else holders | alone
                index[key] = more

    def _remove(self, life: _Life, tier: str, keys: Iterable[bytes]) -> None:
        """These have left one of its tiers."""
        if tier == STORE:
            if (store := self._store(life)) is not None:
                for key in keys:
                    store.keys[key] -= 1
                    if not store.keys[key]:
                        del store.keys[key]
            return
        index, alone = self._index(tier), life.alone
        after: dict[_Holders, _Holders] = {alone: _NOBODY}
        for key in keys:
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
        return self._lives[next(iter(holders))].alone if len(holders) == 1 else holders

    def _index(self, tier: str) -> dict[bytes, _Holders]:
        return self._device if tier == DEVICE else self._own[tier]

    def _store(self, life: _Life) -> _Store | None:
        (name,) = life.alone
        return self._stores.get(self._store_of.get(name, ""))

    def check(self) -> None:
        """Raise AssertionError unless the maps agree."""
        for tier in (DEVICE, *OWN):
            index = self._index(tier)
            by_key = {(key, name) for key, names in index.items() for name in names}
            by_name = {(key, name) for name, life in self._lives.items() for key in self._keys(life, tier)}
            assert by_key == by_name, "the index and what instances told differ"
            assert all(index.values()), "a key that nobody has"
            for holders in index.values():
                assert len(holders) > 1 or holders is self._shared(holders), "a block has a set of its own"
        for store in self._stores.values():
            told = Counter(
                key for name in store.members & self._lives.keys() for key in self._keys(self._lives[name], STORE)
            )
            assert told == store.keys, "a store and what its members told differ"
        shared = {(name, member) for name, store in self._stores.items() for member in store.members}
        assert shared == {(store, name) for name, store in self._store_of.items()}, "a store has other members"
        assert all(n > 0 for counts in self._expected.values() for n in counts.values()), "a key that nobody expects"
        assert all(self._expected.values()), "a key that nobody expects"

    @staticmethod
    def _keys(life: _Life, tier: str) -> Set[bytes]:
        return life.tiers[tier].keys if tier in life.tiers else set()


def _differing(before: _Places, now: _Places) -> Set[str]:
    """Those for whom a block is elsewhere than another."""
    found: set[str] = set()
    for were, are in zip(before, now, strict=True):
        if were is not are:
            found |= were - are
            found |= are - were
    return found


def _nearest(name: str, places: _Places) -> str:
    """From where an instance loads a block that it has somewhere; "" if it need not."""
    there, on_host, on_disk, coming = places
    if name in there or name in coming:
        return ""
    return OWN[0] if name in on_host else OWN[1] if name in on_disk else STORE


def _add(loads: dict[str, dict[str, int]], name: str, tier: str | None, blocks: int) -> None:
    if tier:
        known = loads.setdefault(name, {})
        known[tier] = known.get(tier, 0) + blocks
