"""Many instances: which of them runs a request, which work each is for, and how many there are. A new policy is a file
here and a line in its registry."""

from __future__ import annotations

from collections.abc import Callable

from penstock.sched.cluster.aladdin import Aladdin
from penstock.sched.cluster.annealing import Annealing
from penstock.sched.cluster.base import (
    ClusterView,
    Decision,
    Demand,
    DispatchPolicy,
    Fleet,
    InstanceLoad,
    Key,
    Later,
    Move,
    PrioritySLO,
    Random,
    Rates,
    RolePolicy,
    ScalingPolicy,
    Stage,
    Start,
    Stop,
    fitting,
)
from penstock.sched.cluster.colocation import COLOCATION, Colocated, ColocatedRoles
from penstock.sched.cluster.columns import Instances, Line
from penstock.sched.cluster.dispatch import Immediate, hands_over
from penstock.sched.cluster.hfx import HFX
from penstock.sched.cluster.hfx_scaling import HFXScaling
from penstock.sched.cluster.least_loaded import LeastLoaded
from penstock.sched.cluster.round_robin import RoundRobin
from penstock.sched.cluster.rtp_llm import make_rtp_llm, make_rtp_llm_score
from penstock.sched.cluster.scorpio import Scorpio
from penstock.sched.cluster.threshold_scaling import ThresholdScaling
from penstock.sched.cluster.unified import Everywhere, Unified
from penstock.sched.cluster.unified_scaling import UnifiedScaling
from penstock.sched.cluster.xllm import Xllm
from penstock.sched.cluster.xllm_roles import XllmRoles

DISPATCH: dict[str, Callable[[], DispatchPolicy]] = {
    RoundRobin.name: lambda: Immediate(RoundRobin()),
    LeastLoaded.name: lambda: Immediate(LeastLoaded()),
    Xllm.name: Xllm,
    HFX.name: HFX,
    "rtp_llm": make_rtp_llm,
    "rtp_llm_score": make_rtp_llm_score,
    Scorpio.name: Scorpio,
    Aladdin.name: Aladdin,
    Annealing.name: Annealing,
    Unified.name: Unified,
}
ROLES: dict[str, Callable[[], RolePolicy]] = {
    XllmRoles.name: XllmRoles,
    Everywhere.name: Everywhere,
}
SCALING: dict[str, Callable[[], ScalingPolicy]] = {
    ThresholdScaling.name: ThresholdScaling,
    HFXScaling.name: HFXScaling,
    UnifiedScaling.name: UnifiedScaling,
}

__all__ = [
    "COLOCATION",
    "DISPATCH",
    "ROLES",
    "SCALING",
    "ClusterView",
    "Colocated",
    "ColocatedRoles",
    "Decision",
    "Demand",
    "DispatchPolicy",
    "Everywhere",
    "Fleet",
    "Immediate",
    "InstanceLoad",
    "Instances",
    "Key",
    "Later",
    "Line",
    "Move",
    "PrioritySLO",
    "Random",
    "Rates",
    "RolePolicy",
    "ScalingPolicy",
    "Stage",
    "Start",
    "Stop",
    "fitting",
    "hands_over",
]
