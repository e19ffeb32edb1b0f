"""A tier of the KV cache below the device: which slot has which block's copy.

A copy is findable once it is whole. A copy whose parent has gone could never be found, so parents stay as long as they
have children, and what goes is the least recently used of those without: the leaves of the prefix tree (xLLM, section
3.4). Times of use are counted, not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from penstock.kv.groups import BESIDE

State = Literal["coming", "whole", "bad"]


class Kept(NamedTuple):
    """A copy that was there before.

    Attributes:
        number: of later ones is greater.
        parent: see `connector.Move`.
    """

    number: int
    slot: int
    key: bytes
    parent: bytes


@dataclass(slots=True)
class _Copy:
    """Of one block.

    Attributes:
        parent: of which a copy is here too; None of a prompt's first block.
        used: when it was last, as a count of uses.
        state: "coming" while it is written; "bad" when its content is not what was written, until it is written anew.
        children: copies here of which this is the parent.
        readers: that are reading it now.
        told: of whether it is here.
    """

    slot: int
    parent: bytes | None
    used: int
    state: State = "coming"
    children: int = 0
    readers: int = 0
    told: bool = True

    @property
    def is_free_to_go(self) -> bool:
        return not self.children and not self.readers and self.state != "coming"


class Tier:
    """
    Args:
        num_slots: blocks that it has room for.
        name: that it is told of by.
    """

    def __init__(self, num_slots: int, name: str = "host") -> None:
        assert num_slots > 0
        self.num_slots, self.name = num_slots, name
        self._free = list(range(num_slots))[::-1]
        self._copies: dict[bytes, _Copy] = {}
        self._leaves: list[tuple[int, bytes]] = []  # (used, key), a heap; those that are so no longer are passed over
        self._uses = 0
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._evicted: list[bytes] = []

    # --- finding

    def slot(self, key: bytes) -> int | None:
        """Where a whole copy lies; None when there is none."""
        copy = self._copies.get(key)
        return copy.slot if copy is not None and copy.state == "whole" else None

    def has(self, key: bytes) -> bool:
        """Whether a copy is here or coming, so that none is to be made."""
        copy = self._copies.get(key)
        return copy is not None and copy.state != "bad"

    def keys(self) -> list[bytes]:
        """Of everything that can be found and is told of."""
        return [key for key, copy in self._copies.items() if copy.state == "whole" and copy.told]

    def use(self, keys: Iterable[bytes]) -> None:
        """These blocks of one prompt are of use now, on whichever tier they were found."""
        self._uses += 1
        for key in keys:
            copy = self._copies.get(key)
            if copy is not None:
                copy.used = self._uses
                self._look_at(key, copy)

    # --- writing

    def claim(self, key: bytes, parent: bytes | None, *, told: bool = True) -> int | None:
        """A slot to write a block's copy to, for which another one may have to go. None when it has no parent here, or
        everything else is in use.

        Args:
            parent: None for the first block of a prompt, and for one that is found without those before it.
            told: whether `take_changes` and `keys` name it.
        """
        known = self._copies.get(key)
        if known is not None:
            if known.state != "bad" or known.readers:
                return None
            known.state = "coming"
            return known.slot
        above = None
        if parent is not None:
            above = self._copies.get(parent)
            if above is None:
                return None
            above.children += 1  # from here on it is no leaf that might go
        if not self._free and not self._evict():
            if above is not None:
                above.children -= 1
                self._look_at(parent, above)
            return None
        self._uses += 1
        self._copies[key] = copy = _Copy(self._free.pop(), parent, self._uses, told=told)
        return copy.slot

    def written(self, key: bytes, *, whole: bool) -> None:
        """The copy that was claimed is there, or could not be made."""
        copy = self._copies[key]
        assert copy.state == "coming"
        copy.state = "whole" if whole else "bad"
        if whole and copy.told:
            self._note(key, self._added, self._removed)
        self._look_at(key, copy)

    def restore(self, copies: Iterable[Kept]) -> None:
        """Take up what was in the slots when the tier was last used; it is empty now. Of a key the newest copy counts,
        and one whose parent is not there does not."""
        assert not self._copies
        newest = {kept.key: kept for kept in sorted(copies)}
        while newest:
            chain, key = [], next(iter(newest))
            while (kept := newest.pop(key, None)) is not None:  # upwards
                chain.append(kept)
                key = kept.parent
            for kept in reversed(chain):
                self._take_up(kept)
        taken = {copy.slot for copy in self._copies.values()}
        self._free = [slot for slot in self._free if slot not in taken]
        self._uses = max((copy.used for copy in self._copies.values()), default=0)

    def _take_up(self, kept: Kept) -> None:
        told = kept.parent != BESIDE
        parent = kept.parent if kept.parent and told else None
        if parent is not None:
            if parent not in self._copies:
                return
            self._copies[parent].children += 1
        self._copies[kept.key] = copy = _Copy(kept.slot, parent, kept.number, "whole", told=told)
        self._look_at(kept.key, copy)
        if told:
            self._added[kept.key] = None

    # --- reading

    def begin_reading(self, keys: Sequence[bytes]) -> None:
        """Pin these complete copies."""
        for key in keys:
            copy = self._copies[key]
            assert copy.state == "whole"
            copy.readers += 1

    def end_reading(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            copy = self._copies[key]
            copy.readers -= 1
            self._look_at(key, copy)

    def spoil(self, key: bytes) -> None:
        """The copy is corrupt: remove it from the index."""
        copy = self._copies.get(key)
        if copy is not None and copy.state == "whole":
            copy.state = "bad"
            if copy.told:
                self._note(key, self._removed, self._added)

    # --- telling

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that became findable since the last call, and keys that no longer are."""
        if not (self._added or self._removed):
            return [], []
        changes = list(self._added), list(self._removed)
        self._added, self._removed = {}, {}
        return changes

    def take_evicted(self) -> list[bytes]:
        """Keys whose copies had to go for others since the last call, of those that are told of."""
        evicted, self._evicted = self._evicted, []
        return evicted

    @property
    def used(self) -> int:
        """Slots with something in them."""
        return len(self._copies)

    # --- inside

    @staticmethod
    def _note(key: bytes, now: dict[bytes, None], before: dict[bytes, None]) -> None:
        if key in before:
            del before[key]
        else:
            now[key] = None

    def _look_at(self, key: bytes | None, copy: _Copy) -> None:
        """It may have become a leaf, or was used."""
        if key is None or not copy.is_free_to_go:
            return
        heappush(self._leaves, (copy.used, key))
        if len(self._leaves) > 64 + 2 * len(self._copies):
            self._leaves = [(c.used, k) for k, c in self._copies.items() if c.is_free_to_go]
            heapify(self._leaves)

    def _evict(self) -> bool:
        while self._leaves:
            used, key = heappop(self._leaves)
            copy = self._copies.get(key)
            if copy is None or copy.used != used or not copy.is_free_to_go:
                continue
            del self._copies[key]
            self._free.append(copy.slot)
            if copy.told:
                self._evicted.append(key)
                if copy.state == "whole":
                    self._note(key, self._removed, self._added)
            if copy.parent is not None:
                above = self._copies[copy.parent]
                above.children -= 1
                self._look_at(copy.parent, above)
            return True
        return False

    def check(self) -> None:
        """Raise AssertionError unless every slot is accounted for once and whatever may go can be found."""
        slots = [copy.slot for copy in self._copies.values()]
        assert sorted(slots + self._free) == list(range(self.num_slots)), "a slot is lost, or is used twice"
        children = dict.fromkeys(self._copies, 0)
        for copy in self._copies.values():
            if copy.parent is not None:
                assert copy.parent in children, "a copy can no longer be found: its parent has gone"
                children[copy.parent] += 1
        leaves = set(self._leaves)
        for key, copy in self._copies.items():
            assert copy.children == children[key]
            assert copy.readers >= 0
            assert not (copy.state == "coming" and copy.readers), "a copy is read while it is written"
            assert not copy.is_free_to_go or (copy.used, key) in leaves, "a leaf would never go"
        assert self._added.keys().isdisjoint(self._removed)
        assert all(self.slot(key) is not None for key in self._added)
        assert all(self.slot(key) is None for key in self._removed)
