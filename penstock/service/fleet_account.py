"""What the instances of a deployment cost, how long they took to start, and how often their number was changed."""

from __future__ import annotations

from collections import Counter, deque
from statistics import median

from penstock.core.wire.master import FleetTotals, StartTotals
from penstock.sched.cluster import FleetChange

LATELY = 5  # starts, whose median is what the next is expected to take
UNKNOWN = "unknown"  # path of a start of which the engine does not say how it came to its weights


class FleetAccount:
    """
    Attributes:
        holding: instances that hold devices: those that start, serve or drain.
    """

    def __init__(self, holding: int) -> None:
        self.holding = holding
        self._seconds = 0.0  # up to `_since`
        self._since: float | None = None
        self._took: dict[str, float] = {}  # starts whose paths are not known yet
        self._came: dict[str, str] = {}  # paths of those whose times are not
        self._counts: Counter[str] = Counter()
        self._sums: dict[str, float] = {}
        self._latest: deque[float] = deque(maxlen=LATELY)
        self._changes: Counter[str] = Counter()

    def begin(self, now: float) -> None:
        """Count from now on, if it did not before."""
        if self._since is None:
            self._since = now

    def hold(self, now: float, more: int) -> None:
        """So many instances more hold devices from now on."""
        self._seconds, self._since = self.seconds(now), now
        self.holding += more

    def seconds(self, now: float) -> float:
        """Instance-seconds so far."""
        self.begin(now)
        assert self._since is not None
        return self._seconds + self.holding * (now - self._since)

    def took(self, name: str, seconds: float) -> None:
        """From the order to start an instance until it could be reached."""
        self._took[name] = seconds
        self._join(name)

    def came(self, name: str, path: str) -> None:
        """By which path an instance that serves now came to its weights."""
        self._came[name] = path or UNKNOWN
        self._join(name)

    def left(self, name: str) -> None:
        self._came.pop(name, None)
        self._took.pop(name, None)

    def _join(self, name: str) -> None:
        if name in self._took and name in self._came:
            path, seconds = self._came.pop(name), self._took.pop(name)
            self._counts[path] += 1
            self._sums[path] = self._sums.get(path, 0.0) + seconds
            self._latest.append(seconds)

    def changed(self, change: FleetChange) -> None:
        """It was decided on."""
        self._changes[type(change).__name__.lower()] += 1

    def expected(self, believed: float) -> float:
        """Seconds that the next start takes: as those lately, or as is believed."""
        return median(self._latest) if self._latest else believed

    def totals(self, now: float) -> FleetTotals:
        starts = [StartTotals(path, self._counts[path], self._sums[path]) for path in sorted(self._counts)]
        return FleetTotals(self.seconds(now), self.holding, starts, dict(self._changes))
