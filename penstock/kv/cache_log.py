"""What comes and goes in an instance's cache, to be told to the master (`CacheLog`), and how often (`DeltaPace`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

SOONEST, LATEST = 0.05, 3.0  # seconds between two reports of what has changed
MANY = 64  # changed keys that are worth a report


class CacheLog:
    """Additions and removals cancel each other, so the log is bounded by the cache's contents now and when last taken.

    Attributes:
        changed: whether there may be something to take.
    """

    def __init__(self) -> None:
        self.sequence = 0  # of the last one taken
        self.changed = False
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def note(self, added: Collection[bytes], removed: Collection[bytes]) -> None:
        """Removals first, as a key may go and come again."""
        if not (added or removed):
            return
        for key in removed:
            if key in self._added:
                del self._added[key]
            else:
                self._removed[key] = None
        for key in added:
            if key in self._removed:
                del self._removed[key]
            else:
                self._added[key] = None
        self.changed = bool(self._added or self._removed)

    def __len__(self) -> int:
        return len(self._added) + len(self._removed)

    def take(self) -> tuple[list[bytes], list[bytes]] | None:
        """Added and removed since the last call, under the next number; None when nothing changed."""
        if not self.changed:
            return None
        self.sequence += 1
        changes = list(self._added), list(self._removed)
        self._added, self._removed, self.changed = {}, {}, False
        return changes


class DeltaPace:
    """How often changes are told: each report costs the master something, however little is in it.

    So what decoding adds, block by block, is put off until there is enough of it, for `LATEST` seconds at most. Others
    may want a prompt as soon as it is computed; and as long as its request runs the master counts it as cached there,
    but from its end on goes by what it was told.

    Attributes:
        hurries: whether a prompt was computed, or a request has ended, since changes were told last.
    """

    def __init__(self) -> None:
        self.hurries = False
        self._at = -inf  # when they were

    def due(self, logs: Iterable[CacheLog]) -> float:
        """When changes are to be told; inf while there are none."""
        changes = sum(map(len, logs))
        if not changes:
            return inf
        return self._at + (SOONEST if self.hurries or changes >= MANY else LATEST)

    def told(self, now: float) -> None:
        self._at, self.hurries = now, False
