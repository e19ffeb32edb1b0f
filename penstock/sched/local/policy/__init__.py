"""How an engine paces its work: which prompts are read next, and how fast, beside what decodes."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.errors import ConfigError
from penstock.sched.local.policy.base import Allowance, LocalPolicy
from penstock.sched.local.policy.fcfs import Fcfs
from penstock.sched.local.policy.slack import Slack
from penstock.sched.steptime import StepTime

# each is made of what predicts steps, None as long as nothing does, and of the tokens that a step may hold
LOCAL_POLICIES: dict[str, Callable[[StepTime | None, int], LocalPolicy]] = {
    "fcfs": lambda times, most: Fcfs(),
    "priority": lambda times, most: Fcfs(),  # what others call it when priorities count; here they always do
    "slack": Slack,
}


def make_local_policy(name: str, times: StepTime | None, most: int) -> LocalPolicy:
    """A fresh one. Raises ConfigError for a name that nothing has."""
    if name not in LOCAL_POLICIES:
        raise ConfigError(f"scheduling-policy: {name!r}, allowed are {', '.join(LOCAL_POLICIES)}", "scheduling-policy")
    return LOCAL_POLICIES[name](times, most)


__all__ = ["LOCAL_POLICIES", "Allowance", "LocalPolicy", "make_local_policy"]
