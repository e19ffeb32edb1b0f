"""Blocks as files in a directory that hosts share, as on a site's parallel file system.

    DIR/NAMESPACE/ab/abcdef...    a record (`block_store`) under its key, in a folder by the key's first byte

A file is written under another name, and renamed when it is whole. Nobody has a list of them, and nobody locks
anything: engines on several hosts write and delete as they like, and whatever is gone when it is read is a miss.

Each folder holds its share of the size, as a set of a set-associative cache does. Who writes looks at the folder that
it writes to, now and then, and deletes what was used longest ago; so to keep the bound costs the same whatever the size
is, and engines that do so at the same time exceed it by a 64th each. A file's time is when it was put, got or found
last, to the minute.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from penstock.core.errors import ConfigError
from penstock.core.sizes import size
from penstock.transfer.files import DIRECT, FAILS, FULL, READ_ONLY, opened, read_into, write_all
from penstock.transfer.memory import PoolMemory
from penstock.transfer.store_url import StoreURL

SIZE = 100 << 30  # bytes by default
FOLDERS = 256
LOOKS = 64  # at a folder, while it is filled once
SAMPLE = 256  # files whose times are looked at, of a folder with more
TOUCH_AFTER = 60.0  # seconds for which a file's time is good enough
UNFINISHED, ABANDONED_AFTER = ".", 3600.0  # names of files that are not whole begin so; seconds
GONE = (errno.ENOENT, errno.ESTALE)


class Directory:
    """
    Args:
        root: exists already, so that a file system which is not mounted is noticed.
        limit: bytes of the namespace's files.
    """

    threads = 8
    batch = 1

    def __init__(self, root: Path, namespace: str, limit: int) -> None:
        self._root, self._folder, self._limit = root, root / namespace, limit
        self._lock = threading.Lock()
        self._unseen: dict[Path, int] = {}  # folder -> files that may be put before it is looked at

    @classmethod
    def of_url(cls, url: StoreURL, namespace: str) -> Directory:
        limit = url.option("size", size, SIZE)
        if url.host not in ("", "localhost") or not url.path.startswith("/"):
            raise url.wrong("file:///PATH, with three slashes")
        return cls(Path(url.path), namespace, limit)

    def open(self, memory: PoolMemory) -> None:
        self._memory, self._record_bytes = memory, memory.block_bytes
        self._share = self._limit // FOLDERS // self._record_bytes  # files
        if not self._share:
            least = FOLDERS * self._record_bytes / 2**20
            raise ConfigError(
                f"remote-cache: size {self._limit / 2**20:.0f} MiB, allowed with blocks of this size is "
                f"{least:.0f} MiB and more",
                "remote-cache",
            )
        self._stride = max(1, self._share // LOOKS)
        try:
            if not self._root.is_dir():
                raise FileNotFoundError(errno.ENOENT, "there is no such directory; is its file system mounted?")
            self._folder.mkdir(mode=0o700, exist_ok=True)  # it has what users wrote
            self._direct = self._tried()
        except OSError as error:
            if error.errno in FAILS:
                raise
            reason = error.strerror or str(error)
            raise ConfigError(f"remote-cache: {str(self._root)!r} cannot be used ({reason})", "remote-cache") from None

    def write(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[bool]:
        return [self._write(self._path(key), self._memory.block(slot)) for key, slot in zip(keys, slots, strict=True)]

    def read(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[bool]:
        return [self._read(self._path(key), self._memory.block(slot)) for key, slot in zip(keys, slots, strict=True)]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._is_there(self._path(key)) for key in keys]

    def drop(self, key: bytes) -> None:
        self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        pass

    def _path(self, key: bytes) -> Path:
        return self._folder / key[:1].hex() / key.hex()

    def _tried(self) -> int:
        """The flag by which files are read and written past the page cache."""
        path = self._folder / f"{UNFINISHED}{token_hex(8)}"
        for direct in (DIRECT, 0):
            try:
                fd = opened(path, direct)
                try:
                    write_all(fd, self._memory.block(0), 0)
                    if read_into(fd, self._memory.block(0), 0) == self._record_bytes:
                        return direct
                finally:
                    os.close(fd)
            except OSError as error:
                if error.errno in FULL:
                    return 0
                if not direct:
                    raise
            finally:
                path.unlink(missing_ok=True)
        raise OSError(errno.EIO, "what was written cannot be read")

    def _is_there(self, path: Path) -> bool:
        try:
            stat = path.stat()
        except OSError as error:
            if error.errno in GONE:
                return False
            raise
        _touch(path, stat)
        return stat.st_size == self._record_bytes

    def _write(self, path: Path, record: memoryview) -> bool:
        if self._is_there(path):
            return True
        unfinished = path.with_name(f"{UNFINISHED}{token_hex(8)}")
        try:
            self._make_room(path.parent)
            self._write_new(unfinished, record)
            unfinished.rename(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            if error.errno in (*FULL, *READ_ONLY):
                return False  # what is there can still be read
            if error.errno in GONE and self._root.is_dir():  # whoever deleted its folder
                return False
            raise
        return True

    def _write_new(self, path: Path, record: memoryview) -> None:
        try:
            fd = opened(path, self._direct)
        except FileNotFoundError:
            for folder in (self._folder, path.parent):  # and no others: that file system may be mounted no longer
                folder.mkdir(mode=0o700, exist_ok=True)
            fd = opened(path, self._direct)
        try:
            write_all(fd, record, 0)
        finally:
            os.close(fd)  # some file systems tell only now that it is full

    def _read(self, path: Path, record: memoryview) -> bool:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | self._direct)
            try:
                stat = os.fstat(fd)
                _touch(fd, stat)
                return stat.st_size == len(record) == read_into(fd, record, 0)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in GONE:
                return False
            raise

    def _make_room(self, folder: Path) -> None:
        """For one more file."""
        with self._lock:
            left = self._unseen.get(folder, 0)
            self._unseen[folder] = left - 1 if left else self._stride - 1
        if left:
            return
        names = [name for name in _names(folder) if not _is_abandoned(folder / name)]
        excess = len(names) + self._stride - self._share
        if excess > 0:
            whole = [name for name in names if not name.startswith(UNFINISHED)]
            sample = random.sample(whole, min(len(whole), max(SAMPLE, 4 * excess)))
            for _, path in sorted(_with_times(folder, sample))[:excess]:
                path.unlink(missing_ok=True)


def _touch(file: Path | int, stat: os.stat_result) -> None:
    """It is of use now."""
    if abs(time.time() - stat.st_mtime) > TOUCH_AFTER:
        with suppress(OSError):  # it may be gone, or somebody else's
            os.utime(file)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _is_abandoned(path: Path) -> bool:
    """Whether its writer has ended before it was whole. Then it is deleted."""
    if not path.name.startswith(UNFINISHED):
        return False
    with suppress(FileNotFoundError):
        if time.time() - path.stat().st_mtime < ABANDONED_AFTER:
            return False
        path.unlink()
    return True


def _with_times(folder: Path, names: Iterable[str]) -> Iterator[tuple[float, Path]]:
    for name in names:
        with suppress(FileNotFoundError):
            yield (folder / name).stat().st_mtime, folder / name
