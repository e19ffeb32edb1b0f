"""What came and went lately."""

from __future__ import annotations

from collections import deque

from penstock.core.wire.master import Outcome
from penstock.sched.cluster import Demand, Rates

WINDOW = 10.0  # seconds


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
