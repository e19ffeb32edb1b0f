"""Where the programs of a deployment run: on this machine, or where some other system has room for them.

A launcher asks a `Spawner` for one `Incarnation` of a program after another, looks at each many times a second, and has
its `Supervisor` decide what follows. Whatever starts processes elsewhere is one more class with these methods.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.core.heartbeat import LastStep, box_of, forget, read_black_box, read_heartbeat
from penstock.service.answer_guard import AnswerGuard
from penstock.service.process import begin
from penstock.service.supervisor import STOP, ProcessKind, Program
from penstock.service.warm import WarmPool
from penstock.service.watch import Trouble, Vitals, Watch, is_stopped, read_vitals

log = logging.getLogger("penstock.launcher")
LAST_OUTPUT = 500  # characters
STDERR = 2


class Incarnation(Protocol):
    """One run of a program. Nothing here waits, but for `close`.

    Attributes:
        endpoint: ZMQ endpoint where others reach an engine; "" for other programs, and while it is not known.
    """

    endpoint: str

    def poll(self) -> int | None:
        """The exit code, as `subprocess` has it: -N when signal N ended it; None while it runs."""

    def is_up(self) -> bool:
        """Whether it can be reached; for programs with a socket."""

    def trouble(self, now: float) -> Trouble | None:
        """Why it hangs, or may hang. Call it a few times a second."""

    def give_time(self, now: float) -> None:
        """This process did not run for a while, and the other perhaps did not either."""

    def stop(self) -> None:
        """Tell a program without an endpoint to end."""

    def reload(self) -> None:
        """Tell a frontend to read its files again."""

    def kill(self) -> None: ...

    def last_words(self) -> str:
        """The last line of its standard error; call it once, when it has ended."""

    def last_step(self) -> LastStep | None:
        """What an engine was computing when it ended; None of others, and where nobody knows."""

    def close(self) -> None:
        """It is over, whatever the state; then no process of it is left."""


class Spawner(Protocol):
    def spawn(self, program: Program, now: float) -> Incarnation:
        """Start a program that does not run."""

    def refill(self, now: float) -> None:
        """Have processes become warm in the place of those that were taken; call it while nothing is started."""

    def release(self, name: str) -> None:
        """This program is not started again: what was kept for its next incarnation is free."""

    def close(self) -> None:
        """Release all."""


class LocalSpawner:
    """Processes of this machine.

    Args:
        environments: kind -> environment of its processes, where it is not this process's own.
        heartbeat_timeout: seconds without a sign of life after which one hangs.
        warm: processes that wait to become engines.
    """

    def __init__(
        self, environments: Mapping[ProcessKind, Mapping[str, str]], heartbeat_timeout: float, warm: int = 0
    ) -> None:
        self._environments, self._timeout = environments, heartbeat_timeout
        self._pool = WarmPool(warm)

    def spawn(self, program: Program, now: float) -> LocalProcess:
        environment = self._environments.get(program.kind)
        warm = self._pool.take(program, environment)
        process = LocalProcess(program, environment, self._timeout, now, warm=warm)
        log.info("%s is process %d%s", program.name, process.pid, "" if warm is None else ", of the warm pool")
        return process

    def refill(self, now: float) -> None:
        """Have processes become warm in the place of those that were taken; call it while nothing is started."""
        self._pool.refill(now, self._environments.get("engine"))

    def release(self, name: str) -> None:
        pass  # nothing is kept

    def close(self) -> None:
        self._pool.close()


class LocalProcess:
    """
    Args:
        environment: of the process; None for this process's own.
        timeout: seconds without a sign of life after which it hangs.
        hear: gets every line of an engine's standard error; by default this process's own gets it.
        warm: the process, where it waited for this; its standard error is a pipe.

    Attributes:
        pid: of the process, and of its process group.
    """

    def __init__(
        self,
        program: Program,
        environment: Mapping[str, str] | None,
        timeout: float,
        now: float,
        hear: Callable[[bytes], object] | None = None,
        warm: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._program = program
        self.endpoint = program.public or program.address or ""
        if program.socket is not None:
            program.socket.unlink(missing_ok=True)
        self._watch: Watch | None = None
        self._trouble: Trouble | None = None
        if program.heartbeat is not None:
            forget(program.heartbeat)
            self._watch = Watch(now, timeout, waits=program.needs is not None, early=program.kind == "engine")
        self._guard = AnswerGuard() if program.kind == "frontend" else None
        self._process = warm or begin(
            program.command,
            environment,
            subprocess.DEVNULL if self._guard is None else self._guard.link.fileno(),
            subprocess.PIPE if program.kind == "engine" else None,
            program.descriptors,
        )
        if self._guard is not None:
            self._guard.link.close()  # it is the frontend's now
        self.pid = self._process.pid
        self._voice = None if self._process.stderr is None else _Voice(self._process, hear or _repeat)

    def poll(self) -> int | None:
        if self._guard is not None:
            self._guard.look()
        return self._process.poll()

    def is_up(self) -> bool:
        return self._program.socket is not None and self._program.socket.exists()

    def trouble(self, now: float) -> Trouble | None:
        if self._watch is None:
            return None
        assert self._program.heartbeat is not None
        if self._watch.beats(now, read_heartbeat(self._program.heartbeat)):
            self._trouble = None
        elif is_stopped(self.pid):
            self._trouble = self._watch.trouble(now, Vitals(stopped=True))
        elif not self._watch.is_new(now):
            self._trouble = self._watch.trouble(now, read_vitals(self.pid))
        return self._trouble

    def give_time(self, now: float) -> None:
        self._trouble = None
        if self._watch is not None:
            self._watch.restart(now)

    def stop(self) -> None:
        self._process.send_signal(STOP)

    def reload(self) -> None:
        self._process.send_signal(signal.SIGHUP)  # blocked until it reads it

    def kill(self) -> None:
        self._process.kill()

    def last_words(self) -> str:
        if self._guard is not None:
            answers = self._guard.end()
            if answers.unfinished:
                log.warning("%s has left %s", self._program.name, answers)
        return self._voice.last_output() if self._voice is not None else ""

    def last_step(self) -> LastStep | None:
        heartbeat = self._program.heartbeat
        return None if heartbeat is None else read_black_box(box_of(heartbeat))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._guard is not None:
            self._guard.close()


class _Voice:
    """Passes a process's standard error on, line by line."""

    def __init__(self, process: subprocess.Popen[bytes], hear: Callable[[bytes], object]) -> None:
        self._process, self._hear = process, hear
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
                self._hear(line)


def _repeat(line: bytes) -> None:
    with contextlib.suppress(OSError):  # standard error is closed
        os.write(STDERR, line)
