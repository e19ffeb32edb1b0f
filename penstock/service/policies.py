"""Policies by name, for `penstock up` and the simulator. A name stands for a bundle: dispatch, roles, co-location,
scaling and local policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from penstock.core.service_level import Bounds
from penstock.core.wire.engine import MediaRoute
from penstock.sched.cluster import (
    DISPATCH,
    HFX,
    Balancer,
    Colocated,
    ColocatedRoles,
    DispatchPolicy,
    MediaPolicy,
    MigrationPolicy,
    PrioritySLO,
    RolePolicy,
    ScalingPolicy,
    Unified,
)
from penstock.sched.cluster.balance import Balance, Together
from penstock.sched.cluster.colocation import LatencyRoles
from penstock.sched.cluster.conversion import Conversions
from penstock.sched.cluster.elastic_roles import ElasticRoles
from penstock.sched.cluster.epd_profiler import EPDProfiler
from penstock.sched.cluster.group_balance import GroupBalance
from penstock.sched.cluster.hfx_scaling import HFXScaling
from penstock.sched.cluster.priority_slo import PriorityMapping
from penstock.sched.cluster.pull import Pull
from penstock.sched.cluster.rtp_llm import make_rtp_llm_score
from penstock.sched.cluster.scaling import Bounded, Sizing
from penstock.sched.cluster.unified_scaling import UnifiedScaling
from penstock.sched.cluster.xllm import make_xllm


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The policies of a cluster.

    Attributes:
        migration: decides who decodes, where `dispatch` leaves that open; None where it never does.
        balance: moves what runs; None moves only what instances that drain have.
        priorities: targets by priority, for requests without any; None leaves them without.
        media: decides which stages of requests with images are together; None leaves that as it was set. One that
            changes roles for it is `roles` as well.
    """

    dispatch: DispatchPolicy
    migration: MigrationPolicy | None = None
    balance: Balancer | None = None
    roles: RolePolicy | None = None
    scaling: ScalingPolicy | None = None
    priorities: PrioritySLO | None = None
    media: MediaPolicy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What policies know of their deployment.

    Attributes:
        interval: seconds between two decisions about the number of instances; None leaves it to the policy.
        cooldown_out, cooldown_in: seconds from one growth to the next, and from any change to a cut; likewise.
        priorities: bounds of the targets that a priority implies; none: priorities imply no targets.
        live_roles: whether roles change also under policies that leave them as they are.
        media_route: which stages of requests with images are together at first.
    """

    interval: float | None = None
    cooldown_out: float | None = None
    cooldown_in: float | None = None
    priorities: Mapping[int, Bounds] = field(default_factory=dict)
    live_roles: bool = False
    media_route: MediaRoute | None = None

    def mapping(self) -> PriorityMapping | None:
        return PriorityMapping(self.priorities) if self.priorities else None

    def roles(self) -> RolePolicy | None:
        return ElasticRoles() if self.live_roles else None

    def balance(self) -> Balancer:
        """Of a bundle that has none of its own."""
        return Together(*([Conversions()] if self.live_roles else []), GroupBalance())

    def scaling(self, sizing: Sizing) -> ScalingPolicy:
        return Bounded(sizing, interval=self.interval, out=self.cooldown_out, back=self.cooldown_in)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """
    Attributes:
        make: new policy objects, as they have state.
        local_policy: of the engines, a name in `sched.local.LOCAL_POLICIES`.
        moves: whether instances may have to hand over to all others, whatever their roles.
        scales: whether it starts and stops instances.
    """

    make: Callable[[Circumstances], Policies]
    local_policy: str = "fcfs"
    moves: bool = False
    scales: bool = False


def dispatched(make: Callable[[], DispatchPolicy]) -> Bundle:
    """A bundle with a dispatch policy only."""
    return Bundle(
        make=lambda at: Policies(dispatch=make(), balance=at.balance(), roles=at.roles(), priorities=at.mapping())
    )


def scaled(bundle: Bundle, make: Callable[[], Sizing]) -> Bundle:
    """The same bundle, with a scaling policy. What runs on an instance that is to stop moves, so all are linked."""
    return replace(
        bundle, make=lambda at: replace(bundle.make(at), scaling=at.scaling(make())), moves=True, scales=True
    )


def _xllm(at: Circumstances) -> Policies:
    dispatch, roles = make_xllm()
    colocation = LatencyRoles()
    return Policies(
        dispatch=Colocated(dispatch, colocation),
        migration=dispatch,
        balance=Together(Conversions(), Pull(colocation), GroupBalance()),
        roles=ColocatedRoles(roles, colocation),
        priorities=at.mapping(),
    )


def _hfx(at: Circumstances) -> Policies:
    hfx = HFX()
    return Policies(dispatch=hfx, migration=hfx, balance=at.balance(), roles=at.roles(), priorities=at.mapping())


def _epd(at: Circumstances) -> Policies:
    """Which roles there are is the profiler's alone."""
    profiler = EPDProfiler(at.media_route)
    return Policies(
        dispatch=DISPATCH["least-loaded"](),
        balance=Together(Conversions(), GroupBalance()),
        roles=profiler,
        priorities=at.mapping(),
        media=profiler,
    )


def _unified(at: Circumstances) -> Policies:
    unified = Unified()
    return Policies(
        dispatch=unified,
        migration=unified,
        balance=Together(Conversions(), Balance(), GroupBalance()),
        roles=ElasticRoles(),
        priorities=at.mapping(),
    )


_HFX = Bundle(make=_hfx)
_UNIFIED = Bundle(make=_unified, local_policy="slack", moves=True)

# policies for comparison, which only the simulator has, are in `sim/baselines`
BUNDLES = {
    "round_robin": dispatched(DISPATCH["round-robin"]),
    "least_loaded": dispatched(DISPATCH["least-loaded"]),
    "xllm": Bundle(make=_xllm, moves=True),
    "hfx": _HFX,
    "hfx_scaling": scaled(_HFX, HFXScaling),
    "rtp_llm": dispatched(DISPATCH["rtp_llm"]),
    "rtp_llm_score": dispatched(make_rtp_llm_score),
    "epd": Bundle(make=_epd, moves=True),
    "unified": _UNIFIED,
    "unified_scaling": scaled(_UNIFIED, UnifiedScaling),
}
STEADY = tuple(name for name, bundle in BUNDLES.items() if not bundle.scales)  # without scaling
