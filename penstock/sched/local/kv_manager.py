"""The KV manager: the blocks of sequences, found in the prefix cache, allocated for steps, and published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.pool import BlockPool
from penstock.sched.local.limits import Limits
from penstock.sched.local.offload import MOST_LOADS, Offload
from penstock.sched.local.sequence import Sequence, blocks_for
from penstock.sched.local.steps import InFlightSteps


class KVManager:
    """The pool as a scheduler's sequences use it. Preemption is decided by the scheduler.

    Args:
        prefix_cache: whether anything can be found.
        in_flight: whose blocks stay held until they have landed.
        offload: None without a tier below the device.
        window: positions that any layer sees; None is all.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        prefix_cache: bool,
        in_flight: InFlightSteps,
        offload: Offload | None,
        window: int | None,
    ) -> None:
        self.pool, self.offload, self._window = pool, offload, window
        self._limits, self._prefix_cache, self._in_flight = limits, prefix_cache, in_flight

    def prefix_hit(self, sequence: Sequence) -> list[int]:
        """Cached blocks of its tokens."""
        return self.pool.match(self._keys(sequence))

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
            return self.room_without([], [], running) - len(running) - sum(s.demand for s in before)

        return self.offload.begin(sequence, self._keys(sequence), room)

    def admit(self, sequence: Sequence, hit: list[int]) -> None:
        """Admit it with the blocks that were found."""
        self.pool.hold(hit)
        sequence.blocks = hit
        sequence.computed = len(hit) * BLOCK_TOKENS
        sequence.published = len(hit)
        if self.offload is not None:
            self.offload.use(sequence)

    def set_aside(self, sequence: Sequence, count: int, running: Iterable[Sequence]) -> list[int]:
        """Blocks for its next `count` tokens, which must be there, and for the step after them, if that evicts nothing.
        Returns those that are new.

        Args:
            running: all that run, whose needs come before that step.
        """
        end = sequence.computed + count
        if end == len(sequence.tokens) and end < len(sequence.blocks) * BLOCK_TOKENS and not sequence.branching:
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
        goal = blocks_for(min(end + min(rest, self._limits.token_budget), self._limits.max_model_len))
        have = max(len(sequence.blocks), blocks_for(end))
        if goal <= have:
            return 0
        spare = self.pool.unused - (have - len(sequence.blocks)) - self.promised(running)
        return goal - have if goal - have <= spare else 0

    def victims(
        self,
        missing: int,
        hit: list[int],
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
        self, victims: list[Sequence], needed: int, hit: list[int], running: list[Sequence], places: int
    ) -> bool:
        if places > sum([v.rows for v in victims]):
            return False
        return needed <= self.room_without(victims, hit, running)

    def room_without(self, victims: list[Sequence], hit: list[int], running: list[Sequence]) -> int:
        """Blocks that could be handed out if these victims ran no longer, beside what all others of `running` still
        need.

        Args:
            hit: blocks that are wanted as they are.
        """
        if not victims:
            return self.pool.available - self.promised(running)
        giving = (v.blocks[v.published :] if v.storing else v.held for v in victims)
        freed = Counter(block for blocks in giving for block in blocks if block not in hit)
        gained = sum(count == self.pool.holders(block) for block, count in freed.items())
        return self.pool.available + gained - self.promised(s for s in running if s not in victims)

    @staticmethod
    def promised(sequences: Iterable[Sequence]) -> int:
        """Blocks that these still need for the tokens they have."""
        promised = 0
        for s in sequences:
            have = len(s.blocks)
            if len(s.tokens) > have * BLOCK_TOKENS or s.branching:  # most have all they need
                promised += max(0, s.demand - have)
        return promised

    def publish(self, sequence: Sequence) -> None:
        """Publish its full blocks to the prefix cache, and give back those that have left the window."""
        full = sequence.findable // BLOCK_TOKENS
        if full != sequence.published and self._prefix_cache:
            self._publish(sequence, full)
        stays_whole = sequence.branching or sequence.migrates or sequence.transferring or sequence.storing
        if self._window is not None and not stays_whole:
            self._drop(sequence, max(0, sequence.settled + 1 - self._window) // BLOCK_TOKENS)

    def _drop(self, sequence: Sequence, end: int) -> None:
        """Give back its first `end` blocks, as far as others may find them already. What is in flight does not look at
        them either, but its kernels may read them and leave out what they have read."""
        if self._prefix_cache:
            end = min(end, sequence.published)
        if self.offload is not None:
            end = min(end, sequence.kept)
        blocks, before = sequence.blocks, sequence.dropped
        if end > before:
            gone, sequence.dropped = blocks[before:end], end
            if (flight := self._in_flight.of(sequence)) is not None:
                flight.kept.append(gone)
            else:
                self.pool.release(gone)
        if end := sequence.dropped:  # also where the block after them was swapped
            blocks[:end] = [blocks[end]] * end

    def _publish(self, sequence: Sequence, full: int) -> None:
        sequence.extend_keys(full)
        flight, pool, blocks, keys = self._in_flight.of(sequence), self.pool, sequence.blocks, sequence.keys
        for i in range(sequence.published, full):
            mine, key = blocks[i], keys[i]
            if flight is not None and pool.match([key]) not in ([], [mine]):
                pool.hold([mine])  # it will be swapped, and the step in flight reads this one
                flight.kept.append([mine])
            blocks[i] = pool.publish(mine, key, keys[i - 1] if i else sequence.root)
        sequence.published = full
        if self.offload is not None:
            self.offload.keep(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """Of all its blocks."""
        # what is on its way is checked where it arrives, and asked for again
        self.pool.end_transfer(sequence.blocks[: sequence.transferring])
        if self.offload is not None:
            self.offload.let_go(sequence)
        if not self._in_flight.keep(sequence):
            self.pool.release(sequence.held)
        if sequence.dropped:
            self.pool.touch(sequence.keys[: sequence.dropped])
        sequence.transferring = sequence.dropped = 0
        sequence.blocks = []
