"""How the KV of a prompt comes to be on an instance: computed there, or brought from where it is, and the rest computed
(xLLM, sections 3.4 and 3.5).

In ms from now to the next token, of n tokens of which the instance has h:

    recompute   max(queue, its own loads) + prefill(n - h)
    fetch       max(queue, its own loads, transfer of k - h) + prefill(n - k), from a peer that has the first k
    remap       the same, where a failed instance has left them in the instance's KV pool

What is brought comes while others are prefilled, so only the longer of both is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import Demand, InstanceLoad, Way

ROUND_TRIPS_MS = 2.0  # until the first block comes, and until it is said that the last one has
WORTH = 0.8  # of what computing takes, that bringing and computing the rest may take


class Holder(NamedTuple):
    """Somebody who has KV of a prompt.

    Attributes:
        name: of a peer; "" for the KV pool of the instance that is asked about.
        tokens: leading ones of the prompt.
    """

    name: str
    tokens: int


def recompute(load: InstanceLoad, now: float, demand: Demand) -> Way:
    """With what the instance has itself."""
    cached = min(demand.hits.get(load.name, 0), demand.prompt_tokens - 1)
    ms = _ms(load, now, demand, cached, 0.0)
    return Way(how="recompute", source="", tokens=cached, bring_ms=0.0, ms=ms, recompute_ms=ms)


def bring(load: InstanceLoad, now: float, demand: Demand, holder: Holder, instead: Way) -> Way:
    """From one holder.

    Args:
        instead: what `recompute` says.
    """
    tokens = min(holder.tokens, (demand.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    blocks = max(0, tokens - instead.tokens) // BLOCK_TOKENS
    measured = load.fetch_ms if holder.name else None  # a remapped block does not pass through a transport
    each = load.times.load_ms(BLOCK_TOKENS) if measured is None else measured
    bring_ms = ROUND_TRIPS_MS + blocks * each
    return Way(
        how="fetch" if holder.name else "remap",
        source=holder.name,
        tokens=max(tokens, instead.tokens),
        bring_ms=bring_ms,
        ms=_ms(load, now, demand, max(tokens, instead.tokens), bring_ms),
        recompute_ms=instead.ms,
    )


def cheapest(load: InstanceLoad, now: float, demand: Demand, holders: Iterable[Holder]) -> Way:
    """The way that brings the next token first, if that is clearly earlier than by computing."""
    computed = recompute(load, now, demand)
    ways = [bring(load, now, demand, holder, computed) for holder in holders if holder.tokens > computed.tokens]
    best = min(ways, key=lambda way: (way.ms, way.source), default=computed)
    return best if best.ms < WORTH * computed.ms else computed


def _ms(load: InstanceLoad, now: float, demand: Demand, cached: int, bring_ms: float) -> float:
    ready = max(load.begins_at(now, demand), now + bring_ms / 1e3)
    if demand.offline:
        ready = max(ready, load.idle_at)
    tokens = max(1, demand.prompt_tokens - cached)
    return (ready - now + load.prefill_seconds(tokens, demand.prompt_tokens - tokens)) * 1e3
