"""Policies by name. A name is a whole bundle: everything about a cluster that is decided and not configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.sched.cluster import COLOCATION, DISPATCH, SCALING, Colocated, ColocatedRoles, Everywhere, ScalingPolicy
from penstock.sched.cluster.priority_slo import Bounds, PriorityMapping
from penstock.sched.cluster.xllm import make_xllm
from penstock.service.master import Policies


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What policies are told of where they decide.

    Attributes:
        interval: seconds between two decisions about the number of instances; None leaves it to the policy.
        priorities: bounds of the targets that a priority may be worth; none: a priority is worth no target.
    """

    interval: float | None = None
    priorities: Mapping[int, Bounds] = field(default_factory=dict)

    def mapping(self) -> PriorityMapping | None:
        return PriorityMapping(self.priorities) if self.priorities else None

    def scaling(self, name: str) -> ScalingPolicy:
        policy = SCALING[name]()
        if self.interval is not None:
            policy.interval = self.interval
        return policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """
    Attributes:
        make: fresh policies: they remember.
        pacing: of the engines, a name in `sched.local.PACING`.
    """

    make: Callable[[Circumstances], Policies]
    pacing: str = "fcfs"


def _dispatch(name: str) -> Bundle:
    """One that only says where sequences run."""
    return Bundle(make=lambda at: Policies(dispatch=DISPATCH[name](), priorities=at.mapping()))


def _colocated(name: str) -> Bundle:
    """Least-loaded, and something that shares the instances between online and offline work."""
    return Bundle(make=lambda at: Policies(dispatch=Colocated(DISPATCH["least-loaded"](), COLOCATION[name]())))


def _xllm(at: Circumstances) -> Policies:
    dispatch, roles = make_xllm()
    pools = COLOCATION["xllm"]()
    return Policies(dispatch=Colocated(dispatch, pools), roles=ColocatedRoles(roles, pools), priorities=at.mapping())


def _scaled(dispatch: str, scaling: str, at: Circumstances) -> Policies:
    return Policies(dispatch=DISPATCH[dispatch](), scaling=at.scaling(scaling), priorities=at.mapping())


BUNDLES = {
    "round_robin": _dispatch("round-robin"),
    "least_loaded": _dispatch("least-loaded"),
    "threshold_scaling": Bundle(make=lambda at: _scaled("least-loaded", "threshold", at)),
    "separate": _colocated("separate"),
    "online_first": _colocated("online-first"),
    "xllm": Bundle(make=_xllm),
    "hfx": _dispatch("hfx"),
    "hfx_scaling": Bundle(make=lambda at: _scaled("hfx", "hfx", at)),
    "rtp_llm": _dispatch("rtp_llm"),
    "rtp_llm_score": _dispatch("rtp_llm_score"),
    "scorpio": _dispatch("scorpio"),
    "aladdin": _dispatch("aladdin"),
    "annealing": _dispatch("annealing"),
    "unified": Bundle(
        make=lambda at: Policies(dispatch=DISPATCH["unified"](), roles=Everywhere(), priorities=at.mapping()),
        pacing="slack",
    ),
    "unified_scaling": Bundle(
        make=lambda at: Policies(
            dispatch=DISPATCH["unified"](),
            roles=Everywhere(),
            scaling=at.scaling("unified"),
            priorities=at.mapping(),
        ),
        pacing="slack",
    ),
}
