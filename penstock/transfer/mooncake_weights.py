"""Weights by Mooncake's transfer engine: who has them lets others read the memory that they are in.

What comes is compared with its digests by who reads it, as whatever comes from another host. Nobody writes for others.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from time import sleep

from penstock.core.errors import Unavailable
from penstock.transfer.mooncake import LOOK_EVERY, Engine, Read, engine_of

AHEAD = 4  # reads at once


@contextlib.contextmanager
def lent(host: str, address: int, size: int) -> Iterator[str]:
    """Memory of this process that others can read while this is entered. Gives what `spans_read` wants to know of it.
    Raises ConfigError.

    Args:
        host: where others reach this process.
    """
    engine = engine_of(host)
    engine.register(address, size)
    try:
        yield f"{engine.session}/{address:x}"
    finally:
        engine.unregister(address)


def spans_read(
    host: str, lent: str, memory: mmap.mmap, spans: Iterable[tuple[int, int]]
) -> Generator[tuple[int, int], None, None]:
    """Read from what somebody has lent to the same places of a memory. To be closed: then nothing writes to it any
    more.

    Args:
        spans: (first byte, end) of each.

    Yields:
        Each of them, in their order, when it has come.

    Raises:
        Unavailable: one does not come.
        ConfigError: there is no Mooncake, or it cannot have the memory.
    """
    session, _, base = lent.rpartition("/")
    there, here = int(base, 16), ctypes.addressof(ctypes.c_char.from_buffer(memory))
    engine = Engine(host)  # one that has met nobody: it would remember what memory was lent there before
    engine.register(here, len(memory))
    reading: deque[tuple[Read, tuple[int, int]]] = deque()
    try:
        for start, stop in spans:
            reading.append((Read(engine, session, there + start, here + start, stop - start), (start, stop)))
            if len(reading) == AHEAD:
                yield _come(*reading.popleft())
        while reading:
            yield _come(*reading.popleft())
    finally:
        for read, _ in reading:
            _await(read)
        engine.unregister(here)


def _come(read: Read, span: tuple[int, int]) -> tuple[int, int]:
    _await(read)
    if not read.came:
        raise Unavailable(f"Mooncake has not brought bytes {span[0]} to {span[1]}")
    return span


def _await(read: Read) -> None:
    """Mooncake gives up by itself."""
    while not read.is_over():
        sleep(LOOK_EVERY)
