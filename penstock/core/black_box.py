"""What an engine was computing when it ended: a mapped file that outlives its process, however that ends.

Whoever started the engine reads it with the exit code. An engine that failed in a step, or was ended by a signal that
only a fault raises, was broken by something in the step; one that was killed from outside was not. SIGKILL proves
nothing: the system sends it for want of memory, and people and supervisors for any reason.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

FATAL = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP})
ROOM = 1 << 17  # bytes for ids, which is 2,500 of the usual length; what does not fit is left out
_HEAD = Struct("=qQ?I")  # incarnation, steps begun, whether it has failed, bytes of ids


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
        path: of the file, which is made anew.
    """

    def __init__(self, path: Path, incarnation: int) -> None:
        with path.open("w+b") as file:
            os.truncate(file.fileno(), _HEAD.size + ROOM)
            self._map = mmap.mmap(file.fileno(), _HEAD.size + ROOM)
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
    """None where there is none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) != _HEAD.size + ROOM:
        return None
    incarnation, steps, failed, size = _HEAD.unpack_from(data)
    text = data[_HEAD.size : _HEAD.size + min(size, ROOM)].decode(errors="replace")
    return LastStep(incarnation, steps, failed, tuple(text.split("\n")) if text else ())
