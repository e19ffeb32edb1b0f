"""Whether a process makes progress, from its heartbeat and from what the system says of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from penstock.core.heartbeat import Beat

MOVED = 0.1  # seconds of CPU that count as progress; threads that only poll use less
SUSPECT_AFTER = 3.0  # seconds without a sign of life after which a process is suspected; fewer with a short timeout
SUSPECT_SHARE = 0.6  # of the heartbeat timeout
STOPPED_AFTER = 0.4  # seconds after which one that a signal has stopped is suspected: it cannot be busy
NEW = 0.5  # seconds for which what was seen of a process says enough: to look costs milliseconds
_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds


@dataclass(frozen=True, slots=True)
class Vitals:
    """
    Attributes:
        cpu: seconds that it and what it started have used.
        faults: pages that had to be read for them.
        stopped: a signal keeps it from running.
        held_up: some thread waits for a core or a disk: it would run, if the machine let it.
    """

    cpu: float = 0.0
    faults: int = 0
    stopped: bool = False
    held_up: bool = False


def is_stopped(process: int) -> bool:
    """Whether a signal keeps it from running. A thousandth of the work of `read_vitals`."""
    words = _words(Path(f"/proc/{process}/stat"))
    return words is not None and words[0] in "Tt"


def read_vitals(group: int) -> Vitals:
    """Of a process and of all others in its process group: an engine that compiles waits for its compiler."""
    cpu, faults, stopped, held_up = 0.0, 0, False, False
    for path in Path("/proc").glob("[0-9]*/stat"):
        words = _words(path)
        if words is None or int(words[2]) != group:
            continue
        cpu += (int(words[11]) + int(words[12])) * _TICK
        faults += int(words[9])
        stopped |= path.parent.name == str(group) and words[0] in "Tt"
        threads = map(_words, (path.parent / "task").glob("*/stat"))
        held_up |= any(thread is not None and thread[0] in "RD" for thread in threads)
    return Vitals(cpu, faults, stopped, held_up)


def _words(path: Path) -> list[str] | None:
    """State, parent, group, ... of a process or a thread; None when it has just gone."""
    try:
        return path.read_text().rpartition(")")[2].split()  # the name, in parentheses, may have spaces
    except (OSError, UnicodeDecodeError):
        return None


@dataclass(frozen=True, slots=True)
class Trouble:
    """
    Attributes:
        hangs: whether it is to be killed; else it is only suspected.
    """

    why: str
    hangs: bool


class Watch:
    """Of one incarnation of a process. Call `beats`, and `trouble` where there was none, a few times a second.

    Args:
        timeout: seconds without a heartbeat after which it hangs, unless it computes or the machine holds it up.
        waits: it may be waiting for another process that is watched, which is to be found out first.
        early: others can do its work meanwhile: it is suspected as soon as it is certain that it cannot run.
    """

    def __init__(self, now: float, timeout: float, waits: bool = False, early: bool = False) -> None:
        self._timeout = timeout
        self._still_limit = 2 * timeout if waits else timeout
        self._suspect_after = min(SUSPECT_AFTER, SUSPECT_SHARE * timeout)
        self._stopped_after = min(STOPPED_AFTER, self._suspect_after) if early else self._suspect_after
        self._beat: Beat | None = None
        self.restart(now)

    def restart(self, now: float) -> None:
        """It gets new time: it has beaten, or whoever watches did not run either."""
        self._at = now
        self._seen: Vitals | None = None
        self._quiet = self._still = self._stopped = 0.0  # seconds since the last sign of each kind

    def beats(self, now: float, beat: Beat) -> bool:
        """Whether there was a new heartbeat since the last check; then it makes progress."""
        if self._beat is not None and beat.number == self._beat.number:
            return False
        self._beat = beat
        self.restart(now)
        return True

    def is_new(self, now: float) -> bool:
        """Whether what was seen last says enough, unless a signal has stopped it."""
        return now - self._at < NEW

    def trouble(self, now: float, vitals: Vitals) -> Trouble | None:
        """Why it hangs, or may hang. For checks without a new heartbeat."""
        assert self._beat is not None
        passed, self._at = now - self._at, now
        self._quiet += passed
        self._stopped = self._stopped + passed if vitals.stopped else 0.0
        if self._seen is None or vitals.cpu - self._seen.cpu >= MOVED or vitals.faults > self._seen.faults:
            self._seen, self._still = vitals, 0.0
        elif not vitals.held_up:
            self._still += passed
        still_limit = max(self._beat.still, self._still_limit)
        if self._stopped > self._timeout:
            return self._found("a signal has stopped it", hangs=True)
        if self._still > still_limit:
            return self._found("it does nothing", hangs=True)
        if self._quiet > self._beat.limit:
            return self._found("no step takes that long", hangs=True)
        if self._stopped > self._stopped_after:
            return self._found("a signal has stopped it", hangs=False)
        if self._still > self._suspect_after and not self._beat.still:
            return self._found("it does nothing", hangs=False)
        return None

    def _found(self, why: str, *, hangs: bool) -> Trouble:
        return Trouble(f"no heartbeat for {self._quiet:.0f} s, {why}", hangs)
