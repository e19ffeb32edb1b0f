"""The flight recorder's file: FILE, and FILE.1 from before the last rotation.

After `MAGIC` come frames: length and CRC-32 of a record, 4 bytes each, little-endian, and the record. A crash damages
the last frame at most; an incomplete frame is not read, and overwritten.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from struct import Struct
from typing import BinaryIO
from zlib import crc32

import msgspec

from penstock.core.clock import Clock
from penstock.core.errors import ConfigError
from penstock.service.recorder import Entry, FlightRecorder
from penstock.service.recording import AnyRecord, RecordDecoder, RecordEncoder, from_bytes, to_bytes

log = logging.getLogger("penstock.master")
MAGIC = b"penstock flight recording 1\n"
HEAD = Struct("<II")
LARGEST = 1 << 26  # bytes of a record; a length beyond it is none
LIMIT = 128 << 20  # bytes of a file; there are two
EVERY = 0.05  # seconds between two looks at the recorder: what a crash loses
AGAIN = 10.0  # seconds from a failure until it is tried again
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FIELD = "flight-recorder"


class RecorderFile:
    """Appends what a recorder holds to a file, which it locks.

    Args:
        limit: bytes after which the file becomes FILE.1, and the one of that name is gone.
        wall: seconds since 1970, UTC.

    Raises:
        ConfigError: the file cannot be written, is something else, or is written by another process. Not for want of
            room, which there may be later.
    """

    def __init__(
        self,
        path: Path,
        recorder: FlightRecorder,
        clock: Clock,
        limit: int = LIMIT,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._recorder, self._clock, self._limit, self._wall = path, recorder, clock, limit, wall
        self._encoder = RecordEncoder()
        self._written = recorder.total  # entries
        self._whole = 0  # bytes of the file up to the last record that is whole; 0 while that is to be found
        self._again = 0.0  # when it is tried again; 0 while it has not failed
        self._file: BinaryIO = BytesIO()  # until there is one
        try:
            self._open()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise ConfigError(f"{FIELD}: {path} cannot be written ({error.strerror or error})", FIELD) from None
            self._stop(error)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(EVERY)
            self.flush()

    def flush(self) -> None:
        """Write new entries. After a failure, which is logged, those of `AGAIN` seconds are not; serving continues."""
        new, behind = self._recorder.since(self._written), self._recorder.total - self._written
        self._written += behind
        if not new or self._clock.now() < self._again:
            return
        if len(new) < behind:
            log.warning("the flight recorder could not keep up: %d entries are missing", behind - len(new))
        try:
            if self._again:
                self._open()
                self._again = 0.0
                log.warning("the flight recorder goes on: %s; what came since it stopped is missing", self._path)
            for entry in new:
                self._write(self._encoder.encode(entry))
                if self._file.tell() > self._limit:
                    self._rotate()
            self._flush()
        except Exception as error:
            self._stop(error)

    def _flush(self) -> None:
        self._file.flush()
        self._whole = self._file.tell()

    def _stop(self, error: Exception) -> None:
        if not self._again:
            log.error("the flight recorder stops: %s: %s", self._path, error)
        self._again = self._clock.now() + AGAIN
        with contextlib.suppress(OSError):  # what is not written yet
            self._file.close()

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        try:
            self._file.close()
        except OSError as error:  # left by an earlier write to a full disk
            log.error("the flight recorder could not write its end: %s: %s", self._path, error)

    def _open(self) -> None:
        self._file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"{FIELD}: {self._path} is written by another process", FIELD) from None
        if os.fstat(self._file.fileno()).st_size == 0:
            self._file.write(MAGIC)
        else:
            _check_kind(self._file, self._path, FIELD)
            if not self._whole:
                self._whole = self._file.tell() + sum(HEAD.size + len(record) for record in _frames(self._file))
            self._file.seek(self._whole)
            self._file.truncate()
        self._write([self._encoder.begin(self._clock.now(), self._wall())])
        self._flush()

    def _rotate(self) -> None:
        self._file.close()
        self._path.replace(_older(self._path))
        self._whole = 0
        self._open()

    def _write(self, records: list[AnyRecord]) -> None:
        for record in records:
            content = to_bytes(record)
            self._file.write(HEAD.pack(len(content), crc32(content)) + content)


def read(path: Path) -> Iterator[tuple[float, Entry]]:
    """Every entry of a recording, the oldest first, with its time in seconds since 1970, UTC.

    Raises ConfigError when there is none, or it makes no sense.
    """
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(path.open("rb"))]
            if _older(path).exists():
                older = stack.enter_context(_older(path).open("rb"))
                if not os.path.sameopenfile(older.fileno(), files[0].fileno()):  # rotated between the two
                    files.insert(0, older)
        except OSError as error:
            raise ConfigError(f"--file: {path} cannot be read ({error.strerror or error})", "file") from None
        for file in files:
            _check_kind(file, path, "--file")
            try:
                yield from RecordDecoder().decode(map(from_bytes, _frames(file)))
            except (msgspec.DecodeError, ValueError) as error:
                raise ConfigError(f"--file: {file.name} is of another version, or damaged ({error})", "file") from None


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _check_kind(file: BinaryIO, path: Path, source: str) -> None:
    if file.read(len(MAGIC)) != MAGIC:
        raise ConfigError(f"{source}: {path} is no flight recording", source.lstrip("-"))


def _frames(file: BinaryIO) -> Iterator[bytes]:
    """The records from here on, as far as they are whole."""
    while len(head := file.read(HEAD.size)) == HEAD.size:
        length, checksum = HEAD.unpack(head)
        content = file.read(length) if 0 < length <= LARGEST else b""
        if not content or len(content) < length or crc32(content) != checksum:
            return
        yield content
