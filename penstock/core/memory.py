"""Memory that is free, and goes back to the system."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


@functools.cache
def _allocator() -> Any:
    """glibc's `malloc_trim`, or None where the C library has none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None


def give_back_memory() -> None:
    """Give back what was freed; glibc otherwise keeps it. Takes about 1 ms, so it is for what took megabytes."""
    trim = _allocator()
    if trim is not None:
        trim(0)
