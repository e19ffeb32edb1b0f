"""The thread that copies blocks between the device and the tier below it, as `sched.local.offload` orders.

The tier's `Way` does the copying. The order of copies and their verification are the same for all tiers.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, takewhile
from typing import NamedTuple, Protocol

from penstock.engine.executor.inline import Bell
from penstock.kv.connector import Move, Moved

log = logging.getLogger("penstock.engine")
PIECE = 16  # blocks; copying them takes the host's memory milliseconds
COMPLAIN_EVERY = 60.0  # seconds


class Way(Protocol):
    """Copies blocks to a tier's slots and back. One thread calls it."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        ...

    def store(self, moves: Sequence[Move]) -> Sequence[memoryview]:
        """Copy these blocks to their slots. They are there when this returns, with the bytes of each, which may change
        at the next call."""
        ...

    def load(self, moves: Iterable[Move]) -> int:
        """Copy slots to their blocks, in this order, each as soon as it comes. Returns how many came; all have arrived.

        If it raises, nothing is written any longer either.
        """
        ...

    def content(self, slot: int) -> memoryview:
        """The bytes of a slot, until the next call."""
        ...

    def close(self) -> None:
        """Release the slots and the device's blocks."""
        ...


class Journal(Protocol):
    """Writes down what lies in slots that outlive the engine. One thread calls it.

    Attributes:
        stored: slot -> key and checksum of what lay there when it was opened.
    """

    @property
    def stored(self) -> Mapping[int, tuple[bytes, int]]: ...

    def write(self, move: Move, checksum: int) -> None:
        """This is in its slot now."""
        ...


class _Order(NamedTuple):
    """A push or a pull."""

    handle: int
    moves: Sequence[Move]
    is_pull: bool


def checksum_of(data: memoryview) -> int:
    """64 bits, as of the blocks of a pool (`transfer.records`). Detects corruption; not secure against an attacker."""
    from xxhash import xxh3_64_intdigest  # an engine without a tier never needs it

    return xxh3_64_intdigest(data)


class Mover:
    """A `KVTier` over the slots of a `Way`: takes orders from one thread, and executes them in order in its own.

    Pulls come before waiting pushes. The key and checksum of each slot's content are kept, and a pull verifies them. A
    failure ends the order, not the engine.

    Args:
        checksum: of a slot's bytes.
        journal: None where slots are empty at first and do not outlive this.
        piece: blocks of a push, after each of which pulls may come first.
    """

    def __init__(
        self,
        way: Way,
        checksum: Callable[[memoryview], int] = checksum_of,
        journal: Journal | None = None,
        piece: int = PIECE,
    ) -> None:
        self._way = way
        self._handles = count(1)
        self._desk = desk = _Desk()
        # slot -> key and checksum of what lies there
        self._stored: dict[int, tuple[bytes, int]] = {} if journal is None else dict(journal.stored)
        work = _Carrier(desk, way, checksum, self._stored, journal, piece).work
        thread = threading.Thread(target=work, name="penstock-mover", daemon=True)
        # the memory must outlive a running copy, also at interpreter exit
        self._stop = weakref.finalize(self, _stop, thread, desk, way)
        thread.start()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._way.block_bytes

    def fileno(self) -> int:
        return self._desk.bell.fd

    def push(self, moves: Sequence[Move]) -> int:
        return self._give(moves, is_pull=False)

    def pull(self, moves: Sequence[Move], source: None = None) -> int:
        return self._give(moves, is_pull=True)

    def poll(self) -> list[Moved]:
        return self._desk.take() if self._desk.over else []

    def contains(self, keys: Sequence[bytes]) -> int:
        stored = {key for key, _ in list(self._stored.values())}
        return sum(1 for _ in takewhile(stored.__contains__, keys))

    def settle(self) -> None:
        self._desk.settle()

    def close(self) -> None:
        self._stop()

    def _give(self, moves: Sequence[Move], *, is_pull: bool) -> int:
        order = _Order(next(self._handles), moves, is_pull)
        self._desk.give(order)
        return order.handle


class _Desk:
    """The queue between two threads: orders in, results out.

    Attributes:
        over: not taken yet. The bell has rung if and only if there is something.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self.over: list[Moved] = []
        self._changed = threading.Condition()
        self._pulls: deque[_Order] = deque()
        self._pushes: deque[_Order] = deque()
        self._open = 0  # given, and not over
        self._closed = False

    def give(self, order: _Order) -> None:
        with self._changed:
            (self._pulls if order.is_pull else self._pushes).append(order)
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

    def next(self) -> _Order | None:
        """To be carried out now, if it is a push a piece of it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pulls or self._pushes or self._closed)
            if self._closed:
                return None
            return self._pulls[0] if self._pulls else self._pushes[0]

    def end(self, order: _Order, good: int, seconds: float) -> None:
        """The first of its kind is over."""
        with self._changed:
            (self._pulls if order.is_pull else self._pushes).popleft()
            self._open -= 1
            blocks = tuple(move.block for move in order.moves[:good])
            self.over.append(Moved(order.handle, blocks, seconds))
            self.bell.ring()
            self._changed.notify_all()


class _Carrier:
    """What the thread does."""

    def __init__(
        self,
        desk: _Desk,
        way: Way,
        checksum: Callable[[memoryview], int],
        stored: dict[int, tuple[bytes, int]],
        journal: Journal | None,
        piece: int,
    ) -> None:
        self._desk, self._way, self._checksum, self._stored = desk, way, checksum, stored
        self._journal, self._piece = journal, piece
        self._done = 0  # blocks of the first push
        self._took = 0.0  # for those
        self._complain_at = 0.0

    def work(self) -> None:
        while (order := self._desk.next()) is not None:
            began = time.monotonic()
            try:
                good = self._load(order.moves) if order.is_pull else self._store(order.moves)
            except Exception as error:
                self._complain("%d blocks could not be copied: %s: %s", len(order.moves), type(error).__name__, error)
                good = 0
            took = time.monotonic() - began
            if not order.is_pull:
                self._took += took
                if 0 < good < len(order.moves):
                    continue
                took, self._took, self._done = self._took, 0.0, 0
            self._desk.end(order, good, took)

    def _store(self, order: Sequence[Move]) -> int:
        """A piece of it. Returns how many of its blocks are there."""
        moves = order[self._done : self._done + self._piece]
        for move in moves:
            self._stored.pop(move.slot, None)
        for move, content in zip(moves, self._way.store(moves), strict=True):
            checksum = self._checksum(content)
            if self._journal is not None:
                self._journal.write(move, checksum)
            self._stored[move.slot] = move.key, checksum
        self._done += len(moves)
        return self._done

    def _load(self, moves: Sequence[Move]) -> int:
        return self._way.load(takewhile(self._is_sound, moves))

    def _is_sound(self, move: Move) -> bool:
        """Whether a slot's key and checksum are those stored."""
        if self._stored.get(move.slot) == (move.key, self._checksum(self._way.content(move.slot))):
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
