"""Decides which of a deployment's processes are started, stopped or killed, from exits and time."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from penstock.core.wire.engine import Role

ProcessKind = Literal["kv_pool", "engine", "master", "frontend"]
STOP_ORDER: tuple[ProcessKind, ...] = ("frontend", "master", "engine", "kv_pool")  # each serves those before it
STOP = signal.SIGUSR1  # tells a process to end; a service manager sends SIGTERM to all at once, which only we follow
CANNOT_BE_SERVED = 2  # exit code of a usage error: not restarted, unless it was up before
STEADY = 60.0  # seconds of service after which the count of failures is reset
BROKEN = 20  # times in a row that an engine may be broken by requests: so many are not to blame, but it is
MOST_BACKOFF = 30.0  # seconds
STOP_GRACE = 5.0  # seconds that a process has to end after it was told to
DRAIN_GRACE = 10.0  # seconds beyond the drain timeout that a frontend gets, because it ends its requests by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """
    Attributes:
        backoff: seconds until a failed process is restarted; doubles with every failure in a row.
        limit: failures in a row after which it is restarted.
        heartbeat_timeout: seconds without a sign of life after which a process hangs and is killed.
        slow_after: seconds of work after which the master has a slow engine start again; 0 for never.
    """

    backoff: float
    limit: int
    heartbeat_timeout: float
    slow_after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A process of the deployment, over all its incarnations.

    Attributes:
        command: the command line.
        descriptors: file descriptors that it inherits.
        address: ZMQ endpoint of an engine, which is told there to stop; others get `STOP`. "" where whoever spawns it
            knows its place.
        public: the same for other hosts; "" where there are none.
        role: of an engine.
        socket: made by it when it can be reached. One left behind is removed before the next start.
            Without one, an incarnation of `STEADY` seconds shows that it could be.
        heartbeat: its heartbeat file; None where it is not watched.
        needs: the program whose socket must be there first, and whose end ends this one too.
        starts: whether it runs from the start on; else once it is told to.
        resources: what is to be set apart for it where it runs, such as {"CPU": 2, "GPU": 1}; none on this machine.
        devices: that it takes.
        model: prefix of the deployment that it is for; of no meaning for a frontend, which is for all.
    """

    name: str
    kind: ProcessKind
    command: tuple[str, ...]
    descriptors: tuple[int, ...] = ()
    address: str | None = None
    public: str = ""
    role: Role = "any"
    socket: Path | None = None
    heartbeat: Path | None = None
    needs: str | None = None
    starts: bool = True
    resources: Mapping[str, float] = field(default_factory=dict)
    devices: int = 1
    model: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    what: Literal["start", "stop", "kill"]
    name: str
    why: str = ""


@dataclass(slots=True)
class _Place:
    """One program's state. It runs, or waits until `due`, or is stopped, or has ended for good."""

    program: Program
    due: float | None = None
    stops_by: float | None = None  # it is stopped by itself, and killed then
    since: float | None = None  # start of the incarnation that runs now
    up: bool = False  # those that need it may start
    up_since: float | None = None  # of one with a socket
    proven: bool = False  # some incarnation was up, so its configuration is valid
    fallen: bool = False  # a program that it needs has ended
    suspected: str = ""  # why it may hang
    hangs: str = ""  # why it does
    killed: bool = False
    told: bool = False  # to stop, by itself
    again: bool = False  # it starts again when it has stopped so
    ended: str = ""  # how its last incarnation did, until the next one is up
    given_up: bool = False
    deaths: int = 0  # in a row
    broken: int = 0  # likewise, by requests; such a death is not counted with the others

    @property
    def running(self) -> bool:
        return self.since is not None

    def served(self, now: float) -> float:
        """Seconds that this incarnation has been reachable; without a socket, its age."""
        since = self.since if self.program.socket is None else self.up_since
        return 0.0 if since is None else now - since

    @property
    def well(self) -> bool:
        """Whether those that need it may count on it."""
        return self.up and not (self.suspected or self.hangs or self.killed)

    @property
    def trouble(self) -> str:
        """Why those that need it have to do without; "" when they need not, or it only starts."""
        why = self.hangs or self.suspected
        return f"{self.program.name} hangs: {why}" if why else self.ended

    def end(self) -> None:
        """This incarnation has ended."""
        self.since = self.due = self.up_since = self.stops_by = None
        self.up = self.fallen = self.killed = False
        self.suspected = self.hangs = ""


class Supervisor:
    """Call `exited`, `is_up`, `suspect`, `hangs` and `stop` as things happen, and do what `actions` says, a few times a
    second. Of processes that end together, those that others need are reported first.

    Args:
        drain_timeout: seconds that running requests get to finish.

    Attributes:
        heartbeat_timeout: see `RestartPolicy`.
        over: no process runs, and none will be started.
        exit_code: 0 when it was told to stop; else what the deployment ended with.
        failure: why it ended by itself; "" when it did not.
    """

    def __init__(self, programs: Sequence[Program], restart: RestartPolicy, drain_timeout: float) -> None:
        self._places = {program.name: _Place(program, 0.0 if program.starts else None) for program in programs}
        self._restart = restart
        self.heartbeat_timeout = restart.heartbeat_timeout
        self._patience = drain_timeout + DRAIN_GRACE  # seconds for frontends to drain
        self._stopping: ProcessKind | None = None  # the kind being stopped
        self._deadline: float | None = None  # of that kind; None before it was told
        self._lost: set[str] = set()  # models that can be served no longer
        self.over = False
        self.exit_code = 0
        self.failure = ""

    @property
    def stopping(self) -> bool:
        return self._stopping is not None

    def is_up(self, name: str, now: float) -> None:
        """The program can be reached."""
        place = self._places[name]
        place.up = place.proven = True
        place.up_since = now
        place.ended = ""

    def add(self, program: Program) -> None:
        """One more, which is stopped."""
        assert program.name not in self._places, f"{program.name} is there"
        self._places[program.name] = _Place(program)

    def replace(self, program: Program) -> None:
        """What its next incarnation is."""
        self._places[program.name].program = program

    def remove(self, name: str) -> None:
        """One that has ended, for good."""
        assert not self._places[name].running, f"{name} runs"
        del self._places[name]

    def start(self, name: str, now: float) -> None:
        """Start a stopped program. No effect on others, nor when everything stops."""
        if self.is_stopped(name) and not self.stopping:
            self._places[name].due = now
            self._places[name].deaths = self._places[name].broken = 0

    def retire(self, name: str, now: float, again: bool = False) -> None:
        """Stop one program until it is started again.

        Args:
            again: at once, if it runs; else nothing is done.
        """
        place = self._places[name]
        if again and (not place.running or (place.stops_by is not None and not place.again)):
            return
        place.again = again
        place.due = None
        if place.running and place.stops_by is None:
            place.stops_by = now + STOP_GRACE
            place.told = False

    def is_stopped(self, name: str) -> bool:
        """Whether it was stopped, or not started yet; not whether it failed."""
        place = self._places[name]
        return not (place.running or place.given_up) and place.due is None

    def has_given_up(self, name: str) -> bool:
        """Whether it has failed too often to be started again."""
        return self._places[name].given_up

    def comes_back(self, name: str) -> bool:
        """Whether an ended program is to be started again, as far as is known."""
        return self._places[name].due is not None

    def suspect(self, name: str, why: str) -> None:
        """The program may hang; not any longer when `why` is ""."""
        self._places[name].suspected = why

    def hangs(self, name: str, why: str) -> None:
        """The program hangs. Not its fault, and ignored, while what it needs may hang: it waits for that."""
        place = self._places[name]
        if self._needed_is_well(place):
            place.hangs = why

    @property
    def troubles(self) -> dict[str, str]:
        """Of each engine that cannot serve although it could before: why, with the name of the process at fault."""
        found: dict[str, str] = {}
        for name, place in self._places.items():
            if place.program.kind == "engine":
                needs = place.program.needs
                why = (needs and self._places[needs].trouble) or place.trouble
                found |= {name: why} if why else {}
        return found

    def _needed_is_well(self, place: _Place) -> bool:
        needs = place.program.needs
        return needs is None or self._places[needs].well

    def exited(self, name: str, code: int, now: float, last_output: str = "", *, broken: bool = False) -> str:
        """A process has ended; returns a sentence that says so, and what follows.

        Args:
            code: as `subprocess` has it: -N when signal N ended it.
            last_output: the last line of its standard error.
            broken: an engine, by requests.
        """
        place = self._places[name]
        assert place.running, f"{name} does not run"
        sentence = self._follow(place, code, now, last_output, broken)
        place.ended = "" if self.is_stopped(name) else sentence
        return sentence

    def _follow(self, place: _Place, code: int, now: float, last_output: str, broken: bool) -> str:
        name = place.program.name
        served, killed = place.served(now), place.killed
        fallen = place.fallen or not self._needed_is_well(place)
        retired = place.stops_by is not None
        place.proven |= place.program.socket is None and served >= STEADY
        ending = f"{shown(code)} ({place.hangs})" if place.hangs else shown(code)
        how = f"{name} ended with {ending}"
        place.end()
        if self.stopping:
            if code not in (0, -STOP) and not killed and not self.failure:
                self.failure, self.exit_code = f"{how} while everything was stopped", 1  # a crash is no success
            return how
        for other in self._places.values():
            other.fallen |= other.running and other.program.needs == name
        if retired:
            again, place.again = place.again, False
            place.due = now if again else None
            return f"{name} was stopped" + (", and starts again" if again else "")
        if code == CANNOT_BE_SERVED and not place.proven and place.program.starts:
            return self._lose(place, f"{how}: it cannot be served", CANNOT_BE_SERVED, now)
        if fallen:
            place.due = now
            return f"{how} because of {place.program.needs}, and starts again"
        if served >= STEADY:
            place.deaths = place.broken = 0
        place.deaths, place.broken = place.deaths + (not broken), place.broken + broken
        if place.deaths > self._restart.limit or place.broken > BROKEN:
            deaths = place.deaths + place.broken
            times = "once" if deaths == 1 else f"{deaths} times in a row"
            why = f"{name} ended {times}, the last time with {ending}"
            if last_output:
                why += f"; its last output: {last_output}"
            model = [other.program for other in self._places.values() if other.program.model == place.program.model]
            place.given_up = True
            if place.program.kind == "engine" and any(
                p.kind == "engine" and not self.has_given_up(p.name) for p in model
            ):
                return f"{why}; it is given up, and the other engines serve on"
            return self._lose(place, why, 1, now)
        delay = min(self._restart.backoff * 2 ** max(0, place.deaths - 1), MOST_BACKOFF)
        place.due = now + delay
        return f"{how} and starts again in {delay:g} s"

    def stop(self, now: float) -> None:
        """Drain and stop everything. A second call stops without waiting for running requests."""
        if not self.stopping:
            self._stopping = STOP_ORDER[0]
            for place in self._places.values():
                place.due = None
        elif self._stopping == "frontend":  # a second signal makes it end its requests
            self._patience, self._deadline = STOP_GRACE, None

    def actions(self, now: float) -> list[Action]:
        """The actions that are due; each is returned once."""
        actions = self._kill_due() + self._retire_due(now)
        return actions + (self._stop_next(now) if self._stopping is not None else self._start_due(now))

    def _kill_due(self) -> list[Action]:
        actions = []
        for name, place in self._places.items():
            if (place.fallen or place.hangs) and place.running and not place.killed:
                place.killed = True
                why = f"it hangs: {place.hangs}" if place.hangs else f"{place.program.needs} has ended"
                actions.append(Action("kill", name, why))
        return actions

    def _retire_due(self, now: float) -> list[Action]:
        actions = []
        for name, place in self._places.items():
            if place.stops_by is None or place.killed:
                continue
            if not place.told:
                place.told = True
                actions.append(self._end_one(place))
            elif now >= place.stops_by:
                place.killed = True
                actions.append(Action("kill", name, "it did not end in time"))
        return actions

    def _start_due(self, now: float) -> list[Action]:
        actions = []
        for name, place in self._places.items():
            if place.due is not None and place.due <= now and self._needed_is_well(place):
                place.due, place.since = None, now
                if place.program.socket is None:
                    place.ended = ""
                actions.append(Action("start", name))
        return actions

    def _stop_next(self, now: float) -> list[Action]:
        while self._stopping is not None:
            running = [p for p in self._places.values() if p.running and p.program.kind == self._stopping]
            if running:
                return self._stop_role(running, now)
            at = STOP_ORDER.index(self._stopping) + 1
            if at == len(STOP_ORDER):
                break
            self._stopping, self._deadline = STOP_ORDER[at], None
        self.over = True
        return []

    def _stop_role(self, running: Sequence[_Place], now: float) -> list[Action]:
        if self._deadline is None:
            self._deadline = now + (self._patience if self._stopping == "frontend" else STOP_GRACE)
            return [self._end_one(place) for place in running]
        late = [place for place in running if now >= self._deadline and not place.killed]
        for place in late:
            place.killed = True
        return [Action("kill", place.program.name, "it did not end in time") for place in late]

    def _end_one(self, place: _Place) -> Action:
        if place.program.kind == "engine" and place.program.socket is not None and not place.up:
            place.killed = True  # it is loading and does not read messages
        return Action("kill" if place.killed else "stop", place.program.name)

    def refuse(self, why: str, now: float) -> None:
        """The master does not take what runs here."""
        self._fail(why, CANNOT_BE_SERVED, now)

    def _lose(self, place: _Place, why: str, code: int, now: float) -> str:
        """A program has failed for good, and with it its model. When that was the last one, or a frontend, all ends.
        Returns a sentence that says so."""
        place.given_up = True
        self._lost.add(place.program.model)
        models = {other.program.model for other in self._places.values() if other.program.kind != "frontend"}
        if place.program.kind == "frontend" or models <= self._lost:
            self._fail(why, code, now)
            return self.failure
        return f"{why}; {place.program.model.rstrip('/')} is given up, and the other models serve on"

    def _fail(self, why: str, code: int, now: float) -> None:
        self.failure, self.exit_code = why, code
        self.stop(now)


def shown(code: int) -> str:
    """An exit code, for people; a signal by its name."""
    try:
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
