"""How often Python looks for what only refers to itself."""

from __future__ import annotations

import gc

NEW_OBJECTS = 20_000  # between two looks at what is new, where Python's own number is 700


def collect_rarely() -> None:
    """To be called by a process that has started and now serves for long: what it has made so far stays, and is never
    looked at again; what a request leaves behind is seldom a cycle."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
