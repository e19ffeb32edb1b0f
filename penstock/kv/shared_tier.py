"""A tier below the device that others fill and empty too: what one engine knows of it.

A block is known to be there when this engine has put it there, or was told so when it asked; and known not to be for a
while after it was asked for in vain. Of all others nothing is known: they are to be asked for. What is known may be
wrong, since the store drops blocks without a word: then a load fails, and the block is believed in no longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

MOST = 1 << 17  # keys that are known to be there, and as many that are not: some 20 MB each
ABSENT = 10.0  # seconds for which a block that is not there is not asked for again


class SharedTier:
    """As `kv.tier.Tier`, with keys in place of slots: every block's slot is 0.

    Attributes:
        now: seconds, of any clock that runs on.
        used: blocks that this engine has put there and that it tells of, as far as they are known to be there.
    """

    num_slots = 0

    def __init__(self, name: str = "remote", most: int = MOST) -> None:
        self.name, self.now, self.used = name, 0.0, 0
        self._most = most
        self._there: OrderedDict[bytes, bool] = OrderedDict()  # -> whether it is told of; the least recently used first
        self._absent: OrderedDict[bytes, float] = OrderedDict()  # -> until when that is believed
        self._coming: dict[bytes, bool] = {}  # -> whether it is to be told of
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    # --- finding

    def slot(self, key: bytes) -> int | None:
        """Whether a block is there, as far as is known; None when it is not."""
        return 0 if key in self._there else None

    def has(self, key: bytes) -> bool:
        """Whether a block is there or on its way, so that none is to be put."""
        return key in self._there or key in self._coming

    def unknown(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those of a prefix's blocks that are to be asked for: from the first on of which nothing is known, but none
        behind one that is known not to be there."""
        first = next((i for i, key in enumerate(keys) if key not in self._there), len(keys))
        if first == len(keys) or self._absent.get(keys[first], 0.0) > self.now:
            return ()
        return keys[first:]

    def keys(self) -> list[bytes]:
        """Of everything that this engine has put there and tells of."""
        return [key for key, told in self._there.items() if told]

    def use(self, keys: Iterable[bytes]) -> None:
        """These blocks are of use now."""
        for key in keys:
            if key in self._there:
                self._there.move_to_end(key)

    # --- learning

    def answered(self, keys: Sequence[bytes], count: int) -> None:
        """Of these, that were asked for, so many are there, from the first on, and the next one is not."""
        for key in keys[:count]:
            if key not in self._coming:
                self._know(key, told=False)
        if count < len(keys) and not self.has(keys[count]):
            self._miss(keys[count])

    def claim(self, key: bytes, parent: bytes | None, *, told: bool = True) -> int | None:
        """It is going to be put there."""
        assert not self.has(key)
        self._coming[key] = told
        return 0

    def written(self, key: bytes, *, whole: bool) -> None:
        """It is there, or could not be put."""
        told = self._coming.pop(key)
        if whole:
            self._know(key, told=told)

    def begin_reading(self, keys: Sequence[bytes]) -> None:
        """They are going to be loaded."""

    def end_reading(self, keys: Sequence[bytes]) -> None:
        """They are loaded, or not."""

    def spoil(self, key: bytes) -> None:
        """It was not there, or was not what it should be."""
        if key in self._there:
            self._forget(key)
            self._miss(key)

    def doubt(self, keys: Iterable[bytes]) -> None:
        """Something before these was not there: they are to be asked for again, or put."""
        for key in keys:
            if key in self._there:
                self._forget(key)

    # --- telling

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that this engine has put there since the last call, and such keys of which it knows no longer."""
        if not (self._added or self._removed):
            return [], []
        changes = list(self._added), list(self._removed)
        self._added, self._removed = {}, {}
        return changes

    def take_evicted(self) -> list[bytes]:
        """None: nobody says what goes."""
        return []

    # --- inside

    def _know(self, key: bytes, *, told: bool) -> None:
        self._absent.pop(key, None)
        told |= self._there.get(key, False)
        if told and not self._there.get(key):
            self.used += 1
            if key in self._removed:
                del self._removed[key]
            else:
                self._added[key] = None
        self._there[key] = told
        self._there.move_to_end(key)
        if len(self._there) > self._most:
            self._forget(next(iter(self._there)))

    def _forget(self, key: bytes) -> None:
        if self._there.pop(key):
            self.used -= 1
            if key in self._added:
                del self._added[key]
            else:
                self._removed[key] = None

    def _miss(self, key: bytes) -> None:
        self._absent[key] = self.now + ABSENT
        self._absent.move_to_end(key)
        if len(self._absent) > self._most:
            self._absent.popitem(last=False)

    def check(self) -> None:
        """Raise AssertionError unless what is told adds up."""
        assert not self._there.keys() & self._coming.keys()
        assert len(self._there) <= self._most
        assert len(self._absent) <= self._most
        assert self.used == sum(self._there.values())
        assert all(self._there.get(key) for key in self._added)
        assert not any(self._there.get(key) for key in self._removed)
