"""Cache-aware dispatch by predicted cost in milliseconds (RTP-LLM, section 5).

The cost of a prefiller is what a prompt waits there until the prompts before it are prefilled, as predicted, and what
prefilling its uncached rest takes. A sequence goes to one of those near the least, chosen at random, so that a burst is
spread; a conversation returns to the instance with its KV while that pays. Decoders admit by blocks: when no instance
has room for a sequence's expected length, it waits in the master's queue, and not in an engine that would have to
preempt.

The window is all that waits, w = |R|, as our engines have a data-parallel size of 1. Of it the oldest and all of
similar length go first, in batches: those that are sent at one moment go to one instance while they fit in a step of it
and none of them gets a worse place by that.

Not as in the paper:
- Prompts on one instance are prefilled one after another, so that a prompt's start in equation (1) is the end of the
  one before it.
- `rtp_llm` weighs in milliseconds, as RTP-LLM's public code does; `rtp_llm_score` is the paper's equation (2). What it
  counts as remote is what an instance would load from below its device or fetch from another one: where that takes
  longer than computing, it counts nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from math import inf
from operator import attrgetter

import numpy as np

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import ClusterView, Decision, Demand, InstanceLoad, Key, Later, Random, Stage
from penstock.sched.cluster.columns import Column, QueueColumns
from penstock.sched.cluster.reuse import FETCHERS, fetched
from penstock.sched.cluster.stages import prefillers, takers, why

KEPT = 65536  # conversations


@dataclass(frozen=True, slots=True)
class Homes:
    """Where the last turn of a conversation was prefilled, and where it decoded."""

    prefill: str
    decode: str


class ChatAffinity:
    """The instances of recent conversations, in LRU order.

    Args:
        kept: conversations that are remembered.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._homes: OrderedDict[str, Homes] = OrderedDict()

    def homes(self, chat: str) -> Homes | None:
        """None when it is new, or "" because it is unknown."""
        return self._homes.get(chat) if chat else None

    def remember(self, chat: str, prefill: str, decode: str) -> None:
        if not chat:
            return
        self._homes[chat] = Homes(prefill, decode)
        self._homes.move_to_end(chat)
        if len(self._homes) > self._kept:
            self._homes.popitem(last=False)


def returns(wait: float, best: float, reload: float) -> bool:
    """Whether a conversation goes back although it has to wait: unless that wait is more than going elsewhere costs, by
    more than what has to be computed again there; twice, for in the next turn the same may have to be. All in one unit.

    Args:
        wait: until the holder can begin.
        best: the least cost of the others, what is computed again included.
        reload: to compute what the holder has.
    """
    return wait <= best + 2 * reload


COMPARED = 16  # prefillers with the least to do, those with the longest hits, and decoders, that are compared closely
TRIED = 4  # sequences, while those before them find no room
PASSED = 16  # sequences that may go before one that finds none
HOT = 3.0  # of the mean wait: instances with more are left out
BAND, BAND_MS = 0.1, 20.0  # above the least cost; the larger of the two: within it the choice is random
FULL = 0.95  # share of an instance's blocks that sequences may come to
OUTPUT = 256  # tokens, where nothing has ended yet
ALPHA, BETA, GAMMA = 1.0, 0.5, 1.0  # weights of the prompt's shares on the device and elsewhere, and of latency's share


@dataclass(frozen=True, slots=True)
class Offer:
    """What an instance would make of a prompt; milliseconds.

    Attributes:
        wait: until it begins to prefill.
        saved: by its cache.
        hit: tokens in that, of which `local` are on its device.
        remote: tokens after the local ones that it loads from below its device, or fetches from another instance.
    """

    instance: InstanceLoad
    wait: float
    prefill: float
    saved: float = 0.0
    hit: int = 0
    local: int = 0
    remote: int = 0

    @property
    def cost(self) -> float:
        return self.wait + self.prefill


class Batches:
    """What is sent to instances at one moment and of one length, and may be prefilled there in one step."""

    def __init__(self) -> None:
        self._of: tuple[float, int] | None = None  # the moment, and the length
        self._room: dict[str, int] = {}  # instance -> tokens that its step still takes

    def open_to(self, now: float, demand: Demand, near: Sequence[Offer]) -> Offer | None:
        """The first offer of an instance whose batch it fits in."""
        of = now, demand.prompt_tokens.bit_length()
        if of != self._of:
            self._of, self._room = of, {}
        return next((o for o in near if demand.to_compute(o.instance.name) <= self._room.get(o.instance.name, 0)), None)

    def add(self, demand: Demand, instance: InstanceLoad) -> None:
        left = self._room.get(instance.name, instance.token_budget)
        self._room[instance.name] = left - demand.to_compute(instance.name)


# offers, prompt tokens -> the cost of each; and how far above the least the lot decides
Weigh = Callable[[Sequence[Offer], int], tuple[list[float], float]]


def in_milliseconds(offers: Sequence[Offer], prompt_tokens: int) -> tuple[list[float], float]:
    costs = [offer.cost for offer in offers]
    return costs, max(BAND * min(costs), BAND_MS)


def by_score(offers: Sequence[Offer], prompt_tokens: int) -> tuple[list[float], float]:
    """The paper's score, negated: shares of the prompt against a share of the longest latency."""
    longest = max(offer.cost for offer in offers)
    cached = [(ALPHA * offer.local + BETA * offer.remote) / prompt_tokens for offer in offers]
    return [GAMMA * offer.cost / longest - share for offer, share in zip(offers, cached, strict=True)], 0.0


def make_rtp_llm() -> RtpLlm:
    return RtpLlm("rtp_llm", in_milliseconds)


def make_rtp_llm_score() -> RtpLlm:
    return RtpLlm("rtp_llm_score", by_score)


class RtpLlm:
    """A `DispatchPolicy`.

    Args:
        weigh: offers against each other.
    """

    wants_keys = True

    def __init__(self, name: str, weigh: Weigh) -> None:
        self.name = name
        self._weigh = weigh
        self._chats = ChatAffinity()
        self._available, self._pending = Column(attrgetter("available_at")), Column(attrgetter("pending_tokens"))
        self._group: set[Key] = set()  # of similar length, that go one after another
        # of all that waits: its length, and whether it is in the group
        self._window = QueueColumns(lambda d: d.prompt_tokens.bit_length(), lambda d: d.key in self._group)
        self._batches = Batches()
        self._first: Key | None = None  # that found no room
        self._passed = 0  # sequences that went before it

    def decide(self, view: ClusterView, rng: Random) -> Decision | Later:
        tried = 0
        for demand in self._in_order(view):
            able = prefillers(view, demand)
            if not able:
                continue
            decision = self._place(view, demand, able, rng)
            if decision is not None:
                self._chats.remember(demand.chat, decision.prefill, decision.decode or decision.prefill)
                self._passed = self._passed + 1 if tried else 0
                return decision
            if not tried and demand.key != self._first:
                self._first, self._passed = demand.key, 0
            tried += 1
            if tried >= TRIED or self._passed >= PASSED:
                break
        return Later()

    def _in_order(self, view: ClusterView) -> Iterator[Demand]:
        """The group that was begun, then the oldest's group, then the others; offline ones when nothing else waits."""
        queue = view.queue or view.offline
        if not queue:
            return
        if self._first is not None and queue[0].key == self._first and self._passed:
            yield queue[0]  # it found no room lately: others go only when it still finds none
            yield from (d for d in queue[1 : TRIED + 1])
            return
        lengths, group = self._window.of(queue)
        if not group.any():
            group[:] = lengths == lengths[0]
            self._group = {queue[place].key for place in np.flatnonzero(group).tolist()}
        yield from (queue[place] for place in np.argsort(-group, kind="stable").tolist())

    def _place(self, view: ClusterView, demand: Demand, able: Sequence[InstanceLoad], rng: Random) -> Decision | None:
        """None when no instance has room for it."""
        output = min(demand.max_tokens, round(view.rates.output_tokens) or OUTPUT)
        offers = self._offers(view, demand, able, output)
        if not offers:
            return None
        costs, band = self._weigh(offers, demand.prompt_tokens)
        limit = min(costs) + band
        near = [offer for offer, cost in zip(offers, costs, strict=True) if cost <= limit]
        homes = self._chats.homes(demand.chat)
        back = None if homes is None else _holder(offers, homes.prefill)
        first = back or self._batches.open_to(view.now, demand, near) or rng.choice(near)
        decode_costs: dict[str, float] = {}
        before = None if homes is None else homes.decode
        for prefiller in (first, *sorted((o for o in offers if o is not first), key=lambda o: o.cost)[:TRIED]):
            home = _home(view, demand, prefiller.instance, output, before, decode_costs)
            if home is not None:
                break
        else:
            return None
        self._batches.add(demand, prefiller.instance)
        decode = None if home is prefiller.instance else home.name
        by_stage: dict[Stage, dict[str, float]] = {
            "prefill": {o.instance.name: cost for o, cost in zip(offers, costs, strict=True)}
        }
        if decode is not None:
            by_stage["decode"] = decode_costs
        return Decision(
            key=demand.key,
            prefill=prefiller.instance.name,
            decode=decode,
            policy=self.name,
            reason="chat: its KV is there" if prefiller is back else why(prefiller.instance, decode),
            costs=by_stage,
            predicted_ttft=view.now - demand.arrived + prefiller.cost / 1e3,
        )

    def _offers(self, view: ClusterView, demand: Demand, able: Sequence[InstanceLoad], output: int) -> list[Offer]:
        """Of those that wait least and those with hits, without the hot ones."""
        waits = np.maximum(self._available.of(able) - view.now, 0.0)
        mean = 1e3 * sum(waits.tolist()) / len(able)
        order = np.lexsort((self._pending.of(able), waits))[:COMPARED]
        chosen = [able[k] for k in order.tolist()]
        if demand.hits:
            known = {i.name for i in chosen}
            holders = [i for i in able if i.name in demand.hits and i.name not in known]
            chosen += nsmallest(COMPARED, holders, key=lambda i: (-demand.hits[i.name], i.load_seconds(demand)))
        # those without a peer to hand over to must keep what they prefill
        offering = [i for i in chosen if i.peers or _has_room(i, demand, output)]
        if not offering:
            offering = [i for i in able if i.peers or _has_room(i, demand, output)][:COMPARED]
        offers = [_offer(view, demand, i) for i in offering]
        if demand.lenders:
            for place in nsmallest(FETCHERS, range(len(offers)), key=lambda place: offers[place].cost):
                offers[place] = _fetching(view, demand, offers[place])
        cool = [o for o in offers if o.wait <= max(HOT * mean, o.saved + BAND_MS)]
        return cool or offers


def _offer(view: ClusterView, demand: Demand, instance: InstanceLoad) -> Offer:
    tokens = demand.to_compute(instance.name)
    hit = demand.prompt_tokens - tokens
    loaded = demand.to_load(instance.name)
    brought = max(demand.brought_in.get(instance.name, 0.0), instance.load_seconds(demand) if loaded else 0.0)
    wait = max(brought, instance.available_at - view.now) * 1e3
    prefill = instance.prefill_seconds(tokens, hit) * 1e3
    saved = instance.prefill_seconds(demand.prompt_tokens) * 1e3 - prefill if hit else 0.0
    local = hit - min(hit, loaded)
    return Offer(instance, wait, prefill, saved, hit, local, hit - local)


def _fetching(view: ClusterView, demand: Demand, offer: Offer) -> Offer:
    """The same, if it fetches what others have more of, where that pays."""
    instance = offer.instance
    if (way := fetched(instance, view.now, demand)) is None:
        return offer
    prefill = instance.prefill_seconds(demand.prompt_tokens - way.tokens, way.tokens) * 1e3
    return replace(offer, wait=max(offer.wait, way.bring_ms), prefill=prefill, remote=way.tokens - offer.local)


def _holder(offers: Sequence[Offer], name: str) -> Offer | None:
    """The instance with a conversation's KV, if returning pays."""
    holder = next((o for o in offers if o.instance.name == name and o.hit), None)
    if holder is None:
        return None
    best = min((o.cost for o in offers if o is not holder), default=inf)
    return holder if returns(holder.wait, best, holder.saved) else None


def _home(
    view: ClusterView,
    demand: Demand,
    prefiller: InstanceLoad,
    output: int,
    before: str | None,
    costs: dict[str, float],
) -> InstanceLoad | None:
    """Who decodes: where the conversation decoded before, else where the next step is shortest, with what each would
    take in ms; None when nobody has room."""
    others = takers(view, demand, prefiller)
    if not others:
        return prefiller if _has_room(prefiller, demand, output) else None
    able = [prefiller, *others] if prefiller.role == "any" else others
    compared = nsmallest(COMPARED, able, key=lambda i: (i.held_tokens, i.name))
    if before is not None and all(i.name != before for i in compared):
        compared += [i for i in able if i.name == before]
    compared = [i for i in compared if _has_room(i, demand, output)]
    for i in compared:
        costs[i.name] = i.times.step_ms((), i.requests + 1, i.held_tokens + demand.prompt_tokens)
    same = next((i for i in compared if i.name == before), None)
    return same or min(compared, key=lambda i: (costs[i.name], i.name), default=None)


def _has_room(instance: InstanceLoad, demand: Demand, output: int) -> bool:
    """Whether its blocks bear one more beside what its sequences will come to, half of their output being left on
    average. One with nothing to do takes anything. Offline work makes room for online."""
    spare = 0 if demand.offline else instance.offline_requests
    requests = instance.requests - spare
    if requests <= 0:
        return True
    if requests >= instance.max_sequences:
        return False
    held = max(instance.held_tokens, (instance.num_blocks - instance.free_blocks) * BLOCK_TOKENS)
    if spare:
        held = instance.held_tokens - instance.offline_tokens
    coming = demand.prompt_tokens + output + requests * output / 2
    return held + coming <= FULL * instance.num_blocks * BLOCK_TOKENS
