"""Offloading: copies of blocks in a tier below the device, loaded instead of being recomputed.

Full blocks are copied to the tier when they can be found for the first time, so what is on the device is also below it
(xLLM, section 3.4); what could not be copied then, because too much was on its way or the copy of what comes before it
had gone, is copied when it is used next.

A sequence whose prefix goes on in the tier waits outside the queue while that is loaded, if loading is quicker than
computing and there is room for the sequence. Then it queues like any other and finds the blocks in the cache. What
cannot be loaded is computed.

This module moves no bytes. `take_orders` returns what to move; the mover reports results (`stored`, `loaded`), and may
report that a load takes too long (`give_up`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.connector import Move
from penstock.kv.groups import held_of, key_of, keys_of_all, parent_of, reach
from penstock.kv.pool import BlockPool, Hit
from penstock.kv.tier import Tier
from penstock.sched.local.sequence import Sequence, StoreHold, WantedBlock, wanted_blocks
from penstock.sched.steptime import StepTime

MOST_STORES, SHARE_OF_STORES = 16, 1 / 8  # blocks that are copied at once: so many, or that share of all if it is more
MOST_LOADS = 2  # for one sequence, whose blocks may be evicted again before its turn
KEPT = 0.9  # of what was measured of loads, at each new one, and whenever one is not made for what was measured
PRIOR = 16  # blocks whose load counts as measured once, in the time that the model says
# what is copied is held until it is there, perhaps longer than by its sequence: where that takes time, at most that of
# computing so much of a block, or one block if loads are that many times as quick as computing; else nothing is copied
HELD, PAYS = 1 / 8, 2.0


class Store(NamedTuple):
    """Copy these blocks to the tier, in any order."""

    number: int
    moves: tuple[Move, ...]


class Load(NamedTuple):
    """Bring these copies into their blocks, and look whether they are what was stored.

    Attributes:
        seconds: that it is expected to take, waiting for others included; 0 when unknown.
    """

    number: int
    moves: tuple[Move, ...]
    seconds: float


class _Storing(NamedTuple):
    """
    Attributes:
        dropping: blocks held for this, since their sequence may give them back before it ends.
    """

    store: Store
    sequence: Sequence
    store_hold: StoreHold
    dropping: list[int]


@dataclass(slots=True)
class _Loading:
    """
    Attributes:
        sequence: the one that waits for it; None when it no longer waits.
        wanted: of the prefix, in order, each held once for this.
        moves: those that are loaded.
    """

    sequence: Sequence | None
    wanted: list[WantedBlock]
    moves: tuple[Move, ...]

    @property
    def blocks(self) -> list[int]:
        return [each.block for each in self.wanted if each.block is not None]


class Offload:
    """One scheduler's use of a tier.

    Args:
        block_seconds: that copying a block takes either way, as far as nothing is measured, in a tier that may be slow;
            None is what the device's model says of its host's memory.

    Attributes:
        tier: what it has.
        waiting: request id -> the sequence that waits for its blocks, in order of the loads.
        loaded_blocks, stored_blocks: that arrived, since the start.
        loads: that have ended, since the start.
        failed_loads, failed_stores: that brought less than they should have.
        late_loads: that took so long that who waited for them computed instead.
    """

    def __init__(self, pool: BlockPool, tier: Tier, block_seconds: float | None = None) -> None:
        self.tier = tier
        self.waiting: dict[str, Sequence] = {}
        self.loaded_blocks = self.stored_blocks = 0
        self.loads = self.failed_loads = self.failed_stores = self.late_loads = 0
        self._pool, self._block_seconds = pool, block_seconds
        self._most_stores = max(MOST_STORES, int(SHARE_OF_STORES * pool.num_blocks))
        self._number = 0
        self._stores: dict[int, _Storing] = {}
        self._loads: dict[int, _Loading] = {}
        self._orders: list[Store | Load] = []
        self._storing = self._loading = 0  # blocks under way
        self._late: set[int] = set()  # loads that nobody waits for any longer since they take too long
        self._times: StepTime | None = None
        self._measured = 0.0, 0.0  # blocks that were loaded, and the seconds that it took; the last ones count most

    def predict_by(self, times: StepTime) -> None:
        """What a sequence would take to compute is predicted so from now on."""
        self._times = times

    def take_orders(self) -> list[Store | Load]:
        """What is to be moved, since the last call."""
        orders, self._orders = self._orders, []
        return orders

    @property
    def block_seconds(self) -> dict[str, float]:
        """What loading a block takes from each tier, as measured, or expected; none while nothing is known."""
        each = self._seconds_each()
        return {self.tier.name: each} if each else {}

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._stores or self._loads)

    # --- to the tier

    def keep(self, sequence: Sequence) -> None:
        """Copy those of its findable blocks that were not looked at yet and are not in the tier."""
        groups, moves, dropping = sequence.groups, [], []
        most = self._room_for_stores(groups)
        for place in range(sequence.kept * groups, sequence.published * groups):
            i, group = divmod(place, groups)
            key = key_of(sequence.keys[i], group)
            if i >= sequence.dropped[group] and not self.tier.has(key):
                slot = self._claim(sequence, i, group, key) if self._storing < most else None
                if slot is None:
                    sequence.kept = i  # and none of those after it, which need their parents: another time
                    break
                above = parent_of(sequence.keys[i - 1] if _chained(sequence, i, group) else b"", group)
                moves.append(Move(sequence.blocks[place], slot, key, parent=above))
                self._storing += 1
                if sequence.windows[group] is not None:
                    dropping.append(sequence.blocks[place])
        else:
            sequence.kept = sequence.published
        if moves:
            if sequence.store_hold is None:
                sequence.store_hold = StoreHold()
            sequence.store_hold.stores += 1
            self._number += 1
            store = Store(self._number, tuple(moves))
            self._pool.hold(dropping)
            self._stores[store.number] = _Storing(store, sequence, sequence.store_hold, dropping)
            self._orders.append(store)

    def _claim(self, sequence: Sequence, i: int, group: int, key: bytes) -> int | None:
        """A slot for a block; None when there is none now."""
        parent = sequence.keys[i - 1] if _chained(sequence, i, group) else None
        return self.tier.claim(key, parent, told=not group)

    def _room_for_stores(self, groups: int) -> int:
        """Blocks that may be on their way to the tier at once, where so many have the same tokens."""
        if self._late:
            return 0
        if self._block_seconds is None or self._times is None:
            return self._most_stores
        tokens = PRIOR * BLOCK_TOKENS
        compute = self._times.prefill_ms(tokens, 0, budget=tokens) / 1e3 / (PRIOR * groups)
        ratio = compute / self._seconds_each()
        if ratio < PAYS:
            self._forget()
            return 0
        return min(self._most_stores, max(1, int(HELD * ratio)))

    def let_go(self, sequence: Sequence) -> None:
        """It is about to let go of its blocks: those that are being copied are held on."""
        store_hold, sequence.store_hold = sequence.store_hold, None
        if store_hold is not None and store_hold.stores:
            store_hold.blocks = held_of(sequence.blocks[: sequence.published * sequence.groups], sequence.dropped)
            self._pool.hold(store_hold.blocks)

    def stored(self, number: int, *, whole: bool = True) -> None:
        """A store has ended; without `whole` it failed."""
        store, sequence, store_hold, dropping = self._stores.pop(number)
        self._pool.release(dropping)
        for move in store.moves:
            self.tier.written(move.key, whole=whole)
        self._storing -= len(store.moves)
        self.stored_blocks += len(store.moves) * whole
        self.failed_stores += not whole
        store_hold.stores -= 1
        if not store_hold.stores:
            self._pool.release(store_hold.blocks)
        if whole and sequence.store_hold is store_hold:  # it has its blocks: those there was no room for
            self.keep(sequence)

    # --- from the tier

    def use(self, sequence: Sequence) -> None:
        """It was admitted with what it found: that is of use on the tier too, and what is missing there is copied."""
        keys, groups = sequence.keys, range(sequence.groups)
        self.tier.use([key_of(key, group) for key in keys[: sequence.published] for group in groups])
        self.keep(sequence)

    def begin(self, sequence: Sequence, keys: Items[bytes], chunk: int, room: Callable[[], int]) -> bool:
        """Load what of its prefix is not on the device, if that is worth it; then it waits.

        Args:
            keys: of the blocks that it may find.
            chunk: see `Sequence.missing`.
            room: tells how many blocks there are for it, beside those that others hold.
        """
        if self._late:  # it may not answer any more, and every load keeps its blocks
            return False
        windows, groups = sequence.windows, sequence.groups
        named = keys_of_all(keys, groups)
        tables: list[list[int | None]] = [self._pool.match_each(names) for names in named]
        cached = reach(windows, tables, len(keys))
        found = [self._anywhere(names, table) for names, table in zip(named, tables, strict=True)]
        end = reach(windows, found, len(keys))
        if end == cached:
            return False
        seen, wanted = wanted_blocks(sequence, named, tables, end)
        there = [each.block for each in wanted if each.block is not None]
        free = len(wanted) - len(there) + sum(map(self._pool.idle, there))
        if sequence.missing(chunk, Hit(end, [], seen)) + free > room():
            return False
        if not self._is_quicker(len(wanted) - len(there), (end - cached) * BLOCK_TOKENS, cached * BLOCK_TOKENS):
            self._forget()
            return False
        self._order(sequence, wanted)
        return True

    def _anywhere(self, keys: Items[bytes], table: Items[int | None]) -> list[int | None]:
        """What there is of a group's blocks on either tier."""
        return [self.tier.slot(key) if block is None else block for key, block in zip(keys, table, strict=True)]

    def _order(self, sequence: Sequence, wanted: list[WantedBlock]) -> None:
        self._pool.hold([each.block for each in wanted if each.block is not None])
        lacking = [each for each in wanted if each.block is None]
        moves = []
        for each, block in zip(lacking, self._pool.allocate(len(lacking)), strict=True):
            slot = self.tier.slot(each.key)
            assert slot is not None
            each.block = block
            moves.append(Move(block, slot, each.key))
        self.tier.use([each.key for each in wanted])
        self.tier.begin_reading([move.key for move in moves])
        seconds = self._load_seconds(len(moves))
        self._number += 1
        self._loads[self._number] = _Loading(sequence, wanted, tuple(moves))
        self._loading += len(moves)
        self._orders.append(Load(self._number, tuple(moves), seconds))
        sequence.loads += 1
        self.waiting[sequence.id] = sequence

    def loaded(self, number: int, good: int, seconds: float | None = None) -> Sequence | None:
        """A load has ended. Returns the sequence that waited for it, which is to queue now.

        Args:
            good: of its blocks, from the first on; the next one was not what had been stored, if there is a next one.
            seconds: that it took, without the wait for loads before it; None is not measured.
        """
        load = self._loads.pop(number)
        self._late.discard(number)
        self.loads += 1
        self.failed_loads += good < len(load.moves)
        arrived = {move.key for move in load.moves[:good]}
        self._pool.release(
            [
                self._pool.publish(block, each.key, each.parent) if each.key in arrived else block
                for each, block in zip(load.wanted, load.blocks, strict=True)
            ]
        )
        self.tier.end_reading([move.key for move in load.moves])
        if good < len(load.moves):
            self.tier.spoil(load.moves[good].key)
        self._loading -= len(load.moves)
        self.loaded_blocks += good
        if seconds and good:
            self._forget()
            blocks, before = self._measured
            self._measured = blocks + good, before + seconds
        if load.sequence is not None:
            del self.waiting[load.sequence.id]
            load.sequence.loaded += good * BLOCK_TOKENS // load.sequence.groups
        return load.sequence

    def give_up(self, number: int) -> Sequence | None:
        """A load takes too long: the waiting sequence, which is returned, computes instead."""
        load = self._loads.get(number)
        if load is None or load.sequence is None:
            return None
        load.sequence.loads = MOST_LOADS
        self._late.add(number)
        self.late_loads += 1
        return self.stop_waiting(load.sequence.id)

    def stop_waiting(self, request_id: str) -> Sequence | None:
        """The sequence stops waiting, and is returned if it did. Its load continues."""
        sequence = self.waiting.pop(request_id, None)
        for load in self._loads.values() if sequence is not None else ():
            if load.sequence is sequence:
                load.sequence = None
        return sequence

    def _is_quicker(self, blocks: int, tokens: int, cached: int) -> bool:
        """Whether so many blocks are loaded sooner than so many tokens are computed. Without a prediction of computing,
        they are."""
        if self._times is None:
            return True
        compute = self._times.prefill_ms(tokens, cached, budget=max(tokens, 1)) / 1e3
        return self._load_seconds(blocks) < compute

    def _load_seconds(self, blocks: int) -> float:
        """Expected, behind the loads that are under way."""
        return (blocks + self._loading) * self._seconds_each()

    def _seconds_each(self) -> float:
        """That loading a block takes; 0 when nothing is known."""
        loaded, seconds = self._measured
        if self._times is not None:
            # small loads say little of large ones: each has to be ordered, and reported
            prior = self._block_seconds or self._times.load_blocks_ms(1) / 1e3
            loaded, seconds = loaded + PRIOR, seconds + PRIOR * prior
        return seconds / loaded if loaded else 0.0

    def _forget(self) -> None:
        """Decay the measurement, so that a tier that was slow is tried again."""
        blocks, seconds = self._measured
        self._measured = KEPT * blocks, KEPT * seconds

    # --- checks

    def holders(self) -> Counter[int]:
        """How often each block is held, for loads and for stores whose sequences have let go."""
        stores = self._stores.values()
        holds = {id(each.store_hold): each.store_hold.blocks for each in stores}
        held = [*(load.blocks for load in self._loads.values()), *(each.dropping for each in stores), *holds.values()]
        return Counter(block for blocks in held for block in blocks)

    def counts(self) -> Mapping[str, int]:
        """For whoever inspects the engine."""
        return {
            "tier_slots": self.tier.num_slots,
            "tier_used": self.tier.used,
            "stores_under_way": len(self._stores),
            "loads_under_way": len(self._loads),
        }

    def check(self) -> None:
        """Raise AssertionError unless what is under way is what is held for it."""
        self.tier.check()
        stores = Counter(id(each.store_hold) for each in self._stores.values())
        assert all(each.store_hold.stores == stores[id(each.store_hold)] for each in self._stores.values())
        assert self._storing == sum(len(each.store.moves) for each in self._stores.values())
        assert self._loading == sum(len(load.moves) for load in self._loads.values())
        assert self._late <= self._loads.keys()
        waiting = [load.sequence for load in self._loads.values() if load.sequence is not None]
        assert waiting == list(self.waiting.values())
        assert not any(sequence.blocks for sequence in waiting)


def _chained(sequence: Sequence, i: int, group: int) -> bool:
    """Whether a block is found behind the one before it: not the first, and not in groups with windows, or further
    ones (`kv.groups.parent_of`)."""
    return i > 0 and not group and sequence.windows[group] is None
