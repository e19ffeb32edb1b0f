"""Sequences that nobody could take just now: a few of them ask again, and the others when one of those was taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice

ASKERS = 8  # questions under way at once
AGAIN = 0.05  # seconds until somebody asks again, whatever happens


class WaitingRoom:
    """
    Args:
        ask: has a sequence ask, by its id. The answer comes as `enter`, or as `leave`.
    """

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask = ask
        self._waiting: dict[str, None] = {}  # the first one first
        self._asking: set[str] = set()
        self._timer: asyncio.Handle | None = None
        self._soon = False  # what the timer is

    def __len__(self) -> int:
        return len(self._waiting) + len(self._asking)

    def __iter__(self) -> Iterator[str]:
        """Those that ask just now are not among them."""
        return iter(list(self._waiting))

    def enter(self, sequence_id: str) -> None:
        """It has to wait, because it asked in vain or because others wait already."""
        self._asking.discard(sequence_id)
        self._waiting[sequence_id] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(AGAIN, self._ask_some)

    def leave(self, sequence_id: str) -> None:
        """It has a place, or is over. Harmless when it is not here."""
        self._waiting.pop(sequence_id, None)
        self._asking.discard(sequence_id)

    def hurry(self) -> None:
        """Something has changed: ask now, however often this is said at once."""
        if self._waiting and not self._soon:
            self.close()
            self._soon = True
            self._timer = asyncio.get_running_loop().call_soon(self._ask_some)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask_some(self) -> None:
        self._timer, self._soon = None, False
        chosen = list(islice(self._waiting, ASKERS - len(self._asking)))
        for sequence_id in chosen:
            if sequence_id in self._waiting:  # one that failed may have taken others with it
                del self._waiting[sequence_id]
                self._asking.add(sequence_id)
                self._ask(sequence_id)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(AGAIN, self._ask_some)
