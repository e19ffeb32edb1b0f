"""Kernels in Triton for CUDA devices, compiled when they are first needed; one file for the ops that belong together.

What a row gets depends on that row and its sequence alone, to the bit: every reduction has an order of its own that
neither the number of rows nor what else is there changes.

Triton interprets them on a CPU too (TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

DEVICES = frozenset({"cuda"})


@functools.cache
def missing() -> str | None:
    """Why kernels cannot be used on this machine, or None."""
    return "triton is not installed" if find_spec("triton") is None else None


def power_of_two(count: int) -> int:
    """The next one, from `count` on."""
    return 1 << (count - 1).bit_length()
