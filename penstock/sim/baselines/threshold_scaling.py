"""Threshold scaling: on utilisation and queue length, with a cooldown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from penstock.core.wire.engine import Role
from penstock.sched.cluster.base import ClusterView, Fleet, InstanceLoad
from penstock.sched.cluster.scaling import Wish, fits_elsewhere, held, stages, starting


class ThresholdScaling:
    """A `Sizing`. A stage grows in proportion to what is over a threshold, and shrinks by one at a time; a wish of one
    that is starting counts as fulfilled. Targets are not looked at.

    Args:
        high, low: share of the memory or of the sequences in use, the mean over a stage.
        waiting: sequences that wait to be prefilled, for each instance of a stage that prefills; it does not shrink
            while any wait.
        out, back: cooldowns in seconds.
    """

    name = "threshold"

    def __init__(
        self,
        *,
        interval: float = 1.0,
        high: float = 0.8,
        low: float = 0.3,
        waiting: float = 4.0,
        out: float = 10.0,
        back: float = 60.0,
    ) -> None:
        self.interval, self.out, self.back = interval, out, back
        self._high, self._low, self._waiting = high, low, waiting

    def wishes(self, view: ClusterView, fleet: Fleet) -> Mapping[Role, Wish]:
        return {role: self._wish(view, role, loads, starting(fleet, role)) for role, loads in stages(view).items()}

    def _wish(self, view: ClusterView, role: Role, loads: Sequence[InstanceLoad], coming: int) -> Wish:
        count = len(loads)
        full = sum(max(held(i), (i.requests - i.offline_requests) / i.max_sequences) for i in loads) / count
        waits = 0 if role == "decode" else len(view.queue) + sum(i.prefilling for i in loads)
        reason = f"{full:.0%} full, {waits} to be prefilled by {count}"
        wanted = ceil(count * max(full / self._high, waits / count / self._waiting))
        if wanted > count:
            return Wish(max(0, wanted - count - coming), reason)
        if full < self._low and not view.queue and not coming:
            lightest = min(loads, key=held)
            if fits_elsewhere(lightest, [i for i in loads if i is not lightest]):
                return Wish(-1, reason)
        return Wish(0, reason)
