"""How many tokens a step may hold, found while steps run (xLLM, section 3.3)."""

from __future__ import annotations

LIMIT_MS = 100.0  # that a step may take, for streams that go on beside prompts
CPU_LIMIT_MS = 500.0  # on a CPU, which in 100 ms reads so few tokens of a prompt that it reads them a tenth slower
GRAIN = 64  # tokens: what is found is a multiple of it
WORTH = 1.125  # a step's time is not known to better than that


class StepBudget:
    """The greatest number of tokens whose step stays within a time limit.

    Only steps that were as large as they might be tell something. It begins with the least and at most doubles with
    each of them, so that nothing has to be measured before the first request. Noise only adds to a step's time, so it
    takes two steps in a row beyond the limit to make it smaller.

    Args:
        low, high: its bounds; at least `low` and GRAIN whatever that takes.
        limit: seconds.

    Attributes:
        tokens: now.
        high: as given.
    """

    def __init__(self, low: int, high: int, limit: float) -> None:
        assert 1 <= low <= high
        low = max(low, min(GRAIN, high))
        self.tokens = low
        self.high = high
        self._low, self._limit = low, limit
        self._slow = 0.0  # what the last of these steps took, when that was too long

    def ran(self, tokens: int, seconds: float) -> bool:
        """A step of so many tokens has run. Returns whether `tokens` has changed."""
        before = self.tokens
        if tokens < before:
            return False
        if seconds > self._limit:
            if self._slow:
                self._set(before * max(0.5, self._limit / min(seconds, self._slow)))
            self._slow = 0.0 if self._slow else seconds
            return self.tokens != before
        self._slow = 0.0
        room = min(2.0, self._limit / seconds if seconds else 2.0)
        if room >= WORTH:
            self._set(before * room)
        return self.tokens != before

    def _set(self, tokens: float) -> None:
        self.tokens = min(max(int(tokens) // GRAIN * GRAIN, self._low), self.high)
