"""Blocks that are about to be used get their memory before they are.

A pool's memory is sparse: the system finds and clears a page when it is first touched, which takes 0.6 ms a MiB, and
several times that in a virtual machine whose host has to find it first. Prompts would wait for it, so a thread touches
the blocks that come next, a limited number ahead: best while nothing runs, since it takes a core from whatever does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from penstock.engine.arena import Arena

MOST = 64  # blocks: prompts of 4,096 tokens together

Wanted = SimpleQueue[int | threading.Event | None]


class Reserve:
    """One thread calls it.

    Attributes:
        size: blocks that are kept ready.
    """

    def __init__(self, arena: Arena) -> None:
        self.size = min(MOST, arena.num_blocks)
        self._there: set[int] = set()  # blocks that have their memory, or will without anybody's doing
        self._left = 0  # of those that were expected
        self._wanted: Wanted = SimpleQueue()
        stopped = threading.Event()
        # a daemon, for a process need not end later for memory that it gives back
        self._thread = threading.Thread(
            target=_work, args=(arena, self._wanted, stopped), name="penstock-reserve", daemon=True
        )
        self._stop = weakref.finalize(self, _stop, self._wanted, stopped)
        self._thread.start()

    def use(self, blocks: Sequence[int]) -> bool:
        """These are being written. Returns whether so few are ready that others should not wait for a better time."""
        self._there.update(blocks)
        self._left -= len(blocks)
        return self._left < self.size // 2

    def expect(self, coming: Iterable[int]) -> None:
        """These are next, in this order; as many as `size`, if there are."""
        self._left = self.size
        for block in coming:
            if block not in self._there:
                self._there.add(block)
                self._wanted.put(block)

    def settle(self) -> None:
        """Return when everything that was expected has its memory, or was refused it: then its use will tell."""
        reached = threading.Event()
        self._wanted.put(reached)
        reached.wait()

    def close(self) -> None:
        """Nothing is touched any more, and nothing of this keeps the memory."""
        self._stop()
        self._thread.join()


def _work(arena: Arena, wanted: Wanted, stopped: threading.Event) -> None:
    while (next_one := wanted.get()) is not None and not stopped.is_set():
        if isinstance(next_one, threading.Event):
            next_one.set()
        else:
            with suppress(OSError):
                arena.touch(next_one)


def _stop(wanted: Wanted, stopped: threading.Event) -> None:
    stopped.set()
    wanted.put(None)
