"""Baseline policies for comparison, in the simulator only."""

from __future__ import annotations

from collections.abc import Callable

from penstock.sched.cluster import Colocated, Immediate
from penstock.sched.cluster.colocation import Colocation
from penstock.sched.cluster.dispatch import LeastLoaded
from penstock.sched.local import LOCAL_POLICIES
from penstock.service.policies import BUNDLES, Bundle, Circumstances, Policies, dispatched, scaled
from penstock.sim.baselines.aladdin import Aladdin
from penstock.sim.baselines.annealing import Annealing
from penstock.sim.baselines.colocation import OnlineFirst, Separate
from penstock.sim.baselines.scorpio import Scorpio
from penstock.sim.baselines.threshold_scaling import ThresholdScaling
from penstock.sim.baselines.unchunked import Unchunked


def _colocated(share: Callable[[], Colocation]) -> Bundle:
    """Least-loaded dispatch, with a policy that divides the instances between online and offline work."""

    def make(at: Circumstances) -> Policies:
        return Policies(dispatch=Colocated(Immediate(LeastLoaded()), share()), priorities=at.mapping())

    return Bundle(make=make)


BASELINES = {
    "threshold_scaling": scaled(BUNDLES["least_loaded"], ThresholdScaling),
    "separate": _colocated(Separate),
    "online_first": _colocated(OnlineFirst),
    "scorpio": dispatched(Scorpio),
    "aladdin": dispatched(Aladdin),
    "annealing": dispatched(Annealing),
}
POLICIES = BUNDLES | BASELINES  # all that a scenario may name
ENGINE_POLICIES = LOCAL_POLICIES | {"unchunked": Unchunked}  # and for its engines
