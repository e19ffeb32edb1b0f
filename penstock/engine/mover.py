"""The thread that copies blocks between the device and the tier below it, as `sched.local.offload` orders.

The tier's `Way` does the copying. The order of copies and their verification are the same for all tiers.
"""

from __future__ import annotations

import logging
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from penstock.engine.executor.inline import Bell
from penstock.sched.local.offload import Copied, Load, Store

log = logging.getLogger("penstock.engine")
PIECE = 16  # blocks of a store, after each of which loads may come first
COMPLAIN_EVERY = 60.0  # seconds


class Way(Protocol):
    """Copies blocks to a tier's slots and back. One thread calls it."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        ...

    def store(self, moves: Sequence[Copied]) -> None:
        """Copy these blocks to their slots. They are there when this returns."""
        ...

    def load(self, moves: Iterable[Copied]) -> int:
        """Copy slots to their blocks, in this order, each as soon as it comes. Returns how many came; all have arrived.

        If it raises, nothing is written any longer either.
        """
        ...

    def content(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        ...

    def close(self) -> None:
        """Release the slots and the device's blocks."""
        ...


class Moved(NamedTuple):
    """An order that is over.

    Attributes:
        good: of its blocks, from the first on, that arrived as they should be; of a store all or none.
        seconds: that it took, without the wait for its turn.
    """

    order: Store | Load
    good: int
    seconds: float


def checksum_of(data: memoryview) -> int:
    """64 bits, as of the blocks of a pool (`transfer.records`). Detects corruption; not secure against an attacker."""
    from xxhash import xxh3_64_intdigest  # an engine without a tier never needs it

    return xxh3_64_intdigest(data)


class Mover:
    """Takes orders from one thread, and executes them in order in its own.

    Loads come before waiting stores. The key and checksum of each slot's content are kept, and a load verifies them. A
    failure ends the order, not the engine.

    Args:
        checksum: of a slot's bytes.
    """

    def __init__(self, way: Way, checksum: Callable[[memoryview], int] = checksum_of) -> None:
        self._way = way
        self._desk = desk = _Desk()
        self._waiter = select.poll()
        self._waiter.register(desk.bell.fd, select.POLLIN)
        thread = threading.Thread(target=_Carrier(desk, way, checksum).work, name="penstock-mover", daemon=True)
        # the memory must outlive a running copy, also at interpreter exit
        self._stop = weakref.finalize(self, _stop, thread, desk, way)
        thread.start()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._way.block_bytes

    def fileno(self) -> int:
        """Readable when there is something to take."""
        return self._desk.bell.fd

    def give(self, orders: Iterable[Store | Load]) -> None:
        self._desk.give(orders)

    def take(self) -> list[Moved]:
        """The orders completed since the last call. Does not wait."""
        return self._desk.take() if self._desk.over else []

    def wait(self, seconds: float) -> None:
        """Return when there is something to take, or after so long."""
        self._waiter.poll(seconds * 1e3)

    def settle(self) -> None:
        """Wait until all orders are completed."""
        self._desk.settle()

    def close(self) -> None:
        """Copy nothing any longer, and let go of the memory; what waits is dropped. It is not used again."""
        self._stop()


class _Desk:
    """The queue between two threads: orders in, results out.

    Attributes:
        over: not taken yet. The bell has rung if and only if there is something.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self.over: list[Moved] = []
        self._changed = threading.Condition()
        self._loads: deque[Load] = deque()
        self._stores: deque[Store] = deque()
        self._open = 0  # given, and not over
        self._closed = False

    def give(self, orders: Iterable[Store | Load]) -> None:
        with self._changed:
            for order in orders:
                if isinstance(order, Load):
                    self._loads.append(order)
                else:
                    self._stores.append(order)
                self._open += 1
            self._changed.notify_all()

    def take(self) -> list[Moved]:
        with self._changed:
            self.bell.hush()
            over, self.over = self.over, []
        return over

    def settle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._closed)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def next(self) -> Store | Load | None:
        """To be carried out now, if it is a store a piece of it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._loads or self._stores or self._closed)
            if self._closed:
                return None
            return self._loads[0] if self._loads else self._stores[0]

    def end(self, moved: Moved) -> None:
        """The first of its kind is over."""
        with self._changed:
            (self._loads if isinstance(moved.order, Load) else self._stores).popleft()
            self._open -= 1
            self.over.append(moved)
            self.bell.ring()
            self._changed.notify_all()


class _Carrier:
    """What the thread does."""

    def __init__(self, desk: _Desk, way: Way, checksum: Callable[[memoryview], int]) -> None:
        self._desk, self._way, self._checksum = desk, way, checksum
        self._stored: dict[int, tuple[bytes, int]] = {}  # slot -> key and checksum of what lies there
        self._done = 0  # blocks of the first store
        self._took = 0.0  # for those
        self._complain_at = 0.0

    def work(self) -> None:
        while (order := self._desk.next()) is not None:
            began = time.monotonic()
            try:
                good = self._load(order) if isinstance(order, Load) else self._store(order)
            except Exception as error:
                self._complain("%d blocks could not be copied: %s: %s", len(order.moves), type(error).__name__, error)
                good = 0
            took = time.monotonic() - began
            if isinstance(order, Store):
                self._took += took
                if 0 < good < len(order.moves):
                    continue
                took, self._took, self._done = self._took, 0.0, 0
            self._desk.end(Moved(order, good, took))

    def _store(self, order: Store) -> int:
        """A piece of it. Returns how many of its blocks are there."""
        moves = order.moves[self._done : self._done + PIECE]
        for _, slot, _ in moves:
            self._stored.pop(slot, None)
        self._way.store(moves)
        for _, slot, key in moves:
            self._stored[slot] = key, self._checksum(self._way.content(slot))
        self._done += len(moves)
        return self._done

    def _load(self, order: Load) -> int:
        return self._way.load(takewhile(self._is_sound, order.moves))

    def _is_sound(self, copied: Copied) -> bool:
        """Whether a slot's key and checksum are those stored."""
        _, slot, key = copied
        if self._stored.get(slot) == (key, self._checksum(self._way.content(slot))):
            return True
        self._complain("a copy of a block is not what was stored: what it held is computed again")
        return False

    def _complain(self, message: str, *args: object) -> None:
        """Log a warning, rate-limited."""
        if time.monotonic() >= self._complain_at:
            self._complain_at = time.monotonic() + COMPLAIN_EVERY
            log.warning(message, *args)


def _stop(thread: threading.Thread, desk: _Desk, way: Way) -> None:
    desk.close()
    if thread is not threading.current_thread():
        thread.join()
    way.close()
    desk.bell.close()
