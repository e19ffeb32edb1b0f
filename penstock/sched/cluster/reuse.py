"""How the KV of a prompt comes to be on an instance: computed there, or brought from where it is, and the rest computed
(xLLM, sections 3.4 and 3.5).

In ms from now to the next token, of n tokens of which the instance has h:

    recompute   max(queue, its own loads) + prefill(n - h)
    fetch       max(queue, its own loads, transfer of k - h) + prefill(n - k), from a peer that has the first k
    remap       the same, where a failed instance has left them in the instance's KV pool

What is brought comes while others are prefilled, so only the longer of both is waited for. A transfer is what it takes
until the first block comes, as measured lately, what others fetch from the same peer before it, and the blocks at the
measured bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import Demand, Holder, InstanceLoad, Way

ROUND_TRIPS_MS = 2.0  # until the first block comes, and until it is said that the last one has; where not measured
WORTH = 0.8  # of what computing some tokens takes, that may be waited for, beyond the queue, until they are brought
FETCHERS = 8  # candidates that are asked what they would fetch: the best without that, as it gains all about the same
Prefill = Callable[[int, int], float]  # tokens to compute, tokens before them -> seconds


def recompute(load: InstanceLoad, now: float, demand: Demand, prefill: Prefill | None = None) -> Way:
    """With what the instance has itself.

    Args:
        prefill: the instance's `prefill_seconds`, or one that remembers.
    """
    cached = min(demand.hits.get(load.name, 0), demand.prompt_tokens - 1)
    ms = _ms(load, now, demand, cached, 0.0, prefill)
    return Way(how="recompute", source="", tokens=cached, bring_ms=0.0, ms=ms, recompute_ms=ms)


def bring(
    load: InstanceLoad, now: float, demand: Demand, holder: Holder, instead: Way, prefill: Prefill | None = None
) -> Way:
    """From one holder.

    Args:
        instead: what `recompute` says.
    """
    tokens = min(holder.tokens, (demand.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    blocks = max(0, tokens - instead.tokens) // BLOCK_TOKENS
    wait = ROUND_TRIPS_MS
    if holder.name:
        wait = (ROUND_TRIPS_MS if load.fetch_wait_ms is None else load.fetch_wait_ms) + max(
            0.0, (holder.free_at - now) * 1e3
        )
    bring_ms = wait + blocks * block_ms(load, holder)
    return Way(
        how="fetch" if holder.name else "remap",
        source=holder.name,
        tokens=max(tokens, instead.tokens),
        bring_ms=bring_ms,
        ms=_ms(load, now, demand, max(tokens, instead.tokens), bring_ms, prefill),
        recompute_ms=instead.ms,
    )


def block_ms(load: InstanceLoad, holder: Holder) -> float:
    """Of one block from there."""
    measured = load.fetch_ms if holder.name else None  # a remapped block does not pass through a transport
    return load.times.load_ms(BLOCK_TOKENS) if measured is None else measured


def cheapest(
    load: InstanceLoad, now: float, demand: Demand, holders: Iterable[Holder], prefill: Prefill | None = None
) -> Way:
    """The way that brings the next token first, if what is waited for is clearly less than what is not computed."""
    computed = recompute(load, now, demand, prefill)
    ways = [
        bring(load, now, demand, holder, computed, prefill) for holder in holders if holder.tokens > computed.tokens
    ]
    if not ways:
        return computed
    best = min(ways, key=lambda way: (way.ms, way.source))
    queue = (_begins(load, now, demand) - now) * 1e3
    begins = max(queue, best.bring_ms)
    saved = computed.ms - queue - (best.ms - begins)
    return best if begins - queue < WORTH * saved else computed


def fetched(load: InstanceLoad, now: float, demand: Demand, prefill: Prefill | None = None) -> Way | None:
    """What an instance would fetch from a healthy peer; None where it computes what it lacks, or somebody knows
    already what it brings (`Demand.brought`)."""
    if not load.fetches or demand.brought:
        return None
    has = demand.hits.get(load.name, 0)
    holders = [
        holder
        for holder in demand.lenders
        if holder.tokens >= has + BLOCK_TOKENS and holder.name != load.name and holder.name not in load.unlinked
    ]
    if not holders:
        return None
    way = cheapest(load, now, demand, holders, prefill)
    return way if way.how == "fetch" else None


def _begins(load: InstanceLoad, now: float, demand: Demand) -> float:
    """When it could begin with what it has itself."""
    begins = load.begins_at(now, demand)
    return max(begins, load.idle_at) if demand.offline else begins


def _ms(load: InstanceLoad, now: float, demand: Demand, cached: int, bring_ms: float, prefill: Prefill | None) -> float:
    ready = max(_begins(load, now, demand), now + bring_ms / 1e3)
    tokens = max(1, demand.prompt_tokens - cached)
    return (ready - now + (prefill or load.prefill_seconds)(tokens, demand.prompt_tokens - tokens)) * 1e3
