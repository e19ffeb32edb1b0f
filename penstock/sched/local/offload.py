"""Offloading: copies of blocks in tiers below the device, loaded instead of being recomputed.

Full blocks are copied to each tier when they can be found for the first time, so what is on the device is also below it
(xLLM, section 3.4); what could not be copied then, because too much was on its way or the copy of what comes before it
had gone, is copied when it is used next.

A sequence whose prefix goes on below the device waits outside the queue while that is loaded, if loading is quicker
than computing and there is room for the sequence. All tiers are looked up at once: each block comes from the quickest
that has it, beside those that come from others, and how much of the prefix is loaded is decided by what that and the
rest would take. Then the sequence queues like any other and finds the blocks in the cache. What cannot be loaded is
computed.

What is in a tier that others use too (`kv.shared_tier`) has to be asked for. That is a wait like that for a load, and
beside it if there is one; when there is an answer, what has turned up is found by the next look.

This module moves no bytes. `take_orders` returns what to move; the movers report results (`stored`, `loaded`,
`answered`), and may report that something takes too long (`give_up`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.connector import Move
from penstock.kv.groups import WHOLE, held_of, key_of, keys_of_all, parent_of, reach
from penstock.kv.pool import BlockPool, Hit
from penstock.kv.shared_tier import SharedTier
from penstock.sched.local.lane import Lane
from penstock.sched.local.sequence import Sequence, StoreHold, WantedBlock, wanted_blocks
from penstock.sched.steptime import StepTime

MOST_LOADS = 2  # for one sequence, whose blocks may be evicted again before its turn


class Store(NamedTuple):
    """Copy these blocks to a tier, in any order."""

    number: int
    tier: str
    moves: tuple[Move, ...]


class Load(NamedTuple):
    """Bring these copies into their blocks, and look whether they are what was stored.

    Attributes:
        seconds: that it is expected to take, waiting for others included; 0 when unknown.
    """

    number: int
    tier: str
    moves: tuple[Move, ...]
    seconds: float


class Question(NamedTuple):
    """Find out how many of these blocks a tier has, from the first on.

    Attributes:
        moves: their keys; blocks and slots mean nothing.
        seconds: that it is expected to take.
    """

    number: int
    tier: str
    moves: tuple[Move, ...]
    seconds: float


Order = Store | Load | Question


class _Storing(NamedTuple):
    """
    Attributes:
        dropping: blocks held for this, since their sequence may give them back before it ends.
    """

    store: Store
    lane: Lane
    sequence: Sequence
    store_hold: StoreHold
    dropping: list[int]


@dataclass(slots=True)
class _Wait:
    """One sequence's, for loads and questions.

    Attributes:
        sequence: None when it no longer waits.
        wanted: of the prefix, in order, each held once for this until all loads have ended.
        found: how many of these, from the first on, can be found.
        lacking: blocks that have not arrived.
        loads: that have not ended.
        pending: those of them that it waits for, and questions.
    """

    sequence: Sequence | None
    wanted: list[WantedBlock]
    found: int = 0
    lacking: set[int] = field(default_factory=set)
    loads: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)

    @property
    def blocks(self) -> list[int]:
        return [each.block for each in self.wanted if each.block is not None]


class _Loading(NamedTuple):
    """
    Attributes:
        seconds: that it should take by itself.
    """

    load: Load
    lane: Lane
    wait: _Wait
    seconds: float


class _Asking(NamedTuple):
    question: Question
    lane: Lane
    wait: _Wait


class _Choice(NamedTuple):
    """What could be loaded of a prefix.

    Attributes:
        end: of the prefix, in blocks of tokens.
        wanted: see `_Wait`.
        seen: see `wanted_blocks`.
        moves: for each lane, places in `wanted` that come from there.
    """

    end: int
    seen: list[int]
    wanted: list[WantedBlock]
    moves: dict[Lane, list[int]]

    @property
    def seconds(self) -> float:
        """Until all is there."""
        return max(lane.load_seconds(len(places)) for lane, places in self.moves.items())


class Offload:
    """One scheduler's use of the tiers below its device.

    Args:
        lanes: at least one; where two are as quick, the first has it.

    Attributes:
        waiting: request id -> the sequence that waits for its blocks, in order.
    """

    def __init__(self, pool: BlockPool, lanes: Items[Lane]) -> None:
        assert lanes
        self.lanes = tuple(lanes)
        self.waiting: dict[str, Sequence] = {}
        self._pool = pool
        self._number = 0
        self._stores: dict[int, _Storing] = {}
        self._loads: dict[int, _Loading] = {}
        self._questions: dict[int, _Asking] = {}
        self._waits: list[_Wait] = []
        self._orders: list[Order] = []
        self._lane = {lane.name: lane for lane in lanes}
        self._shared = [lane.tier for lane in lanes if isinstance(lane.tier, SharedTier)]
        self._times: StepTime | None = None
        self.came(pool.keys())

    def predict_by(self, times: StepTime) -> None:
        """What a sequence would take to compute is predicted so from now on."""
        self._times = times
        for lane in self.lanes:
            lane.predict_by(times)

    def take_orders(self) -> list[Order]:
        """What is to be moved, since the last call."""
        orders, self._orders = self._orders, []
        return orders

    @property
    def block_seconds(self) -> dict[str, float]:
        """What loading a block takes from each tier, as measured, or expected; none while nothing is known."""
        return {lane.name: each for lane in self.lanes if (each := lane.seconds_each)}

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._stores or self._loads or self._questions)

    def look_at(self, now: float) -> None:
        """It is so late, in seconds of any clock that runs on."""
        for tier in self._shared:
            tier.now = now

    def lane(self, tier: str) -> Lane:
        """By the tier's name."""
        return self._lane[tier]

    # --- to the tiers

    def came(self, keys: Items[bytes]) -> None:
        """These blocks came to the device from elsewhere, and are copied when they are used."""
        for lane in self.lanes:
            lane.refuse(keys, "unused")
            if len(lane.refused) > 64 + 2 * self._pool.num_blocks:
                there = set(self._pool.keys())
                lane.refused = {key: why for key, why in lane.refused.items() if key in there}

    def keep(self, sequence: Sequence) -> None:
        """Copy those of its findable blocks that were not looked at yet and are not in a tier."""
        for lane in self.lanes:
            self._keep(lane, sequence)

    def _keep(self, lane: Lane, sequence: Sequence) -> None:
        groups, moves, dropping = sequence.groups, list[Move](), list[int]()
        most, kept = lane.room(groups, self._pool.num_blocks), sequence.published
        for place in range(sequence.kept.get(lane.name, 0) * groups, sequence.published * groups):
            i, group = divmod(place, groups)
            key = key_of(sequence.keys[i], group)
            if i >= sequence.dropped[group] and not lane.tier.has(key):
                # what a window leaves behind would be held on for the copy: perhaps it was that which left no room
                is_busy = lane.storing >= most or (sequence.gave_way and sequence.windows[group] is not None)
                slot = None if is_busy else self._claim(lane, sequence, i, group, key)
                if slot is None:
                    kept = i  # and none of those after it, which need their parents: another time
                    lane.refuse(sequence.keys[i : sequence.published], "busy" if is_busy else "full")
                    break
                above = parent_of(sequence.keys[i - 1] if _chained(sequence, i, group) else b"", group)
                moves.append(Move(sequence.blocks[place], slot, key, parent=above))
                lane.storing += 1
                if sequence.windows[group] is not None:
                    dropping.append(sequence.blocks[place])
        sequence.kept[lane.name] = kept
        if moves:
            self._order_store(lane, sequence, tuple(moves), dropping)

    def _order_store(self, lane: Lane, sequence: Sequence, moves: tuple[Move, ...], dropping: list[int]) -> None:
        if sequence.store_hold is None:
            sequence.store_hold = StoreHold()
        sequence.store_hold.stores += 1
        self._number += 1
        store = Store(self._number, lane.name, moves)
        self._pool.hold(dropping)
        self._stores[store.number] = _Storing(store, lane, sequence, sequence.store_hold, dropping)
        self._orders.append(store)

    def _claim(self, lane: Lane, sequence: Sequence, i: int, group: int, key: bytes) -> int | None:
        """A slot for a block; None when there is none now."""
        parent = sequence.keys[i - 1] if _chained(sequence, i, group) else None
        return lane.claim(key, parent, told=not group)

    def let_go(self, sequence: Sequence) -> None:
        """It is about to let go of its blocks: those that are being copied are held on."""
        store_hold, sequence.store_hold = sequence.store_hold, None
        if store_hold is not None and store_hold.stores:
            store_hold.blocks = held_of(sequence.blocks[: sequence.published * sequence.groups], sequence.dropped)
            self._pool.hold(store_hold.blocks)

    def stored(self, number: int, *, whole: bool = True) -> None:
        """A store has ended; without `whole` it failed."""
        store, lane, sequence, store_hold, dropping = self._stores.pop(number)
        self._pool.release(dropping)
        lane.written([move.key for move in store.moves], whole=whole)
        store_hold.stores -= 1
        if not store_hold.stores:
            self._pool.release(store_hold.blocks)
        if whole and sequence.store_hold is store_hold:  # it has its blocks: those there was no room for
            self._keep(lane, sequence)

    # --- from the tiers

    def use(self, sequence: Sequence) -> None:
        """It was admitted with what it found: that is of use in the tiers too, and what is missing there is copied."""
        keys = [key_of(key, group) for key in sequence.keys[: sequence.published] for group in range(sequence.groups)]
        for lane in self.lanes:
            lane.tier.use(keys)
        self.keep(sequence)

    def begin(self, sequence: Sequence, keys: Items[bytes], chunk: int, room: Callable[[], int]) -> bool:
        """Load what of its prefix is not on the device, if that is worth it; then it waits.

        Args:
            keys: of the blocks that it may find.
            chunk: see `Sequence.missing`.
            room: tells how many blocks there are for it, beside those that others hold.
        """
        named = keys_of_all(keys, sequence.groups)
        tables: list[list[int | None]] = [self._pool.match_each(names) for names in named]
        cached = reach(sequence.windows, tables, len(keys))
        choices = self._choices(sequence, named, tables, cached)
        choice = self._quickest(choices, cached)
        if choice is None and choices:
            for lane in choices[-1].moves:
                lane.forget()
        if choice is not None and not self._fits(sequence, choice, chunk, room):
            return False
        wait = _Wait(sequence, [])
        if self._shared and not sequence.asked:
            self._ask(wait, named, choices[-1].end if choices else cached)
        if choice is not None:
            self._order_loads(wait, choice)
        if not wait.pending:
            return False
        self._waits.append(wait)
        self.waiting[sequence.id] = sequence
        return True

    def _ask(self, wait: _Wait, named: Items[Items[bytes]], start: int) -> None:
        """Ask for those of its blocks from `start` on of which nothing is known, where that is worth it."""
        sequence, end = wait.sequence, len(named[0])
        assert sequence is not None
        if start == end:
            return
        keys = [names[i] for i in range(start, end) for names in named]
        compute = self._compute_seconds(start, end)
        for lane in self.lanes:
            if unknown := lane.unknown(keys, compute):
                self._number += 1
                moves = tuple(Move(i, 0, key) for i, key in enumerate(unknown))
                question = Question(self._number, lane.name, moves, lane.answer_seconds)
                self._questions[question.number] = _Asking(question, lane, wait)
                self._orders.append(question)
                wait.pending.add(question.number)
                sequence.asked = True

    def answered(self, number: int, count: int, seconds: float) -> Sequence | None:
        """A question has ended: so many are there. Returns the sequence that waited for it and for nothing else any
        longer, which is to queue now, or to begin again."""
        question, lane, wait = self._questions.pop(number)
        lane.answered(number, [move.key for move in question.moves], count, seconds)
        return self._over(number, wait) if number in wait.pending else None

    def _choices(
        self, sequence: Sequence, named: Items[Items[bytes]], tables: Items[list[int | None]], cached: int
    ) -> list[_Choice]:
        """What could be loaded: from the quickest tier alone, from the two quickest, and so on, as far as each of them
        makes more of it."""
        choices, end = list[_Choice](), cached
        if sequence.windows == WHOLE and not any(
            lane.tier.has(key) for key in named[0][end : end + 1] for lane in self.lanes
        ):
            return choices  # who is next and has no room comes by at every step: most have nothing below the device
        homes: list[list[Lane | None]] = [[None] * len(table) for table in tables]
        found = [list(table) for table in tables]
        for lane in sorted((lane for lane in self.lanes if lane.is_open), key=lambda lane: lane.seconds_each):
            for names, home, table in zip(named, homes, found, strict=True):
                for i, key in enumerate(names):
                    if table[i] is None and (slot := lane.tier.slot(key)) is not None:
                        table[i], home[i] = slot, lane
            longer = reach(sequence.windows, found, len(named[0]))
            if longer > end:
                end = longer
                seen, wanted = wanted_blocks(sequence, named, tables, end)
                places = [i * sequence.groups + g for i in range(end) for g in range(sequence.groups) if i >= seen[g]]
                moves: dict[Lane, list[int]] = {}
                for place, each in enumerate(wanted):
                    if each.block is None:
                        i, group = divmod(places[place], sequence.groups)
                        source = homes[group][i]
                        assert source is not None
                        moves.setdefault(source, []).append(place)
                choices.append(_Choice(end, seen, wanted, moves))
        return choices

    def _quickest(self, choices: list[_Choice], cached: int) -> _Choice | None:
        """The longest of which each part is there sooner than it is computed; None where there is none. Without a
        prediction of computing, all are."""
        best, end, seconds = None, cached, 0.0
        for choice in choices:
            more = self._compute_seconds(end, choice.end)
            if choice.seconds - seconds < more and choice.seconds < self._compute_seconds(cached, choice.end):
                best, end, seconds = choice, choice.end, choice.seconds
        return best

    def _compute_seconds(self, start: int, end: int) -> float:
        """That computing these blocks of a prompt takes."""
        if self._times is None:
            return inf
        tokens = (end - start) * BLOCK_TOKENS
        return self._times.prefill_ms(tokens, start * BLOCK_TOKENS, budget=max(tokens, 1)) / 1e3

    def _fits(self, sequence: Sequence, choice: _Choice, chunk: int, room: Callable[[], int]) -> bool:
        there = [each.block for each in choice.wanted if each.block is not None]
        free = len(choice.wanted) - len(there) + sum(map(self._pool.idle, there))
        return sequence.missing(chunk, Hit(choice.end, [], choice.seen)) + free <= room()

    def _order_loads(self, wait: _Wait, choice: _Choice) -> None:
        sequence, wanted = wait.sequence, choice.wanted
        assert sequence is not None
        self._pool.hold([each.block for each in wanted if each.block is not None])
        lacking = [each for each in wanted if each.block is None]
        for each, block in zip(lacking, self._pool.allocate(len(lacking)), strict=True):
            each.block = block
        wait.wanted = wanted
        for lane in self.lanes:
            lane.tier.use([each.key for each in wanted])
        for lane, places in choice.moves.items():
            self._order_load(lane, wait, [wanted[place] for place in places])
        sequence.loads += 1

    def _order_load(self, lane: Lane, wait: _Wait, lacking: list[WantedBlock]) -> None:
        moves = []
        for each in lacking:
            slot = lane.tier.slot(each.key)
            assert slot is not None
            assert each.block is not None
            moves.append(Move(each.block, slot, each.key))
            wait.lacking.add(each.block)
        lane.tier.begin_reading([move.key for move in moves])
        self._number += 1
        load = Load(self._number, lane.name, tuple(moves), lane.load_seconds(len(moves)))
        self._loads[load.number] = _Loading(load, lane, wait, len(moves) * lane.seconds_each)
        lane.loading += len(moves)
        wait.loads.add(load.number)
        wait.pending.add(load.number)
        self._orders.append(load)

    def loaded(self, number: int, good: int, seconds: float | None = None) -> Sequence | None:
        """A load has ended. Returns the sequence that waited for it and for no other any longer, which is to queue now.

        Args:
            good: of its blocks, from the first on; the next one was not what had been stored, if there is a next one.
            seconds: that it took, without the wait for loads before it; None is not measured.
        """
        load, lane, wait, expected = self._loads.pop(number)
        lane.loaded(number, [move.key for move in load.moves], good, expected, seconds)
        wait.lacking.difference_update([move.block for move in load.moves[:good]])
        wait.loads.remove(number)
        if wait.sequence is not None:
            loaded = wait.sequence.loaded
            loaded[lane.name] = loaded.get(lane.name, 0) + good * BLOCK_TOKENS // wait.sequence.groups
        return self._over(number, wait)

    def hit(self, sequence: Sequence, cached: int) -> int:
        """So many of its tokens were found. Returns how many of them since they had been loaded."""
        rest = cached
        for tier, tokens in sequence.loaded.items():
            found = min(tokens, rest)
            self._lane[tier].hit_tokens += found
            rest -= found
        return cached - rest

    def give_up(self, number: int) -> Sequence | None:
        """A load takes too long, or an answer: nothing else begins on its lane until it ends. Returns the sequence that
        waited for it and for nothing else any longer, and computes instead."""
        move = self._move(number)
        if move is None or number in move.lane.late:
            return None
        lane, wait = move.lane, move.wait
        lane.late.add(number)
        if wait.sequence is None:
            return None
        if isinstance(move, _Loading):
            lane.late_loads += 1
            wait.sequence.loads = MOST_LOADS
        else:
            lane.late_questions += 1
        return self._over(number, wait)

    def _move(self, number: int) -> _Loading | _Asking | None:
        if number in self._loads:
            return self._loads[number]
        return self._questions.get(number)

    def _over(self, number: int, wait: _Wait) -> Sequence | None:
        """A load or a question has ended, or is not waited for any longer."""
        wait.pending.discard(number)
        sequence = None
        if not wait.pending:
            self._publish(wait)
            sequence, wait.sequence = wait.sequence, None
            if sequence is not None:
                del self.waiting[sequence.id]
        if not wait.loads and not wait.pending:
            self._waits.remove(wait)
            self._pool.release(wait.blocks)
        return sequence

    def _publish(self, wait: _Wait) -> None:
        """Have what has arrived found, up to the first block that has not: what comes after that is found behind it."""
        came = []
        while wait.found < len(wait.wanted) and (each := wait.wanted[wait.found]).block not in wait.lacking:
            assert each.block is not None
            each.block = self._pool.publish(each.block, each.key, each.parent)
            came.append(each.key)
            wait.found += 1
        self.came(came)

    def stop_waiting(self, request_id: str) -> Sequence | None:
        """The sequence stops waiting, and is returned if it did. Its loads continue."""
        sequence = self.waiting.pop(request_id, None)
        for wait in self._waits if sequence is not None else ():
            if wait.sequence is sequence:
                wait.sequence = None
        return sequence

    # --- checks

    def holders(self) -> Counter[int]:
        """How often each block is held, for loads and for stores whose sequences have let go."""
        stores = self._stores.values()
        holds = {id(each.store_hold): each.store_hold.blocks for each in stores}
        held = [*(wait.blocks for wait in self._waits), *(each.dropping for each in stores), *holds.values()]
        return Counter(block for blocks in held for block in blocks)

    def counts(self) -> Mapping[str, int]:
        """For whoever inspects the engine."""
        return {
            "tier_slots": sum(lane.tier.num_slots for lane in self.lanes),
            "tier_used": sum(lane.tier.used for lane in self.lanes),
            "stores_under_way": len(self._stores),
            "loads_under_way": len(self._loads),
            "questions_under_way": len(self._questions),
        }

    def check(self) -> None:
        """Raise AssertionError unless what is under way is what is held for it, and each lane knows what is not below
        the device."""
        on_device = self._pool.keys()
        stores = Counter(id(each.store_hold) for each in self._stores.values())
        assert all(each.store_hold.stores == stores[id(each.store_hold)] for each in self._stores.values())
        for lane in self.lanes:
            lane.check(on_device)
            assert lane.storing == sum(len(each.store.moves) for each in self._stores.values() if each.lane is lane)
            assert lane.loading == sum(len(each.load.moves) for each in self._loads.values() if each.lane is lane)
            loads = {number for number, each in self._loads.items() if each.lane is lane}
            assert lane.late <= loads | {number for number, each in self._questions.items() if each.lane is lane}
        assert sum(len(wait.loads) for wait in self._waits) == len(self._loads)
        for wait in self._waits:
            assert wait.loads or wait.pending
            assert wait.loads <= self._loads.keys()
            assert wait.pending <= wait.loads | self._questions.keys()
        waiting = [wait.sequence for wait in self._waits if wait.sequence is not None]
        assert waiting == list(self.waiting.values())
        assert not any(sequence.blocks for sequence in waiting)


def _chained(sequence: Sequence, i: int, group: int) -> bool:
    """Whether a block is found behind the one before it: not the first, and not in groups with windows, or further
    ones (`kv.groups.parent_of`)."""
    return i > 0 and not group and sequence.windows[group] is None
