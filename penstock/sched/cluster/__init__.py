"""Many instances: which of them runs a request, which work each is for, and how many there are. A new policy is a file
here and a line in its registry."""

from __future__ import annotations

from collections.abc import Callable

from penstock.sched.cluster.base import (
    Balancer,
    ClusterView,
    Decision,
    Demand,
    DispatchPolicy,
    Fleet,
    FleetChange,
    InstanceLoad,
    Key,
    Later,
    MediaPolicy,
    Migration,
    MigrationPolicy,
    Move,
    PrioritySLO,
    Random,
    Rates,
    Resident,
    Restart,
    RolePolicy,
    Scaled,
    ScalingPolicy,
    Stage,
    Start,
    Stop,
    Tally,
    Verdict,
    fitting,
)
from penstock.sched.cluster.colocation import Colocated, ColocatedRoles
from penstock.sched.cluster.columns import Instances, ViewQueue
from penstock.sched.cluster.dispatch import Immediate, LeastLoaded, RoundRobin
from penstock.sched.cluster.hfx import HFX
from penstock.sched.cluster.rtp_llm import make_rtp_llm
from penstock.sched.cluster.slow import Pace, SlowInstances
from penstock.sched.cluster.stages import hands_over
from penstock.sched.cluster.unified import Unified
from penstock.sched.cluster.xllm import Xllm

DISPATCH: dict[str, Callable[[], DispatchPolicy]] = {
    RoundRobin.name: lambda: Immediate(RoundRobin()),
    LeastLoaded.name: lambda: Immediate(LeastLoaded()),
    Xllm.name: Xllm,
    HFX.name: HFX,
    "rtp_llm": make_rtp_llm,
    Unified.name: Unified,
}

__all__ = [
    "DISPATCH",
    "HFX",
    "Balancer",
    "ClusterView",
    "Colocated",
    "ColocatedRoles",
    "Decision",
    "Demand",
    "DispatchPolicy",
    "Fleet",
    "FleetChange",
    "Immediate",
    "InstanceLoad",
    "Instances",
    "Key",
    "Later",
    "MediaPolicy",
    "Migration",
    "MigrationPolicy",
    "Move",
    "Pace",
    "PrioritySLO",
    "Random",
    "Rates",
    "Resident",
    "Restart",
    "RolePolicy",
    "Scaled",
    "ScalingPolicy",
    "SlowInstances",
    "Stage",
    "Start",
    "Stop",
    "Tally",
    "Unified",
    "Verdict",
    "ViewQueue",
    "fitting",
    "hands_over",
]
