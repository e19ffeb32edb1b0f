"""How fast something goes."""

from __future__ import annotations

from collections import deque

WINDOW = 10.0  # seconds
SURE = 1.0  # seconds after which a measured pace is better than the last one


class RateMeter:
    """The rate of some work while there is any, over the last `WINDOW` seconds."""

    def __init__(self) -> None:
        self._done: deque[tuple[float, float]] = deque()  # when, how much
        self._sum = 0.0
        self._since: float | None = None  # when there began to be something to do
        self._last = 0.0

    def begin(self, now: float) -> None:
        """Work is available. No effect if it was before."""
        if self._since is None:
            self._since = now

    def count(self, now: float, amount: float) -> None:
        """Count work done."""
        self._done.append((now, amount))
        self._sum += amount

    def rest(self, now: float) -> None:
        """No work is left."""
        self._last = self.rate(now)
        self._done.clear()
        self._sum, self._since = 0.0, None

    def rate(self, now: float) -> float:
        """Per second; when there is nothing to do, of the last time that there was. 0 when nothing is known."""
        if self._since is None:
            return self._last
        while self._done and self._done[0][0] < now - WINDOW:
            self._sum -= self._done.popleft()[1]
        elapsed = min(now - self._since, WINDOW)
        if not self._done or (elapsed < SURE and self._last):
            return self._last
        return self._sum / max(elapsed, 0.1)
