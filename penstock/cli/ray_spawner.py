"""Engines as Ray actors: each on a Ray node that has room for it, with its devices set apart in a placement group.

Ray is control alone. It finds a node, starts an actor there, and starts it again, there or elsewhere, when it or its
node dies. The actor (`ray_actor.py`) runs the engine's process and says what becomes of it; whether an engine that has
ended is started again is the supervisor's to say, as everywhere. Requests, tokens and KV blocks travel over the
engine's own sockets, which listen at its node's address.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.curve import SECRET
from penstock.cli.ray_actor import VERSION, Order
from penstock.cli.ray_pool import RayWarmPool
from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import ConfigError
from penstock.core.heartbeat import LastStep
from penstock.core.host_port import split_host_port
from penstock.service.checkpoint import find_checkpoint, fingerprint
from penstock.service.spawner import STDERR
from penstock.service.supervisor import CANNOT_BE_SERVED, Program
from penstock.service.watch import Trouble

if TYPE_CHECKING:
    from concurrent.futures import Future

log = logging.getLogger("penstock.launcher")
SILENCE = 3.0  # seconds without an answer after which an actor is suspected
ASK_AGAIN = 0.5  # seconds until an actor that could not be reached is asked again
ROOM = 10.0  # seconds between two looks whether an actor that does not answer has no node to run on
CONNECT_TIMEOUT = 5.0  # seconds
KILL_GRACE = 2.0  # seconds that an actor has to kill its engine, or to end
FAILED = 1  # exit code of an engine of which Ray says no more than that
LOST = -signal.SIGKILL  # of one whose actor died: it ends with that
COLOURS = re.compile(r"\x1b\[[\d;]*m")


def actor_class() -> type:
    """Of the Ray actors. The class travels with its code, so that a node with another version of penstock, or without
    one, says that and nothing else."""

    class Instance:
        def __init__(self) -> None:
            self._engine: Any = None  # an `EngineActor`

        def start(self, number: int, order: dict[str, Any]) -> dict[str, Any]:
            return self._refused(order) or self._engine.start(number, order)

        def warm(self, order: dict[str, Any]) -> dict[str, Any]:
            return self._refused(order) or self._engine.warm(order)

        def is_warm(self) -> dict[str, Any]:
            return {"refused": "Ray has started it again"} if self._engine is None else self._engine.is_warm()

        def _refused(self, order: dict[str, Any]) -> dict[str, Any] | None:
            import ray

            try:
                from penstock.cli.ray_actor import VERSION, EngineActor
            except ImportError as error:
                found, make = f"no penstock of that version ({error})", None
            else:
                found, make = VERSION, EngineActor
            if found != order["version"] or make is None:
                node = ray.util.get_node_ip_address()
                return {"refused": f"this deployment has {order['version']}, and Ray node {node} has {found}"}
            self._engine = self._engine or make()
            return None

        def follow(self, number: int, seen: int, up: bool) -> dict[str, Any]:
            return {"lost": True} if self._engine is None else self._engine.follow(number, seen, up)

        def kill(self, number: int) -> None:
            if self._engine is not None:
                self._engine.kill(number)

        def close(self) -> None:
            if self._engine is not None:
                self._engine.close()

    return Instance


class _Actor:
    """An instance's actor and its placement group, of which Ray takes care.

    Args:
        name: of the instance; of one that is warm no other's.
        number: no other of the deployment's actors has it.
        resources: set apart for it: "CPU", "GPU", and what nodes were given names for.
    """

    def __init__(self, name: str, number: int, resources: Mapping[str, float]) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.name, self._resources, own = name, resources, dict(resources)
        self._group = placement_group([own], name=name)
        self._handle: Any = (
            ray.remote(actor_class())
            .options(
                name=f"{name}.{number}",
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

        state = ""
        with contextlib.suppress(Exception):  # of many kinds, where Ray's head has gone
            state = placement_group_table(self._group)["state"]
        if state in ("PENDING", "RESCHEDULING"):
            wanted = ", ".join(f"{amount:g} {what}" for what, amount in self._resources.items())
            log.warning("%s waits for a Ray node that has %s", self.name, wanted)

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        return getattr(self._handle, method).remote(*arguments).future()

    def end(self) -> None:
        """With its engine; waits for that."""
        import ray
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # else its engine ends because it does
            self.ask("close").result(KILL_GRACE)
        with contextlib.suppress(Exception):  # of many kinds, where Ray's head has gone, and so will these
            ray.kill(self._handle)
            remove_placement_group(self._group)


class RaySpawner:
    """Spawns engines in a Ray cluster.

    Args:
        address: "HOST:PORT" of the cluster's head; None for the one that RAY_ADDRESS or this machine knows.
        model: see `Order`; here, too, it is a checkpoint.
        secret: of the deployment.
        heartbeat_timeout: seconds without a sign of life after which an engine hangs.
        givers: the launcher's file of who gives weights.
        warm: actors that wait to become an instance's.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """

    def __init__(
        self, address: str | None, model: str, secret: str, heartbeat_timeout: float, givers: Path, warm: int = 0
    ) -> None:
        _connect(address)
        self._word, self._givers = secrets.token_hex(4), givers
        self._model, self._digest = model, fingerprint(find_checkpoint(model))
        self._secret, self._timeout = secret, heartbeat_timeout
        self._actors: dict[str, _Actor] = {}
        self._numbers = count(1)
        self._ending: list[threading.Thread] = []
        self._clock = SystemClock()
        self._pool = RayWarmPool(warm, self._make_warm, self._end, self._warm_order)

    def spawn(self, program: Program, now: float) -> RayIncarnation:
        environment = self._environment(program.resources)
        settings = json.loads(program.command[-1])
        givers = json.loads(self._givers.read_text()) if self._givers.exists() else {}
        givers.pop(program.name, None)
        told = (VERSION, self._model, self._digest, settings, environment, self._timeout, self._word, givers)
        order = Order(*told)
        return RayIncarnation(self.actor, self.release, program, next(self._numbers), order, self._clock)

    def refill(self, now: float) -> None:
        """Have actors become warm in the place of those that were taken; call it while nothing is started."""
        self._pool.refill(now)

    def _environment(self, resources: Mapping[str, float]) -> dict[str, str]:
        return {SECRET: self._secret, "OMP_NUM_THREADS": f"{resources['CPU']:g}"}

    def _warm_order(self, resources: Mapping[str, float]) -> dict[str, Any]:
        return {"version": VERSION, "environment": self._environment(resources)}

    def _make_warm(self, resources: Mapping[str, float]) -> _Actor:
        number = next(self._numbers)
        return _Actor(f"warm process {number}", number, resources)

    def actor(self, program: Program, number: int) -> _Actor:
        """One that is warm, the one that there is, or a new one."""
        if (warm := self._pool.take(program.resources)) is not None:
            self.release(program.name)
            warm.name = program.name
            self._actors[program.name] = warm
        if program.name not in self._actors:
            self._actors[program.name] = _Actor(program.name, number, program.resources)
        return self._actors[program.name]

    def release(self, name: str) -> None:
        if actor := self._actors.pop(name, None):
            self._end(actor)

    def _end(self, actor: _Actor) -> None:
        thread = threading.Thread(target=actor.end, daemon=True)  # what it waits for others do not
        thread.start()
        self._ending = [*(other for other in self._ending if other.is_alive()), thread]

    def close(self) -> None:
        import ray

        self._pool.close()
        for name in list(self._actors):
            self.release(name)
        for thread in self._ending:
            thread.join(2 * KILL_GRACE)
        ray.shutdown()  # with it go the actors that are left, if any


class RayIncarnation:
    """One run of an engine, as its actor tells of it.

    Args:
        find: program and number of this incarnation -> the program's actor.
        release: the program's name -> there is none any more.
    """

    def __init__(
        self,
        find: Callable[[Program, int], _Actor],
        release: Callable[[str], None],
        program: Program,
        number: int,
        order: Order,
        clock: Clock,
    ) -> None:
        self.endpoint = ""
        self._find, self._release, self._program, self._name = find, release, program, program.name
        self._number, self._clock = number, clock
        self._actor: _Actor | None = None
        self._order = asdict(order)
        self._answered = self._wondered = clock.now()
        self._asked: Future[Any] | None = None
        self._ask_at = 0.0
        self._deaths = 0  # in a row, of the actor
        self._started = self._up = False
        self._seen = 0  # lines of standard error
        self._code: int | None = None
        self._last = ""
        self._step: LastStep | None = None
        self._trouble: Trouble | None = None
        self._kill_by: float | None = None

    def poll(self) -> int | None:
        now = self._clock.now()
        if self._code is None and self._asked is not None and self._asked.done():
            self._hear(self._asked, now)
        if self._code is None and self._asked is None and now >= self._ask_at:
            self._ask()
        if self._code is None and self._kill_by is not None and now >= self._kill_by:
            self._give_up(LOST, "its actor did not kill it")
        if self._code is None and self._actor is not None and now - max(self._answered, self._wondered) >= ROOM:
            self._wondered = now
            threading.Thread(target=self._actor.say_if_without_room, daemon=True).start()
        return self._code

    def _ask(self) -> None:
        more = ("follow", self._number, self._seen, self._up)
        try:
            self._actor = self._actor or self._find(self._program, self._number)
            self._asked = self._actor.ask(*(more if self._started else ("start", self._number, self._order)))
        except Exception as error:  # of many kinds
            self._give_up(FAILED, f"Ray does not make an actor for it: {_lines_of(error)[-1]}")

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
            of_pool = " (of the warm pool)" if said["warm"] else ""
            log.info("%s is process %d on Ray node %s%s", self._name, said["pid"], said["node"], of_pool)

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
        self._step = LastStep(**said["step"]) if said.get("step") else None

    def _give_up(self, code: int, why: str) -> None:
        """This actor is of no use any more."""
        log.warning("%s: %s", self._name, why)
        self._code, self._last = code, why
        self._release(self._name)

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

    def reload(self) -> None:
        raise AssertionError("frontends are this machine's")

    def kill(self) -> None:
        if self._started and self._actor is not None:
            self._actor.ask("kill", self._number)
            self._kill_by = self._clock.now() + KILL_GRACE
        else:
            self._give_up(LOST, "it is ended before it has begun")

    def last_words(self) -> str:
        return self._last

    def last_step(self) -> LastStep | None:
        return self._step

    def close(self) -> None:
        self._release(self._name)


def _connect(address: str | None) -> None:
    try:
        import ray
    except ImportError:
        raise ConfigError("launcher: ray needs the package ray: pip install 'penstock[ray]'", "launcher") from None
    known = address or os.environ.get("RAY_ADDRESS") or "auto"
    space = f"penstock-{socket.gethostname()}-{os.getpid()}"
    try:
        if known != "auto":  # Ray would try for minutes
            socket.create_connection(split_host_port(known), CONNECT_TIMEOUT).close()
        ray.init(known, namespace=space, log_to_driver=False, configure_logging=False)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
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
