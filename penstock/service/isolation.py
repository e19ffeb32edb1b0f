"""Which request breaks engines, and which only ran beside it (RTP-LLM, self-healing nodes).

An engine that fails in a step, or dies by a signal that only a fault raises, says itself or by what it leaves
(`core.heartbeat`) which requests were in that step: those are suspects. A suspect goes on as any interrupted sequence
does, but alone: no other is in its steps (`Request.alone`), until it has brought `PROBATION` more tokens. A row's
result depends on that row alone, so what broke one engine breaks the next one at the same token, and what has passed it
is innocent. An engine that breaks in a step with a single suspect has been broken by that one, which is refused. So a
request breaks two engines at most, and nobody is refused for what another did.

An engine that was killed or stood still proves nothing against anyone: its requests go on together. Which of the two
it was is known when its launcher has looked at what is left of it, a moment after its connections have ended. Its
requests wait for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Any, Literal

from penstock.core.wire.engine import Peer
from penstock.service.flight import Flight

PROBATION = 16  # tokens: more than two steps bring, with drafts, and what was on the way when the engine broke
CAUSE = 0.5  # seconds that requests wait for the cause; launchers look every 0.05 s, and a busy machine is slower
REMEMBERED = 1024  # incarnations

Life = tuple[str, int]  # an instance, and its incarnation
Verdict = Literal["innocent", "suspect", "guilty"]


def life_of(peer: Peer) -> Life:
    return peer.name, peer.incarnation


def judge(flight: Flight[Any], life: Life, broken_by: Collection[str]) -> Verdict:
    """What it means for a sequence that an incarnation was broken by one of these, of which it is one."""
    assert flight.id in broken_by
    late = life not in map(life_of, flight.places)  # it is elsewhere now, or about to be
    if late and flight.heard:
        return "innocent"
    if flight.suspected and len(broken_by) == 1:
        return "guilty"
    return "innocent" if late and flight.suspected else "suspect"


class Causes:
    """Why incarnations have ended, as far as that is known.

    Args:
        told: whether somebody tells; else nothing is waited for.
    """

    def __init__(self, told: bool) -> None:
        self._told = told
        self._awaited: dict[Life, float] = {}  # and until when
        self._known: deque[Life] = deque(maxlen=REMEMBERED)

    def lost(self, life: Life, now: float) -> bool:
        """Its connection has ended. Returns whether the cause is to be waited for."""
        if not self._told or life in self._known:
            return False
        self._awaited[life] = now + CAUSE
        return True

    def learn(self, life: Life) -> bool:
        """The cause is known. Returns whether that is news."""
        self._awaited.pop(life, None)
        if life in self._known:
            return False
        self._known.append(life)
        return True

    def awaited(self, peers: Iterable[Peer]) -> bool:
        """Whether the cause is being waited for, of any of these."""
        return bool(self._awaited) and any(life_of(peer) in self._awaited for peer in peers)

    def expire(self, now: float) -> bool:
        """Wait no longer for what was not told in time; returns whether there was any."""
        late = [life for life, until in self._awaited.items() if until <= now]
        for life in late:
            del self._awaited[life]
        return bool(late)

    def check(self) -> None:
        """Raise AssertionError when something is both known and waited for."""
        assert self._awaited.keys().isdisjoint(self._known)
