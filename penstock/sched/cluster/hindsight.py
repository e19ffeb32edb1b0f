"""What other numbers of instances would have made of the latest traffic.

Bursts of a second or two cannot be answered with instances that take as long to start, and a mean over any window does
not show them. So the number of instances is not read off a rate: the prompts that came lately are run again, in a
model of one queue, on fewer and on more instances, and it is counted how many would have kept their TTFT. What does
not come in time then is given up, as `unified` gives it up, so that a burst costs what it is too much and no more. How
bursty the traffic is, and what that needs, is in it by itself. Prompts count whole, as if nothing of them were cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import InstanceLoad, Tally
from penstock.sched.cluster.foresight import prefill_seconds_alone


@dataclass(frozen=True, slots=True)
class Lot:
    """Prompts that came together.

    Attributes:
        at: seconds.
        seconds: that they add to the steps of one instance, all of them.
        alone: that one of them takes by itself.
    """

    at: float
    count: int
    seconds: float
    alone: float


class Hindsight:
    """Remembers what came and went."""

    def __init__(self) -> None:
        self._tallies: deque[Tally] = deque()
        self._since: float | None = None

    def hear(self, now: float, lately: Sequence[Tally], memory: float) -> None:
        """What is older than `memory` seconds is forgotten."""
        if self._since is None:
            self._since = lately[0].at if lately else now
        self._since = max(self._since, now - memory)
        self._tallies += lately
        while self._tallies and self._tallies[0].at < self._since:
            self._tallies.popleft()

    def span(self, now: float) -> float:
        """Seconds that it remembers."""
        return 0.0 if self._since is None else now - self._since

    def outcomes(self, since: float) -> tuple[int, int]:
        """(completed, of these kept their targets) since then."""
        these = [tally for tally in self._tallies if tally.at >= since]
        return sum(tally.completions for tally in these), sum(tally.attained for tally in these)

    def lots(self, load: InstanceLoad) -> list[Lot]:
        """What came, for instances like this one."""
        token, one = token_seconds(load), prefill_seconds_alone(load, 1)
        taken: dict[int, float] = {}  # by length in blocks
        found = []
        for tally in self._tallies:
            if not tally.arrivals:
                continue
            mean = tally.prompt_tokens / tally.arrivals
            blocks = max(1, round(mean / BLOCK_TOKENS))
            alone = taken.get(blocks)
            if alone is None:
                alone = taken[blocks] = prefill_seconds_alone(load, blocks * BLOCK_TOKENS)
            # a prompt adds less to steps that run anyway than it takes by itself, when it is short
            seconds = tally.arrivals * max(mean * token, alone - one)
            found.append(Lot(tally.at, tally.arrivals, seconds, alone))
        return found


def token_seconds(load: InstanceLoad) -> float:
    """For each token of a step that is full of prompts."""
    return prefill_seconds_alone(load, load.token_budget) / load.token_budget


def in_time(lots: Sequence[Lot], instances: int, share: float, ttft: float) -> float:
    """Share of the prompts that would have kept their TTFT. Those that no number of instances could are not counted,
    and wait for the others.

    Args:
        share: of an instance's time that prompts may take.
        ttft: in seconds.
    """
    speed = instances * share
    waiting, before = 0.0, -inf  # seconds of prompts
    came = kept = 0.0
    for lot in lots:
        waiting, before = max(0.0, waiting - (lot.at - before) * speed), lot.at
        room = (ttft - lot.alone / share) * speed
        if room <= 0:
            continue
        fits = min(1.0, max(0.0, (room - waiting) / lot.seconds))
        waiting += fits * lot.seconds
        came += lot.count
        kept += fits * lot.count
    return kept / came if came else 1.0
