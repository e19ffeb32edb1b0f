"""A thread that waits for sockets, and runs timers and the commands of other threads between them."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class IOThread:
    """
    Args:
        after_turn: called after sockets, commands and timers were served, and once more at the end.
        ended: called on the thread when it ends, with the error if it failed.

    Attributes:
        selector: for the thread alone; a key's data is called with the events.
    """

    def __init__(self, after_turn: Callable[[], None], ended: Callable[[BaseException | None], None]) -> None:
        self._after_turn, self._ended = after_turn, ended
        self._commands: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._timer_numbers = count()
        self._stopping = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._wakeup, selectors.EVENT_READ, self._woken)
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def do(self, command: Callable[[], object]) -> None:
        """Have the thread run a command. From any thread."""
        self._commands.append(command)
        if not self._stopping:
            os.eventfd_write(self._wakeup, 1)

    def later(self, seconds: float, command: Callable[[], object]) -> None:
        """Run a command in so many seconds. From the thread alone."""
        heappush(self._timers, (time.monotonic() + seconds, next(self._timer_numbers), command))

    def stop(self) -> None:
        """Return when the thread has run the commands that were given before, and ended. To be called once."""
        self._stopping = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        os.close(self._wakeup)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._stopping:
                self._turn()
            self._run_commands()
            self._after_turn()
        except BaseException as raised:
            error = raised
        finally:
            self._ended(error)
            self.selector.close()

    def _turn(self) -> None:
        wait = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for key, events in self.selector.select(wait):
            key.data(events)
        self._run_commands()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heappop(self._timers)[2]()
        self._after_turn()

    def _woken(self, events: int) -> None:
        os.eventfd_read(self._wakeup)

    def _run_commands(self) -> None:
        for _ in range(len(self._commands)):
            self._commands.popleft()()
