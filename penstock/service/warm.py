"""The warm pool: processes that have imported all that an engine needs, and wait to become one (HFX, arXiv 2508.15919,
section 3.4).

Each has one end of a socket as its standard input. It says there that it is ready, and is told the settings of its
engine, with the descriptors that come with them; the end of the launcher is its end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from math import inf

from penstock.service.process import begin
from penstock.service.supervisor import Program

log = logging.getLogger("penstock.launcher")
ENGINE = (sys.executable, "-m", "penstock.cli.engine")  # how the command line begins of what one can become
ROOM = " " * 4096  # a process can only show a command line that is not longer than its own; Linux shows so much
WARM = (sys.executable, "-m", "penstock.cli.warm", ROOM)
AGAIN = 10.0  # seconds from the end of one that nobody took until it is replaced


class WarmProcess:
    """
    Args:
        environment: of the process; None for this process's own.

    Attributes:
        process: its standard error is a pipe.
    """

    def __init__(self, environment: Mapping[str, str] | None) -> None:
        self._environment, self._cores = environment, os.sched_getaffinity(0)
        self._link, theirs = socket.socketpair()
        self._ready = False
        try:
            self.process = begin(WARM, environment, theirs.fileno(), subprocess.PIPE)
        except OSError:
            self._link.close()
            raise
        finally:
            theirs.close()

    def is_ready(self) -> bool:
        """Whether it has imported all."""
        if not self._ready:
            with contextlib.suppress(OSError):  # it has not said so, or has ended
                self._ready = bool(self._link.recv(1, socket.MSG_DONTWAIT))
            if self._ready:
                log.info("process %d is warm", self.process.pid)
        return self._ready

    def fits(self, environment: Mapping[str, str] | None) -> bool:
        """Whether its threads are on the cores, and as many, as those of a process that is started now would be."""
        return self._environment == environment and self._cores == os.sched_getaffinity(0)

    def become(self, program: Program) -> bool:
        """Have it be that engine. Whether it was told."""
        told = json.dumps({**json.loads(program.command[-1]), "warm": self.is_ready()}).encode() + b"\n"
        try:
            with self._link:
                sent = socket.send_fds(self._link, [told], program.descriptors)
                if sent < len(told):  # else it may have closed its end by now
                    self._link.sendall(told[sent:])
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End it. Not once it is an engine."""
        self._link.close()
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def last_output(self) -> str:
        """The last line of its standard error; ask when it has ended."""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)  # a child of it, as a compiler, may hold the pipe
        lines = (self.process.stderr.read() or b"").decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class WarmPool:
    """Call `refill` many times a second, while nothing is started.

    Args:
        size: processes that wait.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: list[WarmProcess] = []
        self._due = -inf

    def take(self, program: Program, environment: Mapping[str, str] | None) -> subprocess.Popen[bytes] | None:
        """A process that is this program from now on; None where there is none, or none can be it."""
        if program.command[:3] != ENGINE:
            return None
        while self._waiting:
            first = self._waiting.pop(0)
            if first.process.poll() is None and first.fits(environment) and first.become(program):
                return first.process
            first.close()
        return None

    def refill(self, now: float, environment: Mapping[str, str] | None) -> None:
        """Replace what was taken, what has ended and what does not fit that environment: one after another, beside
        engines that serve."""
        for one in list(self._waiting):
            if one.process.poll() is not None:
                log.warning("a warm process has ended, and is replaced: %s", one.last_output() or "it said nothing")
                self._due = now + AGAIN
            elif one.fits(environment):
                continue
            self._waiting.remove(one)
            one.close()
        settled = all(one.is_ready() for one in self._waiting)
        if settled and len(self._waiting) < self._size and now >= self._due:
            try:
                self._waiting.append(WarmProcess(environment))
            except OSError as error:
                log.warning("no warm process can be started: %s", error)
                self._due = now + AGAIN

    def close(self) -> None:
        for one in self._waiting:
            one.close()
        self._waiting.clear()
