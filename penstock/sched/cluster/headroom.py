"""Headroom of an instance, also where sequences share prefixes (`unified`).

By what its sequences hold and will come to, as `foresight.most_tokens` has it; or by the blocks that are free, less
what they will come to, where that is more: a beginning that many share is counted with each of them, and held once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import Demand, InstanceLoad
from penstock.sched.cluster.columns import Column
from penstock.sched.cluster.foresight import room


def headroom(load: InstanceLoad, output: float) -> float:
    """Tokens that one more online sequence may come to: inf where there is no other, -inf where none has a place.

    Args:
        output: tokens that sequences generate; 0 when that is not known. Those that are there are half through.
    """
    online = _online(load)
    if not online:
        return inf
    return _left(load) - online * output / 2 if online < load.max_sequences else -inf


def needed(demand: Demand, output: float) -> float:
    """Tokens that a sequence will come to."""
    return demand.prompt_tokens + min(output, demand.max_tokens)


class Headrooms:
    """The same of very many instances."""

    def __init__(self) -> None:
        self._online, self._left = Column(_online), Column(_left)
        self._full = Column(lambda load: _online(load) >= load.max_sequences, bool)

    def of(self, instances: Sequence[InstanceLoad], output: float) -> npt.NDArray[np.float64]:
        """[instances]."""
        online = self._online.of(instances)
        rooms = np.where(self._full.of(instances), -inf, self._left.of(instances) - online * output / 2)
        return np.where(online == 0, inf, rooms)


def _online(load: InstanceLoad) -> int:
    return load.requests - load.offline_requests


def _left(load: InstanceLoad) -> float:
    """Tokens, as if nothing there grew. Offline sequences make way."""
    if not load.free_blocks:  # and perhaps more is promised than there is
        return room(load, 0.0)
    return max(room(load, 0.0), load.free_blocks * BLOCK_TOKENS + load.offline_tokens)
