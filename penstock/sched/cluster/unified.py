"""Slack-based dispatch: one policy for deadlines, prefix affinity and offline work.

Every sequence has a deadline, so there is a best moment to bind it to an instance: as late as keeps that one busy.
Until then it waits in one queue. The rules:

- An instance is given prompts while those it has last for less than `AHEAD`; then it is full.
- It is given none for which there is no room beside what its sequences will come to: a preempted sequence is prefilled
  twice, and a queued one can still go anywhere. The first in order that finds no room gets the next that the roomiest
  instance has: others are not placed there before it.
- Prompts go in order of deadline, those first that can still keep it; see `slack_order`.
- A prompt goes where it keeps its deadline, and of these where it is prefilled soon and with little computing, so to
  its prefix, and where it pushes little out of the cache that is still asked for (`turnover`); where nowhere does, to
  where it is prefilled first.
- A turn of a chat goes back to the instance with its KV unless waiting there costs more than that saves, now and in the
  next turn.
- It stays there to decode unless its tokens would come too slowly or there is no room: then who decodes is decided
  when its prompt has ended, the instance whose steps stay shortest. What runs moves on when that turns out badly
  (`balance`).
- Roles are preferences, as engines that pace their steps by slack prefill and decode at once: a prompt counts as dearer
  on an instance that is meant to decode, so it goes there when those for prompts are behind or its prefix is there; and
  from an instance for prompts a sequence goes on to one that decodes, if it lasts longer than the hand-over and its
  tokens come soon enough there. Roles change as under `elastic_roles`.
- Offline work is given out only as far as it fits beside that: a little to prefill, and decodes while steps stay well
  under the strictest target and memory is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from math import inf
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import (
    ClusterView,
    Decision,
    Demand,
    InstanceLoad,
    Key,
    Later,
    Migration,
    Random,
    Resident,
    Stage,
    fitting,
)
from penstock.sched.cluster.columns import Column, Places
from penstock.sched.cluster.headroom import Headrooms, headroom, needed
from penstock.sched.cluster.reuse import FETCHERS, fetched
from penstock.sched.cluster.rtp_llm import returns
from penstock.sched.cluster.slack_order import MARGIN, SlackOrder
from penstock.sched.cluster.turnover import Turnover

AHEAD = 0.08  # seconds of prompts that an instance has at hand: more than its reports are old
DEARER = 0.5  # by how much a prompt counts more on an instance that is meant to decode
SAVING = 3.0  # seconds that a prompt that is in time waits to save a second of computing, under load
COMPARED = 64  # instances that are free first, and as many that have most of a prompt, which are looked at closely
EASE = 0.5  # share of a TPOT target that the measured steps of one may take, that gets what could stay where it is
LASTS = 0.5  # seconds that a sequence decodes at least, to leave an instance that is meant for prompts
ROOM = 0.05  # of an instance's blocks that are left for what decodes there to grow
OFFLINE_AHEAD = 1.0  # seconds of offline prompts that an instance has at hand
OFFLINE_STEP = 0.6  # of the strictest TPOT that a step with offline decodes may take
OFFLINE_ROOM = 0.25  # of an instance's blocks that offline work leaves


class Unified:
    """A `DispatchPolicy`."""

    name = "unified"
    wants_keys = True

    def __init__(self) -> None:
        self._order = SlackOrder()
        self._turnover = Turnover()
        self._prefillers: dict[str, _Prefiller] = {}
        self._free_at, self._requests = Column(attrgetter("free_at")), Column(attrgetter("requests"))
        self._headrooms, self._places = Headrooms(), Places()
        self._kept: tuple[Key | None, str] = None, ""  # an instance for somebody

    def decide(self, view: ClusterView, rng: Random) -> Decision | Later:
        if view.queue:
            decision = self._online(view)
            if decision is not None:
                return decision
        if view.offline:
            decision = self._offline(view)
            if decision is not None:
                return decision
        return Later(at=_next_gap(view))

    # --- online

    def _online(self, view: ClusterView) -> Decision | None:
        output = view.rates.output_tokens
        open_ = any(i.free_at - view.now < AHEAD and headroom(i, output) > 0 for i in view.instances)
        order, barred = self._order, None
        if not open_ and not (order.with_hits or order.are_stale(view)):
            return None
        for place, demand in enumerate(order.of(view)):
            decision = self._place(view, demand, barred) if open_ or demand.hits else None
            if decision is not None:
                order.take(place)
                return decision
            if place == 0:
                barred = self._kept_for(view, demand)
        return None

    def _place(self, view: ClusterView, demand: Demand, barred: str | None) -> Decision | None:
        """None: the instance that it is for has enough at the moment, or there is no room.

        Args:
            barred: one that may not be taken.
        """
        able = fitting(view, demand)
        offers = [self._offer(view, demand, i) for i in self._compared(view, demand, able) if i.name != barred]
        if not offers:
            return None
        if demand.lenders:
            for place in nsmallest(FETCHERS, range(len(offers)), key=lambda place: _rank(offers[place])):
                offers[place] = self._fetching(view, demand, offers[place])
        offer = min(offers, key=_rank)
        back = _holder(view, demand, offers, offer) if demand.chat else None
        best = (back or offer).instance
        if best.free_at - view.now >= AHEAD:
            return None
        # what is fetched evicts as much as what is computed
        self._turnover.note(view.now, best.name, demand.prompt_tokens, demand.to_compute(best.name))
        others = able if barred is None else [i for i in able if i.name != barred]
        decode, decode_costs = _home(view, demand, best, others)
        costs = {o.instance.name: (o.done - demand.arrived) * 1e3 for o in offers}
        stages: dict[Stage, Mapping[str, float]] = {"prefill": costs}
        if decode_costs:
            stages["decode"] = decode_costs
        reason = "stays" if decode is None else "open"
        return Decision(
            key=demand.key,
            prefill=best.name,
            decode=None,
            policy=self.name,
            reason=reason if back is None else f"chat: its KV is there; {reason}",
            costs=stages,
            predicted_ttft=(back or offer).done - demand.arrived,
            open=decode is not None,
        )

    def _offer(self, view: ClusterView, demand: Demand, instance: InstanceLoad) -> _Offer:
        compute = demand.to_compute(instance.name)
        alone = self._prefiller(instance).alone(compute, demand.prompt_tokens - compute)
        return self._offered(view, demand, instance, instance.begins_at(view.now, demand), alone, alone)

    def _fetching(self, view: ClusterView, demand: Demand, offer: _Offer) -> _Offer:
        """The same, if it fetches what others have more of, where that pays."""
        prefiller = self._prefiller(offer.instance)
        way = fetched(offer.instance, view.now, demand, prefiller.alone)
        if way is None:
            return offer
        alone = prefiller.alone(demand.prompt_tokens - way.tokens, way.tokens)
        begins = max(offer.begins, view.now + way.bring_ms / 1e3)
        return self._offered(view, demand, offer.instance, begins, alone, offer.alone, way.source)

    def _offered(
        self,
        view: ClusterView,
        demand: Demand,
        instance: InstanceLoad,
        begins: float,
        alone: float,
        new: float,
        source: str = "",
    ) -> _Offer:
        """
        Args:
            alone: seconds to prefill it; `new`: as if all that is new to its cache were computed.
        """
        done = begins + self._prefiller(instance).paced(alone, demand.tpot)
        # prefilling delays others, and what is new evicts prefixes that they would have found: both count
        # when the deadline allows waiting
        saving = min(SAVING, 1 + len(view.queue) / len(view.instances))
        saving += DEARER if instance.role == "decode" else 0.0
        late = done > demand.arrived + demand.ttft * MARGIN
        more = saving * alone + self._turnover.cost(instance.name, len(view.instances)) * new
        return _Offer(instance, begins, alone, done, late, done if late else done + more, source)

    def migrate(self, view: ClusterView, prefilled: Sequence[Resident]) -> Migration | Later:
        """The first of them: where it is, if that keeps its pace by now, else where steps stay shortest."""
        loads = {i.name: i for i in view.instances}
        for resident in prefilled:
            if (here := loads.get(resident.at)) is not None:
                to = _home_now(view, resident.demand, here)
                return Migration(key=resident.demand.key, to=to, reason="stays" if to == here.name else "hand-off")
        return Later()

    def _kept_for(self, view: ClusterView, demand: Demand) -> str | None:
        """The instance reserved for the first in order until there is room: the one with the most room when first
        asked. None when it waits for something else."""
        able, output = fitting(view, demand), view.rates.output_tokens
        rooms = self._headrooms.of(able, output)
        if not able or rooms.max() >= needed(demand, output):
            return None
        key, name = self._kept
        if key != demand.key or not any(i.name == name for i in able):
            self._kept = demand.key, able[int(rooms.argmax())].name
        return self._kept[1]

    def _prefiller(self, instance: InstanceLoad) -> _Prefiller:
        known = self._prefillers.get(instance.name)
        if known is None or known.instance is not instance:
            known = self._prefillers[instance.name] = _Prefiller(instance)
        return known

    def _compared(self, view: ClusterView, demand: Demand, able: Sequence[InstanceLoad]) -> Sequence[InstanceLoad]:
        """All of those that have room, unless they are very many."""
        output = view.rates.output_tokens
        tokens = needed(demand, output)
        if len(able) <= COMPARED:
            return [i for i in able if tokens <= headroom(i, output)]
        free_at = self._free_at.of(able)
        roomy = np.flatnonzero(self._headrooms.of(able, output) >= tokens)
        free = roomy[free_at[roomy] <= view.now]
        if len(free) > COMPARED:
            first = free[np.argsort(self._requests.of(able)[free], kind="stable")[:COMPARED]]
        else:
            first = roomy[np.argsort(free_at[roomy], kind="stable")[:COMPARED]]
        chosen = [able[place] for place in first.tolist()]
        if demand.hits:
            known, places = {i.name for i in chosen}, self._places.of(able)
            holders = [able[place] for place in sorted(places[name] for name in demand.hits if name in places)]
            holders = [i for i in holders if i.name not in known and tokens <= headroom(i, output)]
            chosen += nsmallest(COMPARED, holders, key=lambda i: (-demand.hits[i.name], i.load_seconds(demand)))
        return chosen

    # --- offline

    def _offline(self, view: ClusterView) -> Decision | None:
        ready = [i for i in view.instances if _takes_offline(view, i)]
        if not ready:
            return None
        for demand in view.offline:
            blocks = -(-demand.prompt_tokens // BLOCK_TOKENS)
            able = [i for i in ready if demand.tokens <= i.max_model_len and i.name not in demand.exclude]
            able = [i for i in able if blocks <= i.free_blocks or not i.requests]
            if able:
                costs = {i.name: max(0.0, i.idle_at - view.now) * 1e3 for i in able}
                chosen = min(able, key=lambda i: (costs[i.name], i.offline_requests, i.name))
                return Decision(
                    key=demand.key,
                    prefill=chosen.name,
                    decode=None,
                    policy=self.name,
                    reason="offline",
                    costs={"prefill": costs},
                )
        return None


class _Offer(NamedTuple):
    """What comes of a prompt on an instance.

    Attributes:
        begins: when it begins to be prefilled.
        alone: seconds that this takes, without what decodes there.
        done: when it is prefilled, so that the instance keeps its pace.
        late: that is after its deadline, less the margin.
        cost: `done`, and what else counts, in seconds.
        source: from whom it would fetch what it has not got; "" where it computes that.
    """

    instance: InstanceLoad
    begins: float
    alone: float
    done: float
    late: bool
    cost: float
    source: str = ""


def _rank(offer: _Offer) -> tuple[bool, float]:
    return offer.late, offer.cost


def _holder(view: ClusterView, demand: Demand, offers: Sequence[_Offer], best: _Offer) -> _Offer | None:
    """That of the instance with the most of a chat's KV, if it is not the best and going back pays nevertheless; see
    `rtp_llm.returns`. A deadline is not missed for it."""
    hits = demand.hits
    holder = max(offers, key=lambda o: (hits.get(o.instance.name, 0), -o.begins))
    there = hits.get(holder.instance.name, 0)
    if holder is best or there <= hits.get(best.instance.name, 0) or (holder.late and not best.late):
        return None
    again = best.alone if best.source else holder.instance.prefill_seconds(demand.prompt_tokens)
    reload = again - holder.alone  # next to nothing where it is fetched
    pays = returns(holder.begins - view.now, best.done - view.now, max(0.0, reload))
    return holder if pays else None


class _Prefiller:
    """How fast an instance prefills prompts. Remembered for as long as its load is the same object."""

    def __init__(self, instance: InstanceLoad) -> None:
        self.instance = instance
        self._step = instance.decode_seconds if instance.decoding else 0.0
        self._alone: dict[tuple[int, int], float] = {}

    def alone(self, tokens: int, cached: int) -> float:
        """Predicted seconds to prefill a prompt as if it did not have to wait for what decodes there."""
        known = self._alone.get((tokens, cached))
        if known is None:
            known = self._alone[tokens, cached] = self.instance.prefill_seconds(tokens, cached)
        return known

    def paced(self, alone: float, tpot: float) -> float:
        """The same on an engine that keeps the TPOT of what decodes there.

        In every span of the strictest target S, steps that decode take d of it and prompts get the rest: p S / (S - d)
        (HFX, 3.3.1, for prompts prefilled in chunks).

        Args:
            alone: p.
        """
        strictest = min(self.instance.tpot, tpot)
        if not self._step or strictest == inf:
            return alone
        return alone * strictest / max(strictest - self._step, 0.1 * strictest)


def _home(
    view: ClusterView, demand: Demand, prefiller: InstanceLoad, able: Sequence[InstanceLoad]
) -> tuple[str | None, Mapping[str, float]]:
    """The instance that decodes after the prompt, as it looks before it; None for the prefiller. With the ms of a step
    on each that was compared."""
    bears = _holds(prefiller, demand) and _keeps_pace(prefiller, demand)
    leaves = prefiller.role == "prefill" and _lasts(view, demand, prefiller)
    if bears and not leaves:
        return None, {}
    others = [i for i in able if i.name in prefiller.peers and _holds(i, demand)]
    if bears:
        others = _decoders(others, demand)
    if not others:
        return None, {}
    costs = {i.name: _step_with(i, demand) * 1e3 for i in (prefiller, *others)}
    best = min(others, key=lambda i: (costs[i.name], i.name))
    worse = not bears and costs[best.name] >= costs[prefiller.name] and _holds(prefiller, demand)
    return (None if worse else best.name), costs


def _home_now(view: ClusterView, demand: Demand, here: InstanceLoad) -> str:
    """The same once it has been prefilled `here`, and is counted there."""
    step = here.decode_seconds
    bears = step <= MARGIN * min(here.tpot, demand.tpot) and here.free_blocks > 0
    if bears and not (here.role == "prefill" and _lasts(view, demand, here)):
        return here.name
    others = [i for i in fitting(view, demand) if i.name in here.peers and _holds(i, demand)]
    if bears:
        others = _decoders(others, demand)
    best = min(others, key=lambda i: (_step_with(i, demand), i.name), default=here)
    return best.name if bears or _step_with(best, demand) < step else here.name


def _decoders(instances: Sequence[InstanceLoad], demand: Demand) -> list[InstanceLoad]:
    """Those that are meant to decode and have the time for one more, also by what they take with offline work beside
    it: what is handed over loses up to a step there."""
    able = [i for i in instances if i.role == "decode" and _keeps_pace(i, demand)]
    return [i for i in able if (i.interval or 0.0) <= EASE * min(i.tpot, demand.tpot)]


def _lasts(view: ClusterView, demand: Demand, instance: InstanceLoad) -> bool:
    """Whether its tokens will take clearly longer than to hand it over."""
    tokens = min(demand.max_tokens, view.rates.output_tokens or demand.max_tokens)
    return tokens * _step_with(instance, demand) > LASTS


def _keeps_pace(instance: InstanceLoad, demand: Demand) -> bool:
    return _step_with(instance, demand) <= MARGIN * min(instance.tpot, demand.tpot)


def _step_with(instance: InstanceLoad, demand: Demand) -> float:
    """Seconds of a decode step when this sequence has joined."""
    decodes, tokens = instance.requests + 1, instance.held_tokens + demand.prompt_tokens
    return instance.times.step_ms(decodes=decodes, kv_tokens=tokens) / 1e3


def _holds(instance: InstanceLoad, demand: Demand) -> bool:
    """Whether it has room for one more."""
    needed = -(-demand.prompt_tokens // BLOCK_TOKENS)
    return instance.requests < instance.max_sequences and needed <= instance.free_blocks - ROOM * instance.num_blocks


def _takes_offline(view: ClusterView, instance: InstanceLoad) -> bool:
    if instance.idle_at - view.now >= OFFLINE_AHEAD or instance.free_blocks < OFFLINE_ROOM * instance.num_blocks:
        return False
    if instance.requests >= instance.max_sequences:
        return False
    return instance.decode_seconds <= OFFLINE_STEP * instance.tpot


def _next_gap(view: ClusterView) -> float:
    """When the next instance has room for more prompts."""
    gap = min((i.free_at - AHEAD for i in view.instances), default=inf) if view.queue else inf
    if view.offline:
        gap = min(gap, min((i.idle_at - OFFLINE_AHEAD for i in view.instances), default=inf))
    # it is full for other reasons where that is over already: what ends, or a report, will say
    return gap if gap > view.now else inf
