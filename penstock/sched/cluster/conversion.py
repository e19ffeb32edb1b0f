"""What decodes on an instance that has become one for prompts goes on elsewhere, where that is better than to drain.

A move to another role changes nothing about what runs (xLLM, section 3.2), so sequences that were there before
decode on beside the prompts for which the instance was moved: their tokens come slower, and so do these prompts. Now
that running sequences can be handed over, one leaves when what it is predicted to gain by that is more than the pause
it costs, and somebody has the time and the room for it. The other way round there is nothing to move: one that has
become a decoder prefills the prompts that it has first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nsmallest

from penstock.core.wire.engine import Role
from penstock.sched.cluster.base import ClusterView, InstanceLoad, Migration, Resident, fitting
from penstock.sched.cluster.elastic_roles import FULL, MARGIN, fullness, interval, step_seconds

AT_ONCE = 16  # sequences that leave one instance in one answer
COMPARED = 16  # instances that take over, which are looked at closely
PAUSE = 0.05  # seconds that a hand-over delays a sequence's tokens
OUTPUT = 256  # tokens, where nothing has ended yet


class Conversions:
    """A `Balancer`."""

    name = "conversions"

    def __init__(self) -> None:
        self._roles: dict[str, Role] = {}  # of the last view
        self._since: dict[str, float] = {}  # of those in "prefill" that were in another role: when they were moved

    def balance(self, view: ClusterView, residents: Callable[[str], Sequence[Resident]]) -> Sequence[Migration]:
        self._watch(view)
        migrations: list[Migration] = []
        takers: list[InstanceLoad] | None = None
        for load in view.instances:
            since = self._since.get(load.name)
            if since is None or not load.decoding or not load.pending_tokens:
                continue  # without prompts nobody is in its way
            if takers is None:
                able = (i for i in view.instances if i.role != "prefill")
                takers = nsmallest(COMPARED, able, key=lambda i: (i.held_tokens, i.name))
            before = [r for r in residents(load.name) if r.since <= since]
            migrations += _leave(view, load, before[:AT_ONCE], takers, {m.to for m in migrations})
        return migrations

    def _watch(self, view: ClusterView) -> None:
        """Which instances have become ones for prompts, and when."""
        roles = {i.name: i.role for i in view.instances}
        for name, role in roles.items():
            if role == "prefill" and self._roles.get(name, role) != role:
                self._since[name] = view.now
        self._since = {name: since for name, since in self._since.items() if roles.get(name) == "prefill"}
        self._roles = roles


def _leave(
    view: ClusterView, load: InstanceLoad, residents: Sequence[Resident], takers: Sequence[InstanceLoad], used: set[str]
) -> list[Migration]:
    """Who goes where. Takers of other instances in the same answer, `used`, get nothing more."""
    given: dict[str, tuple[int, int]] = {i.name: (0, 0) for i in takers if i.name in load.peers and i.name not in used}
    migrations: list[Migration] = []
    for resident in residents:
        demand = resident.demand
        long_enough = {i.name for i in fitting(view, demand)}
        for taker in takers:
            if taker.name not in given or taker.name not in long_enough:
                continue
            sequences, tokens = given[taker.name]
            sequences, tokens = sequences + 1, tokens + demand.prompt_tokens
            step = step_seconds(taker, sequences=sequences, kv_tokens=tokens)
            if _bears(taker, resident, sequences, tokens, step) and _gain(view, load, resident, step) > PAUSE:
                given[taker.name] = sequences, tokens
                reason = f"converted: {load.name} prefills prompts now"
                migrations.append(Migration(key=demand.key, to=taker.name, reason=reason))
                break
    return migrations


def _gain(view: ClusterView, load: InstanceLoad, resident: Resident, step: float) -> float:
    """Seconds that a sequence is over earlier elsewhere, where steps take so long, than beside prompts."""
    here = max(interval(load), step_seconds(load))
    output = min(resident.demand.max_tokens, round(view.rates.output_tokens) or OUTPUT)
    left = output - (view.now - resident.since) / interval(load)
    return max(0.0, left) * (here - step)


def _bears(taker: InstanceLoad, resident: Resident, sequences: int, tokens: int, step: float) -> bool:
    """Whether it has the time and the room for so many more, of which this is the last."""
    target = MARGIN * min(taker.tpot, resident.demand.tpot)
    return max(step, interval(taker)) <= target and fullness(taker, sequences=sequences, tokens=tokens) <= FULL
