"""The block pool: the holders of each block, and the prefix cache.

A block of an instance is in exactly one of four states:

    free     not held; its content is void
    held     sequences hold it (`holders`), or a hand-off in progress does (`transfers`); a full one may have a key,
             so that others can join
    idle     not held, but it has a key, or keys of what it begins with (`tails`): found by a prefix hit, or evicted
             when blocks are needed
    spent    no holder here and no key, but another instance may be reading it: it is exchanged for another block of the
    source

Blocks become idle from the tail of a sequence to its head, and a sequence that holds a block holds every block before
it. So in the order of becoming idle every block stands before its parent, and evicting the oldest is at once
least-recently-used and leaf-first: no tree needs to be walked. (Blocks that leave a window become idle before those
after them, and are touched when these do. A block that another instance hands over may arrive before its parent; should
that order come out wrong for it, it merely stays unfound until it is evicted in its turn.)
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import MediaSpan
from penstock.kv.groups import BESIDE, WHOLE, Windows, first_seen, held_of, keys_of_all, reach
from penstock.kv.keys import KEY_BYTES, touching

_TOKEN_BYTES = array("I").itemsize


class BlockSource(Protocol):
    """The source of blocks: the host's KV pool, or a substitute."""

    def exchange(self, give: Sequence[int], want: int) -> list[int]:
        """Give up blocks and get `want` others, never fewer; at most as many as were given up."""
        ...


class Tail(NamedTuple):
    """A block in which a match may end.

    Attributes:
        keys: of its first tokens, at the sampled places.
        filled: tokens of it that are known; whole: key of all of these.
    """

    parent: bytes
    keys: Sequence[bytes]
    filled: int
    whole: bytes


def sampled(tokens: int, interval: int) -> range:
    """After how many of a block's first tokens a match may end: every so many, but for the end of a full block, whose
    key says it all (RTP-LLM, section 5.2.3, which begins with the 208th token of a larger block)."""
    return range(interval, min(tokens, BLOCK_TOKENS - 1) + 1, interval)


def beginning_keys(
    parent: bytes, tokens: Sequence[int], start: int, counts: Sequence[int], media: Sequence[MediaSpan] = ()
) -> list[bytes]:
    """Keys of the beginnings of one block, which is full or not.

    Args:
        parent: key of the block before it.
        start: place of its first token in `tokens`.
        counts: tokens of each beginning, at least one, in ascending order.
        media: see `kv.keys.extend_keys`.
    """
    spans = touching(media, start) if media else b""
    digest = blake2b(parent + len(spans).to_bytes(8, "little") + spans, digest_size=KEY_BYTES, person=b"penstock.tail")
    data = array("I", tokens[start : start + counts[-1]]).tobytes()
    keys, done = [], 0
    for count in counts:
        end = count * _TOKEN_BYTES
        digest.update(data[done:end])
        keys.append(digest.digest())
        done = end
    return keys


class TailIndex:
    """The blocks of one instance in which a match may end. Of several with the same beginning the one that was added
    last is found."""

    def __init__(self) -> None:
        self._tails: dict[int, Tail] = {}
        self._block: dict[bytes, int] = {}
        self._behind: Counter[bytes] = Counter()  # tails that have this parent

    def __contains__(self, block: int) -> bool:
        return block in self._tails

    def behind(self, parent: bytes) -> bool:
        """Whether there are any behind that block."""
        return parent in self._behind

    def filled(self, block: int) -> int:
        """Tokens of the block that are known."""
        return self._tails[block].filled

    def find(self, keys: Sequence[bytes]) -> tuple[int, int, Tail] | None:
        """The longest of these beginnings that is there: its place in `keys`, the block, and all of that."""
        for place in reversed(range(len(keys))):
            block = self._block.get(keys[place])
            if block is not None:
                return place, block, self._tails[block]
        return None

    def add(self, block: int, tail: Tail) -> int:
        """What is known of a block. Returns the one that has all of it: perhaps another, and then this one is none."""
        known = self._tails.get(block)
        if known is not None:
            if known.filled >= tail.filled:
                return block
            self.remove(block)
        other = self._block.get(tail.keys[-1])
        if other is not None and self._covers(self._tails[other], tail):
            for key in tail.keys:
                self._block.setdefault(key, other)
            return other
        self._tails[block] = tail
        self._behind[tail.parent] += 1
        for key in tail.keys:
            self._block[key] = block
        return block

    @staticmethod
    def _covers(other: Tail, tail: Tail) -> bool:
        """Whether a block that has this one's last sampled key is known to have all of its tokens."""
        return other.whole == tail.whole or tail.whole == tail.keys[-1]

    def remove(self, block: int) -> None:
        """The block will be something else; nothing if it is none of these."""
        tail = self._tails.pop(block, None)
        if tail is None:
            return
        for key in tail.keys:
            if self._block.get(key) == block:
                del self._block[key]
        self._behind[tail.parent] -= 1
        if not self._behind[tail.parent]:
            del self._behind[tail.parent]

    def items(self) -> Iterable[tuple[int, Tail]]:
        return self._tails.items()

    def check(self) -> None:
        """Raise AssertionError unless what is found is there."""
        assert all(key in self._tails[block].keys for key, block in self._block.items())
        assert self._behind == Counter(tail.parent for tail in self._tails.values())
        assert all(0 < tail.filled <= BLOCK_TOKENS for tail in self._tails.values())


class Published(NamedTuple):
    """A block that was added to the prefix cache.

    Attributes:
        parent: the key of the block before it; BESIDE where it is found without that one, as blocks of further groups
            of layers are beside those of the first (`kv.groups`). Nobody else is told of these.
    """

    block: int
    key: bytes
    parent: bytes

    @property
    def told(self) -> bool:
        return self.parent != BESIDE


class TailHit(NamedTuple):
    """A match that ends inside a block: so many of its first tokens."""

    block: int
    tokens: int


class Hit(NamedTuple):
    """A prefix that was found in the cache.

    Attributes:
        length: blocks of each group.
        blocks: in a sequence's order.
        dropped: for each group, how many of its first blocks are not needed and perhaps not there: in their places
            stands the one after them.
        tail: what goes on behind these blocks; None where nothing does.
    """

    length: int
    blocks: list[int]
    dropped: list[int]
    tail: TailHit | None = None

    @property
    def tokens(self) -> int:
        return self.length * BLOCK_TOKENS + (0 if self.tail is None else self.tail.tokens)

    @property
    def held(self) -> list[int]:
        """Those that are to be held."""
        return held_of(self.blocks, self.dropped) if any(self.dropped) else self.blocks


class BlockPool:
    """The blocks of one instance.

    Args:
        blocks: their ids, any numbers.
        source: takes blocks that other instances may be reading, and gives others; None without sharing.
        windowed: sequences let go of their first blocks while they hold others, because nothing will look so far back.

    Attributes:
        tails: blocks in which a match may end.
    """

    def __init__(self, blocks: Iterable[int], source: BlockSource | None = None, *, windowed: bool = False) -> None:
        self._windowed = windowed
        # most blocks of an unshared range are never used: they are not listed one by one
        self._fresh = blocks if isinstance(blocks, range) and source is None else range(0)  # free, below all of `_free`
        self._free = [] if self._fresh else list(blocks)[::-1]  # a stack: the block used last is the warmest
        self._ours: range | set[int] = self._fresh or set(self._free)
        self._holders: dict[int, int] = {}  # of blocks that have been held
        self._transfers: dict[int, int] = {}
        self.tails = TailIndex()
        self._named: dict[int, Published] = {}  # every block with a key
        self._block: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the order of eviction; a dict's first is slow to find
        self._offered: set[int] = set()
        self._spent: list[int] = []
        self._source = source
        self._added: dict[bytes, Published] = {}
        self._removed: set[bytes] = set()
        self.changed = False  # whether there is something for `take_changes`
        self.used = 0  # blocks that somebody holds
        self.num_blocks = self.unused
        assert len(self._ours) == self.num_blocks > 0

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._fresh) + len(self._idle) + len(self._spent)

    @property
    def unused(self) -> int:
        """Blocks that `allocate` can hand out without evicting anything."""
        return len(self._free) + len(self._fresh)

    @property
    def cached(self) -> int:
        """Blocks that can be found by key."""
        return len(self._block)

    def keys(self) -> list[bytes]:
        """Of everything that can be found and is told of."""
        return [named.key for named in self._named.values() if named.told]

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest leading run of `keys` that is cached. Holds nothing: `hold` them at once."""
        found = []
        for key in keys:
            block = self._block.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, keys: Sequence[bytes], windows: Windows) -> Hit:
        """The longest prefix of which everything is cached that the tokens after it see. Holds nothing.

        Args:
            keys: of its blocks, as far as it may reach.
            windows: of the model's groups of layers.
        """
        if windows == WHOLE:
            found = self.match(keys)
            return Hit(len(found), found, [0])
        tables = [self.match_each(names) for names in keys_of_all(keys, len(windows))]
        length = reach(windows, tables, len(keys))
        dropped = [first_seen(window, length * BLOCK_TOKENS) for window in windows]
        blocks = [table[max(i, gone)] for i in range(length) for table, gone in zip(tables, dropped, strict=True)]
        assert None not in blocks
        return Hit(length, blocks, dropped)  # type: ignore[arg-type]

    def match_each(self, keys: Iterable[bytes]) -> list[int | None]:
        """The block of each of `keys`, None where it is not cached. Holds nothing."""
        return list(map(self._block.get, keys))

    def owns(self, block: int) -> bool:
        """Whether the block belongs to this pool."""
        return block in self._ours

    def agrees(self, block: int, key: bytes) -> bool:
        """Whether a block of ours may hold what `key` names: it has that key, or none yet."""
        named = self._named.get(block)
        return named is None or named.key == key

    def idle(self, block: int) -> bool:
        return block in self._idle

    def holders(self, block: int) -> int:
        """Sequences that hold it."""
        return self._holders.get(block, 0)

    def transfers(self, block: int) -> int:
        """Hand-offs in progress that need it."""
        return self._transfers.get(block, 0)

    def coming(self, count: int) -> list[int]:
        """The blocks that `allocate` hands out next, at most `count` of those that nothing has to be evicted for."""
        coming = self._free[: -count - 1 : -1]
        return [*coming, *self._fresh[: count - len(coming)]]

    # --- holding

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder for each; they must be held or idle."""
        for block in blocks:
            if not self._is_held(block):
                assert block in self._idle, f"block {block} is free"
                del self._idle[block]
                self.used += 1
            self._holders[block] = self._holders.get(block, 0) + 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder and no key, evicting idle ones where needed; at most `available`."""
        assert 0 <= count <= self.available
        blocks = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(blocks) :]
        if len(blocks) < count:
            fresh = self._fresh[: count - len(blocks)]
            self._fresh = self._fresh[len(fresh) :]
            blocks += fresh
        while len(blocks) + len(self._spent) < count:
            block = self._evict()
            (self._spent if block in self._offered else blocks).append(block)
        if len(blocks) < count:
            blocks += self._renew(count - len(blocks))
        for block in blocks:
            self._holders[block] = 1
        self.used += count
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each block of a sequence, given from head to tail."""
        holders = self._holders
        for block in reversed(blocks):
            left = holders[block] - 1
            assert left >= 0, f"block {block} has no holder"
            holders[block] = left
            if not left:
                self._let_go(block)

    def begin_transfer(self, blocks: Sequence[int]) -> None:
        """A hand-off needs these held blocks to stay as they are."""
        for block in blocks:
            assert self._is_held(block), f"block {block} is not held"
            self._transfers[block] = self._transfers.get(block, 0) + 1

    def end_transfer(self, blocks: Sequence[int]) -> None:
        """Undo `begin_transfer`, given from head to tail."""
        for block in reversed(blocks):
            self._transfers[block] -= 1
            if not self._transfers[block]:
                del self._transfers[block]
                if not self._holders.get(block):
                    self._let_go(block)

    # --- finding

    def publish(self, block: int, key: bytes, parent: bytes) -> int:
        """Give a held, full block its key. Returns the block to use from now on.

        That is another one when the same tokens were computed twice at once: the caller's block is released and the
        block that already has the key is held instead, so that the holder of a block always holds its parents.
        """
        assert self._holders[block] > 0
        known = self._block.get(key)
        if known is None:
            self._name(Published(block, key, parent))
            return block
        if known == block:  # another sequence with the same handed-over block published it first
            return block
        assert block not in self._named
        self.hold([known])
        self.release([block])
        return known

    def leave(self, block: int, tail: Tail) -> None:
        """The first tokens of a held block can be found from now on, whoever holds it later. Nothing before the end of
        `tail` is written to it again."""
        assert self._is_held(block)
        same = self.tails.add(block, tail)
        if same in self._idle:
            self._idle.move_to_end(same)

    def exclusive(self, tail: TailHit) -> bool:
        """Whether who found this may take the block itself and go on in it, since nobody else holds, reads or could
        find more of it."""
        block = tail.block
        there = block in self._idle and block not in self._named and block not in self._offered
        return there and self.tails.filled(block) == tail.tokens

    def touch(self, keys: Sequence[bytes]) -> None:
        """As if idle ones of these, given from head to tail, had been let go of just now."""
        for key in reversed(keys):
            block = self._block.get(key)
            if block is not None and block in self._idle:
                self._idle.move_to_end(block)

    def restore(self, inherited: Iterable[Published]) -> None:
        """At start-up: free blocks become idle and findable, children given before their parents."""
        for published in inherited:
            if published.key not in self._block:
                self._name(published)
                self._idle[published.block] = None
        self._free = [*self._fresh[::-1], *self._free]
        self._fresh = range(0)
        assert self._idle.keys() <= set(self._free)
        self._free = [block for block in self._free if block not in self._idle]

    def published(self) -> list[Published]:
        """Everything that can be found."""
        return list(self._named.values())

    def clear(self) -> list[int]:
        """Forget everything that nobody holds. Returns the blocks whose contents nobody needs, in this instance or in
        another, in ascending order."""
        while self._idle:
            block = self._evict()
            (self._spent if block in self._offered else self._free).append(block)
        return sorted((*self._free, *self._fresh))

    def take_changes(self) -> tuple[list[Published], list[bytes]]:
        """What was added to the prefix cache since the last call, and the keys removed from it that are told of."""
        if not self.changed:
            return [], []
        changes = list(self._added.values()), list(self._removed)
        self._added, self._removed, self.changed = {}, set(), False
        return changes

    # --- sharing with other instances

    def offer(self, block: int) -> None:
        """Another instance was told of this block: once released here it goes back to the source, which reuses it only
        after the other one has released it too."""
        assert self._is_held(block)
        if self._source is not None:
            self._offered.add(block)

    def replace(self, mine: int, theirs: int) -> None:
        """A held block without key was exchanged for another instance's; the holder now holds that one."""
        assert theirs not in self._ours
        assert self._holders[mine] == 1
        assert mine not in self._named
        assert mine not in self._transfers
        assert mine not in self.tails
        self._trade([mine], [theirs])
        self._holders[theirs] = 1
        self._offered.add(theirs)

    def regain(self, block: int) -> bool:
        """One more holder for a block of ours that another instance hands over again; False when it is free, which it
        cannot be if both speak of the same use."""
        if block in self._spent:
            self._spent.remove(block)
            self._holders[block] = 1
            self.used += 1
        elif self._is_held(block) or block in self._idle:
            self.hold([block])
        else:
            return False
        return True

    # --- inside

    def _is_held(self, block: int) -> bool:
        return self._holders.get(block, 0) > 0 or block in self._transfers

    def _let_go(self, block: int) -> None:
        """The last sequence has released it; a hand-off may still need it."""
        if block in self._transfers:
            return
        self.used -= 1
        if block in self._named or block in self.tails:
            self._idle[block] = None
        elif block in self._offered:
            self._spent.append(block)
        else:
            self._free.append(block)

    def _name(self, published: Published) -> None:
        block, key, _ = published
        assert block not in self._named
        self._named[block] = self._added[key] = published
        self._block[key] = block
        self._removed.discard(key)
        self.changed = True

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self.tails.remove(block)
        named = self._named.pop(block, None)
        if named is None:
            return block
        key = named.key
        del self._block[key]
        if self._added.pop(key, None) is None and named.told:
            self._removed.add(key)
        self.changed = True
        return block

    def _renew(self, count: int) -> list[int]:
        """Exchange some of the spent blocks."""
        assert self._source is not None
        given, self._spent = self._spent[:count], self._spent[count:]
        blocks = self._source.exchange(given, count)
        assert len(blocks) == count
        self._trade(given, blocks)
        return blocks

    def _trade(self, mine: Sequence[int], theirs: Sequence[int]) -> None:
        """Replace these blocks by others."""
        assert isinstance(self._ours, set)
        self._ours.difference_update(mine)
        self._offered.difference_update(mine)
        for block in mine:
            self._holders.pop(block, None)  # an inherited block that was never held has none
        assert self._ours.isdisjoint(theirs)
        self._ours.update(theirs)

    def counts(self) -> dict[str, int]:
        """Blocks by state, and how many each of the three counts keeps."""
        return {
            "free_blocks": self.unused,
            "idle_blocks": len(self._idle),
            "spent_blocks": len(self._spent),
            "held_blocks": self.used,
            "mapped_blocks": sum(h > 0 for h in self._holders.values()),
            "cached_blocks": len(self._block),
            "transfer_blocks": len(self._transfers),
        }

    def check_holders(self, expected: Mapping[int, int]) -> None:
        """Raise AssertionError unless every block has exactly so many holders."""
        assert all(map(self.owns, expected)), "somebody holds a block that is not ours"
        held = {block: holders for block, holders in self._holders.items() if holders}
        wrong = held.items() ^ expected.items()
        assert not wrong, f"blocks have holders that are no sequence, or the reverse: {sorted(wrong)}"

    def check_transfers(self, expected: Mapping[int, int]) -> None:
        """Raise AssertionError unless so many hand-offs need each block."""
        assert self._transfers == dict(expected), "a block is being sent that no sequence sends, or the reverse"

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for exactly once and eviction is leaf-first."""
        free, idle, spent = set(self._free), set(self._idle), set(self._spent)
        held = {b for b, holders in self._holders.items() if holders} | self._transfers.keys()
        assert len(free) == len(self._free), "a block is free twice"
        assert len(spent) == len(self._spent), "a block is spent twice"
        seen = free | idle | spent | held
        assert all(map(self.owns, seen)), "a block is not ours"
        assert self._holders.keys() <= seen, "a block is lost"
        assert not any(block in self._fresh for block in seen), "a block that was used is fresh"
        assert (
            len(free) + len(idle) + len(spent) + len(held) + len(self._fresh) == self.num_blocks == len(self._ours)
        ), "a block is in two places"
        assert self.used == len(held)
        assert min(self._holders.values(), default=0) >= 0
        assert all(t > 0 for t in self._transfers.values())
        assert self._block == {named.key: block for block, named in self._named.items()}
        assert all(named.block == block for block, named in self._named.items())
        tails = dict(self.tails.items())
        assert (self._named.keys() | tails.keys()).isdisjoint(free | spent)
        assert idle <= self._named.keys() | tails.keys()
        self.tails.check()
        assert spent <= self._offered, "a block that nobody else knows is given back"
        assert not free & self._offered, "a block that somebody else may read would be reused"
        assert all(map(self.owns, self._offered))
        place = {block: i for i, block in enumerate(self._idle)}
        above = {block: tail.parent for block, tail in tails.items()}
        above |= {named.block: named.parent for named in self._named.values()}
        for block, key in above.items():
            parent = self._block.get(key)
            if parent is None or block in self._offered or self._windowed:
                continue  # the first block of a prefix, or one that came alone from elsewhere, its parent still to come
            assert self._is_held(parent) or not self._is_held(block), "a block is held without its parent"
            assert self.holders(parent) >= self.holders(block), "a block is held by more than its parent"
            if parent in place:
                assert place.get(block, len(place)) < place[parent], "a parent would go before its child"
