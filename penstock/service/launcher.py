"""The processes of a deployment on this machine: their command lines, the loop that keeps them running,
and whether they make progress, seen from outside."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.clock import Clock
from penstock.core.heartbeat import STILL, Beat, read_heartbeat
from penstock.service.supervisor import Action, ProcessKind, Program, Supervisor

if TYPE_CHECKING:
    import zmq

    from penstock.service.deployment import Deployment, Group

log = logging.getLogger("penstock.launcher")
LOOK = 0.05  # seconds between two looks at the processes
LOOK_CLOSELY = 1.0  # seconds between two checks of their progress
LAST_OUTPUT = 500  # characters
STDERR = 2
MOVED = 0.1  # seconds of CPU that count as progress; threads that only poll use less
LONGEST_LOOK = 2.0  # most seconds counted between two checks: the checker itself may have been stopped
_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds


def plan(
    deployment: Deployment,
    directory: Path,
    folder: Path,
    listeners: Sequence[socket.socket],
    engine_fields: Callable[[Group, int], dict[str, Any]],
) -> list[Program]:
    """Every process of the deployment, in the order in which they start.

    Args:
        directory: of the model.
        folder: for sockets; short, because the path of one has at most 107 bytes.
        listeners: bound, one for each frontend. They stay open here, so that a restarted frontend keeps its port.
        engine_fields: group and number of an instance among all -> fields of its engine's options.
    """
    import msgspec

    common = {
        "parent": os.getpid(),
        "log_level": deployment.server["log_level"],
        "log_format": deployment.server["log_format"],
    }
    kv_pool, master = folder / "kv-pool", f"ipc://{folder}/master"
    places = [(group, name) for group in deployment.groups for name in group.instances]
    instances = [{"name": name, "address": f"ipc://{folder}/{name}", "role": group.role} for group, name in places]
    programs = []
    if deployment.orphans is not None:
        settings = common | {"path": str(kv_pool), "orphan_seconds": deployment.orphans}
        programs.append(_program("kv-pool", "kv_pool", settings, socket=kv_pool))
    for number, (group, name) in enumerate(places):
        settings = common | instances[number] | {"shown_as": name, "options": engine_fields(group, number)}
        settings["lease_s"] = deployment.lease
        settings |= {"kv_pool": None, "transport": None}
        if group.shares_memory:
            settings |= {"kv_pool": str(kv_pool), "transport": _transport(deployment, folder / f"{name}.transport")}
        needs = "kv-pool" if group.shares_memory else None
        place = {"address": settings["address"], "socket": folder / name}
        programs.append(engine_program(settings, folder / f"{name}.heartbeat", needs=needs, **place))
    settings = {"policy": deployment.policy, "seed": deployment.server["seed"], "instances": instances}
    settings["priorities"] = msgspec.to_builtins(deployment.priorities, str_keys=True)
    settings["flight_recorder"] = deployment.flight_recorder
    programs.append(_program("master", "master", common | settings | {"address": master}, socket=folder / "master"))
    for number, listener in enumerate(listeners):
        settings = {"name": f"frontend-{number}", "listen_fd": listener.fileno(), "master": master}
        settings |= {"instances": instances, "server": _server(deployment, directory, listener, number)}
        programs.append(_program(settings["name"], "frontend", common | settings, descriptors=(settings["listen_fd"],)))
    return programs


def engine_program(settings: Mapping[str, Any], heartbeat: Path, **more: Any) -> Program:
    """An engine's process.

    Args:
        settings: as `penstock.cli.engine` has them, but for the heartbeat.
        heartbeat: the file by which it is watched.
    """
    return _program(settings["name"], "engine", {**settings, "heartbeat": str(heartbeat)}, heartbeat=heartbeat, **more)


def _program(name: str, kind: ProcessKind, settings: Mapping[str, Any], **more: Any) -> Program:
    command = (sys.executable, "-m", f"penstock.cli.{kind}", json.dumps(settings))
    return Program(name=name, kind=kind, command=command, **more)


def _transport(deployment: Deployment, path: Path) -> dict[str, Any] | None:
    if deployment.transport is None:
        return None
    kind = deployment.transport.kind
    address = "tcp:127.0.0.1:0" if kind == "tcp" else f"unix:{path}"
    return {"kind": kind, "address": address, "faults": deployment.transport.faults}


def _server(deployment: Deployment, directory: Path, listener: socket.socket, number: int) -> dict[str, Any]:
    """A frontend's `ServerOptions`, without the API keys. Each frontend chooses seeds of its own."""
    options = {key: value for key, value in deployment.server.items() if key not in ("served_model_name", "api_key")}
    if options["seed"] is not None:
        options["seed"] += number
    return options | {
        "directory": str(directory),
        "names": deployment.names,
        "port": listener.getsockname()[1],
    }


class _Voice:
    """Copies a process's standard error to the launcher's."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._last = b""
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def last_output(self) -> str:
        """The last line; ask when it has ended."""
        self._thread.join(1.0)  # not for longer: a child of the process may hold the pipe
        return self._last.decode(errors="replace").strip()[:LAST_OUTPUT]

    def _carry(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._last = line if line.strip() else self._last
                with contextlib.suppress(OSError):  # standard error is closed
                    os.write(STDERR, line)


@dataclass(frozen=True, slots=True)
class Vitals:
    """
    Attributes:
        cpu: seconds that it and what it started have used.
        faults: pages that had to be read for them.
        stopped: a signal keeps it from running.
    """

    cpu: float = 0.0
    faults: int = 0
    stopped: bool = False


def read_vitals(group: int) -> Vitals:
    """Of a process and of all others in its process group: an engine that compiles waits for its compiler."""
    total = Vitals()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the name, in parentheses, may have spaces; behind it come state, parent, group, ...
            words = path.read_text().rpartition(")")[2].split()
        except (OSError, UnicodeDecodeError):
            continue  # it has just gone
        if int(words[2]) == group:
            stopped = total.stopped or (path.parent.name == str(group) and words[0] in "Tt")
            total = Vitals(total.cpu + (int(words[11]) + int(words[12])) * _TICK, total.faults + int(words[9]), stopped)
    return total


class Watch:
    """Of one incarnation of a process. Call `look` about once a second."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._beat: Beat | None = None
        self._seen: Vitals | None = None
        self._quiet = self._still = self._stopped = 0.0  # seconds since the last sign of each kind

    def beats(self, now: float, beat: Beat) -> bool:
        """Whether there was a new heartbeat since the last check; then it makes progress."""
        if self._beat is not None and beat.number == self._beat.number:
            return False
        self._at, self._beat, self._seen = now, beat, None
        self._quiet = self._still = self._stopped = 0.0
        return True

    def trouble(self, now: float, vitals: Vitals) -> str:
        """Why it counts as hung; "" while it does not. For checks without a new heartbeat."""
        assert self._beat is not None
        passed, self._at = min(now - self._at, LONGEST_LOOK), now
        self._quiet += passed
        self._stopped = self._stopped + passed if vitals.stopped else 0.0
        if self._seen is None or vitals.cpu - self._seen.cpu >= MOVED or vitals.faults > self._seen.faults:
            self._seen, self._still = vitals, 0.0
        else:
            self._still += passed
        if self._stopped > STILL:
            return f"a signal has kept it from running for {self._stopped:.0f} s"
        if self._still > self._beat.still:
            return f"it has done nothing for {self._still:.0f} s"
        if self._quiet > self._beat.limit:
            return f"one step has taken {self._quiet:.0f} s"
        return ""


class Launcher:
    """Runs programs until a signal, or until one of them fails for good.

    Args:
        environments: kind -> environment of its processes, where it is not this process's own.
        listeners: of the frontends; closed when these have ended for good, so that clients are refused.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        supervisor: Supervisor,
        clock: Clock,
        environments: Mapping[ProcessKind, Mapping[str, str]],
        listeners: Sequence[socket.socket] = (),
    ) -> None:
        self._programs = {program.name: program for program in programs}
        self._supervisor, self._clock, self._environments = supervisor, clock, environments
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._voices: dict[str, _Voice] = {}  # of engines
        self._watches: dict[str, Watch] = {}
        self._watched_at = clock.now()
        self._starting: dict[str, Path] = {}  # program -> its socket, which is not there yet
        self._signals: list[int] = []
        self._zmq: zmq.Context[zmq.Socket[bytes]] | None = None
        self._links: list[zmq.Socket[bytes]] = []
        self._listeners = listeners

    def run(self) -> int:
        """Returns the exit code: 0 after SIGTERM or SIGINT, else the supervisor's. No process is left."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, lambda number, _: self._signals.append(number))
        try:
            while not self._supervisor.over:
                self.step()
                time.sleep(LOOK)
        finally:
            self.close()
        if self._supervisor.failure:
            log.error("the deployment has ended: %s", self._supervisor.failure)
        else:
            log.info("stopped")
        return self._supervisor.exit_code

    def step(self) -> list[tuple[str, str]]:
        """Check the processes and act; call it every `LOOK` seconds. Returns those that ended since, each with a
        sentence on how, and what follows."""
        ended = self._look()
        for action in self._supervisor.actions(self._clock.now()):
            self._act(action)
        return ended

    def close(self) -> None:
        """Kill the remaining processes."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._processes.clear()
        if self._zmq is not None:
            self._zmq.destroy(linger=0)

    def _look(self) -> list[tuple[str, str]]:
        """Report changes since the last check to the supervisor."""
        now = self._clock.now()
        ended = []
        while self._signals:
            follows = "running requests are ended" if self._supervisor.stopping else "running requests may finish"
            log.info("%s: %s", signal.Signals(self._signals.pop(0)).name, follows)
            self._supervisor.stop(now)
        for name, path in list(self._starting.items()):
            if path.exists():
                del self._starting[name]
                self._supervisor.is_up(name, now)
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                del self._processes[name]
                self._starting.pop(name, None)
                self._watches.pop(name, None)
                expected = self._supervisor.stopping
                voice = self._voices.pop(name, None)
                sentence = self._supervisor.exited(name, code, now, voice.last_output() if voice is not None else "")
                if sentence != self._supervisor.failure:  # which is logged at the end
                    log.log(logging.INFO if expected else logging.WARNING, "%s", sentence)
                ended.append((name, sentence))
        if now - self._watched_at >= LOOK_CLOSELY:
            self._watched_at = now
            self._watch(now)
        if self._supervisor.stopping and not any(self._programs[n].kind == "frontend" for n in self._processes):
            for listener in self._listeners:
                listener.close()
        return ended

    def _watch(self, now: float) -> None:
        """Report processes that hang to the supervisor."""
        for name, watch in self._watches.items():
            heartbeat = self._programs[name].heartbeat
            assert heartbeat is not None
            if watch.beats(now, read_heartbeat(heartbeat)):
                continue
            if why := watch.trouble(now, read_vitals(self._processes[name].pid)):
                log.warning("%s is stuck: %s", name, why)
                self._supervisor.is_stuck(name, why)

    def _act(self, action: Action) -> None:
        match action.what:
            case "start":
                self._start(self._programs[action.name])
            case "stop":
                self._stop(self._programs[action.name])
            case "kill":
                log.warning("killing %s", action.name)
                self._processes[action.name].kill()

    def _start(self, program: Program) -> None:
        if program.socket is not None:
            program.socket.unlink(missing_ok=True)
            self._starting[program.name] = program.socket
        if program.heartbeat is not None:
            program.heartbeat.unlink(missing_ok=True)
            self._watches[program.name] = Watch(self._clock.now())
        # a group of its own, because a terminal's Ctrl-C must reach only us: frontends drain before the others stop
        process = subprocess.Popen(
            program.command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if program.kind == "engine" else None,
            pass_fds=program.descriptors,
            process_group=0,
            env=self._environments.get(program.kind),
        )
        log.info("%s is process %d", program.name, process.pid)
        self._processes[program.name] = process
        if process.stderr is not None:
            self._voices[program.name] = _Voice(process)

    def _stop(self, program: Program) -> None:
        if program.address is None:
            self._processes[program.name].terminate()
            return
        import zmq  # at the end of all and not at the start, for which an engine waits

        from penstock.core.wire.codec import encode
        from penstock.core.wire.engine import Shutdown

        if self._zmq is None:
            self._zmq = zmq.Context()
        link = self._zmq.socket(zmq.DEALER)
        link.setsockopt(zmq.LINGER, 0)  # at the end: an engine that is stuck never reads it, and is killed
        self._links.append(link)  # until then it must not be collected: it would take the message along
        link.connect(program.address)
        link.send(encode(Shutdown()))
