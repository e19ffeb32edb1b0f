"""Which prefix keys came and went since the last time somebody asked."""

from __future__ import annotations

from collections.abc import Iterable


class CacheLog:
    """Nets what comes and goes, so that it never grows beyond what the cache holds and held when last asked."""

    def __init__(self) -> None:
        self.sequence = 0  # of the last one taken
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    @property
    def changed(self) -> bool:
        """Whether there is something to take."""
        return bool(self._added or self._removed)

    def note(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Removals first, as a key may go and come again."""
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

    def take(self) -> tuple[list[bytes], list[bytes]] | None:
        """Added and removed since the last call, under the next number; None when nothing changed."""
        if not self.changed:
            return None
        self.sequence += 1
        changes = list(self._added), list(self._removed)
        self._added, self._removed = {}, {}
        return changes
