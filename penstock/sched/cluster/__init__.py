"""Many instances: which of them runs a request. A new policy is a file here and a line in `DISPATCH`."""

from __future__ import annotations

from collections.abc import Callable

from penstock.sched.cluster.base import Decision, Demand, DispatchPolicy, InstanceLoad, Random, Stage
from penstock.sched.cluster.dispatch import dispatch, hands_over
from penstock.sched.cluster.least_loaded import LeastLoaded
from penstock.sched.cluster.round_robin import RoundRobin

DISPATCH: dict[str, Callable[[], DispatchPolicy]] = {
    RoundRobin.name: RoundRobin,
    LeastLoaded.name: LeastLoaded,
}

__all__ = [
    "DISPATCH",
    "Decision",
    "Demand",
    "DispatchPolicy",
    "InstanceLoad",
    "Random",
    "Stage",
    "dispatch",
    "hands_over",
]
