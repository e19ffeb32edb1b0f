"""A deployment that was started here: a `penstock up`, a `penstock join` for each further host, and their processes."""

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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from penstock.core.errors import PenstockError, Unavailable
from penstock.drill.faults import HOST, on_host
from penstock.drill.hosts import Hosts, ends_with_us
from penstock.service.programs import KV_POOL

KEPT = 30  # lines of the log that an error shows
PART = re.compile(r" -m penstock\.cli\.(\w+) (\{.*\})")  # of a deployment, in its command line
LOOK = 0.05  # seconds
PORT = 7600  # of the master, where there are several hosts
WARM = re.compile(r"(\S+) is process (\d+), of the warm pool")  # says a launcher
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


def parent_of(pid: int) -> int:
    """Process id; 0 when the child has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


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
        return parent_of(self.pid)

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


@dataclass(slots=True)
class Said:
    """What a deployment's processes have logged.

    Attributes:
        routes: request id -> names of the instances that had it, of requests that have ended.
        raised: the last line of each exception that no client is told of.
        last: lines.
        warm: process id -> the engine that a process of the warm pool has become.
    """

    routes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    raised: list[str] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))
    warm: dict[int, str] = field(default_factory=dict)

    def _raise(self, line: str) -> None:
        if not line.startswith(EXPECTED):
            self.raised.append(line)

    def take(self, said: Mapping[str, Any]) -> None:
        """A line of JSON."""
        if said.get("logger") == "penstock.request":
            names = tuple(name for name in re.split("[>,]", said["instance"]) if name)
            self.routes[said["request_id"]] = (*self.routes.get(said["request_id"], ()), *names)
            return
        if "exception" in said:
            self._raise(said["exception"].rstrip().rpartition("\n")[2])
        message = said.get("message", "")
        if found := WARM.fullmatch(message):
            self.warm[int(found[2])] = found[1]
        self.last.append(f"{said.get('process', '')} {message}".strip())

    def take_raw(self, line: str, traceback: bool) -> bool:
        """Another line; whether the next one is inside a traceback, if this one was or not."""
        if traceback and line and not line.startswith((" ", "Traceback ", "The above", "During handling")):
            self._raise(line)
        self.last.append(line)
        return line.startswith("Traceback ") or (traceback and (not line or line.startswith((" ", "The a"))))


class Launcher:
    """A process that starts those of one host; what it and they log, as JSON, is read all the time.

    Args:
        words: of the command line, whose first ones may be other programs'.
        environment: of all its processes.
        log: gets every line.
        said: what they say.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: IO[bytes], said: Said) -> None:
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=dict(environment),
            start_new_session=True,  # ^C is the drill's, which stops it then
        )  # fmt: skip
        self.pid = self.process.pid
        self._log, self._said = log, said
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        traceback = False  # inside one that is no JSON
        for line in self.process.stderr:
            self._log.write(line)
            text, said = line.decode(errors="replace").rstrip("\n"), None
            if text.startswith("{"):
                with contextlib.suppress(ValueError):
                    said = json.loads(text)
            if said is None:
                traceback = self._said.take_raw(text, traceback)
            else:
                self._said.take(said)

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


class Deployed:
    """
    Args:
        files: of each host; the first one's is for `penstock up`, those of others for `penstock join`.
        hosts: where they run.
        environment: of all processes.
        log: file that gets every line of theirs.
        expected: what is to run.

    Attributes:
        urls: of its frontends; known when it serves.
        said: what was logged.
    """

    def __init__(
        self, files: Sequence[Path], hosts: Hosts, environment: Mapping[str, str], log: Path, expected: Expected
    ) -> None:
        self.hosts, self.expected = hosts, expected
        self.urls: list[str] = []
        self.said = Said()
        self._log = log.open("ab")
        self._settings: dict[str, dict[str, Any]] = {}  # of each process, of its last incarnation that was told any
        self._host: dict[str, int] = {}  # of each process
        self._launchers: list[Launcher] = []
        for host, file in enumerate(files):
            joins = ["join", f"{hosts.addresses[0]}:{PORT}", str(file)]
            more = joins if host else ["up", str(file), "--port", "0"]
            words = [*ends_with_us(), *hosts.enter(host), sys.executable, "-m", "penstock.cli.main", *more]
            self._launchers.append(Launcher(words, environment, self._log, self.said))

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
        if ended := self.ended():
            raise PenstockError(f"{ended}: {self._last_lines}")
        if time.monotonic() > deadline:
            raise PenstockError(f"{why}: {self._last_lines}")
        await asyncio.sleep(LOOK)

    @property
    def _last_lines(self) -> str:
        return "\n".join(self.said.last)

    def _found_frontends(self) -> bool:
        ports = {
            name: settings["server"]["port"] for name, settings in self.told().values() if name.startswith("frontend-")
        }
        names = [f"frontend-{number}" for number in range(self.expected.frontends)]
        if not all(name in ports for name in names):
            return False
        self.urls = [f"http://{self.hosts.addresses[0]}:{ports[name]}" for name in names]
        return True

    def told(self) -> dict[int, tuple[str, dict[str, Any]]]:
        """See `told`; of all hosts."""
        return {pid: each for host in range(len(self._launchers)) for pid, each in self._told_on(host).items()}

    def _told_on(self, host: int) -> dict[int, tuple[str, dict[str, Any]]]:
        launcher, found = self._launchers[host].pid, {}
        for pid, (known, settings) in told(launcher).items():
            name = on_host(known, host) if known == KV_POOL else known
            found[pid] = name, settings
            self._settings[name], self._host[name] = settings, host
        for pid, name in list(self.said.warm.items()):  # whose command line says nothing
            if name in self._settings and parent_of(pid) == launcher:
                found[pid] = name, self._settings[name]
        return found

    def pids(self) -> dict[str, int]:
        """Every process that runs now, by name."""
        return {name: pid for pid, (name, _) in self.told().items()}

    def settings(self) -> dict[str, dict[str, Any]]:
        """What each process was told at its start, by name."""
        return dict(self.told().values())

    def host_of(self, target: str) -> int:
        """Of a process that runs or has, or of a disk."""
        host = target.partition("@")[2]
        return int(host.removeprefix(HOST)) if host else self._host.get(target, 0)

    def checkpoint_of(self, engine: str) -> Path:
        """Folder of the model of one that runs or has."""
        return Path(self._settings[engine]["options"]["model"]).resolve()

    def grip(self, name: str) -> Grip | None:
        """Take hold of one of its processes; None when it does not run now."""
        launchers = {launcher.pid for launcher in self._launchers}
        for pid, (known, _) in self.told().items():
            if known == name:
                with contextlib.suppress(ProcessLookupError):
                    grip = Grip(name, pid, os.pidfd_open(pid))
                    if grip.pid_of_launcher in launchers:  # the number is still that process's
                        return grip
                    grip.close()
        return None

    def ended(self) -> str:
        """How a launcher ended by itself; "" while all run."""
        return next((why for launcher in self._launchers if (why := launcher.ended())), "")

    async def stop(self, patience: float) -> list[str]:
        """End it, hosts that have joined first; what was wrong about how it ended."""
        first, *joined = self._launchers
        wrong = [line for lines in await asyncio.gather(*(one.stop(patience) for one in joined)) for line in lines]
        wrong += await first.stop(patience)
        self._log.close()
        return wrong


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
