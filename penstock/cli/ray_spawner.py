"""Engines as Ray actors: each on a Ray node that has room for it, with its devices set apart in a placement group.

Ray is control alone. It finds a node, starts an actor there, and starts it again, there or elsewhere, when it or its
node dies. The actor runs the engine's process as a launcher does those of its own machine, and says what becomes of
it; whether an engine that ended is started again is the supervisor's to say, as everywhere. Requests, tokens and KV
blocks travel over the engine's own sockets, which listen at its node's address.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.cli.curve import SECRET
from penstock.cli.http import bind
from penstock.cli.run_folder import run_folder
from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import ConfigError
from penstock.core.wire import PROTOCOL
from penstock.service.checkpoint import find_checkpoint, fingerprint
from penstock.service.launcher import make_program
from penstock.service.spawner import STDERR, LocalProcess
from penstock.service.supervisor import CANNOT_BE_SERVED, Program
from penstock.service.watch import Trouble

if TYPE_CHECKING:
    from concurrent.futures import Future

log = logging.getLogger("penstock.launcher")
VERSION = f"penstock {__version__} with protocol {PROTOCOL}"
LOOK = 0.05  # seconds between two looks of an actor at its engine
LOOK_CLOSELY = 0.5  # seconds between two checks of its progress
PATIENCE = 0.5  # seconds after which an actor says that nothing is new
LINES = 1000  # of the engine's standard error that an actor keeps
SILENCE = 3.0  # seconds without an answer after which an actor is suspected
ASK_AGAIN = 0.5  # seconds until an actor that could not be reached is asked again
ROOM = 10.0  # seconds between two looks whether an actor that does not answer has no node to run on
CONNECT_TIMEOUT = 5.0  # seconds
KILL_GRACE = 2.0  # seconds that an actor has to kill its engine, or to end
FAILED = 1  # exit code of an engine of which Ray says no more than that
LOST = -signal.SIGKILL  # of one whose actor died: it ends with that
COLOURS = re.compile(r"\x1b\[[\d;]*m")


# --- on the Ray node


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
    """

    version: str
    model: str
    digest: str
    settings: dict[str, Any]
    environment: dict[str, str]
    heartbeat_timeout: float


class EngineActor:
    """Runs one instance's engine on a Ray node, one incarnation after another. Its methods may be called from several
    threads."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._door: socket.socket | None = None  # where the engine listens; the same for every incarnation
        self._number = 0  # of the incarnation
        self._process: LocalProcess | None = None
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
            "endpoint", "node" and "pid"; or "refused", with the reason why it cannot run here.
        """
        with self._lock:
            address = _node_address()
            if number != self._number or self._process is None:
                try:
                    self._run(number, Order(**order), address)
                except ConfigError as error:
                    return {"refused": f"{error}, on Ray node {address}"}
            assert self._process is not None
            return {"endpoint": self._process.endpoint, "node": address, "pid": self._process.pid}

    def _run(self, number: int, order: Order, address: str) -> None:
        directory = find_checkpoint(order.model)
        if fingerprint(directory) != order.digest:
            raise ConfigError(f"model: {order.model} is another checkpoint than that of the launcher", "model")
        if self._process is not None:
            self._process.close()
        if self._door is None:
            self._folder = self._stack.enter_context(run_folder())
            self._door = self._stack.enter_context(bind(address, 0, f"the address of Ray node {address}"))
            self._door.listen()  # as ZMQ wants it
        program = self._program(order.settings, directory, address)
        # the package that this is, wherever the node's Python looks first
        packages = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **order.environment, "PYTHONPATH": os.pathsep.join(packages)}
        self._number, self._trouble, self._lines = number, None, _Lines()
        now = self._clock.now()
        self._process = LocalProcess(program, environment, order.heartbeat_timeout, now, self._lines.add)

    def _program(self, settings: dict[str, Any], directory: Path, address: str) -> Program:
        """With the places that it has on this node."""
        assert self._door is not None
        path, fd = self._folder / settings["name"], self._door.fileno()
        public = f"tcp://{address}:{self._door.getsockname()[1]}"
        options, transport = {**settings["options"], "model": str(directory)}, settings["transport"]
        settings = {**settings, "parent": os.getpid(), "address": f"ipc://{path}", "options": options}
        settings["public"] = {"address": public, "fd": fd}
        if transport is not None:
            settings["transport"] = {**transport, "address": f"tcp:{address}:0"}
        place = {"address": settings["address"], "public": public, "socket": path, "descriptors": (fd,)}
        return make_program(settings["name"], "engine", settings, path.with_suffix(".heartbeat"), **place)

    def follow(self, number: int, seen: int, up: bool) -> dict[str, Any]:
        """What is new of an incarnation: at once when something is, else after `PATIENCE`.

        Args:
            seen: lines of its standard error that are known.
            up: whether it is known that it can be reached.

        Returns:
            "lines", and how many were "heard"; whether it is "up"; the exit "code" and the "last" line when it has
            ended; "trouble" as (why, hangs). Or "lost" when this actor never ran it.
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


def _node_address() -> str:
    """IPv4 address by which others reach this Ray node."""
    import ray

    return ray.util.get_node_ip_address()


def actor_class() -> type:
    """Of the Ray actors. The class travels with its code, so that a node with another version of penstock, or without
    one, says that and nothing else."""

    class Instance:
        def __init__(self) -> None:
            self._engine: Any = None  # an `EngineActor`

        def start(self, number: int, order: dict[str, Any]) -> dict[str, Any]:
            import ray

            try:
                from penstock.cli.ray_spawner import VERSION, EngineActor
            except ImportError as error:
                found, make = f"no penstock of that version ({error})", None
            else:
                found, make = VERSION, EngineActor
            if found != order["version"] or make is None:
                node = ray.util.get_node_ip_address()
                return {"refused": f"this deployment has {order['version']}, and Ray node {node} has {found}"}
            self._engine = self._engine or make()
            return self._engine.start(number, order)

        def follow(self, number: int, seen: int, up: bool) -> dict[str, Any]:
            return {"lost": True} if self._engine is None else self._engine.follow(number, seen, up)

        def kill(self, number: int) -> None:
            if self._engine is not None:
                self._engine.kill(number)

        def close(self) -> None:
            if self._engine is not None:
                self._engine.close()

    return Instance


# --- at the launcher


class _Actor:
    """An instance's actor and its placement group, of which Ray takes care.

    Args:
        name: of the instance, and so of the actor.
        resources: set apart for it: "CPU", "GPU", and what nodes were given names for.
    """

    def __init__(self, name: str, resources: Mapping[str, float]) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._name, self._resources, own = name, resources, dict(resources)
        self._group = placement_group([own], name=name)
        self._handle: Any = (
            ray.remote(actor_class())
            .options(
                name=name,
                num_cpus=own.pop("CPU"),
                num_gpus=own.pop("GPU", 0),
                resources=own,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0),
                max_restarts=-1,
                max_concurrency=4,  # follow, beside start and kill
            )
            .remote()
        )

    def say_if_without_room(self) -> None:
        """Waits for an answer of Ray's."""
        from ray.util.placement_group import placement_group_table

        if placement_group_table(self._group)["state"] not in ("CREATED", "REMOVED"):
            wanted = ", ".join(f"{amount:g} {what}" for what, amount in self._resources.items())
            log.warning("%s waits for a Ray node that has %s", self._name, wanted)

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        return getattr(self._handle, method).remote(*arguments).future()

    def end(self) -> None:
        """With its engine; waits for that."""
        import ray
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # else its engine ends because it does
            self.ask("close").result(KILL_GRACE)
        ray.kill(self._handle)
        remove_placement_group(self._group)


class RaySpawner:
    """Spawns engines in a Ray cluster.

    Args:
        address: "HOST:PORT" of the cluster's head; None for the one that RAY_ADDRESS or this machine knows.
        model: see `Order`; here, too, it is a checkpoint.
        secret: of the deployment.
        heartbeat_timeout: seconds without a sign of life after which an engine hangs.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """

    def __init__(self, address: str | None, model: str, secret: str, heartbeat_timeout: float) -> None:
        _connect(address)
        self._model, self._digest = model, fingerprint(find_checkpoint(model))
        self._secret, self._timeout = secret, heartbeat_timeout
        self._actors: dict[str, _Actor] = {}
        self._numbers = count(1)
        self._ending: list[threading.Thread] = []
        self._clock = SystemClock()

    def spawn(self, program: Program, now: float) -> RayIncarnation:
        if program.name not in self._actors:
            self._actors[program.name] = _Actor(program.name, program.resources)
        environment = {SECRET: self._secret, "OMP_NUM_THREADS": str(max(1, int(program.resources["CPU"])))}
        settings = json.loads(program.command[-1])
        order = Order(VERSION, self._model, self._digest, settings, environment, self._timeout)
        return RayIncarnation(self, self._actors[program.name], program, next(self._numbers), order, self._clock)

    def release(self, name: str) -> None:
        if actor := self._actors.pop(name, None):
            thread = threading.Thread(target=actor.end, daemon=True)  # what it waits for others do not
            thread.start()
            self._ending = [*(other for other in self._ending if other.is_alive()), thread]

    def close(self) -> None:
        import ray

        for name in list(self._actors):
            self.release(name)
        for thread in self._ending:
            thread.join(2 * KILL_GRACE)
        ray.shutdown()  # with it go the actors that are left, if any


class RayIncarnation:
    """One run of an engine, as its actor tells of it."""

    def __init__(
        self, spawner: RaySpawner, actor: _Actor, program: Program, number: int, order: Order, clock: Clock
    ) -> None:
        self.endpoint = ""
        self._spawner, self._actor, self._name = spawner, actor, program.name
        self._number, self._clock = number, clock
        # not by `dataclasses.asdict`, whose copies would not be plain either
        self._order = {name: getattr(order, name) for name in Order.__slots__}
        self._answered = self._wondered = clock.now()
        self._asked: Future[Any] | None = None
        self._ask_at = 0.0
        self._deaths = 0  # in a row, of the actor
        self._started = self._up = False
        self._seen = 0  # lines of standard error
        self._code: int | None = None
        self._last = ""
        self._trouble: Trouble | None = None
        self._kill_by: float | None = None

    def poll(self) -> int | None:
        now = self._clock.now()
        if self._code is None and self._asked is not None and self._asked.done():
            self._hear(self._asked, now)
        if self._code is None and self._asked is None and now >= self._ask_at:
            more = ("follow", self._number, self._seen, self._up)
            self._asked = self._actor.ask(*(more if self._started else ("start", self._number, self._order)))
        if self._code is None and self._kill_by is not None and now >= self._kill_by:
            self._give_up(LOST, "its actor did not kill it")
        if self._code is None and now - max(self._answered, self._wondered) >= ROOM:
            self._wondered = now
            threading.Thread(target=self._actor.say_if_without_room, daemon=True).start()
        return self._code

    def _hear(self, asked: Future[Any], now: float) -> None:
        from ray.exceptions import ActorDiedError, RayActorError, RayError

        self._asked = None
        try:
            said = asked.result()
        except RayActorError as error:
            # started again by Ray, as soon as it can be; what it may have missed is asked for once more
            self._ask_at = now + ASK_AGAIN
            self._deaths = self._deaths + 1 if isinstance(error, ActorDiedError) else 0
            if self._deaths > 1:
                self._give_up(FAILED, f"its Ray actor is dead: {_lines_of(error)[-1]}")
            return
        except RayError as error:
            self._give_up(FAILED, f"its Ray actor failed: {_lines_of(error)[-1]}")
            return
        self._deaths, self._answered = 0, now
        if self._started:
            self._follow(said)
        elif "refused" in said:
            log.error("%s: %s", self._name, said["refused"])
            self._code, self._last = CANNOT_BE_SERVED, said["refused"]
        else:
            self._started, self.endpoint = True, said["endpoint"]
            log.info("%s is process %d on Ray node %s", self._name, said["pid"], said["node"])

    def _follow(self, said: dict[str, Any]) -> None:
        if "lost" in said:
            log.warning("%s is lost: Ray has started its actor again", self._name)
            self._code = LOST
            return
        for line in said["lines"]:
            os.write(STDERR, line)
        self._seen, self._up = said["heard"], said["up"]
        self._trouble = None if said["trouble"] is None else Trouble(*said["trouble"])
        self._code, self._last = said["code"], said["last"]

    def _give_up(self, code: int, why: str) -> None:
        """This actor is of no use any more."""
        log.warning("%s: %s", self._name, why)
        self._code, self._last = code, why
        self._spawner.release(self._name)

    def is_up(self) -> bool:
        return self._up

    def trouble(self, now: float) -> Trouble | None:
        silent = now - self._answered
        if self._started and silent > SILENCE:  # whether it is dead is for Ray to find out
            return Trouble(f"nothing was heard of its Ray actor for {silent:.0f} s", hangs=False)
        return self._trouble

    def give_time(self, now: float) -> None:
        self._answered = now  # its actor looks after the rest

    def stop(self) -> None:
        raise AssertionError("engines are told over the wire")

    def kill(self) -> None:
        if self._started:
            self._actor.ask("kill", self._number)
            self._kill_by = self._clock.now() + KILL_GRACE
        else:
            self._give_up(LOST, "it is ended before it has begun")

    def last_words(self) -> str:
        return self._last

    def close(self) -> None:
        self._spawner.release(self._name)


def _connect(address: str | None) -> None:
    try:
        import ray
    except ImportError:
        raise ConfigError("launcher: ray needs the package ray: pip install 'penstock[ray]'", "launcher") from None
    known = address or os.environ.get("RAY_ADDRESS") or "auto"
    space = f"penstock-{socket.gethostname()}-{os.getpid()}"
    try:
        if known != "auto":  # Ray would try for minutes
            host, _, port = known.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
        ray.init(known, namespace=space, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        where = "on this machine" if known == "auto" else f"at {known}"
        raise ConfigError(
            f"ray.address: no Ray cluster {where} of which this machine is a node, `ray start` makes it one: "
            f"{_lines_of(error)[0]}",
            "ray.address",
        ) from None


def _lines_of(error: BaseException) -> list[str]:
    """At least one. What caused an error of Ray's is in the last."""
    lines = [line.strip() for line in COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return lines or [type(error).__name__]
