"""What a Ray actor does on its node: it runs an instance's engine, as a launcher does on its own machine."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from glob import escape
from itertools import count
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.cli.http import bind
from penstock.cli.run_folder import PREFIX, run_folder
from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError
from penstock.core.host_port import join_host_port
from penstock.core.wire import PROTOCOL
from penstock.service.checkpoint import find_checkpoint, fingerprint
from penstock.service.programs import GIVERS, make_program
from penstock.service.spawner import LocalProcess
from penstock.service.supervisor import Program
from penstock.service.warm import WarmProcess
from penstock.service.watch import Trouble

VERSION = f"penstock {__version__} with protocol {PROTOCOL}"
LOOK = 0.05  # seconds between two looks at the engine, while somebody waits for news
LOOK_CLOSELY = 0.5  # seconds between two checks of its progress
PATIENCE = 0.5  # seconds after which nothing new is news
LINES = 1000  # of the engine's standard error that are kept


@dataclass(frozen=True, slots=True)
class Order:
    """What an actor is to run. It travels as a dictionary of plain values, which another version of penstock can read.

    Attributes:
        version: of who asks.
        model: a checkpoint's folder on every node, a hub name, or demo.
        digest: of that checkpoint.
        settings: of the engine's process, but for what its node decides.
        environment: of the process, beside the node's.
        heartbeat_timeout: seconds without a sign of life after which it hangs.
        deployment: no other has this word.
        givers: instances of it that may give weights -> where.
    """

    version: str
    model: str
    digest: str
    settings: dict[str, Any]
    environment: dict[str, str]
    heartbeat_timeout: float
    deployment: str = ""
    givers: dict[str, str] = field(default_factory=dict)


class EngineActor:
    """Runs one instance's engine on a Ray node, one incarnation after another. Its methods may be called from several
    threads."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._door: socket.socket | None = None  # where the engine listens; the same for every incarnation
        self._number = 0  # of the incarnation
        self._was_warm = False
        self._process: LocalProcess | None = None
        self._warm: WarmProcess | None = None
        self._lines = _Lines()
        self._trouble: Trouble | None = None
        self._watched_at = 0.0
        self._clock = SystemClock()

    def start(self, number: int, order: dict[str, Any]) -> dict[str, Any]:
        """Run an incarnation, unless it was started already: who asks may not have had the answer.

        Args:
            number: of the incarnation; one that still runs is killed.
            order: fields of an `Order`.

        Returns:
            "endpoint", "node" and "pid", and whether it was "warm"; or "refused", with the reason why it cannot run
            here.
        """
        with self._lock:
            address = _node_address()
            if number != self._number or self._process is None:
                try:
                    self._run(number, Order(**order), address)
                except ConfigError as error:
                    return {"refused": f"{error}, on Ray node {address}"}
            assert self._process is not None
            said = {"endpoint": self._process.endpoint, "node": address, "pid": self._process.pid}
            return said | {"warm": self._was_warm}

    def warm(self, order: dict[str, Any]) -> dict[str, Any]:
        """Have a process that imports what an engine needs, and all but the engine; returns when it is there.

        Args:
            order: "environment", as of an `Order`.

        Returns:
            "node" and "pid"; or "refused", with the reason why it is not there.
        """
        with self._lock:
            address = _node_address()
            self._open(address)
            self._warm = self._warm or WarmProcess(_environment(order["environment"]))
            process = self._warm
        while not process.is_ready():
            if process.process.poll() is not None:
                return {"refused": f"{process.last_output() or 'it said nothing'}, on Ray node {address}"}
            time.sleep(LOOK)
        return {"node": address, "pid": process.process.pid}

    def is_warm(self) -> dict[str, Any]:
        """Empty; or "refused" where its process has ended."""
        with self._lock:
            if self._warm is None or self._warm.process.poll() is None:
                return {}
            return {"refused": f"{self._warm.last_output() or 'it said nothing'}, on Ray node {_node_address()}"}

    def _run(self, number: int, order: Order, address: str) -> None:
        directory = find_checkpoint(order.model)
        if fingerprint(directory) != order.digest:
            raise ConfigError(f"model: {order.model} is another checkpoint than that of the launcher", "model")
        if self._process is not None:
            self._process.close()
        self._open(address)
        program, environment = self._program(order, directory, address), _environment(order.environment)
        self._number, self._trouble, self._lines = number, None, _Lines()
        warm, self._warm = self._warm, None
        if warm is not None and not (warm.process.poll() is None and warm.fits(environment) and warm.become(program)):
            warm.close()
            warm = None
        self._was_warm = warm is not None
        process = None if warm is None else warm.process
        now = self._clock.now()
        self._process = LocalProcess(program, environment, order.heartbeat_timeout, now, self._lines.add, process)

    def _open(self, address: str) -> None:
        if self._door is None:
            self._folder = self._stack.enter_context(run_folder())
            self._door = self._stack.enter_context(bind(address, 0, f"the address of Ray node {address}"))
            self._door.listen()  # as ZMQ wants it

    def _program(self, order: Order, directory: Path, address: str) -> Program:
        """With the places that it has on this node."""
        assert self._door is not None
        settings = order.settings
        path, fd = self._folder / settings["name"], self._door.fileno()
        public = f"tcp://{join_host_port(address, self._door.getsockname()[1])}"
        options, transport = {**settings["options"], "model": str(directory)}, settings["transport"]
        settings = {**settings, "parent": os.getpid(), "address": f"ipc://{path}", "options": options}
        settings["public"] = {"address": public, "fd": fd}
        if transport is not None:
            settings["transport"] = {**transport, "address": f"tcp:{join_host_port(address, 0)}"}
        if settings.get("weights") is not None:
            settings["weights"] = self._weights(order, f"tcp:{join_host_port(address, 0)}")
        place = {"address": settings["address"], "public": public, "socket": path, "descriptors": (fd,)}
        return make_program(
            settings["name"], "engine", settings, self._folder / f"{settings['name']}.heartbeat", **place
        )

    def _weights(self, order: Order, public: str) -> dict[str, Any]:
        """Engines of this node find one another by the deployment's word, whichever actors' folders they are in."""
        file, ending = self._folder / GIVERS, f".{order.deployment}.weights"
        there = order.settings["weights"]["public"]
        host = public.removeprefix("tcp:").rpartition(":")[0] if there["mooncake"] else ""
        file.write_text(json.dumps(order.givers))
        return {
            "address": f"unix:{self._folder}/{order.settings['name']}{ending}",
            "sockets": f"{escape(str(self._folder.parent))}/{PREFIX}*/*{ending}",
            "pair": order.settings["weights"]["pair"],
            "public": {**there, "address": public, "givers": str(file), "mooncake": host},
        }

    def follow(self, number: int, seen: int, up: bool) -> dict[str, Any]:
        """What is new of an incarnation: at once when something is, else after `PATIENCE`.

        Args:
            seen: lines of its standard error that are known.
            up: whether it is known that it can be reached.

        Returns:
            "lines", and how many were "heard"; whether it is "up"; the exit "code", the "last" line and the last "step"
            when it has ended; "trouble" as (why, hangs). Or "lost" when this actor never ran it.
        """
        until = self._clock.now() + PATIENCE
        while True:
            with self._lock:
                if number != self._number or self._process is None:
                    return {"lost": True}
                news = self._news(self._process, seen)
            if news["lines"] or news["code"] is not None or news["up"] != up or self._clock.now() >= until:
                return news
            time.sleep(LOOK)

    def _news(self, process: LocalProcess, seen: int) -> dict[str, Any]:
        now, code = self._clock.now(), process.poll()
        if code is None and now - self._watched_at >= LOOK_CLOSELY:
            self._watched_at = now
            self._trouble = process.trouble(now)
        last = process.last_words() if code is not None else ""  # before the lines: it waits for them
        heard, lines = self._lines.since(seen)
        trouble = None if self._trouble is None else (self._trouble.why, self._trouble.hangs)
        return {
            "lines": lines,
            "heard": heard,
            "up": code is None and process.is_up(),
            "code": code,
            "last": last,
            "step": None if code is None or (step := process.last_step()) is None else asdict(step),
            "trouble": trouble,
        }

    def kill(self, number: int) -> None:
        with self._lock:
            if number == self._number and self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Leave nothing; nothing is started afterwards."""
        with self._lock:
            if self._process is not None:
                self._process.close()
            if self._warm is not None:
                self._warm.close()
                self._warm = None
            self._stack.close()


class _Lines:
    """The last ones that a process wrote. One thread adds, others read."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=LINES)
        self._numbers = count()

    def add(self, line: bytes) -> None:
        self._kept.append((next(self._numbers), line))

    def since(self, seen: int) -> tuple[int, list[bytes]]:
        """How many there were, and those after the first `seen` ones that are still here."""
        kept = [(number, line) for number, line in self._kept.copy() if number >= seen]
        return (kept[-1][0] + 1 if kept else seen), [line for _, line in kept]


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Of an engine's process."""
    # the package that this is, wherever the node's Python looks first
    packages = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(packages)}


def _node_address() -> str:
    """IP address by which others reach this Ray node."""
    import ray

    return ray.util.get_node_ip_address()
