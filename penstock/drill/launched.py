"""A deployment that was started here: a `penstock up` and its processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import PenstockError, Unavailable

KEPT = 30  # lines of the log that an error shows
PART = re.compile(r" -m penstock\.cli\.(\w+) (\{.*\})")  # of a deployment, in its command line
LOOK = 0.05  # seconds
STOPPING = 60.0  # seconds until the last line of a launcher that has ended is read
EXPECTED = ("penstock.core.errors.EngineFailure", "penstock.core.errors.Unavailable")  # what clients are told as well


def told(launcher: int) -> dict[int, tuple[str, dict[str, Any]]]:
    """Process id -> name and settings, of everything that runs under a launcher."""
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    found = {}
    for pid in children:
        with contextlib.suppress(OSError, ValueError):  # it has gone, or is just beginning
            line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")  # one word, where a process has set it
            if part := PART.search(line):  # not between fork and exec, and no zombie
                settings = json.loads(part[2])
                found[int(pid)] = (settings.get("name") or part[1].replace("_", "-"), settings)
    return found


@dataclass(frozen=True, slots=True)
class Grip:
    """One process, by a descriptor: never another one that was given its number later.

    Attributes:
        descriptor: to be closed with `close`.
    """

    name: str
    pid: int
    descriptor: int

    @property
    def pid_of_launcher(self) -> int:
        """0 when it has ended."""
        try:
            return int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return 0

    def send(self, how: int) -> bool:
        """Whether it was there to get the signal."""
        try:
            signal.pidfd_send_signal(self.descriptor, how)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(slots=True, kw_only=True)
class Expected:
    """What is to run.

    Attributes:
        instances: names, of those that are started at first.
        frontends: how many.
    """

    instances: frozenset[str]
    frontends: int


class Deployed:
    """A launcher and its processes; what they log, as JSON, is read all the time.

    Args:
        words: of `penstock`, such as ["up", FILE].
        environment: of all its processes.
        log: file that gets every line of it.
        expected: what is to run.

    Attributes:
        urls: of its frontends; known when it serves.
        routes: request id -> names of the instances that had it, of requests that have ended.
        raised: the last line of each exception that was logged and that no client is told of.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path, expected: Expected) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=dict(environment),
            start_new_session=True,  # ^C is the drill's, which stops it then
        )  # fmt: skip
        self.expected = expected
        self.urls: list[str] = []
        self.routes: dict[str, tuple[str, ...]] = {}
        self.raised: list[str] = []
        self._last: list[str] = []
        self._log = log.open("ab")
        self._raw = False  # inside a traceback that is no JSON
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._log.write(line)
            self._take(line.decode(errors="replace").rstrip("\n"))
        self._log.close()

    def _take(self, line: str) -> None:
        said: Any = None
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                said = json.loads(line)
        if said is None:
            if self._raw and line and not line.startswith((" ", "Traceback ", "The above", "During handling")):
                self._raise(line)
            self._raw = line.startswith("Traceback ") or (self._raw and (not line or line.startswith((" ", "The a"))))
            self._last = [*self._last[-KEPT:], line]
            return
        if said.get("logger") == "penstock.request":
            names = tuple(name for name in re.split("[>,]", said["instance"]) if name)
            self.routes[said["request_id"]] = (*self.routes.get(said["request_id"], ()), *names)
            return
        if "exception" in said:
            self._raise(said["exception"].rstrip().rpartition("\n")[2])
        self._last = [*self._last[-KEPT:], f"{said.get('process', '')} {said.get('message', '')}".strip()]

    def _raise(self, line: str) -> None:
        if not line.startswith(EXPECTED):
            self.raised.append(line)

    def _said(self) -> str:
        """The end of its log."""
        return "\n".join(self._last)

    # --- its processes

    async def serves(self, patience: float) -> None:
        """Wait until every frontend has every instance. Raises PenstockError when that takes too long."""
        deadline = time.monotonic() + patience
        while not self._found_frontends():
            await self._wait(deadline, "its frontends did not start")
        for url in self.urls:
            while not self.expected.instances <= await states(url, ready=True):
                await self._wait(deadline, f"its instances were not ready after {patience:g} s")

    async def _wait(self, deadline: float, why: str) -> None:
        if self.process.poll() is not None:
            raise PenstockError(f"the deployment ended with {self.process.returncode}: {self._said()}")
        if time.monotonic() > deadline:
            raise PenstockError(f"{why}: {self._said()}")
        await asyncio.sleep(LOOK)

    def _found_frontends(self) -> bool:
        ports = {
            name: settings["server"]["port"] for name, settings in self.told().values() if name.startswith("frontend-")
        }
        names = [f"frontend-{number}" for number in range(self.expected.frontends)]
        if not all(name in ports for name in names):
            return False
        self.urls = [f"http://127.0.0.1:{ports[name]}" for name in names]
        return True

    def told(self) -> dict[int, tuple[str, dict[str, Any]]]:
        """See `told`; of this launcher."""
        return told(self.process.pid)

    def pids(self) -> dict[str, int]:
        """Every process that runs now, by name."""
        return {name: pid for pid, (name, _) in self.told().items()}

    def settings(self) -> dict[str, dict[str, Any]]:
        """What each process was told at its start, by name."""
        return dict(self.told().values())

    def grip(self, name: str) -> Grip | None:
        """Take hold of one of its processes; None when it does not run now."""
        for pid, (known, _) in self.told().items():
            if known == name:
                with contextlib.suppress(ProcessLookupError):
                    grip = Grip(name, pid, os.pidfd_open(pid))
                    if grip.pid_of_launcher == self.process.pid:  # the number is still that process's
                        return grip
                    grip.close()
        return None

    def ended(self) -> str:
        """How it ended by itself; "" while it runs."""
        code = self.process.poll()
        return "" if code is None else f"the launcher ended with {code}"

    async def stop(self, patience: float) -> list[str]:
        """End it; what was wrong about how it ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + patience
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(LOOK)
        code = self.process.poll()
        if code is None:
            self.process.kill()  # the others end when they see it
            self.process.wait()
        self._reader.join(STOPPING)
        if code == 0:
            return []
        return ["the launcher did not end in time" if code is None else f"the launcher ended with {code}"]


async def states(url: str, *, ready: bool = False) -> set[str]:
    """Names of the instances that a frontend knows, or of those that are ready; none while it does not answer."""
    try:
        known = json.loads(await fetch(url + "/health"))["instances"]
    except (Unavailable, ValueError, KeyError):
        return set()
    return {each["name"] for each in known if not ready or each["state"] == "ready"}


async def fetch(url: str, patience: float = 2.0) -> str:
    """The body of a GET that is answered with 200. Raises Unavailable."""
    import aiohttp

    try:
        timeout = aiohttp.ClientTimeout(total=patience)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            text = await answer.text()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise Unavailable(f"{url}: no answer ({type(error).__name__})") from None
    if answer.status != 200:
        raise Unavailable(f"{url} answered {answer.status}")
    return text
