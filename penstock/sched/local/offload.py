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
from penstock.kv.pool import BlockPool
from penstock.kv.tier import Tier
from penstock.sched.local.sequence import Sequence, StoreHold
from penstock.sched.steptime import StepTime

MOST_STORES, SHARE_OF_STORES = 16, 1 / 8  # blocks that are copied at once: so many, or that share of all if it is more
MOST_LOADS = 2  # for one sequence, whose blocks may be evicted again before its turn
KEPT = 0.9  # of what was measured of loads, at each new one, and whenever one is not made for what was measured
PRIOR = 16 * BLOCK_TOKENS  # tokens whose load counts as measured once, in the time that the model says


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


@dataclass(slots=True)
class _Loading:
    """
    Attributes:
        sequence: the one that waits for it; None when it no longer waits.
        blocks: of the prefix, in order, each held once for this.
        keys: of all of them.
        root: parent of the first one's key.
        moves: those that are loaded.
    """

    sequence: Sequence | None
    root: bytes
    blocks: list[int]
    keys: list[bytes]
    moves: tuple[Move, ...]


class Offload:
    """One scheduler's use of a tier.

    Attributes:
        tier: what it has.
        waiting: request id -> the sequence that waits for its blocks, in order of the loads.
        loaded_blocks, stored_blocks: that arrived, since the start.
    """

    def __init__(self, pool: BlockPool, tier: Tier) -> None:
        self.tier = tier
        self.waiting: dict[str, Sequence] = {}
        self.loaded_blocks = self.stored_blocks = 0
        self._pool = pool
        self._most_stores = max(MOST_STORES, int(SHARE_OF_STORES * pool.num_blocks))
        self._number = 0
        self._stores: dict[int, tuple[Store, StoreHold]] = {}
        self._loads: dict[int, _Loading] = {}
        self._orders: list[Store | Load] = []
        self._storing = self._loading = 0  # blocks under way
        self._times: StepTime | None = None
        self._measured = 0.0, 0.0  # tokens that were loaded, and the seconds that it took; the last ones count most

    def predict_by(self, times: StepTime) -> None:
        """What a sequence would take to compute is predicted so from now on."""
        self._times = times

    def take_orders(self) -> list[Store | Load]:
        """What is to be moved, since the last call."""
        orders, self._orders = self._orders, []
        return orders

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._stores or self._loads)

    # --- to the tier

    def keep(self, sequence: Sequence) -> None:
        """Copy those of its findable blocks that were not looked at yet and are not in the tier."""
        tier, keys = self.tier, sequence.keys
        end = sequence.published
        moves = []
        for i in range(sequence.kept, end):
            if not tier.has(keys[i]):
                slot = tier.claim(keys[i], keys[i - 1] if i else None) if self._storing < self._most_stores else None
                if slot is None:
                    end = i  # and none of those after it, which need their parents: another time
                    break
                moves.append(Move(sequence.blocks[i], slot, keys[i]))
                self._storing += 1
        sequence.kept = end
        if moves:
            if sequence.store_hold is None:
                sequence.store_hold = StoreHold()
            sequence.store_hold.stores += 1
            self._number += 1
            store = Store(self._number, tuple(moves))
            self._stores[store.number] = store, sequence.store_hold
            self._orders.append(store)

    def let_go(self, sequence: Sequence) -> None:
        """It is about to let go of its blocks: those that are being copied are held on."""
        store_hold, sequence.store_hold = sequence.store_hold, None
        if store_hold is not None and store_hold.stores:
            store_hold.blocks = sequence.blocks[sequence.dropped : sequence.published]
            self._pool.hold(store_hold.blocks)

    def stored(self, number: int, *, whole: bool = True) -> None:
        """A store has ended; without `whole` it failed."""
        store, store_hold = self._stores.pop(number)
        for move in store.moves:
            self.tier.written(move.key, whole=whole)
        self._storing -= len(store.moves)
        self.stored_blocks += len(store.moves) * whole
        store_hold.stores -= 1
        if not store_hold.stores:
            self._pool.release(store_hold.blocks)

    # --- from the tier

    def use(self, sequence: Sequence) -> None:
        """It was admitted with what it found: that is of use on the tier too, and what is missing there is copied."""
        self.tier.use(sequence.keys[: sequence.published])
        self.keep(sequence)

    def begin(self, sequence: Sequence, keys: Items[bytes], room: Callable[[], int]) -> bool:
        """Load what of its prefix is not on the device, if that is worth it; then it waits.

        Args:
            keys: of the blocks that it may find.
            room: tells how many blocks there are for it, beside those that others hold.
        """
        blocks: list[int | None] = [*self._pool.match(keys)]  # None: it is to be loaded
        cached = len(blocks)
        for key in keys[cached:]:
            here = self._pool.match([key])
            if not here and self.tier.slot(key) is None:
                break
            blocks.append(here[0] if here else None)
        while len(blocks) > cached and blocks[-1] is not None:
            blocks.pop()
        if len(blocks) == cached:
            return False
        held = sum(block is not None and not self._pool.idle(block) for block in blocks)
        if sequence.demand - held > room():
            return False
        if not self._is_quicker(blocks.count(None) * BLOCK_TOKENS, cached * BLOCK_TOKENS):
            self._forget()
            return False
        self._order(sequence, blocks, list(keys[: len(blocks)]))
        return True

    def _order(self, sequence: Sequence, blocks: list[int | None], keys: list[bytes]) -> None:
        found = [block for block in blocks if block is not None]
        self._pool.hold(found)
        fresh = iter(self._pool.allocate(len(blocks) - len(found)))
        chain = [next(fresh) if block is None else block for block in blocks]
        moves = []
        for was, block, key in zip(blocks, chain, keys, strict=True):
            if was is None:
                slot = self.tier.slot(key)
                assert slot is not None
                moves.append(Move(block, slot, key))
        self.tier.use(keys)
        self.tier.begin_reading([move.key for move in moves])
        seconds = self._load_seconds(len(moves) * BLOCK_TOKENS)
        self._number += 1
        self._loads[self._number] = _Loading(sequence, sequence.root, chain, keys, tuple(moves))
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
        arrived = {move.block for move in load.moves[:good]}
        blocks, parent = load.blocks, load.root
        for i, (block, key) in enumerate(zip(blocks, load.keys, strict=True)):
            if block in arrived:
                blocks[i] = self._pool.publish(block, key, parent)
            parent = key
        self._pool.release(blocks)
        self.tier.end_reading([move.key for move in load.moves])
        if good < len(load.moves):
            self.tier.spoil(load.moves[good].key)
        self._loading -= len(load.moves)
        self.loaded_blocks += good
        if seconds and good:
            self._forget()
            tokens, before = self._measured
            self._measured = tokens + good * BLOCK_TOKENS, before + seconds
        if load.sequence is not None:
            del self.waiting[load.sequence.id]
            load.sequence.loaded += good * BLOCK_TOKENS
        return load.sequence

    def give_up(self, number: int) -> Sequence | None:
        """A load takes too long: the waiting sequence, which is returned, computes instead."""
        load = self._loads.get(number)
        if load is None or load.sequence is None:
            return None
        load.sequence.loads = MOST_LOADS
        return self.stop_waiting(load.sequence.id)

    def stop_waiting(self, request_id: str) -> Sequence | None:
        """The sequence stops waiting, and is returned if it did. Its load continues."""
        sequence = self.waiting.pop(request_id, None)
        for load in self._loads.values() if sequence is not None else ():
            if load.sequence is sequence:
                load.sequence = None
        return sequence

    def _is_quicker(self, tokens: int, cached: int) -> bool:
        """Whether so many tokens are loaded sooner than computed. Without a prediction of computing, they are."""
        if self._times is None:
            return True
        compute = self._times.prefill_ms(tokens, cached, budget=max(tokens, 1)) / 1e3
        return self._load_seconds(tokens) < compute

    def _load_seconds(self, tokens: int) -> float:
        """Expected, behind the loads that are under way."""
        tokens += self._loading * BLOCK_TOKENS
        loaded, seconds = self._measured
        if self._times is not None:
            # small loads say little of large ones: each has to be ordered, and reported
            loaded, seconds = loaded + PRIOR, seconds + self._times.load_ms(PRIOR) / 1e3
        return tokens * seconds / loaded if loaded else 0.0

    def _forget(self) -> None:
        """Decay the measurement, so that a tier that was slow is tried again."""
        tokens, seconds = self._measured
        self._measured = KEPT * tokens, KEPT * seconds

    # --- checks

    def holders(self) -> Counter[int]:
        """How often each block is held, for loads and for stores whose sequences have let go."""
        holds = {id(store_hold): store_hold for _, store_hold in self._stores.values()}
        held = [*(load.blocks for load in self._loads.values()), *(store_hold.blocks for store_hold in holds.values())]
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
        stores = Counter(id(store_hold) for _, store_hold in self._stores.values())
        assert all(store_hold.stores == stores[id(store_hold)] for _, store_hold in self._stores.values())
        assert self._storing == sum(len(store.moves) for store, _ in self._stores.values())
        assert self._loading == sum(len(load.moves) for load in self._loads.values())
        waiting = [load.sequence for load in self._loads.values() if load.sequence is not None]
        assert waiting == list(self.waiting.values())
        assert not any(sequence.blocks for sequence in waiting)
