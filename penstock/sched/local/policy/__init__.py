"""Local policies: which prompts are prefilled next, and how much of them, beside the decodes."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.errors import ConfigError
from penstock.sched.local.policy.base import Allowance, LocalPolicy, StepLimit
from penstock.sched.local.policy.fcfs import Fcfs
from penstock.sched.local.policy.slack import Slack
from penstock.sched.steptime import StepTime

# arguments: the step-time model or None, and the limit of a step's time
LOCAL_POLICIES: dict[str, Callable[[StepTime | None, StepLimit], LocalPolicy]] = {
    "fcfs": Fcfs,
    "priority": Fcfs,  # vLLM's name for fcfs with priorities, which are always respected here
    "slack": Slack,
}


def make_local_policy(name: str, times: StepTime | None, limit: StepLimit) -> LocalPolicy:
    """A new local policy. Raises ConfigError for an unknown name."""
    if name not in LOCAL_POLICIES:
        raise ConfigError(f"scheduling-policy: {name!r}, allowed are {', '.join(LOCAL_POLICIES)}", "scheduling-policy")
    return LOCAL_POLICIES[name](times, limit)


__all__ = ["LOCAL_POLICIES", "Allowance", "LocalPolicy", "make_local_policy"]
