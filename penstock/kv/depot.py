"""One pool of blocks that many instances share: the holders of each block, and the blocks of failed instances.

A block is in exactly one of three places:

    free       no instance holds it; its content is void
    held       one or more attached instances hold it
    orphaned   its only holder has failed; that instance's next incarnation inherits it

An instance never holds more blocks than its quota, and all quotas, those of failed instances included, never sum to
more than there are blocks. So a lease within a quota always succeeds. It also succeeds within the first `limit` blocks,
that sum: only those are ever leased, so that the memory which was touched is bounded by what was promised.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from penstock.core.errors import ConfigError


class Depot:
    """Blocks 0 to num_blocks - 1. Instances are named; an incarnation is one run of an instance."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.limit = 0  # the sum of all quotas
        self._instances: dict[str, _Instance] = {}
        self._free = _Runs(num_blocks)
        self._holders: dict[int, set[str]] = {}  # block -> names; one failed instance when it is orphaned
        self._generation: dict[int, int] = {}
        self._surplus: list[range] = []

    # --- incarnations

    def attach(self, name: str, incarnation: int, quota: int) -> list[int]:
        """Attach an incarnation. Returns the blocks inherited from the previous one; they count against the quota.

        An inherited block begins a new generation: instances that know it from the old incarnation can no longer hold
        it, so it is exclusive to its heir.

        Raises:
            ConfigError: the name is attached already, or the quotas would not fit together.
        """
        old = self._instances.get(name)
        if old is not None and old.incarnation is not None:
            raise ConfigError(f"instance: {name} is attached already, as incarnation {old.incarnation}", "instance")
        others = self.limit - (old.quota if old is not None else 0)
        if not 0 < quota <= self.num_blocks - others:
            free = self.num_blocks - others
            raise ConfigError(f"quota: {quota} blocks, from 1 to {free} of {self.num_blocks} can be promised", "quota")
        instance = self._instances[name] = old or _Instance()
        instance.incarnation, instance.quota = incarnation, quota
        self._set_limit(others + quota)
        inherited = sorted(instance.blocks)
        self.drop(name, inherited[quota:])
        for block in inherited[:quota]:
            self._generation[block] += 1
        return inherited[:quota]

    def detach(self, name: str, keep: Iterable[int]) -> None:
        """Detach an incarnation. Of the blocks that only it held, `keep` become orphaned; it releases all others."""
        instance = self._instances[name]
        assert instance.incarnation is not None, f"{name} is not attached"
        kept = {block for block in keep if block in instance.blocks and len(self._holders[block]) == 1}
        self.drop(name, [block for block in instance.blocks if block not in kept])
        instance.incarnation = None

    def expire(self, name: str) -> None:
        """No successor attached: free the orphans of a failed instance and its quota.

        The memory of free blocks is then surplus.
        """
        instance = self._instances[name]
        assert instance.incarnation is None, f"{name} is attached"
        del self._instances[name]
        self._set_limit(self.limit - instance.quota)
        for block in instance.blocks:
            self._let_go(block, name)
        self._surplus += self._free.within(0, self.limit)

    def incarnation(self, name: str) -> int | None:
        """The incarnation attached under this name, if any."""
        instance = self._instances.get(name)
        return instance.incarnation if instance is not None else None

    @property
    def names(self) -> set[str]:
        """Every instance with a quota, attached or failed."""
        return set(self._instances)

    # --- blocks

    def lease(self, name: str, count: int) -> list[int]:
        """`count` free blocks, in one run of consecutive ids where there is such a run; at most `room`."""
        assert 0 <= count <= self.room(name), f"{name} has room for {self.room(name)} blocks, not {count}"
        blocks = self._free.take(count, self.limit)
        for block in blocks:
            self._holders[block] = {name}
            self._generation[block] = self._generation.get(block, 0) + 1
        self._instances[name].blocks.update(blocks)
        return blocks

    def hold(self, name: str, blocks: Sequence[tuple[int, int]], give: Sequence[int] = ()) -> bool:
        """Become one more holder of each (block, generation) and drop `give`, or do nothing at all.

        False unless each block is held by another or orphaned, is still in that generation, and is not held already.
        An orphan that is held so is no longer inherited.
        """
        wanted = {block for block, _ in blocks}
        assert len(blocks) <= self.room(name) + len(give), f"{name} has no room for {len(blocks)} blocks"
        for block, generation in blocks:
            holders = self._holders.get(block)
            if holders is None or name in holders or self._generation[block] != generation:
                return False
        if len(wanted) < len(blocks):
            return False
        self.drop(name, give)
        for block in wanted:
            holders = self._holders[block]
            for dead in [other for other in holders if self._instances[other].incarnation is None]:
                holders.remove(dead)
                self._instances[dead].blocks.remove(block)
            holders.add(name)
        self._instances[name].blocks.update(wanted)
        return True

    def drop(self, name: str, blocks: Sequence[int]) -> None:
        """Release these blocks. Those without another holder become free."""
        assert self.holds(name, blocks), f"{name} gives up what it does not hold"
        self._instances[name].blocks.difference_update(blocks)
        for block in blocks:
            self._let_go(block, name)

    def holds(self, name: str, blocks: Sequence[int]) -> bool:
        """Whether `blocks` are different blocks and the name holds every one."""
        wanted = set(blocks)
        return len(wanted) == len(blocks) and wanted <= self._instances[name].blocks

    def held(self, name: str) -> list[int]:
        """What the name holds, or left behind."""
        return sorted(self._instances[name].blocks)

    def room(self, name: str) -> int:
        """Blocks that its quota still allows."""
        return self._instances[name].quota - len(self._instances[name].blocks)

    def quota(self, name: str) -> int:
        """The quota of an instance, attached or failed; 0 without one."""
        instance = self._instances.get(name)
        return instance.quota if instance is not None else 0

    def generation(self, block: int) -> int:
        """Which use of the block this is: counts up when it is leased or inherited; 0 before the first."""
        return self._generation.get(block, 0)

    def take_surplus(self) -> list[range]:
        """Runs of free blocks whose memory is surplus and was not returned before: above `limit`, and all of them when
        a quota is given up."""
        surplus, self._surplus = self._surplus, []
        return surplus

    # --- accounts

    def counts(self) -> dict[str, int]:
        """Blocks by state: "free", "orphaned", and "held:NAME" of every attached instance, shared ones in each."""
        counts = {"free": len(self._free), "orphaned": 0}
        for name, instance in self._instances.items():
            if instance.incarnation is None:
                counts["orphaned"] += len(instance.blocks)
            else:
                counts[f"held:{name}"] = len(instance.blocks)
        return counts

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for exactly once and every quota can be met."""
        self._free.check()
        assert len(self._free) + len(self._holders) == self.num_blocks, "a block is lost"
        assert not any(block in self._free for block in self._holders), "a held block is free"
        assert all(self._holders.values()), "a block is held by nobody"
        assert self.limit == sum(instance.quota for instance in self._instances.values()) <= self.num_blocks
        for name, instance in self._instances.items():
            assert instance.blocks == {b for b, holders in self._holders.items() if name in holders}, f"{name}'s blocks"
            assert len(instance.blocks) <= instance.quota, f"{name} is beyond its quota"
            if instance.incarnation is None:
                assert all(len(self._holders[b]) == 1 for b in instance.blocks), "an orphan is held"
        assert all(self._generation[block] > 0 for block in self._holders)

    def _let_go(self, block: int, name: str) -> None:
        holders = self._holders[block]
        holders.remove(name)
        if not holders:
            del self._holders[block]
            self._free.put(block)
            if block >= self.limit:
                self._surplus.append(range(block, block + 1))

    def _set_limit(self, limit: int) -> None:
        self._surplus += self._free.within(limit, self.limit)
        self.limit = limit


class DepotSource:
    """One instance's end of a depot in its own process; what `KVPoolClient` is to a KV pool server."""

    def __init__(self, depot: Depot, name: str) -> None:
        self.depot = depot
        self.name = name

    def exchange(self, give: Sequence[int], want: int) -> list[int]:
        """Give up some blocks, then lease `want` others."""
        self.depot.drop(self.name, give)
        return self.depot.lease(self.name, want)

    def hold(self, blocks: Sequence[tuple[int, int]], give: Sequence[int]) -> bool:
        """See `Depot.hold`."""
        return self.depot.hold(self.name, blocks, give)


class _Instance:
    __slots__ = ("blocks", "incarnation", "quota")

    def __init__(self) -> None:
        self.incarnation: int | None = None  # None: failed, and its blocks are orphaned
        self.quota = 0
        self.blocks: set[int] = set()


class _Runs:
    """A set of integers, kept as runs [start, end) in order that neither overlap nor touch."""

    def __init__(self, end: int) -> None:
        self._starts = [0]
        self._ends = [end]
        self._size = end

    def __len__(self) -> int:
        return self._size

    def __contains__(self, number: int) -> bool:
        i = bisect_right(self._starts, number) - 1
        return i >= 0 and number < self._ends[i]

    def take(self, count: int, below: int) -> list[int]:
        """Remove and return `count` numbers under `below`: the first run that has them all, or else the lowest."""
        if count == 0:
            return []
        for i in range(bisect_left(self._starts, below)):
            if min(self._ends[i], below) - self._starts[i] >= count:
                return self._cut(count, i)
        taken: list[int] = []
        while len(taken) < count:
            there = min(self._ends[0], below) - self._starts[0]
            assert there > 0, "more was promised than there is"
            taken += self._cut(min(count - len(taken), there), 0)
        return taken

    def put(self, number: int) -> None:
        i = bisect_right(self._starts, number)
        before = i > 0 and self._ends[i - 1] == number
        after = i < len(self._starts) and self._starts[i] == number + 1
        if before and after:
            self._ends[i - 1] = self._ends[i]
            del self._starts[i], self._ends[i]
        elif before:
            self._ends[i - 1] += 1
        elif after:
            self._starts[i] -= 1
        else:
            self._starts.insert(i, number)
            self._ends.insert(i, number + 1)
        self._size += 1

    def within(self, start: int, end: int) -> list[range]:
        """The runs' parts inside [start, end); none when that is empty."""
        if start >= end:
            return []
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        return [range(max(self._starts[i], start), min(self._ends[i], end)) for i in range(first, last)]

    def check(self) -> None:
        flat = [edge for run in zip(self._starts, self._ends, strict=True) for edge in run]
        assert all(a < b for a, b in pairwise(flat)), "runs overlap or touch"
        assert self._size == sum(self._ends) - sum(self._starts)

    def _cut(self, count: int, i: int) -> list[int]:
        start = self._starts[i]
        if start + count == self._ends[i]:
            del self._starts[i], self._ends[i]
        else:
            self._starts[i] += count
        self._size -= count
        return list(range(start, start + count))
