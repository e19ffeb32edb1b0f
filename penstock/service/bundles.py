"""Policies by name, the same ones for `penstock up` and the simulator. A name is a whole bundle: everything about a
cluster that is decided and not configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

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
        local_policy: of the engines, a name in `sched.local.LOCAL_POLICIES`.
        moves: whether instances may have to hand over to all others, whatever their roles.
        scales: whether it starts and stops instances, for which there has to be somebody who does.
    """

    make: Callable[[Circumstances], Policies]
    local_policy: str = "fcfs"
    moves: bool = False
    scales: bool = False


def _dispatch(name: str) -> Bundle:
    """One that only says where sequences run."""
    return Bundle(make=lambda at: Policies(dispatch=DISPATCH[name](), priorities=at.mapping()))


def _colocated(name: str) -> Bundle:
    """Least-loaded, and something that shares the instances between online and offline work."""

    def make(at: Circumstances) -> Policies:
        dispatch = Colocated(DISPATCH["least-loaded"](), COLOCATION[name]())
        return Policies(dispatch=dispatch, priorities=at.mapping())

    return Bundle(make=make)


def _xllm(at: Circumstances) -> Policies:
    dispatch, roles = make_xllm()
    colocation = COLOCATION["xllm"]()
    return Policies(
        dispatch=Colocated(dispatch, colocation), roles=ColocatedRoles(roles, colocation), priorities=at.mapping()
    )


def _unified(at: Circumstances) -> Policies:
    return Policies(dispatch=DISPATCH["unified"](), roles=Everywhere(), priorities=at.mapping())


def _scaled(bundle: Bundle, scaling: str) -> Bundle:
    """The same, with as many instances as are needed."""
    return replace(bundle, make=lambda at: replace(bundle.make(at), scaling=at.scaling(scaling)), scales=True)


UNIFIED = Bundle(make=_unified, local_policy="slack", moves=True)

BUNDLES = {
    "round_robin": _dispatch("round-robin"),
    "least_loaded": _dispatch("least-loaded"),
    "threshold_scaling": _scaled(_dispatch("least-loaded"), "threshold"),
    "separate": _colocated("separate"),
    "online_first": _colocated("online-first"),
    "xllm": Bundle(make=_xllm, moves=True),
    "hfx": _dispatch("hfx"),
    "hfx_scaling": _scaled(_dispatch("hfx"), "hfx"),
    "rtp_llm": _dispatch("rtp_llm"),
    "rtp_llm_score": _dispatch("rtp_llm_score"),
    "scorpio": _dispatch("scorpio"),
    "aladdin": _dispatch("aladdin"),
    "annealing": _dispatch("annealing"),
    "unified": UNIFIED,
    "unified_scaling": _scaled(UNIFIED, "unified"),
}
STEADY = tuple(name for name, bundle in BUNDLES.items() if not bundle.scales)  # where nobody starts and stops instances
