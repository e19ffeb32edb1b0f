"""Which sequences begin again elsewhere before it is known whether their engine is lost (Dean and Barroso, The Tail at
Scale: hedged requests; xLLM, section 3.5).

An engine that stands still may come back, and is killed only after the heartbeat's timeout. Its online sequences do not
wait for that: each gets another attempt elsewhere, and goes on with the one that first brings something. Whoever starts
engines can tell one that stands still from one that is busy (`service.watch`), and the frontend has heard nothing of
it: a launcher that hears nothing either suspects what may be well.

What that costs is bounded. Nothing begins again that is not online, or that may break engines (`isolation`), nor where
no other instance has room (`Place.hedged`), nor while most instances are suspected: then the machine is slow, and more
work is the last thing it needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Protocol

from penstock.core.wire.engine import Ready
from penstock.service.flight import Flight
from penstock.service.isolation import life_of

QUIET = 0.5  # seconds without a message; an engine with something to do says something after each step
SHARE = 0.5  # of the instances that serve, which may be suspected at once
AGAIN = 1.0  # seconds after which it is tried again where there was no room


class Seen(Protocol):
    """What is known of an instance; see `engine_client.Instance`."""

    @property
    def ready(self) -> Ready | None: ...
    @property
    def heard(self) -> float: ...
    @property
    def suspicion(self) -> str: ...


def to_hedge(instances: Collection[Seen], flights: Iterable[Flight[Any]], now: float) -> list[Flight[Any]]:
    """Sequences of instances that may hang, the most urgent first. One that has two places, since it is being handed
    over, and of which nothing was heard yet is among them."""
    serving = [(instance, instance.ready) for instance in instances if instance.ready is not None]
    suspected = [(instance, ready) for instance, ready in serving if instance.suspicion]
    if not suspected or len(suspected) > SHARE * len(serving):
        return []
    hang = {life_of(ready.peer) for instance, ready in suspected if now - instance.heard > QUIET}
    found = [
        flight
        for flight in flights
        if flight.placed
        and not (flight.request.offline or flight.suspected)
        and life_of(flight.here) in hang
        and (flight.can_hedge(now) or flight.unheard)
    ]
    return sorted(found, key=lambda flight: flight.urgency)
