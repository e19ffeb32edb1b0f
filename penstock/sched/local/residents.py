"""The sequences of one instance: where each of them stands, and who gives way to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from operator import attrgetter

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.local.kv_manager import KVManager
from penstock.sched.local.limits import Counters, Limits
from penstock.sched.local.look_ahead import InFlightSteps
from penstock.sched.local.policy.base import LocalPolicy
from penstock.sched.local.queue import Queue
from penstock.sched.local.sequence import Reservation, Sequence

rank = attrgetter("rank")


class Residents:
    """A sequence is in one of these: `running`, `waiting`, `awaiting`, `migrating`, or the `ending` ones in flight.

    Attributes:
        sequences: all of them, by request id.
        awaiting: those that wait for blocks to be loaded; no policy knows them.
        migrating: they only hold blocks, until another instance has them.
        reserved: those that are still to come from other instances.
    """

    def __init__(
        self, kv: KVManager, limits: Limits, policy: LocalPolicy, in_flight: InFlightSteps, counters: Counters
    ) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self.waiting = Queue()
        self.awaiting: Mapping[str, Sequence] = kv.offload.waiting if kv.offload is not None else {}
        self.migrating: dict[str, Sequence] = {}
        self.reserved: list[Reservation] = []
        self._released: list[str] = []
        self._kv, self._pool, self._limits, self._policy = kv, kv.pool, limits, policy
        self._in_flight, self._counters = in_flight, counters

    @property
    def num_running(self) -> int:
        return len(self.running) + len(self._in_flight.ending)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.awaiting)

    def take_released(self) -> list[str]:
        """Requests that have let go of their blocks since the last call."""
        released, self._released = self._released, []
        return released

    def tokens_due(self) -> tuple[int, int, int]:
        """Tokens still to be computed for what waits; for what runs; and tokens that are computed and held."""
        waiting = sum([s.pending for s in self.waiting]) + sum([s.pending for s in self.awaiting.values()])
        held, prefill = 0, 0
        for sequence in (*self.running, *self._in_flight.ending.values()):
            held += sequence.computed
            pending = sequence.pending
            if pending > 1:
                prefill += pending
        return waiting, prefill, held + sum([s.computed for s in self.migrating.values()])

    # --- room

    @property
    def crowd(self) -> int:
        """Sequences that run here or soon will, or whose departure may fail; of a beam search as many as it is wide."""
        here = sum([s.rows for s in self.running]) + len(self._in_flight.ending)
        return here + len(self.migrating) + len(self.reserved)

    def victims(self, missing: int, hit: list[int], lower: Iterable[Sequence], rows: int = 1) -> list[Sequence] | None:
        """Those of `lower`, from the last in rank on, without whom one more sequence fits; None when none are enough.

        Args:
            missing: blocks that it needs besides `hit`, which it found in the cache.
            rows: places that it takes.
        """
        needed = missing + sum(map(self._pool.idle, hit))
        victims: list[Sequence] = []
        if self._fits_without(victims, needed, hit, rows):
            return victims
        for victim in sorted(lower, key=rank, reverse=True):
            victims.append(victim)
            if self._fits_without(victims, needed, hit, rows):
                break
        else:
            return None
        for victim in [v for v in victims if v.storing]:  # it holds on to most of what it has: perhaps in vain
            others = [v for v in victims if v is not victim]
            if self._fits_without(others, needed, hit, rows):
                victims = others
        return victims

    def _fits_without(self, victims: list[Sequence], needed: int, hit: list[int], rows: int) -> bool:
        if self.crowd - sum([v.rows for v in victims]) + rows > self._limits.max_sequences:
            return False
        return needed <= self._kv.room_without(victims, hit, self.running)

    def preempt(self, victim: Sequence) -> None:
        """It gives up its blocks, and waits."""
        self.running.remove(victim)
        self.let_go(victim)
        victim.restart()
        self.enqueue(victim)
        self._counters.preemptions += 1

    def let_go(self, sequence: Sequence) -> None:
        """Of its blocks: it is about to go, or to wait."""
        self._kv.let_go(sequence)
        self._released.append(sequence.id)

    def enqueue(self, sequence: Sequence) -> None:
        """It waits from now on."""
        self._policy.wait(sequence, lambda s: len(self._kv.prefix_hit(s)) * BLOCK_TOKENS)
        self.waiting.add(sequence)

    def check(self) -> None:
        """Raise AssertionError unless sequences, queues and blocks agree."""
        offload = self._kv.offload
        self._pool.check()
        assert self.crowd <= self._limits.max_sequences
        assert self.num_running + self.num_waiting + len(self.migrating) == len(self.sequences)
        holding = [*self.running, *self._in_flight.ending.values(), *self.migrating.values()]
        assert {*holding, *self.waiting, *self.awaiting.values()} == set(self.sequences.values())
        self.waiting.check()
        self._in_flight.check()
        owners: list[Sequence | Reservation] = [*holding, *self.reserved]
        held = [*(owner.blocks for owner in owners), *self._in_flight.kept]
        holders = Counter(block for blocks in held for block in blocks)
        transfers = Counter(block for s in holding for block in s.blocks[: s.transferring])
        if offload is not None:
            offload.check()
            holders += offload.holders()
        self._pool.check_holders(holders)
        self._pool.check_transfers(transfers)
        for s in holding:
            assert s.transferring <= len(s.blocks)
            assert s.blocks
            assert 0 <= s.computed < len(s.tokens) <= self._limits.max_model_len
            assert s.blocks_until(s.computed) <= len(s.blocks) <= s.blocks_until(len(s.tokens) + 1)
            assert len(set(s.blocks)) == len(s.blocks), "a block stands twice in one sequence"
