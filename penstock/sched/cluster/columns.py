"""Columns: numbers of all instances, and of all queued sequences, as arrays that are updated from view to view.

The loads of a thousand instances are scattered in memory, and few change between two decisions; visiting all of them
each time is bound by cache misses. The same holds for ten thousand queued sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.sched.cluster.base import Demand, InstanceLoad


class Instances(list[InstanceLoad]):
    """The instances of a view, with what has changed since earlier ones. It does not change.

    Args:
        history: the places of all that changed, in order, in the views that share it; it only grows. Names and places
            are the same in all of these.
    """

    __slots__ = ("history", "moment")

    def __init__(self, loads: Iterable[InstanceLoad], history: list[int]) -> None:
        super().__init__(loads)
        self.history = history
        self.moment = len(history)


class Column:
    """One number of every instance.

    Args:
        value: a function of a load alone.
    """

    def __init__(self, value: Callable[[InstanceLoad], float], dtype: npt.DTypeLike = float) -> None:
        self._value, self._dtype = value, dtype
        self._values = np.empty(0, dtype)
        self._history: list[int] | None = None
        self._moment = 0

    def of(self, instances: Sequence[InstanceLoad]) -> npt.NDArray[Any]:
        """[instances]. Not to be changed, and not to be kept beyond the next question."""
        if not isinstance(instances, Instances):
            return self._all(instances)
        history, moment = instances.history, instances.moment
        if history is self._history and self._moment <= moment:
            for place in history[self._moment : moment]:
                self._values[place] = self._value(instances[place])
        else:
            self._values = self._all(instances)
        self._history, self._moment = history, moment
        return self._values

    def _all(self, instances: Sequence[InstanceLoad]) -> npt.NDArray[Any]:
        return np.array([self._value(i) for i in instances], self._dtype)


class Places:
    """By name, the place of every instance."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._history: list[int] | None = None

    def of(self, instances: Sequence[InstanceLoad]) -> dict[str, int]:
        """The same object for as long as the views share a history. Not to be changed."""
        if not isinstance(instances, Instances):
            return {load.name: place for place, load in enumerate(instances)}
        if instances.history is not self._history:
            self._places = {load.name: place for place, load in enumerate(instances)}
            self._history = instances.history
        return self._places


class ViewQueue(list[Demand]):
    """The queue of a view, with arrivals and departures since earlier ones. Immutable.

    Args:
        history: of all views that share it, in order: arrivals, at the end, and the places of departures; it only
            grows.
    """

    __slots__ = ("history", "moment")

    def __init__(self, demands: Iterable[Demand], history: list[Demand | int]) -> None:
        super().__init__(demands)
        self.history = history
        self.moment = len(history)


class QueueColumns:
    """Numbers of all queued sequences.

    Args:
        values: functions of a demand, asked once when it comes, and of all again where views share no history.
    """

    def __init__(self, *values: Callable[[Demand], float]) -> None:
        self._functions = values
        self._values = np.empty((len(values), 0))  # [functions, room for demands]
        self._count = 0
        self._history: list[Demand | int] | None = None
        self._moment = 0

    def of(self, queue: Sequence[Demand]) -> npt.NDArray[np.float64]:
        """[functions, demands]. What is written there stays with its demand for as long as views share a history. Not
        to be kept beyond the next question."""
        if not isinstance(queue, ViewQueue):
            return self._all(queue)
        history, moment = queue.history, queue.moment
        if history is self._history and 0 <= moment - self._moment <= len(queue):
            for change in history[self._moment : moment]:
                if isinstance(change, int):
                    self._left(change)
                else:
                    self._came(change)
        else:
            self._values, self._count = self._all(queue), len(queue)
        self._history, self._moment = history, moment
        return self._values[:, : self._count]

    def _came(self, demand: Demand) -> None:
        if self._count == self._values.shape[1]:
            self._values = np.pad(self._values, ((0, 0), (0, self._count + 64)))
        self._values[:, self._count] = [value(demand) for value in self._functions]
        self._count += 1

    def _left(self, place: int) -> None:
        self._values[:, place : self._count - 1] = self._values[:, place + 1 : self._count]
        self._count -= 1

    def _all(self, queue: Sequence[Demand]) -> npt.NDArray[np.float64]:
        values = np.empty((len(self._functions), len(queue)))
        for row, value in enumerate(self._functions):
            values[row] = [value(demand) for demand in queue]
        return values


class Costs(Mapping[str, float]):
    """What each candidate costs. Names are resolved on demand: usually only the chosen one's.

    Args:
        costs: in the order of the candidates.
        chosen: its place among them.
    """

    __slots__ = ("_candidates", "_chosen", "_costs", "_named")

    def __init__(self, candidates: Sequence[InstanceLoad], costs: npt.NDArray[Any], chosen: int) -> None:
        self._candidates, self._costs, self._chosen = candidates, costs, chosen
        self._named: dict[str, float] | None = None

    def _all(self) -> dict[str, float]:
        if self._named is None:
            self._named = {c.name: cost for c, cost in zip(self._candidates, self._costs.tolist(), strict=True)}
        return self._named

    def __getitem__(self, name: str) -> float:
        if name == self._candidates[self._chosen].name:
            return float(self._costs[self._chosen])
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._costs)

    @property
    def least(self) -> float:
        return float(self._costs[self._costs.argmin()])


def least(costs: Mapping[str, float]) -> float:
    """Of any candidate."""
    return costs.least if isinstance(costs, Costs) else min(costs.values())
