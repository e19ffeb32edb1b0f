"""The folders of KV copies on a disk (`engine.disk_tier`).

    DIR/LAYOUT/N/lock     whoever has locked it has the folder

LAYOUT names everything that two engines must have in common to use each other's blocks: another model, quantisation,
version or processor has another folder, and never opens this one. N is a number from 0 on: each engine of several that
share DIR has a folder to itself as long as it runs.

What an engine leaves stays for the next one like it, and DIR is bounded all the same: what nobody has used for an hour
and what an engine has are together no more than that one may have, else the oldest folders go. Not earlier: all engines
of a deployment that is restarted are to find theirs, and one that is rolled back, too. Where the disk itself is full,
the oldest goes that nobody uses, however old it is.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import time
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("penstock.engine")
LAYOUT_BYTES = 8  # of the digest that is its name
LAYOUT, NUMBER = re.compile(rf"[0-9a-f]{{{2 * LAYOUT_BYTES}}}"), re.compile(r"\d+")
LOCK = "lock"
MOST_FOLDERS = 1024
MOST_TRIES = 16  # to lock one that others delete
PEEK = 0.01  # seconds, in which whoever has only looked whether a folder is in use has let go of it
IDLE = 3600.0  # seconds without use after which one may go although the disk has room
LOOK_EVERY = 60.0  # seconds between two looks at what there is


class Folder:
    """Of one engine. Closing it leaves it to others.

    Raises:
        OSError: from the making, or when all that are allowed are in use.
    """

    def __init__(self, layout: Path) -> None:
        for number in range(MOST_FOLDERS):
            self.path = layout / str(number)
            lock = _locked(self.path, make=True)
            if lock is None:
                time.sleep(PEEK)
                lock = _locked(self.path, make=True)
            if lock is not None:
                self._lock = lock
                os.utime(lock)
                return
        raise OSError(errno.EBUSY, f"{MOST_FOLDERS} engines use it")

    def close(self) -> None:
        with suppress(OSError):  # from a disk that has failed
            os.utime(self._lock)
        os.close(self._lock)


class _Left(NamedTuple):
    """A folder that nobody uses, since when, and the bytes that it takes."""

    used_at: float
    path: Path
    size: int


class Leftovers:
    """What others have left in DIR, for an engine that needs room there.

    Args:
        own: folder of that engine.
        most: bytes that it may take.
    """

    def __init__(self, directory: Path, own: Path, most: int) -> None:
        self._directory, self._own, self._most = directory, own, most
        self._look_at = 0.0

    def trim(self) -> None:
        """Delete what is too much, if it is time to look again."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY
        left = self._left(until=time.time() - IDLE)
        over = sum(each.size for each in left) + _size(self._own) - self._most
        for each in left:
            if over > 0 and _deleted(each):
                over -= each.size

    def give_way(self) -> bool:
        """The disk is full: delete the oldest one. False when there is none."""
        return any(each.size and _deleted(each) for each in self._left(until=inf))

    def _left(self, until: float) -> list[_Left]:
        """Those that nobody has used since, from the oldest on."""
        found = []
        for layout in _folders(self._directory, LAYOUT):
            for path in _folders(layout, NUMBER):
                used_at = _used_at(path)
                if used_at <= until and path != self._own and (lock := _unless_used(path)) is not None:
                    os.close(lock)
                    found.append(_Left(used_at, path, _size(path)))
        return sorted(found)


def _folders(parent: Path, names: re.Pattern[str]) -> list[Path]:
    try:
        return [Path(entry) for entry in os.scandir(parent) if names.fullmatch(entry.name)]
    except OSError:  # of somebody else, or gone
        return []


def _used_at(folder: Path) -> float:
    with suppress(OSError):
        return max((entry.stat().st_mtime for entry in os.scandir(folder)), default=inf)
    return inf  # gone


def _size(folder: Path) -> int:
    """Bytes on the disk: files of slots are sparse."""
    with suppress(OSError):
        return sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder))
    return 0


def _deleted(left: _Left) -> bool:
    """Whether it could be, which nobody else has since."""
    path = left.path
    if (lock := _unless_used(path)) is None:
        return False
    try:
        for entry in os.scandir(path):
            if entry.name != LOCK:
                os.unlink(entry)
        os.unlink(path / LOCK)  # last: until then nobody else is here
    except OSError as error:
        log.warning("%s: KV copies that nobody uses cannot be deleted: %s", path, error)
        return False
    finally:
        os.close(lock)
    with suppress(OSError):  # somebody has come, or there are further ones
        path.rmdir()
        path.parent.rmdir()
    hours, size = (time.time() - left.used_at) / 3600, left.size / 2**20
    log.info("%s is deleted: %.0f MiB of KV copies that nobody has used for %.1f hours", path, size, hours)
    return True


def _unless_used(folder: Path) -> int | None:
    with suppress(OSError):
        return _locked(folder, make=False)
    return None


def _locked(folder: Path, *, make: bool) -> int | None:
    """The lock of a folder, a file to be closed; None when somebody has it. Raises OSError."""
    for _ in range(MOST_TRIES):
        if make:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it has what users wrote
            except (FileExistsError, FileNotFoundError):
                if folder.exists() and not folder.is_dir():
                    raise
                continue  # just deleted
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0), 0o600)
        except FileNotFoundError:
            if make:
                continue  # just deleted
            raise
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # deleted by who had it
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
