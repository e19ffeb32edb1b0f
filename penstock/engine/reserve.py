"""Allocates the memory of blocks shortly before their first use.

A pool's memory is sparse: the system finds and clears a page when it is first touched, which takes 0.3 to 0.6 ms a MiB,
and several times that in a virtual machine. A thread touches the next blocks, a limited number ahead, so that prompts
do not wait: when nothing has run for a while, as it uses a core, or at once when few are left.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from penstock.engine.arena import Arena

MOST = 64  # blocks: prompts of 4,096 tokens together
QUIET = 0.05  # seconds without a step: a client that sends its next request at once is not delayed

Wanted = SimpleQueue[int | threading.Event | None]


class _Pause:
    """Says when blocks may be touched."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._hurry = False
        self._from: float | None = 0.0  # when it is quiet; None while something runs

    def begin(self) -> None:
        """Until `end`, unless there is hurry."""
        self._from = None

    def end(self) -> None:
        with self._changed:
            self._from = time.monotonic() + QUIET
            self._changed.notify()

    def hurry(self) -> None:
        """Until `relax`, whatever runs."""
        with self._changed:
            self._hurry = True
            self._changed.notify()

    def relax(self) -> None:
        self._hurry = False

    def wait(self) -> None:
        with self._changed:
            while not self._hurry:
                start = self._from
                left = None if start is None else start - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._changed.wait(left)


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
        self._pause = _Pause()
        # a daemon: the process need not wait for it at its end
        self._thread = threading.Thread(
            target=_work, args=(arena, self._wanted, stopped, self._pause), name="penstock-reserve", daemon=True
        )
        self._stop = weakref.finalize(self, _stop, self._wanted, stopped, self._pause)
        self._thread.start()

    def use(self, blocks: Sequence[int]) -> bool:
        """These are being written, in a step that begins. Returns whether few are ready: then there is hurry."""
        self._pause.begin()
        self._there.update(blocks)
        self._left -= len(blocks)
        return self._left < self.size // 4

    def expect(self, coming: Iterable[int], *, hurry: bool = False) -> None:
        """These are next, in this order; as many as `size`, if there are. Without hurry, nothing runs any more."""
        self._left = self.size
        for block in coming:
            if block not in self._there:
                self._there.add(block)
                self._wanted.put(block)
        if hurry:
            self._pause.hurry()
        else:
            self._pause.end()

    def settle(self) -> None:
        """Return when everything that was expected has its memory, or was refused it; its use will then fail."""
        reached = threading.Event()
        self._wanted.put(reached)
        self._pause.hurry()
        reached.wait()

    def close(self) -> None:
        """Nothing is touched any more, and nothing of this keeps the memory."""
        self._stop()
        self._thread.join()


def _work(arena: Arena, wanted: Wanted, stopped: threading.Event, pause: _Pause) -> None:
    while (next_one := wanted.get()) is not None and not stopped.is_set():
        if isinstance(next_one, threading.Event):
            next_one.set()
        else:
            pause.wait()
            if stopped.is_set():
                return
            with suppress(OSError):
                arena.touch(next_one)
        if wanted.empty():
            pause.relax()


def _stop(wanted: Wanted, stopped: threading.Event, pause: _Pause) -> None:
    stopped.set()
    wanted.put(None)
    pause.hurry()
