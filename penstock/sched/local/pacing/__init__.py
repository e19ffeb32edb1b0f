"""How an engine paces its work: which prompts are read next, and how fast, beside what decodes."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.errors import ConfigError
from penstock.sched.local.pacing.base import Allowance, Pacing
from penstock.sched.local.pacing.fcfs import Fcfs
from penstock.sched.local.pacing.slack import Slack
from penstock.sched.steptime import StepTime

# each is made of what predicts steps, None as long as nothing does, and of the tokens that a step may hold
PACING: dict[str, Callable[[StepTime | None, int], Pacing]] = {
    "fcfs": lambda times, most: Fcfs(),
    "priority": lambda times, most: Fcfs(),  # what others call it when priorities count; here they always do
    "slack": Slack,
}


def make_pacing(name: str, times: StepTime | None, most: int) -> Pacing:
    """A fresh one. Raises ConfigError for a name that nothing has."""
    if name not in PACING:
        raise ConfigError(f"scheduling-policy: {name!r}, allowed are {', '.join(PACING)}", "scheduling-policy")
    return PACING[name](times, most)


__all__ = ["PACING", "Allowance", "Pacing", "make_pacing"]
