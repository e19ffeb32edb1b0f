"""Writes requests that have ended to a file, beside the event loop; see `request_record` for what is written.

A request's end costs a few references. A thread makes lines of them and appends many at once. It is behind by at most
`MOST_WAITING` tokens: what comes then is dropped and counted, as is what cannot be written.

An image or a video is written once in each file, before the first request that has it, so that a file that is left
behind by a rotation has all that its requests need.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec

from penstock import __version__
from penstock.core.clock import Clock
from penstock.core.errors import ConfigError
from penstock.obs.metrics import Metrics
from penstock.service.request_record import BEGINS, SUFFIX, VERSION, RecordedFile, RecordedRequest, older_file

Files: TypeAlias = "Mapping[str, bytes]"  # images and videos of a request, by their digest
NO_FILES: Files = {}
log = logging.getLogger("penstock.frontend")
FIELD = "record-requests"
LEAST = 1 << 20  # bytes of a record
EVERY = 0.05  # seconds in which more requests end that are written together: what a crash loses
MOST_WAITING = 1 << 22  # tokens that are not written yet; a request counts `OVERHEAD` more, 8 bytes of a file one
OVERHEAD = 1000  # as there may be long texts beside them
AT_ONCE = 1 << 18  # bytes in a write
SAY_AGAIN = 60.0  # seconds between two lines of the log on the same trouble
CLOSING = 5.0  # seconds for the rest to be written
FULL = (errno.ENOSPC, errno.EDQUOT)  # which may pass: nothing but the record waits for it


class RequestRecorder:
    """Appends to a file that it locks, and that others cannot read.

    Args:
        folder: made if it is not there.
        name: the frontend's, and the file's.
        size: bytes of the file and of the one from before its rotation, together.
        wall: seconds since 1970, UTC.

    Raises:
        ConfigError: the file cannot be written, is something else, or is written by another process. A disk without
            room is no such error: requests are dropped until it has some.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        size: int,
        metrics: Metrics,
        clock: Clock,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if size < LEAST:
            raise ConfigError(f"{FIELD}-size: {size}, allowed is at least {LEAST} bytes", f"{FIELD}-size")
        self._path = folder / f"{name}{SUFFIX}"
        self._limit = size // 2
        self._metrics, self._clock, self._wall = metrics, clock, wall
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()  # of the next two
        self._waiting: list[tuple[RecordedRequest, Files]] = []
        self._tokens = 0  # in them
        self._inside: set[str] = set()  # files that were written to the one that is open; of the thread
        self._said = ("", 0.0)  # what was logged last, and when
        self._file: int | None = None
        try:
            self._file = self._begun()
        except OSError as error:
            reason = error.strerror or error
            if error.errno not in FULL:
                raise ConfigError(f"{FIELD}: {self._path} cannot be written ({reason})", FIELD) from None
            log.warning("requests are not recorded in %s until there is room: %s", self._path, reason)
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="request-recorder", daemon=True)
        self._thread.start()

    def since_1970(self, time: float) -> float:
        """A time of the clock in seconds since 1970, UTC."""
        return self._wall() - self._clock.now() + time

    def add(self, request: RecordedRequest, files: Files = NO_FILES) -> None:
        """Have it written, with its images and videos; its lists may not change any more."""
        request.penstock = __version__
        tokens = _weight(request, files)
        with self._lock:
            fits = self._tokens + tokens <= MOST_WAITING or not self._waiting
            if fits:
                self._waiting.append((request, files))
                self._tokens += tokens
        if fits:
            self._wake.set()
        else:
            self._drop(1, "requests end faster than they can be written")

    def close(self) -> None:
        """Write the rest; what takes longer than `CLOSING` is lost."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSING)

    def check(self) -> None:
        with self._lock:
            assert self._tokens == sum(_weight(*each) for each in self._waiting), "tokens that wait are miscounted"

    # --- the thread

    def _run(self) -> None:
        while not (self._closing.is_set() and not self._waiting):
            self._wake.wait()
            self._closing.wait(EVERY)
            self._wake.clear()
            with self._lock:
                taken, self._waiting, self._tokens = self._waiting, [], 0
            self._write(taken)
        if self._file is not None:
            os.close(self._file)

    def _write(self, requests: list[tuple[RecordedRequest, Files]]) -> None:
        lines: list[tuple[bytes, Files]] = []
        size = 0
        for request, files in requests:
            try:
                line = self._encoder.encode(request) + b"\n"
            except Exception as error:
                self._drop(1, f"it cannot be written ({type(error).__name__}: {error})")
                continue
            length = len(line) + sum(map(_length, files.values()))
            if length > self._limit:
                self._drop(1, f"it has {length} bytes, at most {self._limit} are allowed, half of {FIELD}-size")
                continue
            if lines and size + length > AT_ONCE:
                self._append(lines)
                lines, size = [], 0
            lines.append((line, files))
            size += length
        if lines:
            self._append(lines)

    def _append(self, lines: list[tuple[bytes, Files]]) -> None:
        """All of them, or none."""
        try:
            if self._file is None:  # there was no room for it
                self._file = self._begun()
            status = os.fstat(self._file)
            content, inside = self._content(lines, self._inside)
            is_full = status.st_size and status.st_size + len(content) > self._limit
            is_removed = not status.st_nlink
            if is_full and not is_removed:
                with suppress(FileNotFoundError):
                    self._path.replace(older_file(self._path))
            if is_full or is_removed:
                file = self._open()
                os.close(self._file)
                self._file = file
                content, inside = self._content(lines, set())
            end = os.fstat(self._file).st_size
            try:
                _write_all(self._file, content)
            except OSError:
                with suppress(OSError):  # the next would follow half a line
                    os.ftruncate(self._file, end)
                raise
        except (OSError, ConfigError) as error:
            self._drop(len(lines), str(error))
            return
        self._inside = inside
        self._metrics.observe_recorded("written", len(lines))

    def _content(self, lines: list[tuple[bytes, Files]], inside: set[str]) -> tuple[bytes, set[str]]:
        """What is to be appended to a file that has such images and videos inside, and what it has then."""
        content, inside = list[bytes](), {*inside}
        for line, files in lines:
            for digest, data in files.items():
                if digest not in inside:
                    inside.add(digest)
                    content.append(self._encoder.encode(RecordedFile(VERSION, digest, data)) + b"\n")
            content.append(line)
        return b"".join(content), inside

    def _drop(self, count: int, why: str) -> None:
        self._metrics.observe_recorded("dropped", count)
        said, at = self._said
        now = self._clock.now()
        if why != said or now - at > SAY_AGAIN:
            self._said = why, now
            log.error("requests are not recorded in %s: %s", self._path, why)

    def _begun(self) -> int:
        """The file, in a folder that is made for it. Raises as `_open`."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._open()

    def _open(self) -> int:
        """The file, at the end of its last whole line. Raises ConfigError, OSError."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            begin = os.pread(file, len(BEGINS), 0)
            if begin and not BEGINS.startswith(begin):
                raise ConfigError(f"{FIELD}: {self._path} is no record of requests", FIELD)
            os.fchmod(file, 0o600)
            os.ftruncate(file, _whole(file))
        except BlockingIOError:
            os.close(file)
            raise ConfigError(f"{FIELD}: {self._path} is written by another process", FIELD) from None
        except BaseException:
            os.close(file)
            raise
        return file


def _length(file: bytes) -> int:
    """Bytes of its line, at most."""
    return len(file) * 4 // 3 + 128


def _weight(request: RecordedRequest, files: Files) -> int:
    numbers = sum(len(output.tokens) + 3 * len(output.logprobs or ()) for output in request.outputs)
    beside = 3 * len(request.embedding or ()) + sum(map(len, files.values())) // 8
    return OVERHEAD + len(request.prompt) + numbers + beside  # numbers are longer than tokens


def _write_all(file: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


def _whole(file: int) -> int:
    """Bytes up to the end of the last line that has one."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - AT_ONCE)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
