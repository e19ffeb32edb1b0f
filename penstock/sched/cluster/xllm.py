"""Greedy under predicted latency, over roles that change while it decides (xLLM, sections 3.2 and 3.4).

A prompt goes to the prefiller (role P) with the earliest first token; where that is late, to one that still decodes
(D->P); where that is late as well, a decoder becomes a prefiller at once and takes it. When its prompt has ended, it
decodes where it was prefilled if that keeps its target, else on the decoder with the fewest tokens.

The first token's time is estimated from the cache (section 3.4): for each candidate how much of the prompt it has, when
what of that lies below its device is loaded and the prompts before are prefilled, and what computing the rest takes; or
when what another instance has more of has come from there, where that is sooner (step 3: `reuse.fetched`).

"Late" is when the first token is predicted after its target, or has come after it lately (`misses`).

Not in the paper:
- When no more decoders may leave, those that can prefill a prompt within one step of their TPOT target help as well.
  xLLM's public code does something like it.
- When no instance can meet the deadline, the prompt goes where it is prefilled first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain

from penstock.core.wire.engine import Role
from penstock.sched.cluster.base import (
    ClusterView,
    Decision,
    Demand,
    InstanceLoad,
    Later,
    Migration,
    Move,
    Random,
    Resident,
    Stage,
)
from penstock.sched.cluster.elastic_roles import (
    DWELL,
    FULL,
    MARGIN,
    ElasticRoles,
    fullness,
    interval,
    misses,
    step_seconds,
    turning,
)
from penstock.sched.cluster.reuse import FETCHERS, fetched
from penstock.sched.cluster.stages import hands_over, prefillers, takers, why

COMPARED = 16  # candidates that are looked at closely: those with the least to do
OUTPUT = 256  # tokens, where nothing has ended yet


@dataclass(frozen=True, slots=True)
class _Prefiller:
    """Who prefills a prompt.

    Attributes:
        ttft: seconds from the client's arrival, as predicted.
        help: how it came to prefill although prefillers are late; "" when it is one of them.
    """

    instance: InstanceLoad
    ttft: float
    help: str = ""


def make_xllm(dwell: float = DWELL) -> tuple[Xllm, ElasticRoles]:
    """Its dispatch and role policies, which share their state."""
    roles = ElasticRoles(dwell)
    return Xllm(roles), roles


class Xllm:
    """A `DispatchPolicy` that never lets sequences wait. Costs are predicted ms: until the first token, and of a decode
    step.

    Args:
        roles: decides whose role changes; None where roles stay as they are.
    """

    name = "xllm"
    wants_keys = True

    def __init__(self, roles: ElasticRoles | None = None) -> None:
        self._roles = roles

    def decide(self, view: ClusterView, rng: Random) -> Decision | Later:
        for demand in chain(view.queue, view.offline):
            if able := prefillers(view, demand):
                return self._place(view, demand, able)
        return Later()

    def _place(self, view: ClusterView, demand: Demand, able: Sequence[InstanceLoad]) -> Decision:
        costs: dict[Stage, dict[str, float]] = {"prefill": {}, "decode": {}}
        prefiller = self._prefiller(view, demand, able, costs["prefill"])
        moves: list[Move] = []
        if prefiller.help == "converted":
            moves.append(Move(name=prefiller.instance.name, role="prefill", reason="late-prompts"))
        if self._roles is not None:
            for move in moves:
                self._roles.moved(move.name, view)
        here = prefiller.instance
        role: Role = "prefill" if moves else here.role
        open_ = any(i.name in here.peers and hands_over(role, i.role) for i in view.instances)
        return Decision(
            key=demand.key,
            prefill=here.name,
            decode=None,
            policy=self.name,
            reason=_reason(demand, prefiller, open_),
            costs=costs,
            predicted_ttft=prefiller.ttft,
            moves=moves,
            open=open_,
        )

    def migrate(self, view: ClusterView, prefilled: Sequence[Resident]) -> Migration | Later:
        """Decode dispatch: first come, first served, and never left waiting."""
        loads = {i.name: i for i in view.instances}
        for resident in prefilled:
            if (here := loads.get(resident.at)) is not None:
                moves: list[Move] = []
                taker = self._taker(view, resident.demand, here, moves)
                if self._roles is not None:
                    for move in moves:
                        self._roles.moved(move.name, view)
                reason = "stays: it keeps its target where it is prefilled" if taker is here else "hand-off"
                return Migration(key=resident.demand.key, to=taker.name, reason=reason, moves=moves)
        return Later()

    # --- the prompt

    def _prefiller(
        self, view: ClusterView, demand: Demand, able: Sequence[InstanceLoad], costs: dict[str, float]
    ) -> _Prefiller:
        """The instance that prefills it; fills in `costs`."""
        if able[0].role == "decode":
            return _soonest(view, demand, able, costs)  # no role prefills prompts
        found: list[_Prefiller] = []
        clear: list[InstanceLoad] = []
        turned: list[InstanceLoad] = []
        for i in able:
            (turned if turning(i) else clear).append(i)
        for group in (clear, turned):
            if group:
                found.append(_soonest(view, demand, group, costs))
                if found[-1].ttft <= demand.ttft and not misses(found[-1].instance, demand.ttft):
                    return found[-1]
        best = min(found, key=_by_ttft)
        decoders = [i for i in view.instances if i.role == "decode" and _may_hold(demand, i)]
        if self._roles is not None and (leaver := self._roles.to_prefill(view, missing=True, among=decoders)):
            converted = _soonest(view, demand, [leaver], costs, "converted")
            if converted.ttft < best.ttft:
                return converted
        decoders = nsmallest(COMPARED, decoders, key=lambda i: (i.pending_tokens, i.held_tokens, i.name))
        spare = [i for i in decoders if _can_spare(demand, i)]
        return min(best, _soonest(view, demand, spare, costs, "spare-decoder"), key=_by_ttft) if spare else best

    # --- the tokens after it

    def _taker(self, view: ClusterView, demand: Demand, here: InstanceLoad, moves: list[Move]) -> InstanceLoad:
        """The instance that decodes; a role change that this needs is added to `moves`.

        Args:
            here: where it was prefilled, and is counted.
        """
        costs: dict[str, float] = {}
        tokens = demand.prompt_tokens + min(demand.max_tokens, round(view.rates.output_tokens) or OUTPUT)
        # as if as much again came to be prefilled while it decodes
        again = 2 * demand.to_compute(here.name)
        costs[here.name] = 1e3 * step_seconds(here, prompt=again)
        if _bears(demand, here, tokens - demand.prompt_tokens, costs[here.name], sequences=0):
            return here
        able = [i for i in takers(view, demand, here) if i.name != here.name]
        compared = nsmallest(COMPARED, able, key=lambda i: (i.held_tokens, i.name))
        for taker in compared:
            costs[taker.name] = 1e3 * step_seconds(taker, sequences=1, kv_tokens=demand.prompt_tokens)
            if _bears(demand, taker, tokens, costs[taker.name]):
                return taker
        if self._roles is not None and here.role == "prefill":
            helper = self._roles.to_decode(view, missing=True)
            if helper is not None and helper is not here and helper.name in here.peers and _may_hold(demand, helper):
                costs[helper.name] = 1e3 * step_seconds(helper, sequences=1, kv_tokens=demand.prompt_tokens)
                moves.append(Move(name=helper.name, role="decode", reason="decode-short"))
                return helper
        # no instance meets the target: one with room and the shortest steps
        # (here it is counted already, which does not matter much where nothing fits)
        roomy = [i for i in (here, *compared) if fullness(i, sequences=1, tokens=tokens) <= FULL]
        return min(roomy or compared or [here], key=lambda i: (costs[i.name], i.name))


def _soonest(
    view: ClusterView, demand: Demand, candidates: Iterable[InstanceLoad], costs: dict[str, float], help: str = ""
) -> _Prefiller:
    """Of those that wait least, and those that have most of the prompt, the one with the earliest first token."""
    candidates = list(candidates)
    compared = nsmallest(COMPARED, candidates, key=lambda i: (max(i.free_at, view.now), i.pending_tokens))
    if demand.hits:
        known = {i.name for i in compared}
        holders = [i for i in candidates if i.name in demand.hits and i.name not in known]
        compared += nsmallest(COMPARED, holders, key=lambda i: (-demand.hits[i.name], i.load_seconds(demand)))
    found = [_Prefiller(i, _ttft(view, demand, i), help) for i in compared]
    if demand.lenders:
        for place in nsmallest(FETCHERS, range(len(found)), key=lambda place: found[place].ttft):
            instance = found[place].instance
            if (way := fetched(instance, view.now, demand)) is not None:
                found[place] = _Prefiller(instance, view.now - demand.arrived + way.ms / 1e3, help)
    costs.update((prefiller.instance.name, prefiller.ttft * 1e3) for prefiller in found)
    return min(found, key=_by_ttft)


def _by_ttft(prefiller: _Prefiller) -> float:
    return prefiller.ttft


def _ttft(view: ClusterView, demand: Demand, instance: InstanceLoad) -> float:
    """Predicted seconds from the client's arrival to the first token."""
    tokens = demand.to_compute(instance.name)
    wait = instance.begins_at(view.now, demand) - view.now
    return view.now - demand.arrived + wait + instance.prefill_seconds(tokens, demand.prompt_tokens - tokens)


def _may_hold(demand: Demand, instance: InstanceLoad) -> bool:
    return demand.tokens <= instance.max_model_len and instance.name not in demand.exclude


def _can_spare(demand: Demand, instance: InstanceLoad) -> bool:
    """Whether its sequences keep their targets although it prefills this, with all that it already has, in one step."""
    limit = MARGIN * min(instance.tpot, demand.tpot)
    return step_seconds(instance, sequences=1, prompt=demand.to_compute(instance.name)) <= limit


def _bears(demand: Demand, instance: InstanceLoad, tokens: int, step_ms: float, sequences: int = 1) -> bool:
    """Whether its memory and its steps, predicted and measured, bear one more sequence of so many tokens."""
    measured = interval(instance) if instance.decoding else 0.0
    if max(step_ms / 1e3, measured) > MARGIN * min(instance.tpot, demand.tpot):
        return False
    return fullness(instance, sequences=sequences, tokens=tokens) <= FULL


def _reason(demand: Demand, prefiller: _Prefiller, open_: bool) -> str:
    if prefiller.help:
        return prefiller.help
    if prefiller.ttft > demand.ttft:
        return "late: nobody can prefill it in time"
    return "open" if open_ else why(prefiller.instance, None)
