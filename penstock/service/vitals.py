"""Whether a process makes progress, seen from outside: by its heartbeat, and by what the kernel says of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from penstock.core.heartbeat import STILL, Beat

MOVED = 0.1  # seconds of CPU that are work; threads that only answer the wire use less while anything is believed of it
LONGEST_LOOK = 2.0  # seconds that count between two looks: whoever looks may itself have been stopped
_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds


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
        """Whether there was a new beat since the last look; then there is nothing more to ask."""
        if self._beat is not None and beat.number == self._beat.number:
            return False
        self._at, self._beat, self._seen = now, beat, None
        self._quiet = self._still = self._stopped = 0.0
        return True

    def trouble(self, now: float, vitals: Vitals) -> str:
        """Why it is taken for dead although it runs; "" as long as it is not. To be asked when there was no beat."""
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
