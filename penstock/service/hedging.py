"""Which sequences begin again elsewhere before it is known whether their engine is lost (Dean and Barroso, The Tail at
Scale: hedged requests; xLLM, section 3.5).

An engine that stands still may come back, and is killed only after the heartbeat's timeout. Its online sequences do not
wait for that: each gets another attempt elsewhere, and goes on with the one that first brings something. Whoever starts
engines can tell one that stands still from one that is busy (`service.watch`), and the frontend has heard nothing of
it: a launcher that hears nothing either suspects what may be well. Of a host that cannot be reached nobody can tell
that: it is suspected when nothing of it is heard, while others are.

In the middle of a hand-over it is not known who has it, if either of the two stands still. Where the other one is the
first, it is told to keep it, and mostly can. Else another attempt begins, and this one may come from either.

What that costs is bounded. Nothing begins again that is not online, or that may break engines (`isolation`), nor where
no other instance has room (`Place.hedged`), nor while most instances are suspected: then the machine is slow, and more
work is the last thing it needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from penstock.core.wire.engine import AT_WORK, Ready
from penstock.service.flight import Flight
from penstock.service.isolation import Life, life_of

QUIET = 2.5 * AT_WORK  # seconds without a message
IDLE_QUIET = 1.25  # the same of those that had nothing to do, which speak every 0.5 s
SHARE = 0.5  # of the instances that serve, which may be suspected at once
AGAIN = 1.0  # seconds after which it is tried again where there was no room

Remedy = Literal["keep", "leave", "hedge"]


class Seen(Protocol):
    """What is known of an instance; see `dispatcher.Instance`."""

    @property
    def ready(self) -> Ready | None: ...
    @property
    def heard(self) -> float: ...
    @property
    def suspicion(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def load(self) -> int: ...


def suspects(instances: Collection[Seen], now: float) -> Mapping[Life, str]:
    """Instances that may hang or cannot be reached, and why; none while these are too many to be true."""
    serving = [(instance, instance.ready) for instance in instances if instance.ready is not None]
    silent = _silent_hosts([instance for instance, _ in serving], now)
    doubted = [(i, ready, why) for i, ready in serving if (why := i.suspicion or silent.get(i.host, ""))]
    if len(doubted) > SHARE * len(serving):
        return {}
    return {life_of(ready.peer): why for instance, ready, why in doubted if now - instance.heard > QUIET}


def _silent_hosts(serving: Sequence[Seen], now: float) -> Mapping[str, str]:
    """Hosts of which nothing is heard while others are: there may be no way to them. Where nobody is heard it is this
    process that does not run."""
    newest: dict[str, float] = {}
    for instance in serving:
        newest[instance.host] = max(instance.heard, newest.get(instance.host, instance.heard))
    last, at_work = max(newest.values(), default=now), {instance.host for instance in serving if instance.load}
    found = {}
    for host, heard in newest.items():
        quiet = QUIET if host in at_work else IDLE_QUIET
        if now - heard > quiet and last - heard > quiet / 2:
            found[host] = f"nothing was heard of {host or 'this host'} for {now - heard:.1f} s"
    return found


def to_hedge(hang: Collection[Life], flights: Iterable[Flight[Any]], now: float) -> list[tuple[Flight[Any], Remedy]]:
    """Sequences of instances that may hang, the most urgent first, and what is to be done for each: "hedge", another
    attempt; "leave", the same instead of this one, of which nothing can come; "keep", who has it is well, and is not to
    hand it over."""
    found = []
    for flight in flights:
        if flight.placed and not (flight.request.offline or flight.suspected):
            remedy = _remedy(flight, hang, now)
            if remedy is not None:
                found.append((flight, remedy))
    return sorted(found, key=lambda each: each[0].urgency)


def _remedy(flight: Flight[Any], hang: Collection[Life], now: float) -> Remedy | None:
    here, *to = [life_of(peer) in hang for peer in flight.places]
    if here and flight.can_leave:
        return "leave"
    if not here and any(to) and flight.can_keep:
        return "keep"
    # who has it, and was not able to keep it, may have given it away after its first token, and not before
    stands = here or (any(to) and flight.heard > 0)
    return "hedge" if stands and flight.can_hedge(now) else None
