"""One instance: which tokens run in the next step."""

from penstock.sched.local.limits import Limits
from penstock.sched.local.pacing import PACING, Pacing, make_pacing
from penstock.sched.local.scheduler import Scheduler

__all__ = ["PACING", "Limits", "Pacing", "Scheduler", "make_pacing"]
