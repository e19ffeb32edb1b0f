"""What lately was: moving means that a heartbeat carries to the master."""

from __future__ import annotations

from penstock.core.plan import StepPlan
from penstock.core.request import Timing

WEIGHT = 0.1  # of the newest value


class Recent:
    """Exponentially weighted means, in milliseconds; None before there is a value."""

    def __init__(self) -> None:
        self.ttft_ms: float | None = None
        self.tpot_ms: float | None = None
        self.interval_ms: float | None = None
        self.factors: dict[str, float] = {}
        self._last_step: float | None = None

    def step(self, plan: StepPlan, now: float, took: float) -> None:
        """A step that ended at `now` after `took` seconds."""
        if self._last_step is not None and any(len(s.tokens) == 1 for s in plan.sequences):
            # from the end of one step to the end of the next, or what the step took after a pause
            self.interval_ms = _mean(self.interval_ms, min(now - self._last_step, 2 * took) * 1e3)
        self._last_step = now
        prefill = sum(len(s.tokens) for s in plan.sequences if len(s.tokens) > 1)
        if not prefill:
            self._factor("decode_ms", took * 1e3)
        else:
            decodes = self.factors.get("decode_ms", 0.0) if prefill < plan.num_tokens else 0.0
            self._factor("prefill_ms_per_token", max(0.0, took * 1e3 - decodes) / prefill)

    def ttft(self, seconds: float) -> None:
        self.ttft_ms = _mean(self.ttft_ms, seconds * 1e3)

    def finished(self, timing: Timing, tokens: int) -> None:
        """A request that got `tokens` tokens after its first."""
        if tokens > 0:
            self.tpot_ms = _mean(self.tpot_ms, timing.decode / tokens * 1e3)

    def _factor(self, name: str, value: float) -> None:
        self.factors[name] = _mean(self.factors.get(name), value)


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + WEIGHT * (value - before)
