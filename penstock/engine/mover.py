"""The thread that copies blocks between the device and a tier below it, as `sched.local.offload` orders.

A `Copier` does what is ordered; the order of it is the same for all tiers. Where a tier has slots, `Slots` copies to
and from them, and what they have is verified here.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, takewhile
from typing import Literal, NamedTuple, Protocol

from penstock.engine.executor.inline import Bell
from penstock.kv.connector import Move, Moved
from penstock.transfer.memory import checksum_of

log = logging.getLogger("penstock.engine")
PIECE = 16  # blocks; copying them takes the host's memory milliseconds
COMPLAIN_EVERY = 60.0  # seconds


class Copier(Protocol):
    """Does what is ordered. One thread calls it; an error ends the order.

    Attributes:
        piece: blocks of a push that are stored at once, after which something else may come first.
        away: the tier does not answer at present, so nothing should be asked of it; `full`: it takes nothing.
    """

    piece: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        ...

    @property
    def away(self) -> bool: ...

    @property
    def full(self) -> bool: ...

    def store(self, moves: Sequence[Move]) -> None:
        """Copy these blocks to the tier; they are there when this returns."""
        ...

    def load(self, moves: Sequence[Move]) -> int:
        """Copy to these blocks what is meant. Returns how many have come, from the first on."""
        ...

    def find(self, moves: Sequence[Move]) -> int:
        """How many of these are in the tier, from the first on."""
        ...

    def close(self) -> None:
        """Release the tier and the device's blocks."""
        ...


class Slots(Protocol):
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
    """A push, a pull or a question."""

    handle: int
    moves: Sequence[Move]
    kind: Literal["push", "pull", "ask"]


class Mover:
    """A `KVTier`: takes orders from one thread, and has them carried out in order in its own.

    Pulls and questions come before waiting pushes. A failure ends the order, not the engine.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._handles = count(1)
        self._desk = desk = _Desk()
        thread = threading.Thread(target=_Worker(desk, copier).work, name="penstock-mover", daemon=True)
        # the memory must outlive a running copy, also at interpreter exit
        self._stop = weakref.finalize(self, _stop, thread, desk, copier)
        thread.start()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._copier.block_bytes

    @property
    def away(self) -> bool:
        """Whether the tier does not answer at present."""
        return self._copier.away

    @property
    def full(self) -> bool:
        """Whether it takes nothing at present."""
        return self._copier.full

    def fileno(self) -> int:
        return self._desk.bell.fd

    def push(self, moves: Sequence[Move]) -> int:
        return self._give(moves, "push")

    def pull(self, moves: Sequence[Move], source: None = None) -> int:
        return self._give(moves, "pull")

    def ask(self, moves: Sequence[Move]) -> int:
        return self._give(moves, "ask")

    def poll(self) -> list[Moved]:
        return self._desk.take() if self._desk.over else []

    def settle(self) -> None:
        self._desk.settle()

    def close(self) -> None:
        self._stop()

    def _give(self, moves: Sequence[Move], kind: Literal["push", "pull", "ask"]) -> int:
        order = _Order(next(self._handles), moves, kind)
        self._desk.give(order)
        return order.handle


class SlotMover(Mover):
    """Over `Slots`. The key and checksum of each slot's content are kept, and a pull verifies them.

    Args:
        checksum: of a slot's bytes.
        journal: None where slots are empty at first and do not outlive this.
        piece: see `Copier`.
    """

    def __init__(
        self,
        slots: Slots,
        checksum: Callable[[memoryview], int] = checksum_of,
        journal: Journal | None = None,
        piece: int = PIECE,
    ) -> None:
        self._slots = slots
        super().__init__(_SlotCopier(slots, checksum, journal, piece))


class _Desk:
    """The queue between two threads: orders in, results out.

    Attributes:
        over: not taken yet. The bell has rung if and only if there is something.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self.over: list[Moved] = []
        self._changed = threading.Condition()
        self._first: deque[_Order] = deque()  # pulls and questions
        self._pushes: deque[_Order] = deque()
        self._open = 0  # given, and not over
        self._closed = False

    def give(self, order: _Order) -> None:
        with self._changed:
            self._queue(order).append(order)
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
            self._changed.wait_for(lambda: self._first or self._pushes or self._closed)
            if self._closed:
                return None
            return self._first[0] if self._first else self._pushes[0]

    def end(self, order: _Order, good: int, seconds: float) -> None:
        """The first of its kind is over."""
        with self._changed:
            self._queue(order).popleft()
            self._open -= 1
            blocks = tuple(move.block for move in order.moves[:good])
            self.over.append(Moved(order.handle, blocks, seconds))
            self.bell.ring()
            self._changed.notify_all()

    def _queue(self, order: _Order) -> deque[_Order]:
        return self._pushes if order.kind == "push" else self._first


class _Worker:
    """What the thread does."""

    def __init__(self, desk: _Desk, copier: Copier) -> None:
        self._desk, self._copier = desk, copier
        self._done = 0  # blocks of the first push
        self._took = 0.0  # for those
        self._complain = Complaints()

    def work(self) -> None:
        while (order := self._desk.next()) is not None:
            began = time.monotonic()
            try:
                good = self._carry_out(order)
            except Exception as error:
                self._complain("%d blocks could not be copied: %s: %s", len(order.moves), type(error).__name__, error)
                good = 0
            took = time.monotonic() - began
            if order.kind == "push":
                self._took += took
                if 0 < good < len(order.moves):
                    continue
                took, self._took, self._done = self._took, 0.0, 0
            self._desk.end(order, good, took)

    def _carry_out(self, order: _Order) -> int:
        """Of a push a piece. Returns how many of its blocks are done."""
        if order.kind == "pull":
            return self._copier.load(order.moves)
        if order.kind == "ask":
            return self._copier.find(order.moves)
        moves = order.moves[self._done : self._done + self._copier.piece]
        self._copier.store(moves)
        self._done += len(moves)
        return self._done


class _SlotCopier:
    """A `Copier` to and from slots."""

    away = full = False

    def __init__(
        self, slots: Slots, checksum: Callable[[memoryview], int], journal: Journal | None, piece: int
    ) -> None:
        self.piece = piece
        self._slots, self._checksum, self._journal = slots, checksum, journal
        # slot -> key and checksum of what lies there
        self._stored: dict[int, tuple[bytes, int]] = {} if journal is None else dict(journal.stored)
        self._complain = Complaints()

    @property
    def block_bytes(self) -> int:
        return self._slots.block_bytes

    def store(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._stored.pop(move.slot, None)
        for move, content in zip(moves, self._slots.store(moves), strict=True):
            checksum = self._checksum(content)
            if self._journal is not None:
                self._journal.write(move, checksum)
            self._stored[move.slot] = move.key, checksum

    def load(self, moves: Sequence[Move]) -> int:
        return self._slots.load(takewhile(self._is_sound, moves))

    def find(self, moves: Sequence[Move]) -> int:
        stored = {key for key, _ in self._stored.values()}
        return sum(1 for _ in takewhile(lambda move: move.key in stored, moves))

    def close(self) -> None:
        self._slots.close()

    def _is_sound(self, move: Move) -> bool:
        """Whether a slot's key and checksum are those stored."""
        if self._stored.get(move.slot) == (move.key, self._checksum(self._slots.content(move.slot))):
            return True
        self._complain("a copy of a block is not what was stored: what it held is computed again")
        return False


class Complaints:
    """Warnings of one kind, at a limited rate."""

    def __init__(self) -> None:
        self._at = 0.0

    def __call__(self, message: str, *args: object) -> None:
        if time.monotonic() >= self._at:
            self._at = time.monotonic() + COMPLAIN_EVERY
            log.warning(message, *args)


def _stop(thread: threading.Thread, desk: _Desk, copier: Copier) -> None:
    desk.close()
    if thread is not threading.current_thread():
        thread.join()
    copier.close()
    desk.bell.close()
