"""Between a simulated device and its host's memory: how long copies of blocks take.

Either direction is a way of its own, on which one order after the other is carried out. Nothing fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.local.offload import Load, Store
from penstock.sched.steptime import StepTime


class Arrival(NamedTuple):
    """A load is over.

    Attributes:
        at: when; `seconds` that it took on the way.
    """

    at: float
    number: int
    blocks: int
    seconds: float


class HostWay:
    """Of one instance.

    Args:
        slowdown: factor on all times.
    """

    def __init__(self, times: StepTime, slowdown: float) -> None:
        self._block = times.load_ms(BLOCK_TOKENS) / 1e3 * slowdown
        self._in_free = self._out_free = 0.0  # when each way is
        self._stores: deque[tuple[float, int]] = deque()  # (over, number), in order

    def send(self, now: float, orders: Iterable[Store | Load]) -> list[Arrival]:
        """Begin what is ordered. Returns when the loads of it will be there."""
        arrivals = []
        for order in orders:
            took = self._block * len(order.moves)
            if isinstance(order, Store):
                self._out_free = max(now, self._out_free) + took
                self._stores.append((self._out_free, order.number))
            else:
                self._in_free = max(now, self._in_free) + took
                arrivals.append(Arrival(self._in_free, order.number, len(order.moves), took))
        return arrivals

    def stored(self, now: float) -> list[int]:
        """The stores that are over and were not told yet."""
        over = []
        while self._stores and self._stores[0][0] <= now:
            over.append(self._stores.popleft()[1])
        return over

    @property
    def next_store(self) -> float:
        """When the next one is over; inf when none is under way."""
        return self._stores[0][0] if self._stores else inf
