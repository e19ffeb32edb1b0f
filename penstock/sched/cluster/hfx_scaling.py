"""HFX's scaler (Algorithm 2; arXiv 2508.15919, section 3.3.3): thresholds on rates, urgency and memory.

    rho  arrivals over completions, of ten seconds; nothing is made of fewer than `least_events` of them
    w    mean over the queue of time waited / TTFT target
    u    share of an instance's blocks that are held or promised

Out when rho or w is over its threshold; in when rho is under its own and the emptiest instance's u is under its, and
its work fits elsewhere. Disaggregated, each stage is looked at by itself, and an instance that one can do without goes
over to the other instead of being stopped.

A stage's own rates: what the first has completed is what arrived less what its backlog grew by, and arrives at the
second. The second has no queue of its own, since its instances reserve before a prompt is prefilled; its urgency is the
share of them that could not take one more sequence without missing a TPOT or their memory, and a queue that waits for
them is not held against the first.

The signals and the window of 10 s are the paper's. Its thresholds are arguments here; the defaults and both cooldowns
are ours. In a stable system completions equal arrivals at any load, so rho seldom asks to scale in; and that nothing
arrives at all counts as rho = 0, however few the events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf

from penstock.core.wire.engine import Role
from penstock.sched.cluster.base import ClusterView, Fleet, InstanceLoad
from penstock.sched.cluster.scaling import Wish, emptiest, fits_elsewhere, held, stages, urgency

FULL = 0.9  # share of its blocks from which an instance has no room for one more


class HFXScaling:
    """A `Sizing`.

    Args:
        rho_out, rho_in, w_out, u_in: thresholds.
        least_events: arrivals and completions together.
        out, back: cooldowns in seconds.
    """

    name = "hfx"

    def __init__(
        self,
        *,
        interval: float = 1.0,
        rho_out: float = 1.1,
        rho_in: float = 0.8,
        w_out: float = 0.5,
        u_in: float = 0.3,
        least_events: int = 20,
        out: float = 5.0,
        back: float = 30.0,
    ) -> None:
        self.interval, self.out, self.back = interval, out, back
        self._rho_out, self._rho_in, self._w_out, self._u_in = rho_out, rho_in, w_out, u_in
        self._least_events = least_events
        self._backlogs: deque[tuple[float, int]] = deque()  # when, sequences whose prompts were not prefilled

    def wishes(self, view: ClusterView, fleet: Fleet) -> Mapping[Role, Wish]:
        prefilled = self._prefilled(view)
        roles = stages(view)
        wishes: dict[Role, Wish] = {}
        if "decode" in roles:
            wishes["decode"] = self._wish(
                roles["decode"], prefilled, view.rates.completions, _overfull(roles["decode"])
            )
            waits_for_decode = wishes["decode"].more > 0
            for role, loads in roles.items():
                if role != "decode":
                    w = 0.0 if waits_for_decode else urgency(view)
                    wishes[role] = self._wish(loads, view.rates.arrivals, prefilled, w)
        else:
            for role, loads in roles.items():
                wishes[role] = self._wish(loads, view.rates.arrivals, view.rates.completions, urgency(view))
        return wishes

    def _prefilled(self, view: ClusterView) -> int:
        """Prompts that were prefilled in the window."""
        backlog = len(view.queue) + sum(i.prefilling for i in view.instances)
        self._backlogs.append((view.now, backlog))
        while self._backlogs[0][0] < view.now - view.rates.window:
            self._backlogs.popleft()
        return max(0, view.rates.arrivals - (backlog - self._backlogs[0][1]))

    def _wish(self, loads: Sequence[InstanceLoad], came: int, went: int, w: float) -> Wish:
        rho = self._rho(came, went)
        u = held(emptiest(loads))
        reason = f"rho {'unknown' if rho is None else f'{rho:.2f}'}, w {w:.2f}, least u {u:.2f}"
        if w > self._w_out or (rho is not None and rho > self._rho_out):
            return Wish(1, reason)
        if rho is not None and rho < self._rho_in and u < self._u_in and len(loads) > 1:
            lightest = emptiest(loads)
            if fits_elsewhere(lightest, [i for i in loads if i is not lightest]):
                return Wish(-1, reason)
            return Wish(0, f"{reason}, which fits nowhere else")
        return Wish(0, reason)

    def _rho(self, came: int, went: int) -> float | None:
        """None when there were too few events to tell."""
        if not came:
            return 0.0
        if came + went < self._least_events:
            return None
        return came / went if went else inf


def _overfull(loads: Sequence[InstanceLoad]) -> float:
    """Share of instances that decode and cannot take one more."""
    return sum(bool(i.requests) and (held(i) > FULL or i.decode_seconds > i.tpot) for i in loads) / len(loads)
