"""The processes that decode, as many as there are threads that wait for them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from penstock.core.request import MediaKind
from penstock.media.limits import MediaLimits
from penstock.media.processor import AnyProcessor, Made, Refused
from penstock.media.worker import Answer, Task, read, write

_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Answer).decode


class Worker:
    """One process, started when it is needed first, and again after one that has ended or was killed. For one thread at
    a time."""

    def __init__(self, command: Callable[[], list[str]] = lambda: [sys.executable, "-m", "penstock.media.worker"]):
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def make(
        self, kind: MediaKind, data: bytes, processor: AnyProcessor, limits: MediaLimits, *, alone: bool = True
    ) -> Made:
        """As `decode.make`. Raises Refused."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = subprocess.Popen(
                self._command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(limits.decode_seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            write(process.stdin, _encode(Task(kind, data, processor, limits, alone)))
            body = read(process.stdout)
        except OSError:
            body = None
        finally:
            timer.cancel()
        if late.is_set() or body is None:
            self.close()
            if late.is_set():
                raise Refused(f"takes more than {limits.decode_seconds:g} s to decode")
            raise Refused("is broken, it ends what decodes it")
        answer = _decode(body)
        if answer.made is None:
            raise Refused(answer.why)
        return answer.made

    def close(self) -> None:
        """Kill its process, if there is one."""
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was not written is for nobody
                        pipe.close()
            process.wait()
