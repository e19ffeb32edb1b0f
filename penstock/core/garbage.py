"""Settings of Python's cyclic garbage collector for server processes."""

from __future__ import annotations

import gc

NEW_OBJECTS = 20_000  # allocations between two collections of the youngest generation; Python's default is 700


def collect_rarely() -> None:
    """Collect less often. For a process at the end of its start: its objects so far are never collected, and requests
    rarely leave cycles."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
