"""The loop that keeps the processes of a deployment on this machine running."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock.core.clock import PAUSE, Clock
from penstock.service.process import TO_ALL, has_terminal, host_of
from penstock.service.spawner import Incarnation, LocalSpawner, Spawner
from penstock.service.supervisor import Action, ProcessKind, Program, Supervisor, shown

if TYPE_CHECKING:
    import zmq

    from penstock.core.wire.master import EngineEnded, HostOrder, HostProgress, HostReport, HostTaken, ToLauncher
    from penstock.service.etcd import EtcdHost

log = logging.getLogger("penstock.launcher")
LOOK = 0.05  # seconds between two looks at the processes
LOOK_CLOSELY = 0.25  # seconds between two checks of their progress
REPEAT = 1.0  # seconds between two reports: a restarted master knows nothing
SILENT = 5.0  # seconds without an answer of the master, after which a host that joins says so
RECONNECT = 50  # ms
LINGER = 200  # ms for the last message
TOLD_FOR = 5.0  # seconds that the end of an engine is told of: the master may be gone too, and come back
NOT_STARTED = 1  # exit code that counts for a process that could not be started
REFUSED_FOR = 10.0  # seconds after which it is no mistake: what is left of an earlier launcher has gone by then


class _Wire:
    """What is said over ZMQ, which is imported when there is something to say: engines wait for the start."""

    def __init__(self, secret: str | None) -> None:
        self._secret = secret
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: dict[str, zmq.Socket[bytes]] = {}  # by address; kept, or a message would be lost with it

    def forget(self, engine: str) -> None:
        """It has ended. What it has not read is not for the next one there."""
        if engine in self._sockets:
            self._sockets.pop(engine).close()

    def tell_to_stop(self, engine: str) -> None:
        """An engine that hangs never reads it, and is killed."""
        from penstock.core.wire.codec import encode
        from penstock.core.wire.engine import Shutdown

        self._socket(engine).send(encode(Shutdown()))

    def report(self, master: str, report: HostReport) -> bool:
        """Whether it was sent: there may be no connection yet, or no master."""
        import zmq

        from penstock.core.wire.codec import encode

        with contextlib.suppress(zmq.Again):
            self._to_master(master).send(encode(report), zmq.NOBLOCK)
            return True
        return False

    def read(self, master: str) -> list[ToLauncher]:
        """What the master has said."""
        import zmq

        from penstock.core.wire.master import decode_to_launcher

        said = []
        with contextlib.suppress(zmq.Again):
            while True:
                said.append(decode_to_launcher(self._to_master(master).recv(zmq.NOBLOCK)))
        return said

    def _to_master(self, master: str) -> zmq.Socket[bytes]:
        import zmq

        # what a dead master does not get is old for the next one
        return self._socket(master, {zmq.IMMEDIATE: 1, zmq.RECONNECT_IVL: RECONNECT})

    def _socket(self, address: str, options: Mapping[int, int] | None = None) -> zmq.Socket[bytes]:
        import zmq

        from penstock.service.channel import make_context, prepare
        from penstock.service.curve import Curve

        if self._context is None:
            self._context = make_context()
        if address not in self._sockets:
            made = self._sockets[address] = self._context.socket(zmq.DEALER)
            for option, value in {zmq.LINGER: 0, **(options or {})}.items():
                made.setsockopt(option, value)
            prepare(made, address, Curve(self._secret) if self._secret is not None else None)
            made.connect(address)
        return self._sockets[address]

    def close(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=LINGER)


@dataclass(slots=True)
class Registration:
    """Of a model's instances at its master.

    Attributes:
        prefix: of the names of its programs.
        master: its ZMQ endpoint; None without a master's process, or while it is not known.
        digest: of what the instances serve.
        givers_file: in which engines that start read of instances on other hosts that may give them weights, as JSON;
            None where there are no such hosts.
        said: the last that the master answered.
        ready: what the master gives requests to, as it said last.
        orders, progress, other: see `HostReport`; set by `service.upgrade` and `service.follower`, as `digest` is.
    """

    prefix: str = ""
    master: str | None = None
    digest: str = ""
    givers_file: Path | None = None
    said: HostTaken | None = None
    ready: Sequence[str] = ()
    orders: Mapping[str, HostOrder] = field(default_factory=dict)
    progress: HostProgress | None = None
    other: str = ""
    refused_since: float | None = None
    told: HostReport | None = None  # what the master knows
    tell_at: float = -inf
    taken: bool = False  # the master has taken the instances, once
    heard: float | None = None  # the master, or when it was first to be heard
    warned: bool = False  # of its silence
    givers: Mapping[str, str] | None = None  # what is to be in the file
    givers_written: bool = False

    def hears(self, now: float) -> bool:
        """Whether the master has just said something."""
        return self.heard is not None and now - self.heard < 2 * REPEAT


class Launcher:
    """Runs programs until a signal, or until one of them fails for good.

    Args:
        environments: kind -> environment of its processes, where it is not this process's own.
        listeners: of the frontends; closed when these have ended for good, so that clients are refused.
        registrations: one for each model that has instances here.
        secret: of the deployment, where its links are protected.
        registry: address of an etcd, where the instances are registered and the master is found; of one model.
        drain: for instances of a deployment that goes on without them: seconds that their requests get to finish; None
            for a whole deployment.
        engines: where these run; None for this machine, as the others do.
        warm: processes of this machine that wait to become engines.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        supervisor: Supervisor,
        clock: Clock,
        environments: Mapping[ProcessKind, Mapping[str, str]],
        listeners: Sequence[socket.socket] = (),
        registrations: Sequence[Registration] = (),
        secret: str | None = None,
        drain: float | None = None,
        registry: str | None = None,
        engines: Spawner | None = None,
        warm: int = 0,
    ) -> None:
        self._programs = {program.name: program for program in programs}
        self._supervisor, self._clock = supervisor, clock
        self._local = LocalSpawner(environments, supervisor.heartbeat_timeout, warm if engines is None else 0)
        self._engines: Spawner = self._local if engines is None else engines
        self._running: dict[str, Incarnation] = {}
        self._endpoints = {p.name: p.public or p.address for p in programs if p.address is not None}
        self._looked_at = self._watched_at = clock.now()
        self._ended: set[str] = set()  # found at the last look
        self._starting: dict[str, float] = {}  # programs whose sockets are not there yet -> when they were started
        self._took: dict[str, float] = {}  # engines that are up -> seconds that this took
        self._signals: list[int] = []
        self._reloads = False  # at SIGHUP
        self._listeners = listeners
        self._registrations, self._wire, self.secret = registrations, _Wire(secret), secret
        self._host, self._incarnation = host_of(os.getpid()), time.time_ns()
        self._drain, self._leaves_by = drain, inf
        self._registry = registry
        self._etcd: EtcdHost | None = None
        self._candidates: dict[str, str] = {}  # programs on trial -> how they ended; "" while they run
        self._leaving: set[str] = set()  # instances that are to drain
        self._engines_ended: deque[tuple[float, EngineEnded]] = deque()  # the latest, and when that was seen
        self._restarted: dict[str, tuple[int, float]] = {}  # slow instances -> how often in a row, and when last

    def run(self, look: Callable[[float], object] = lambda now: None) -> int:
        """Returns the exit code: 0 after SIGTERM or SIGINT, else the supervisor's. No process is left. At SIGHUP
        frontends read their files again; where there is a terminal it is closed, and that is the end, too.

        Args:
            look: called after each look at the processes, with the clock's time.
        """
        self._reloads = not has_terminal()
        for number in TO_ALL:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, lambda number, _: self._signals.append(number))
        try:
            while not self._supervisor.over:
                self.step()
                look(self._clock.now())
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
        if not self._starting and not self._supervisor.stopping:
            self._engines.refill(self._clock.now())
        for registration in self._registrations:
            if self.awaits_kv_pool(registration.prefix):
                continue
            if self._registry is not None:
                self._follow_registry(self._registry, registration)
            if registration.master is not None:
                self._follow_master(registration, registration.master, self._clock.now())
        return ended

    def close(self) -> None:
        """Kill the remaining processes."""
        for incarnation in self._running.values():
            incarnation.close()
        self._running.clear()
        self._engines.close()
        for each in self._registrations:
            if self._drain is not None and each.master is not None:
                self._wire.report(each.master, self._report(each, gone=True))
        if self._etcd is not None:
            self._etcd.close()
        self._wire.close()

    def _look(self) -> list[tuple[str, str]]:
        """Report changes since the last check to the supervisor."""
        now = self._clock.now()
        while self._signals:
            if self._signals[0] == signal.SIGHUP and self._reloads:
                self._signals.pop(0)
                self._reload()
                continue
            again = self._supervisor.stopping or self._leaves_by < inf
            follows = "running requests are ended" if again else "running requests may finish"
            log.info("%s: %s", signal.Signals(self._signals.pop(0)).name, follows)
            if self._drain is not None and not again and (self._is_taken or self._registry is not None):
                self._leaves_by = now + self._drain
            else:
                self._supervisor.stop(now)
        if self._leaves_by < inf and not self._supervisor.stopping and (self._is_empty or now >= self._leaves_by):
            self._supervisor.stop(now)
        for name in list(self._starting):
            if self._running[name].is_up():
                self._took[name] = round(now - self._starting.pop(name), 3)
                self._supervisor.is_up(name, now)
        ended = [self._report_end(name, now) for name in self._found_ended()]
        if now - self._looked_at > PAUSE:  # this process did not run, and they perhaps did not either
            for incarnation in self._running.values():
                incarnation.give_time(now)
        self._looked_at = now
        if now - self._watched_at >= LOOK_CLOSELY:
            self._watched_at = now
            self._watch(now)
        if self._supervisor.stopping and not any(self._programs[n].kind == "frontend" for n in self._running):
            for listener in self._listeners:
                listener.close()
        return ended

    def _reload(self) -> None:
        log.info("SIGHUP: frontends read their files again")
        for name, incarnation in self._running.items():
            if self._programs[name].kind == "frontend":
                incarnation.reload()

    def _found_ended(self) -> list[str]:
        """Processes that have ended. One that needs another is reported a look later: it may have ended with that one,
        which is reported first, and may be found by this look a moment too early."""
        ended = {name for name, incarnation in self._running.items() if incarnation.poll() is not None}
        alone = [name for name in self._running if name in ended and self._programs[name].needs is None]
        others = [name for name in self._running if name in ended & self._ended and name not in alone]
        self._ended = ended
        return alone + others

    def _report_end(self, name: str, now: float) -> tuple[str, str]:
        incarnation = self._running.pop(name)
        code = incarnation.poll()
        assert code is not None
        self._wire.forget(self._programs[name].address or incarnation.endpoint)
        self._starting.pop(name, None)
        self._took.pop(name, None)
        expected, words = self._supervisor.stopping, incarnation.last_words()
        if name in self._candidates:
            self._candidates[name] = f"it ended with {shown(code)}" + (f": {words}" if words else "")
        if name in self._candidates or name in self._leaving:
            self._supervisor.retire(name, now)  # it does not come back
        broken = self._why_ended(name, incarnation, code, now)
        sentence = self._supervisor.exited(name, code, now, words, broken=broken)
        if not self._supervisor.comes_back(name):
            self._spawner(name).release(name)
        if sentence != self._supervisor.failure:  # which is logged at the end
            log.log(logging.INFO if expected or self._supervisor.is_stopped(name) else logging.WARNING, "%s", sentence)
        return name, sentence

    def _why_ended(self, name: str, incarnation: Incarnation, code: int, now: float) -> bool:
        """Whether an engine was broken by what it computed, after it had computed something else."""
        step = incarnation.last_step() if self._programs[name].kind == "engine" else None
        if step is None:
            return False
        from penstock.core.wire.master import EngineEnded

        broken_by = step.broken(code)
        self._engines_ended.append((now, EngineEnded(name, step.incarnation, list(broken_by))))
        return bool(broken_by) and step.steps > 1

    @property
    def ended(self) -> list[EngineEnded]:
        """Engines that have just done so."""
        oldest = self._clock.now() - TOLD_FOR
        while self._engines_ended and self._engines_ended[0][0] < oldest:
            self._engines_ended.popleft()
        return [ended for _, ended in self._engines_ended]

    def _watch(self, now: float) -> None:
        """Report processes that hang, or may hang, to the supervisor."""
        for name, incarnation in self._running.items():
            trouble = incarnation.trouble(now)
            self._supervisor.suspect(name, trouble.why if trouble is not None else "")
            if trouble is not None and trouble.hangs:
                self._supervisor.hangs(name, trouble.why)

    def _follow_registry(self, address: str, registration: Registration) -> None:
        if self._etcd is None:
            from penstock.service.etcd import EtcdHost

            self._etcd = EtcdHost(address)
        self._etcd.instances = [] if self._supervisor.stopping else self._report(registration).instances
        registration.master = self._etcd.master or None

    def awaits_kv_pool(self, prefix: str = "") -> bool:
        """Whether a model's engines are about to be started, for which what takes long has to wait."""
        starting = (self._programs[name] for name in self._starting)
        return any(program.kind == "kv_pool" and program.model == prefix for program in starting)

    @property
    def _is_taken(self) -> bool:
        """Whether a master has taken instances of this host."""
        return any(registration.taken for registration in self._registrations)

    def _follow_master(self, registration: Registration, master: str, now: float) -> None:
        """Register the instances, and start and stop those that the master wants."""
        from penstock.core.wire.master import HostRefused, HostTaken, RestartInstance, StartInstance, StopInstance

        registration.heard = now if registration.heard is None else registration.heard
        for said in self._wire.read(master):
            registration.heard = now
            match said:
                case HostTaken() as taken:
                    registration.said, registration.ready = taken, taken.ready
                    self._be_taken(registration)
                    self._pass_on(registration, taken.givers)
                case StartInstance(name=name) if name in self._programs:
                    self._supervisor.start(name, now)
                case StopInstance(name=name) if name in self._programs:
                    self._supervisor.retire(name, now)
                case RestartInstance(name=name, times=times) if name in self._programs:
                    if times:
                        self._restarted[name] = times, now
                    self._supervisor.retire(name, now, again=True)
                case HostRefused(message=message):
                    self._be_refused(registration, message, now)
        if self._supervisor.stopping:
            return
        if self._drain is not None and not registration.warned and now - registration.heard > SILENT:
            registration.warned = True
            log.warning("the master at %s does not answer: can it be reached, and is the secret its own?", master)
        for name, incarnation in self._running.items():
            if name in self._endpoints and incarnation.endpoint:
                self._endpoints[name] = incarnation.endpoint
        report = self._report(registration)
        if (report != registration.told or now >= registration.tell_at) and self._wire.report(master, report):
            registration.told, registration.tell_at = report, now + REPEAT

    def _be_taken(self, registration: Registration) -> None:
        if self._drain is not None and (registration.warned or not registration.taken):
            log.info("the master at %s has taken this host's instances", registration.master)
        registration.taken, registration.warned = True, False

    def _pass_on(self, registration: Registration, givers: Mapping[str, str]) -> None:
        file = registration.givers_file
        if file is None or (givers == registration.givers and registration.givers_written):
            return
        news, registration.givers = givers != registration.givers, givers
        beside = file.with_suffix(".new")  # whoever reads it reads one of the two
        try:
            beside.write_text(json.dumps(givers))
            beside.replace(file)
            registration.givers_written = True
        except OSError as error:  # there may be room the next time
            registration.givers_written = False
            if news:
                log.warning("engines that start are not told who gives weights: %s", error)

    def _be_refused(self, registration: Registration, why: str, now: float) -> None:
        if registration.refused_since is None or now - registration.refused_since > 2 * REFUSED_FOR:
            registration.refused_since = now
            log.warning("the master does not take this host's instances: %s", why)
        elif now - registration.refused_since > REFUSED_FOR:
            self._supervisor.refuse(why, now)

    @property
    def _is_empty(self) -> bool:
        """Whether no instance runs."""
        return all(self._supervisor.is_stopped(name) for name, p in self._programs.items() if p.kind == "engine")

    def _report(self, registration: Registration, gone: bool = False) -> HostReport:
        """What its master is told."""
        from penstock.core.wire.master import Endpoint, HostReport

        runs: Literal["leaving", "running"] = "leaving" if self._leaves_by < inf else "running"
        instances = [
            Endpoint(
                name,
                endpoint,
                self._programs[name].role,
                "stopped" if stopped else "leaving" if name in self._leaving else runs,
                self._programs[name].devices,
                self._took.get(name, 0.0),
                self._supervisor.has_given_up(name),
            )
            for name, endpoint in self._endpoints.items()
            if name.startswith(registration.prefix)
            if ((stopped := self._supervisor.is_stopped(name)) or endpoint) and not gone
        ]
        prefix = registration.prefix
        troubles = {name: why for name, why in self._supervisor.troubles.items() if name.startswith(prefix)}
        minutes = {
            name: (times, int(self._clock.now() - at) // 60)
            for name, (times, at) in self._restarted.items()
            if name.startswith(prefix)
        }
        return HostReport(
            self._host,
            self._incarnation,
            instances,
            troubles,
            registration.digest,
            ended=[ended for ended in self.ended if ended.name.startswith(prefix)],
            restarted=minutes,
            spread=self._engines is not self._local,
            other=registration.other,
            began=self._drain is None,
            orders=dict(registration.orders),
            progress=None if gone else registration.progress,
        )

    # --- programs that come and go; `service.upgrade` decides which

    @property
    def programs(self) -> Mapping[str, Program]:
        return self._programs

    @property
    def stopping(self) -> bool:
        """Whether it is, or leaves."""
        return self._supervisor.stopping or self._leaves_by < inf

    @property
    def ready(self) -> Sequence[str]:
        """What masters give requests to, as they said last."""
        return [name for registration in self._registrations for name in registration.ready]

    def forget_ready(self) -> None:
        """Until the masters say so again."""
        for registration in self._registrations:
            registration.ready = ()

    def try_out(self, program: Program) -> None:
        """Start one that is not restarted, and not registered. With the name of one that has ended it is that one's
        next incarnation."""
        if program.name in self._programs:
            self._supervisor.replace(program)
        else:
            self._supervisor.add(program)
        self._programs[program.name] = program
        self._candidates[program.name] = ""
        self._supervisor.start(program.name, self._clock.now())

    def end_of(self, name: str) -> str:
        """How one that is tried out has ended; "" while it runs."""
        return self._candidates.get(name, "")

    def is_up(self, name: str) -> bool:
        """Whether it runs, and can be reached."""
        return name in self._running and name not in self._starting

    def endpoint(self, name: str) -> str:
        """Of an engine that runs; "" while it is not known."""
        program, incarnation = self._programs.get(name), self._running.get(name)
        known = incarnation.endpoint if incarnation is not None else ""
        return (program.address if program is not None else None) or known

    def accept(self, name: str) -> None:
        """It is restarted from now on, as the others are, and registered if it is an instance."""
        del self._candidates[name]
        program = self._programs[name]
        if program.address is not None:
            self._endpoints[name] = program.public or program.address

    def leave(self, name: str) -> None:
        """An instance is to drain, and then to be stopped. One that serves nothing now is stopped at once."""
        self._leaving.add(name)
        if not self.is_up(name):
            self.retire(name)

    def retire(self, name: str) -> None:
        """Stop one."""
        self._supervisor.retire(name, self._clock.now())

    def runs(self, name: str) -> bool:
        """Whether it has a process, or is to have one."""
        return name in self._running or self._supervisor.comes_back(name)

    def forget(self, name: str) -> None:
        """One that has ended is not part of the deployment any more."""
        self._supervisor.remove(name)
        del self._programs[name]
        self._endpoints.pop(name, None)
        self._leaving.discard(name)
        self._candidates.pop(name, None)
        for registration in self._registrations:
            registration.ready = [other for other in registration.ready if other != name]

    def change(self, program: Program) -> None:
        """What its next incarnation is."""
        self._supervisor.replace(program)
        self._programs[program.name] = program

    def _act(self, action: Action) -> None:
        match action.what:
            case "start":
                self._start(self._programs[action.name])
            case "stop":
                self._stop(self._programs[action.name])
            case "kill":
                log.warning("%s is killed: %s", action.name, action.why)
                self._running[action.name].kill()

    def _start(self, program: Program) -> None:
        now = self._clock.now()
        try:
            incarnation = self._spawner(program.name).spawn(program, now)
        except OSError as error:  # there may be room for a process later
            self._report_not_started(program.name, str(error), now)
            return
        self._running[program.name] = incarnation
        if program.socket is not None:
            self._starting[program.name] = now

    def _report_not_started(self, name: str, why: str, now: float) -> None:
        log.warning("%s could not be started: %s", name, why)
        if name in self._candidates:
            self._candidates[name] = f"it could not be started: {why}"
            self._supervisor.retire(name, now)  # it does not come back
        sentence = self._supervisor.exited(name, NOT_STARTED, now, why)
        if not self._supervisor.comes_back(name):
            self._spawner(name).release(name)
        if sentence != self._supervisor.failure:  # which is logged at the end
            log.warning("%s", sentence)

    def _stop(self, program: Program) -> None:
        incarnation = self._running[program.name]
        if program.address is None:
            incarnation.stop()
        elif address := program.address or incarnation.endpoint:
            self._wire.tell_to_stop(address)
        else:  # it has not begun, and cannot be told
            incarnation.kill()

    def _spawner(self, name: str) -> Spawner:
        return self._engines if self._programs[name].kind == "engine" else self._local
