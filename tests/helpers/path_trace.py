"""Which of our files a request passes: `install` records it in a server's processes, the rest reads the records."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import penstock

FOLDER = "PENSTOCK_PATH_TRACE"  # environment variable: where every traced process writes its events when it ends
OURS = str(Path(penstock.__file__).parent) + os.sep
ZMQ = os.path.join("zmq", "sugar", "socket.py")
MESSAGES = (b"Enqueue", b"StepReport")  # that are marked when they are sent and received

REQUEST = "> request"  # bytes of an HTTP request have arrived
KERNEL = "> kernel"  # a function of the native library is called


def sitecustomize() -> str:
    """Source of a module `sitecustomize` that installs the tracer in every process that finds it."""
    return "from tests.helpers.path_trace import install\ninstall()\n"


def install() -> None:
    """Record, until this process ends, the file of every call of a function of ours, and marks between them."""
    events: list[str] = []
    files: dict[CodeType, str] = {}

    def name(code: CodeType) -> str:
        """What to record of a call: a file of ours, a mark, or "" for nothing."""
        if code.co_filename.startswith(OURS):
            return code.co_filename.removeprefix(OURS)
        if code.co_name == "data_received":
            return REQUEST
        return ""

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call":
            found = files.get(code)
            if found is None:
                found = files[code] = name(code)
            if found:
                events.append(found)
            elif code.co_name == "send" and code.co_filename.endswith(ZMQ):
                events.extend(f"> sent {m}" for m in _messages([frame.f_locals["data"]]))
        elif event == "return" and code.co_name == "recv_multipart" and code.co_filename.endswith(ZMQ):
            events.extend(f"> received {m}" for m in _messages(arg or ()))

    _mark_kernels(events)
    threading.setprofile(profile)
    sys.setprofile(profile)
    atexit.register(lambda: Path(os.environ[FOLDER], f"{os.getpid()}.json").write_text(json.dumps(events)))


def _messages(frames: Any) -> Iterator[str]:
    for message in MESSAGES:
        if any(message in bytes(frame) for frame in frames):
            yield message.decode()


def _mark_kernels(events: list[str]) -> None:
    """ctypes tells a profiler nothing, so functions of the native library are called through one that does."""
    find = ctypes.CDLL.__getitem__

    class Marked:
        def __init__(self, function: Any) -> None:
            self.__dict__["function"] = function

        def __setattr__(self, name: str, value: object) -> None:
            setattr(self.function, name, value)

        def __call__(self, *arguments: Any) -> Any:
            events.append(KERNEL)
            return self.function(*arguments)

    def found(library: ctypes.CDLL, name: Any) -> Any:
        function = find(library, name)
        return Marked(function) if "penstock" in os.path.basename(library._name or "") else function

    ctypes.CDLL.__getitem__ = found  # type: ignore[method-assign]


def read(folder: Path) -> tuple[list[str], list[str]]:
    """Events of the frontend's process, and of the engine's."""
    traces = [json.loads(file.read_text()) for file in folder.iterdir()]
    (frontend,) = (events for events in traces if "> sent Enqueue" in events)
    (engine,) = (events for events in traces if "> received Enqueue" in events)
    return frontend, engine


def between(events: list[str], start: str, end: str) -> Iterator[set[str]]:
    """Files passed from each `start` that is followed by an `end` to the first such; what another start interrupts
    counts from the later one."""
    files: set[str] | None = None
    for event in events:
        if event == end and files is not None:
            yield files
            files = None
        if event == start:
            files = set()
        elif files is not None and not event.startswith("> "):
            files.add(event)
