"""Reserved addresses, and physical blocks behind them.

The arena is one stretch of addresses: first every block of the pool, in its own order, then the slots of the virtual
ranges. It counts in slots of one block: slot b < num_blocks is the pool's block b, so a block table and a virtual
range are two ways to name places of the same tensor. Reserving costs nothing but addresses; reading a slot that is not
mapped is a segmentation fault, which shows a wrong kernel.

`Mapper` is the thread that maps blocks one step ahead, and counts what mapping costs: time that steps wait, and time
that is hidden.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from penstock.core import mappings
from penstock.kv.ranges import Change

if TYPE_CHECKING:
    from penstock.transfer.memory import PoolMemory

_PIECE = 512 << 10  # bytes: other threads' mappings wait while one is touched


class Arena:
    """`num_slots` slots behind the blocks of a pool. Raises OSError when the system refuses addresses or a mapping.

    Without slots, and over memory that no other process has, it is that memory.
    """

    def __init__(self, memory: PoolMemory, num_slots: int) -> None:
        self.num_blocks = memory.num_blocks
        self.num_slots = num_slots
        self.block_bytes = memory.block_bytes
        self.nbytes = (self.num_blocks + num_slots) * self.block_bytes
        if memory.fd < 0:
            assert not num_slots, "these blocks lie in one place only"
            self._held = memory.held()
            self._address = ctypes.addressof(self._held)
            return
        self._fd = os.dup(memory.fd)
        self._address = mappings.reserve(self.nbytes)
        weakref.finalize(self, _close, self._address, self.nbytes, self._fd)
        self._place(0, 0, self.num_blocks)

    def map(self, slot: int, block: int, count: int = 1, *, populate: bool = True) -> None:
        """Map blocks [block, block + count) to slots [slot, slot + count).

        With `populate` their pages are in the process's page table when this returns; without, each is faulted in when
        it is first touched.
        """
        assert self.num_blocks <= slot <= slot + count <= self.num_blocks + self.num_slots
        assert 0 <= block <= block + count <= self.num_blocks
        self._place(slot, block, count, populate=populate)

    def unmap(self, slot: int, count: int = 1) -> None:
        """Unmap these slots."""
        assert self.num_blocks <= slot <= slot + count <= self.num_blocks + self.num_slots
        mappings.displace(self._address + slot * self.block_bytes, count * self.block_bytes)

    def touch(self, block: int) -> None:
        """Allocate the memory of a block of the pool; its content is unchanged.

        A kernel before 5.14 has no such call: then the block is left to its first use.
        """
        address, size = self._address + block * self.block_bytes, self.block_bytes
        for start in range(0, size, _PIECE):
            number = mappings.touch(address + start, min(_PIECE, size - start))
            if number == errno.EINVAL:
                return
            if number:
                raise OSError(number, f"madvise of block {block}: {os.strerror(number)}")

    def clear(self, slot: int) -> None:
        """Write zeros to a mapped slot."""
        ctypes.memset(self._address + slot * self.block_bytes, 0, self.block_bytes)

    def buffer(self) -> ctypes.Array[ctypes.c_char]:
        """All of it, for tensors over it; keeps the arena alive."""
        buffer = (ctypes.c_char * self.nbytes).from_address(self._address)
        buffer._arena = self  # type: ignore[attr-defined]
        return buffer

    def _place(self, slot: int, block: int, count: int, *, populate: bool = False) -> None:
        address, size = self._address + slot * self.block_bytes, count * self.block_bytes
        mappings.place(address, size, self._fd, block * self.block_bytes, writable=True, populate=populate)


def _close(address: int, nbytes: int, fd: int) -> None:
    mappings.free(address, nbytes)
    os.close(fd)


@dataclass(slots=True)
class MapCounters:
    """Totals since the start; times in seconds.

    Attributes:
        exposed: what steps waited for mappings, their own and those begun ahead.
        hidden: what the thread spent beside running steps.
        mapped, unmapped: slots.
        ahead: slots of `mapped` that the thread did.
        calls: system calls; neighbours in both slots and blocks share one.
    """

    exposed: float = 0.0
    hidden: float = 0.0
    mapped: int = 0
    unmapped: int = 0
    ahead: int = 0
    calls: int = 0


class Mapper:
    """Applies changes to an arena. One thread calls it, and does not touch changed slots before `now` has returned."""

    def __init__(self, arena: Arena) -> None:
        self.counters = MapCounters()
        self._arena = arena
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-map")
        self._pending: Future[tuple[float, int]] | None = None

    def now(self, changes: Sequence[Change]) -> None:
        """Finish what was begun ahead, then make these changes. Raises OSError when the system refuses one."""
        self.settle()
        if not changes:
            return
        start = perf_counter()
        self.counters.calls += _apply(self._arena, changes)
        self._count(changes)
        self.counters.exposed += perf_counter() - start

    def settle(self) -> None:
        """Finish what was begun ahead. Raises OSError when the system has refused it."""
        if self._pending is None:
            return
        start = perf_counter()
        pending, self._pending = self._pending, None
        taken, calls = pending.result()
        waited = perf_counter() - start
        self.counters.hidden += max(0.0, taken - waited)
        self.counters.calls += calls
        self.counters.exposed += waited

    def ahead(self, changes: Sequence[Change], clear: Sequence[int]) -> None:
        """Begin to make these changes, and to clear slots that are mapped then; done when `settle` or `now` returns."""
        assert self._pending is None, "what was begun before must be waited for"
        if not changes and not clear:
            return
        self._count(changes)
        self.counters.ahead += sum(change.block is not None for change in changes)
        self._pending = self._thread.submit(_timed, self._arena, changes, clear)

    def close(self) -> None:
        self._thread.shutdown()

    def _count(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.block is None:
                self.counters.unmapped += 1
            else:
                self.counters.mapped += 1


def _timed(arena: Arena, changes: Sequence[Change], clear: Sequence[int]) -> tuple[float, int]:
    start = perf_counter()
    calls = _apply(arena, changes)
    for slot in clear:
        arena.clear(slot)
    return perf_counter() - start, calls


def _apply(arena: Arena, changes: Iterable[Change]) -> int:
    """Returns the number of system calls."""
    calls = 0
    for slot, block, count in _runs(changes):
        if block is None:
            arena.unmap(slot, count)
        else:
            arena.map(slot, block, count)
        calls += 1
    return calls


def _runs(changes: Iterable[Change]) -> Iterator[tuple[int, int | None, int]]:
    """(slot, block, count): changes of neighbouring slots to neighbouring blocks, or to none, as one."""
    start: Change | None = None
    count = 0
    for change in changes:
        if start is not None and change == _neighbour(start, count):
            count += 1
            continue
        if start is not None:
            yield start.slot, start.block, count
        start, count = change, 1
    if start is not None:
        yield start.slot, start.block, count


def _neighbour(start: Change, count: int) -> Change:
    return Change(start.slot + count, None if start.block is None else start.block + count)
