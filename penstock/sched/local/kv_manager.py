"""The KV manager: the blocks of sequences, found in the prefix cache, allocated for steps, and published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from collections.abc import Sequence as Items
from operator import attrgetter, gt

from penstock.core.plan import BLOCK_TOKENS, TailCopy
from penstock.kv.groups import WHOLE, Windows, key_of, keys_of_all, largest_chunk, most_held, parent_of, reach, stand_in
from penstock.kv.pool import BlockPool, Hit, Tail, TailHit, sampled
from penstock.sched.local.limits import Limits
from penstock.sched.local.offload import MOST_LOADS, Offload
from penstock.sched.local.sequence import Sequence, WantedBlock, blocks_for, wanted_blocks
from penstock.sched.local.steps import InFlightSteps


class KVManager:
    """The pool as a scheduler's sequences use it. Preemption is decided by the scheduler.

    Args:
        prefix_cache: whether anything can be found.
        in_flight: whose blocks stay held until they have landed.
        offload: None without tiers below the device.
        windows: of the model's groups of layers.
        tail_interval: tokens between the places inside a block at which a match may end; 0 is only at its end. With
            windows it ends there in any case: what a window sees of other blocks would have to be there, too.

    Attributes:
        limits: of steps, now.
        windowed: whether any group of layers has a window.
        copies: for the plan that is being made.
        pinned: how often each block is held for fetches (`sched.local.handoff.fetches`).
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        prefix_cache: bool,
        in_flight: InFlightSteps,
        offload: Offload | None,
        windows: Windows,
        tail_interval: int,
    ) -> None:
        self.pool, self.offload, self.limits = pool, offload, limits
        self._prefix_cache, self._in_flight = prefix_cache, in_flight
        self.windows, self.windowed = windows, windows != (None,) * len(windows)
        self._tail_interval = tail_interval if prefix_cache and windows == WHOLE else 0
        self.copies: dict[Sequence, TailCopy] = {}
        self._copying: dict[int, TailCopy] = {}  # by target, of plans that have not landed
        self.pinned: Counter[int] = Counter()
        self._largest = largest_chunk(windows, limits.max_model_len, pool.num_blocks)
        assert self._largest, "the longest sequence does not fit the pool"
        self._most = most_held(windows, limits.max_model_len, min(limits.token_budget, self._largest))

    @property
    def chunk(self) -> int:
        """Tokens that a step computes of a sequence at most: with windows, a long prompt has no blocks for more."""
        return min(self.limits.token_budget, self._largest)

    def as_whole(self, blocks: int) -> int:
        """So many blocks of the pool in blocks of tokens, of all groups together: as many as they hold of the longest
        sequence. Of a shorter one, more of which is in its windows, they hold less."""
        return blocks * blocks_for(self.limits.max_model_len) // self._most

    def kept_blocks(self, blocks: int) -> int:
        """The same in sequences that give none back, such as a beam search."""
        return blocks // len(self.windows)

    @property
    def load_ms(self) -> dict[str, float]:
        """Tier below the device -> time that loading a block of tokens of all groups takes from there."""
        if self.offload is None:
            return {}
        return {tier: each * 1e3 * len(self.windows) for tier, each in self.offload.block_seconds.items()}

    def match(self, keys: Items[bytes]) -> Hit:
        """What is cached of the prefix that these keys name."""
        return self.pool.find(keys if self._prefix_cache else (), self.windows)

    def prefix_hit(self, sequence: Sequence, running: list[Sequence] | None = None) -> Hit:
        """What is cached of its tokens.

        Args:
            running: all that run, if it is to be admitted beside them: then a match ends inside a block only where
                there is room for it.
        """
        hit = self.match(self._keys(sequence))
        if self._tail_interval and not sequence.reads_all and (tail := self._find_tail(sequence, hit.length)):
            longer = hit._replace(tail=tail)
            if running is None or self._has_room(sequence, longer, running):
                return longer
        return hit

    def _find_tail(self, sequence: Sequence, place: int) -> TailHit | None:
        """Of its block at a place as much as is cached, but never all of its tokens."""
        tails, interval = self.pool.tails, self._tail_interval
        most = len(sequence.tokens) - 1 - place * BLOCK_TOKENS
        if most < interval or not tails.behind(sequence.parent(place)):
            return None
        counts = sampled(most, interval)
        found = tails.find(sequence.beginning_keys(place, counts))
        if found is None:
            return None
        count, (at, block, tail) = counts[found[0]], found
        ends_next = at + 1 == len(tail.keys) and count < tail.filled <= min(most, BLOCK_TOKENS - 1)
        if ends_next and sequence.beginning_keys(place, [tail.filled]) == [tail.whole]:
            count = tail.filled
        return TailHit(block, count)

    def _has_room(self, sequence: Sequence, hit: Hit, running: list[Sequence]) -> bool:
        """Whether it can be admitted with a hit, and nobody has to give way."""
        assert hit.tail is not None
        needed = sequence.missing(self.chunk, hit) + sum(map(self.pool.idle, hit.held))
        if not self.pool.exclusive(hit.tail):
            needed += self.pool.idle(hit.tail.block)  # it is held as long as it is read
        return needed <= self.room_without([], [], running)

    def _keys(self, sequence: Sequence) -> list[bytes]:
        """The prefix keys that may be matched: never of all its tokens, since the last one's output is needed, and none
        while every position's is."""
        if not self._prefix_cache or sequence.reads_all:
            return []
        full = (len(sequence.tokens) - 1) // BLOCK_TOKENS
        if full > len(sequence.keys):
            sequence.extend_keys(full)
        return sequence.keys[:full]

    def load(self, sequence: Sequence, running: list[Sequence], before: Iterable[Sequence] = ()) -> bool:
        """Begin to load what of its prefix is only below the device. False when there is no such thing, or it is not
        worth it, or there is no room beside what others need.

        Args:
            running: all that run, each of which is left a block to grow.
            before: those that wait and come first.
        """
        if self.offload is None or sequence.loads >= MOST_LOADS:
            return False

        def room() -> int:
            chunk = self.chunk
            return self.room_without([], [], running) - len(running) - sum(s.missing(chunk) for s in before)

        return self.offload.begin(sequence, self._keys(sequence), self.chunk, room)

    # --- fetches

    def take_in(self, sequence: Sequence, blocks: int, running: list[Sequence]) -> list[WantedBlock]:
        """Pin what is there of its first blocks, and room for what is to come of them from another instance. Nothing
        where all are there, or there is no room beside what others need.

        Args:
            running: all that run, each of which is left a block to grow.
        """
        keys = self._keys(sequence)[:blocks]
        named = keys_of_all(keys, sequence.groups)
        tables = [self.pool.match_each(names) for names in named]
        if reach(sequence.windows, tables, len(keys)) == len(keys):
            return []
        seen, wanted = wanted_blocks(sequence, named, tables, len(keys))
        there = [each.block for each in wanted if each.block is not None]
        free = len(wanted) - len(there) + sum(map(self.pool.idle, there))
        if sequence.missing(self.chunk, Hit(len(keys), [], seen)) + free > (
            self.room_without([], [], running) - len(running)
        ):
            return []
        self.pin(there)
        lacking = [each for each in wanted if each.block is None]
        for each, block in zip(lacking, self.pool.allocate(len(lacking)), strict=True):
            each.block = block
            self.pinned[block] += 1
        return wanted

    def take_over(self, wanted: Items[WantedBlock], good: int, busy: Set[int]) -> None:
        """What was taken in can be found from now on, as far as it is good, and is pinned no longer.

        Args:
            good: how many of the first are there.
            busy: of the others, those that something may still write to: they stay pinned.
        """
        held = []
        for place, each in enumerate(wanted):
            assert each.block is not None
            if each.block in busy:
                continue
            self._unpinned(each.block)
            held.append(self.pool.publish(each.block, each.key, each.parent) if place < good else each.block)
        self.pool.release(held)
        if self.offload is not None:
            self.offload.came([each.key for each in wanted[:good]])

    def pin(self, blocks: Items[int]) -> None:
        """Hold these cached blocks, given from head to tail with all before them, while they are read."""
        self.pool.hold(blocks)
        self.pinned.update(blocks)

    def unpin(self, blocks: Items[int]) -> None:
        for block in blocks:
            self._unpinned(block)
        self.pool.release(blocks)

    def swap_pinned(self, mine: int, theirs: int) -> None:
        """A pinned block that is to be filled was exchanged for another that has its contents."""
        self.pool.replace(mine, theirs)
        self._unpinned(mine)
        self.pinned[theirs] += 1

    def _unpinned(self, block: int) -> None:
        self.pinned[block] -= 1
        if not self.pinned[block]:
            del self.pinned[block]

    # --- blocks of sequences

    def admit(self, sequence: Sequence, hit: Hit) -> list[int]:
        """Admit it with the blocks that were found. Returns those that are new."""
        self.pool.hold(hit.held)
        sequence.blocks, sequence.dropped = hit.blocks, hit.dropped
        sequence.computed = hit.tokens
        sequence.published = hit.length
        if self.offload is not None:
            self.offload.use(sequence)
        if hit.tail is None:
            return []
        source, tokens = hit.tail
        exclusive = self.pool.exclusive(hit.tail)
        self.pool.hold([source])
        new = [] if exclusive else self.pool.allocate(1)
        target = source if exclusive else new[0]
        sequence.blocks = [*sequence.blocks, target]
        self.copies[sequence] = TailCopy(source, target, tokens)
        return new

    def take_copies(self) -> tuple[TailCopy, ...]:
        """Those of the plan that is made. Until it has `landed`, nobody else gets their blocks."""
        copies = tuple(self.copies.values())
        self.copies.clear()
        self._copying |= {copy.target: copy for copy in copies}
        return copies

    def landed(self, copies: Iterable[TailCopy]) -> None:
        """The plan that had these has been computed, or will never be."""
        for copy in copies:
            del self._copying[copy.target]
            self._end_copy(copy)

    def _end_copy(self, copy: TailCopy) -> None:
        if copy.source != copy.target:
            self.pool.release([copy.source])

    def copied_from(self) -> list[int]:
        """Blocks that are held because they are copied."""
        copies = (*self.copies.values(), *self._copying.values())
        return [copy.source for copy in copies if copy.source != copy.target]

    def set_aside(self, sequence: Sequence, count: int, running: Iterable[Sequence]) -> list[int]:
        """Blocks for its next `count` tokens, which must be there, and for the step after them, if that evicts nothing.
        Returns those that are new.

        Args:
            running: all that run, whose needs come before that step.
        """
        end = sequence.computed + count
        if end == len(sequence.tokens) and end < sequence.room and not sequence.branching:
            return []  # it decodes, and even its next token has its place
        missing = sequence.blocks_until(end) - len(sequence.blocks)
        missing = max(0, missing) + self._ahead(sequence, count, running)
        blocks = self.pool.allocate(missing) if missing else []
        sequence.blocks += blocks
        return blocks

    def _ahead(self, sequence: Sequence, count: int, running: Iterable[Sequence]) -> int:
        """Free blocks beyond this step's that the next one will need, so that their memory can be made ready while this
        step runs."""
        end = sequence.computed + count
        rest = len(sequence.tokens) - end
        if rest == 0:  # it decodes: one more token, unless this step's is the last
            rest = sequence.upcoming
        if rest == 0:
            return 0
        goal = sequence.groups * blocks_for(min(end + min(rest, self.chunk), self.limits.max_model_len))
        have = max(len(sequence.blocks), sequence.groups * blocks_for(end))
        if goal <= have:
            return 0
        spare = self.pool.unused - (have - len(sequence.blocks)) - self.promised(running)
        return goal - have if goal - have <= spare else 0

    def victims(
        self,
        missing: int,
        hit: Items[int],
        running: list[Sequence],
        lower: Iterable[Sequence],
        places: int,
    ) -> list[Sequence] | None:
        """Those of `lower`, from the last in rank on, without whom one more sequence fits; None when none are enough.

        Args:
            missing: blocks that it needs besides `hit`, which it found in the cache.
            running: all that run.
            lower: those of them that would give way to it.
            places: that must become free among those that run at once; less than one when there are enough.
        """
        needed = missing + sum(map(self.pool.idle, hit))
        victims: list[Sequence] = []
        if self._fits_without(victims, needed, hit, running, places):
            return victims
        for victim in sorted(lower, key=attrgetter("rank"), reverse=True):
            victims.append(victim)
            if self._fits_without(victims, needed, hit, running, places):
                break
        else:
            return None
        for victim in [v for v in victims if v.storing]:  # most of its blocks stay held for the store
            others = [v for v in victims if v is not victim]
            if self._fits_without(others, needed, hit, running, places):
                victims = others
        return victims

    def _fits_without(
        self, victims: list[Sequence], needed: int, hit: Items[int], running: list[Sequence], places: int
    ) -> bool:
        if places > sum([v.rows for v in victims]):
            return False
        return needed <= self.room_without(victims, hit, running)

    def room_without(self, victims: list[Sequence], hit: Items[int], running: list[Sequence]) -> int:
        """Blocks that could be handed out if these victims ran no longer, beside what all others of `running` still
        need.

        Args:
            hit: blocks that are wanted as they are.
        """
        if not victims:
            return self.pool.available - self.promised(running)
        giving = (v.blocks[v.published * v.groups :] if v.storing else v.held for v in victims)
        freed = Counter(block for blocks in giving for block in blocks if block not in hit)
        gained = sum(count == self.pool.holders(block) for block, count in freed.items())
        return self.pool.available + gained - self.promised(s for s in running if s not in victims)

    def promised(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that these still need for the tokens they have."""
        promised, chunk = 0, self.chunk
        for s in sequences:
            if len(s.tokens) * s.groups > len(s.blocks) * BLOCK_TOKENS or s.branching:  # most have all they need
                promised += s.missing(chunk)
        return promised

    def publish(self, sequence: Sequence) -> None:
        """Publish its full blocks to the prefix cache, and give back those that have left the window."""
        full = sequence.findable // BLOCK_TOKENS
        if full != sequence.published and self._prefix_cache:
            self._publish(sequence, full)
        if self.windowed and not (sequence.branching or sequence.moving):
            self._drop(sequence)

    def outgrown(self, sequence: Sequence) -> bool:
        """Whether it holds what has left its windows."""
        return any(map(gt, sequence.seen_from(sequence.settled), sequence.dropped))

    def _drop(self, sequence: Sequence) -> None:
        """Give back what has left the windows, as far as others may find it already. What is in flight does not look at
        it either, but its kernels may read it and leave out what they have read."""
        blocks, dropped, groups = sequence.blocks, sequence.dropped, sequence.groups
        last = sequence.published if self._prefix_cache else len(blocks) // groups - 1
        gone: list[int] = []
        for group, first in enumerate(sequence.seen_from(sequence.settled)):
            end = min(first, last)
            if end > dropped[group]:
                gone += blocks[dropped[group] * groups + group : end * groups : groups]
                dropped[group] = end
            after = dropped[group]
            if after and blocks[group] != blocks[after * groups + group]:  # which may have been swapped, too
                stand_in(blocks, groups, group, after)
        if gone and (flight := self._in_flight.of(sequence)) is not None:
            flight.kept.append(gone)
        else:
            self.pool.release(gone)

    def _publish(self, sequence: Sequence, full: int) -> None:
        sequence.extend_keys(full)
        flight, pool, blocks, keys = self._in_flight.of(sequence), self.pool, sequence.blocks, sequence.keys
        for i in range(sequence.published, full):
            parent = keys[i - 1] if i else sequence.root
            for group, dropped in enumerate(sequence.dropped):
                if i < dropped:
                    continue
                place, key = i * sequence.groups + group, key_of(keys[i], group)
                mine = blocks[place]
                if flight is not None and pool.match([key]) not in ([], [mine]):
                    pool.hold([mine])  # it will be swapped, and the step in flight reads this one
                    flight.kept.append([mine])
                blocks[place] = pool.publish(mine, key, parent_of(parent, group))
        sequence.published = full
        if self.offload is not None:
            self.offload.keep(sequence)

    def leave_tail(self, sequence: Sequence) -> None:
        """Have the block of the last token that is computed of it found by what it begins with."""
        interval, count = self._tail_interval, min(sequence.findable, sequence.settled)
        place = (count - 1) // BLOCK_TOKENS
        filled = count - place * BLOCK_TOKENS
        if not interval or min(count, filled) < interval or sequence.published < count // BLOCK_TOKENS:
            return
        block = sequence.blocks[place]
        if block not in self._copying:  # else it has not got yet what it is to have
            *keys, whole = sequence.beginning_keys(place, (*sampled(filled, interval), filled))
            self.pool.leave(block, Tail(sequence.parent(place), keys, filled, whole))

    def let_go(self, sequence: Sequence, *, known: bool = True) -> None:
        """Of all its blocks; unless it is `known` what is in them, what is not full is not found again."""
        # what is on its way is checked where it arrives, and asked for again
        self.end_transfer(sequence)
        if (copy := self.copies.pop(sequence, None)) is not None:  # which nobody was told to make
            self._end_copy(copy)
        elif known:
            self.leave_tail(sequence)
        if self.offload is not None:
            self.offload.let_go(sequence)
        if not self._in_flight.keep(sequence):
            self.pool.release(sequence.held)
        if sequence.dropped[0]:
            self.pool.touch(sequence.keys[: sequence.dropped[0]])
        sequence.dropped = [0] * sequence.groups
        sequence.blocks = []

    def end_transfer(self, sequence: Sequence) -> None:
        """Nothing of it is being sent any longer."""
        self.pool.end_transfer(list(sequence.transferring.values()))
        sequence.transferring.clear()
