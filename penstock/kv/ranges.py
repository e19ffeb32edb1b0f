"""Virtual ranges: the mapping of their slots to physical blocks, and the ranges kept for reuse.

A range is as many consecutive virtual slots as the longest sequence needs blocks. Slots are mapped from the front, so
what a range has mapped is one list. A range is in exactly one of three states:

    free       nothing is mapped
    used       a sequence owns it: its first `live` slots are that sequence's blocks, slots behind them are stale
    reusable   not owned, still mapped: the next sequence remaps only the slots that differ

Every mapping costs an entry in the kernel's table, of which a process has a limited number, so mappings are kept under
a budget. Over it, reusable ranges lose theirs, the one released longest ago first; then stale slots of used
ranges go; and when the live ones alone would be too many, a sequence gets no range and is read through its block table.

Slots are mapped by whole blocks, so a block must be a whole number of the device's mapping units. On a CPU it is (4 KiB
pages; core.layout pads a block to them): whatever a prefix shares is mapped, and nothing is copied. A device with a
larger unit (2 MiB on CUDA, often several blocks) would add this: slots are units; the pool hands out whole units, in
which blocks of one sequence lie in order; and when a sequence joins a prefix that ends inside a unit, the blocks of
that last, partial unit are copied into a unit of its own, since two sequences continue it differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import eq
from typing import NamedTuple


class Change(NamedTuple):
    """A slot's new block, or None."""

    slot: int
    block: int | None


class _Range:
    """What one range has mapped, from its first slot on, and how many of these slots its owner needs."""

    __slots__ = ("live", "mapped")

    def __init__(self) -> None:
        self.mapped: list[int] = []
        self.live = 0


class Ranges:
    """Range r has slots [base + r * range_blocks, base + (r + 1) * range_blocks).

    Args:
        range_blocks: slots of a range: blocks of the longest sequence.
        budget: slots that may be mapped at once.
        base: number of the first slot.
    """

    def __init__(self, num_ranges: int, range_blocks: int, budget: int, base: int = 0) -> None:
        assert num_ranges > 0
        assert range_blocks > 0
        assert budget > 0
        self.num_ranges = num_ranges
        self.range_blocks = range_blocks
        self.budget = budget
        self.base = base
        self.mapped = 0  # slots
        self._ranges = [_Range() for _ in range(num_ranges)]
        self._free = list(range(num_ranges - 1, -1, -1))
        self._used: dict[str, int] = {}
        self._reusable: dict[int, None] = {}  # the one let go longest ago first

    def place(self, owner: str, blocks: Sequence[int]) -> tuple[int | None, list[Change]]:
        """Have `blocks`, all of a sequence's in order, behind consecutive slots.

        Returns:
            The first slot, and what must be changed before the slots are used, in this order. No slot when the budget
            does not allow it or all ranges are used: then nothing is to be changed, and the owner has no range.
        """
        assert 0 < len(blocks) <= self.range_blocks
        number = self._used.get(owner)
        if number is None:
            number = self._choose(blocks)
        if number is None:
            return None, []
        found = self._ranges[number]
        more = max(0, len(blocks) - len(found.mapped))
        if more > self._room(number):
            self.release(owner)
            return None, []
        self._take(owner, number)
        changes = self._make_room(more, number)
        changes += self._map(number, 0, blocks)
        found.live = len(blocks)
        return self._slot(number, 0), changes

    def extend(self, owner: str, ahead: Sequence[int]) -> list[Change]:
        """Map blocks behind those that `place` was told of, as many as fit. The sequence will probably need them next.

        Returns what must be changed before they are used, in this order.
        """
        number = self._used.get(owner)
        if number is None:
            return []
        found = self._ranges[number]
        most = min(self.range_blocks, len(found.mapped) + self._room(number)) - found.live
        ahead = ahead[: max(0, most)]
        changes = self._make_room(max(0, found.live + len(ahead) - len(found.mapped)), number)
        changes += self._map(number, found.live, ahead)
        found.live += len(ahead)
        return changes

    def release(self, owner: str) -> None:
        """Release the owner's range, if it has one."""
        number = self._used.pop(owner, None)
        if number is not None:
            self._ranges[number].live = 0
            self._reusable[number] = None

    def blocks(self, owner: str) -> list[int]:
        """The blocks of the owner's live slots; empty when it has no range."""
        number = self._used.get(owner)
        return [] if number is None else self._ranges[number].mapped[: self._ranges[number].live]

    def counts(self) -> dict[str, int]:
        """Ranges by state ("free", "used", "reusable"); slots "mapped", and "live" of them."""
        return {
            "free": len(self._free),
            "used": len(self._used),
            "reusable": len(self._reusable),
            "mapped": self.mapped,
            "live": sum(r.live for r in self._ranges),
        }

    def mappings(self) -> Counter[int]:
        """Physical block -> slots that it lies behind, live or not."""
        return Counter(block for r in self._ranges for block in r.mapped)

    def _slot(self, number: int, place: int) -> int:
        return self.base + number * self.range_blocks + place

    # --- which range

    def _choose(self, blocks: Sequence[int]) -> int | None:
        """The reusable range that already has most of the blocks in their places; else a free one, which leaves the
        others to sequences that may match them; else the reusable one most like it in length, of these the oldest.
        """
        best, best_score = None, (0, 0)
        for number in self._reusable:
            mapped = self._ranges[number].mapped
            score = (sum(map(eq, mapped, blocks)), -abs(len(mapped) - len(blocks)))
            if best is None or score > best_score:
                best, best_score = number, score
        if self._free and best_score[0] == 0:
            return self._free[-1]
        return best

    def _take(self, owner: str, number: int) -> None:
        if owner in self._used:
            return
        if number in self._reusable:
            del self._reusable[number]
        else:
            assert self._free[-1] == number
            self._free.pop()
        self._used[owner] = number

    # --- the budget

    def _room(self, keep: int) -> int:
        """How many slots more can be mapped, when all but live ones and range `keep` may go."""
        kept = self._ranges[keep]
        live = sum(self._ranges[number].live for number in self._used.values()) - kept.live
        return self.budget - live - len(kept.mapped)

    def _make_room(self, more: int, keep: int) -> list[Change]:
        """Unmap until `more` slots can be mapped; `_room` says that it is possible."""
        changes: list[Change] = []
        for number in (*self._reusable, *self._used.values()):
            if self.mapped + more <= self.budget:
                break
            if number != keep:
                changes += self._unmap(number, self.mapped + more - self.budget)
        assert self.mapped + more <= self.budget
        return changes

    def _unmap(self, number: int, most: int) -> list[Change]:
        """Unmap up to `most` slots that are not live, from the back."""
        found = self._ranges[number]
        end = len(found.mapped)
        stay = max(found.live, end - most)
        del found.mapped[stay:]
        self.mapped -= end - stay
        if not found.mapped and number in self._reusable:
            del self._reusable[number]
            self._free.append(number)
        return [Change(self._slot(number, i), None) for i in range(stay, end)]

    def _map(self, number: int, start: int, blocks: Sequence[int]) -> list[Change]:
        """Have `blocks` behind the slots from `start` on, which is mapped or the first that is not."""
        mapped = self._ranges[number].mapped
        assert start <= len(mapped)
        wanted = list(blocks)
        before = mapped[start : start + len(wanted)]
        if before == wanted:  # nearly always
            return []
        mapped[start : start + len(wanted)] = wanted
        self.mapped += len(wanted) - len(before)
        first = self._slot(number, start)
        known = len(before)
        return [Change(first + i, block) for i, block in enumerate(wanted) if i >= known or before[i] != block]

    def check(self) -> None:
        """Raise AssertionError unless every range is in one state and every mapping is counted."""
        used = set(self._used.values())
        assert len(used) == len(self._used), "a range has two owners"
        assert len(set(self._free)) == len(self._free), "a range is free twice"
        states = [*self._free, *used, *self._reusable]
        assert sorted(states) == list(range(self.num_ranges)), "a range is lost, or in two states"
        assert self.mapped == sum(len(r.mapped) for r in self._ranges) == self.mappings().total()
        assert self.mapped <= self.budget, "more is mapped than allowed"
        for number, r in enumerate(self._ranges):
            assert 0 <= r.live <= len(r.mapped) <= self.range_blocks
            assert not r.live or number in used, "slots are live that nobody needs"
        assert not any(self._ranges[number].mapped for number in self._free)
        assert all(self._ranges[number].mapped for number in self._reusable)
