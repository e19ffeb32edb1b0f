"""One instance: which tokens run in the next step."""

from penstock.sched.local.limits import Limits
from penstock.sched.local.policy import LOCAL_POLICIES, LocalPolicy, make_local_policy
from penstock.sched.local.scheduler import Scheduler

__all__ = ["LOCAL_POLICIES", "Limits", "LocalPolicy", "Scheduler", "make_local_policy"]
