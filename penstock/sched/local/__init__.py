"""One instance: which tokens run in the next step."""

from penstock.sched.local.scheduler import Limits, Scheduler

__all__ = ["Limits", "Scheduler"]
