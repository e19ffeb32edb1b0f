"""The thread that maps blocks one step ahead, with its counters: exposed and hidden time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

from penstock.engine.arena import Arena
from penstock.kv.ranges import Change


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
