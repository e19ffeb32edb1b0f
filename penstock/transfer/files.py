"""Reading and writing files at places of theirs, past the page cache where that is possible."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

DIRECT = getattr(os, "O_DIRECT", 0)  # other systems have other ways
FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
# Of a disk that fails, which is no reason not to serve; all else is a mistake of whoever named the folder
FAILS = (errno.EIO, errno.EROFS, *FULL, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN)


def opened(path: Path, flags: int = 0) -> int:
    """A file to be read and written by this user alone; it is made where there is none."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)


def write_all(fd: int, data: bytes | mmap.mmap | memoryview, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, place)
        view, place = view[written:], place + written


def read_all(fd: int, size: int) -> bytes:
    """The first `size` bytes, or as many as there are."""

    def pieces() -> Iterator[bytes]:
        place = 0
        while piece := os.pread(fd, min(size - place, 1 << 24), place):
            yield piece
            place += len(piece)

    return b"".join(pieces())


def read_into(fd: int, buffer: memoryview, place: int) -> int:
    """Fill a buffer. Returns how many bytes there were."""
    done = 0
    while done < len(buffer) and (size := os.preadv(fd, [buffer[done:]], place + done)):
        done += size
    return done
