"""The machine's memory: how much there is, and what is free goes back to it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
from pathlib import Path
from typing import Any, Literal

Part = Literal["weights", "kv_cache"]  # of an engine's memory, which it gives back while it sleeps
PARTS: tuple[Part, ...] = ("weights", "kv_cache")
CGROUPS = Path("/sys/fs/cgroup")
SEAL_FUTURE_WRITE = 0x10  # Python has no name for it


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


def seal(fd: int) -> None:
    """Let nobody truncate a memfd, of which those who map it would die, nor map it to write to it."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with contextlib.suppress(OSError):  # Linux before 5.1
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEAL_FUTURE_WRITE)


def total_memory() -> int:
    """Bytes of main memory that the processes here may take together: the machine's, or the container's if less."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_cgroup_limits()])


def _cgroup_limits() -> list[int]:
    """Of the control group of this process, and of those around it, in version 2."""
    try:
        (line,) = [x for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::")]
    except (OSError, ValueError):
        return []
    group = CGROUPS / line[3:].strip("/")
    limits = []
    for folder in (group, *group.parents):
        if folder.is_relative_to(CGROUPS):
            try:
                limits.append(int((folder / "memory.max").read_text()))
            except (OSError, ValueError):  # "max", or there is none
                continue
    return limits
