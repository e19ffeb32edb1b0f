"""What a process tells those who watch it, in mapped files.

Its heartbeat proves that it makes progress: a counter, and how long one beat may take.

A turn of its loop is a beat. Of an engine, the beginning and the end of a step are too; the step itself is one call
into the model, so there the limit is what no working step takes: it grows with the step's tokens.

An engine's black box says what it was computing when it ended: the file outlives its process, however that ends.
Whoever started the engine reads it with the exit code. An engine that failed in a step, or was ended by a signal that
only a fault raises, was broken by something in the step; one that was killed from outside was not. SIGKILL proves
nothing: the system sends it for want of memory, and people and supervisors for any reason.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

EVERY = 0.5  # seconds between the beats of an event loop
TURN = 60.0  # seconds that one turn of a loop may take, aside from a step's tokens
STILL_LOADING = 60.0  # seconds that a process may do nothing while it loads, which may be from a slow disk or network
TOKEN_ON_CPU = 1.0  # seconds per token, beyond which a step counts as hung
TOKEN_ELSEWHERE = 0.01

FATAL = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP})
ROOM = 1 << 17  # bytes for ids, which is 2,500 of the usual length; what does not fit is left out
_HEAD = struct.Struct("=qQ?I")  # incarnation, steps begun, whether it has failed, bytes of ids
_LAYOUT = struct.Struct("=Qdd")  # beats, limit, still


@dataclass(frozen=True, slots=True)
class Beat:
    """
    Attributes:
        number: of the beat; 0 while the process loads.
        limit: seconds within which the next one comes, if all is well.
        still: seconds that it may do nothing until then; 0 where whoever watches sets the limit.
    """

    number: int
    limit: float
    still: float = 0.0


LOADING = Beat(0, inf, STILL_LOADING)


def _mapped(path: Path, size: int) -> mmap.mmap:
    """A file of so many bytes, which has its room on the disk: a hole in it would be a fault of the process that writes
    there once the disk is full. What an earlier process had is taken over, which needs no more room."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        if os.fstat(file.fileno()).st_size != size:
            file.truncate(0)
            file.write(bytes(size))
            file.flush()
        return mmap.mmap(file.fileno(), size)


def forget(path: Path) -> None:
    """The next process begins to beat anew. The file stays, and its room on the disk with it."""
    for each, size in ((path, _LAYOUT.size), (box_of(path), _HEAD.size)):
        with contextlib.suppress(FileNotFoundError), each.open("r+b") as file:
            file.write(bytes(min(size, os.fstat(file.fileno()).st_size)))


def step_limit(tokens: int, device: str) -> float:
    """Seconds that a step of so many tokens takes at the very most.

    Args:
        device: such as "cpu", "cuda:0" or "modelled:h200".
    """
    return TURN + tokens * (TOKEN_ELSEWHERE if device.startswith("cuda") else TOKEN_ON_CPU)


class Heartbeat:
    """The side that beats.

    Args:
        path: of the file.
        device: where an engine computes its steps.
    """

    def __init__(self, path: Path, device: str = "cpu") -> None:
        self._map = _mapped(path, _LAYOUT.size)
        self._map[:] = bytes(_LAYOUT.size)
        self._number = 0
        self._device = device

    def beat(self, tokens: int = 0) -> None:
        """It gets on.

        Args:
            tokens: of the step that begins; 0 where none does.
        """
        self._number += 1
        limit = step_limit(tokens, self._device)
        # others than a CPU compute, or are waited for, without this process doing anything
        still = 0.0 if not tokens or self._device == "cpu" else limit
        _LAYOUT.pack_into(self._map, 0, self._number, limit, still)


async def keep_beating(path: Path) -> None:
    """The heartbeat of a process that is an event loop; runs until it is cancelled."""
    import asyncio  # not at the top: an engine starts without it

    heartbeat = Heartbeat(path)
    while True:
        heartbeat.beat()
        await asyncio.sleep(EVERY)


def read_heartbeat(path: Path) -> Beat:
    """The newest beat."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return LOADING
    beat = Beat(*_LAYOUT.unpack(data)) if len(data) == _LAYOUT.size else LOADING
    return beat if beat.number else LOADING


@dataclass(frozen=True, slots=True)
class LastStep:
    """
    Attributes:
        incarnation: of the engine.
        steps: that it had begun.
        failed: it had noticed a failure itself.
        requests: in the last of these.
    """

    incarnation: int
    steps: int
    failed: bool
    requests: tuple[str, ...]

    def broken(self, code: int) -> tuple[str, ...]:
        """The requests in the step that broke the engine; none where it was not one.

        Args:
            code: exit code, as `subprocess` has it.
        """
        return self.requests if self.failed or -code in FATAL else ()


def box_of(heartbeat: Path) -> Path:
    """The file, beside the heartbeat's."""
    return heartbeat.with_name(heartbeat.name + ".step")


class BlackBox:
    """The engine's side.

    Args:
        path: of the file.
        incarnation: not 0.
    """

    def __init__(self, path: Path, incarnation: int) -> None:
        self._map = _mapped(path, _HEAD.size + ROOM)
        self._incarnation, self._steps, self._size = incarnation, 0, 0
        self._requests: Sequence[str] = ()
        self._write(failed=False)

    def begin(self, requests: Sequence[str]) -> None:
        """These are computed from now on; none when nothing is."""
        self._steps += bool(requests)
        if requests != self._requests:
            self._requests = requests
            self._write(failed=False, size=0)  # ids that are being written are nobody's
            text = "\n".join(requests).encode()
            self._size = len(text) if len(text) <= ROOM else text.rindex(b"\n", 0, ROOM)
            self._map[_HEAD.size : _HEAD.size + self._size] = text[: self._size]
        self._write(failed=False, size=self._size)

    def fail(self, requests: Sequence[str]) -> None:
        """It ends, because of a failure with these; none where it was not because of requests."""
        self.begin(requests)
        self._write(failed=True, size=self._size)

    def _write(self, *, failed: bool, size: int = 0) -> None:
        _HEAD.pack_into(self._map, 0, self._incarnation, self._steps, failed, size)


def read_black_box(path: Path) -> LastStep | None:
    """None where there is none, or nothing in it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) != _HEAD.size + ROOM:
        return None
    incarnation, steps, failed, size = _HEAD.unpack_from(data)
    if not incarnation:
        return None
    text = data[_HEAD.size : _HEAD.size + min(size, ROOM)].decode(errors="replace")
    return LastStep(incarnation, steps, failed, tuple(text.split("\n")) if text else ())
