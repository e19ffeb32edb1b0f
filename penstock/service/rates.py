"""What came and went lately."""

from __future__ import annotations

from collections import deque

from penstock.core.wire.master import Outcome
from penstock.sched.cluster import Demand, Rates

WINDOW = 10.0  # seconds
SURE = 1.0  # seconds after which a measured pace is better than the last one


class RateWindow:
    """Of online sequences, over the last `WINDOW` seconds."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[float, int]] = deque()  # when, prompt tokens
        self._ended: deque[tuple[float, int, bool]] = deque()  # when, output tokens, whether it kept its targets
        self._prompt_tokens = self._output_tokens = self._attained = 0  # sums of these

    def arrive(self, now: float, demand: Demand) -> None:
        self._arrived.append((now, demand.prompt_tokens))
        self._prompt_tokens += demand.prompt_tokens

    def end(self, now: float, demand: Demand, outcome: Outcome) -> None:
        kept = outcome.ttft_ms <= demand.ttft * 1e3 and (outcome.tpot_ms or 0.0) <= demand.tpot * 1e3
        self._ended.append((now, outcome.tokens, kept))
        self._output_tokens += outcome.tokens
        self._attained += kept

    def rates(self, now: float) -> Rates:
        while self._arrived and self._arrived[0][0] < now - WINDOW:
            self._prompt_tokens -= self._arrived.popleft()[1]
        while self._ended and self._ended[0][0] < now - WINDOW:
            _, tokens, kept = self._ended.popleft()
            self._output_tokens -= tokens
            self._attained -= kept
        arrived, ended = len(self._arrived), len(self._ended)
        return Rates(
            window=WINDOW,
            arrivals=arrived,
            completions=ended,
            attained=self._attained,
            prompt_tokens=self._prompt_tokens / arrived if arrived else 0.0,
            output_tokens=self._output_tokens / ended if ended else 0.0,
        )


class RateMeter:
    """How fast something goes while there is any of it to do, over the last `WINDOW` seconds."""

    def __init__(self) -> None:
        self._done: deque[tuple[float, float]] = deque()  # when, how much
        self._sum = 0.0
        self._since: float | None = None  # when there began to be something to do
        self._last = 0.0

    def begin(self, now: float) -> None:
        """There is something to do. Harmless when there was before."""
        if self._since is None:
            self._since = now

    def count(self, now: float, amount: float) -> None:
        """So much was done."""
        self._done.append((now, amount))
        self._sum += amount

    def rest(self, now: float) -> None:
        """There is nothing left to do."""
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
