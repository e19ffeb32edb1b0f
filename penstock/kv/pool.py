"""Who holds which block, and which blocks can be found again by their prefix key.

A block is in exactly one of three places:

    free     nobody holds it and it holds nothing worth finding
    held     one or more sequences hold it; a full one may have a key, so that others can join
    idle     nobody holds it, but it has a key: found again by a prefix hit, or evicted when room is needed

Blocks become idle from the tail of a sequence to its head, and a sequence that holds a block holds every block before
it. So in the order of becoming idle every block stands before its parent, and evicting the oldest is at once
least-recently-used and leaf-first: no tree needs to be walked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block used last is the warmest
        self._holders = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._block: dict[bytes, int] = {}
        self._idle: dict[int, None] = {}  # in the order of eviction
        self._parent: dict[int, bytes] = {}  # block with a key -> its parent's key

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.available

    @property
    def cached(self) -> int:
        """Blocks that can be found by key."""
        return len(self._block)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest leading run of `keys` that is cached. Holds nothing: `hold` them at once."""
        found = []
        for key in keys:
            block = self._block.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, block: int) -> bool:
        return block in self._idle

    def holders(self, block: int) -> int:
        return self._holders[block]

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder for each; they must be held or idle."""
        for block in blocks:
            assert self._holders[block] or block in self._idle, f"block {block} is free"
            self._idle.pop(block, None)
            self._holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder and no key, evicting idle ones where needed; at most `available`."""
        assert 0 <= count <= self.available
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each block of a sequence, given from head to tail."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} has no holder"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._key[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def publish(self, block: int, key: bytes, parent: bytes) -> int:
        """Give a held, full block its key. Returns the block to use from now on.

        That is another one when the same tokens were computed twice at once: the caller's block is released and the
        block that already has the key is held instead, so that the holder of a block always holds its parents.
        """
        assert self._holders[block] > 0
        assert self._key[block] is None
        known = self._block.get(key)
        if known is not None:
            self.hold([known])
            self.release([block])
            return known
        self._key[block] = key
        self._block[key] = block
        self._parent[block] = parent
        return block

    def _evict(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        key = self._key[block]
        assert key is not None
        del self._block[key], self._parent[block]
        self._key[block] = None
        return block

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for exactly once and eviction is leaf-first."""
        free, idle = set(self._free), set(self._idle)
        held = {b for b in range(self.num_blocks) if self._holders[b] > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert free | idle | held == set(range(self.num_blocks)), "a block is lost"
        assert len(free) + len(idle) + len(held) == self.num_blocks, "a block is in two places"
        assert all(h >= 0 for h in self._holders)
        assert {b: k for k, b in self._block.items()} == {b: k for b, k in enumerate(self._key) if k is not None}
        assert not any(self._key[b] for b in free)
        assert all(self._key[b] for b in idle)
        place = {block: i for i, block in enumerate(self._idle)}
        for block, parent_key in self._parent.items():
            parent = self._block.get(parent_key)
            if parent is None:
                continue  # the first block of a prefix
            assert self._holders[parent] >= self._holders[block], "a block is held without its parent"
            if parent in place:
                assert place.get(block, len(place)) < place[parent], "a parent would go before its child"
