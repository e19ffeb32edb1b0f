"""The order of the queue when not all prompts can meet their deadlines (`unified`).

By deadline, as far as all of these can be kept; where they cannot, the longest is given up, which maximises the number
that are met (Moore and Hodgson, with the cluster as one machine). Prompts that were given up use spare capacity, and
get a share of the work after `PATIENCE`; so do those without a deadline.

Under overload thousands wait, most of them too late. A prompt that cannot meet its deadline even alone never will, so
these are set aside for good, and only the others are reconsidered.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from heapq import heappop, heappush
from itertools import repeat
from math import inf
from operator import attrgetter, is_
from typing import NamedTuple

from penstock.sched.cluster.base import ClusterView, Demand, Key
from penstock.sched.cluster.columns import Column, ViewQueue

MARGIN = 0.9  # of a target that predictions may use up
PATIENCE = 10.0  # seconds after which a prompt that was given up gets its share
SHARE = 1 / 16  # of the work that these turns may take as long as there are prompts that can be in time
RETHINK = 0.05  # seconds between two reorderings of the queue without arrivals
LOOK = 32  # sequences in that order that are tried, when those before them have to wait for an instance that is full


class _Hopeful(NamedTuple):
    """A prompt that may meet its deadline, in order of deadline.

    Attributes:
        latest: when it has to be prefilled, with the margin.
        seconds: that it takes to be prefilled.
    """

    priority: int
    deadline: float
    arrived: float
    number: int
    latest: float
    seconds: float
    demand: Demand


class _Late(NamedTuple):
    """A prompt that will miss its deadline, in order of arrival."""

    priority: int
    arrived: float
    deadline: float
    number: int
    demand: Demand


class SlackOrder:
    """The order; recomputed on arrivals, or after `RETHINK`.

    Attributes:
        with_hits: whether anything in the queue is in a cache.
    """

    def __init__(self) -> None:
        self.with_hits = False
        self._first: list[Demand] = []  # of the order; those who are late follow as they are needed
        self._given_up: list[_Late] = []  # of the hopeful, sorted, from the last in order to the first
        self._next = 0  # of the hopeless
        self._count = 0  # of all
        self._made_at = -inf
        self._free_at = Column(attrgetter("free_at"))
        self._newest: Demand | None = None
        self._history: object = None  # of the view's queue; another one where what waits is known better
        self._waiting: dict[Key, _Hopeful] = {}
        self._taken: list[Demand] = []  # since that was compared with the queue
        self._hits = 0  # of these, how many are in a cache
        self._numbered = 0  # so far, in order of arrival
        self._hopeful: list[_Hopeful] = []  # sorted, as is the next
        self._hopeless: list[_Late] = []  # who has left is still here for a while
        self._seconds: dict[Key, float] = {}  # that each takes to be prefilled
        self._overdue: Key | None = None  # whose turn it is although it is late
        self._owed = 0.0  # seconds of work that is in time, before the next such turn

    def are_stale(self, view: ClusterView) -> bool:
        """Whether the queue is another than it was, or has waited."""
        same = len(view.queue) == self._count and view.queue[-1] == self._newest
        same = same and _history(view) is self._history
        return not same or view.now - self._made_at >= RETHINK

    def of(self, view: ClusterView) -> list[Demand]:
        """The first in order."""
        if self.are_stale(view):
            self._made_at, self._newest = view.now, view.queue[-1]
            self._compare(view)
            self.with_hits = self._hits > 0
            self._make(view)
        while len(self._first) < min(LOOK, self._count):
            entry = self._next_late()
            if self._waits(entry) and entry.demand.key != self._overdue:
                self._first.append(entry.demand)
        return self._first[:LOOK]

    def take(self, place: int) -> None:
        """A sequence was placed."""
        gone = self._first.pop(place)
        self._count -= 1
        self._leave(gone.key)
        self._taken.append(gone)
        seconds = self._seconds.pop(gone.key, 0.0)
        if gone.key == self._overdue:
            self._overdue = None
            self._owed = seconds / SHARE
        else:
            self._owed -= seconds
        if gone == self._newest:
            self._newest = None  # whoever is the newest now, it is looked at once more

    # --- the queue

    def _compare(self, view: ClusterView) -> None:
        """Find arrivals, which are at the end, and departures."""
        come: list[Demand] = []
        for demand in reversed(view.queue):
            if self._knows(demand):
                break
            come.append(demand)
        taken, self._taken = self._taken, []
        # decisions that are only tried, not carried out, leave those in the queue whom they take
        in_vain = any(any(map(is_, view.queue, repeat(demand))) for demand in taken)
        renewed, self._history = _history(view) is not self._history, _history(view)
        if in_vain or renewed or len(self._waiting) + len(come) != len(view.queue):
            present = {demand.key: demand for demand in view.queue}
            for key, entry in list(self._waiting.items()):
                if present.get(key) is not entry.demand:
                    self._leave(key)
                    self._seconds.pop(key, None)
            self._seconds = {key: seconds for key, seconds in self._seconds.items() if key in present}
            come = [demand for demand in reversed(view.queue) if demand.key not in self._waiting]
        for demand in reversed(come):
            self._come(view, demand)

    def _come(self, view: ClusterView, demand: Demand) -> None:
        self._hits += bool(demand.hits)
        seconds = self._seconds[demand.key] = self._seconds.get(demand.key) or _read_seconds(view, demand)
        latest = demand.arrived + demand.ttft * MARGIN
        self._numbered += 1
        entry = _Hopeful(demand.priority, demand.deadline, demand.arrived, self._numbered, latest, seconds, demand)
        self._waiting[demand.key] = entry
        insort(self._hopeful, entry)

    def _leave(self, key: Key) -> None:
        entry = self._waiting.pop(key)
        self._hits -= bool(entry.demand.hits)
        place = bisect_left(self._hopeful, entry)
        if place < len(self._hopeful) and self._hopeful[place].number == entry.number:
            del self._hopeful[place]

    def _knows(self, demand: Demand) -> bool:
        entry = self._waiting.get(demand.key)
        return entry is not None and entry.demand is demand

    def _waits(self, entry: _Hopeful | _Late) -> bool:
        """Whether its sequence still waits with the same arrival: one may leave and come again."""
        known = self._waiting.get(entry.demand.key)
        return known is not None and known.number == entry.number

    # --- their order

    def _make(self, view: ClusterView) -> None:
        if len(self._hopeless) > 2 * len(self._waiting):
            self._hopeless = [entry for entry in self._hopeless if self._waits(entry)]
        given_up = self._give_up(view)
        self._given_up = sorted((_late(self._hopeful[place]) for place in given_up), reverse=True)
        in_time = [entry.demand for place, entry in enumerate(self._hopeful) if place not in given_up]
        self._overdue = None
        self._first = in_time
        oldest = self._oldest()
        if oldest is not None and self._owed <= 0 and view.now - oldest.arrived > _patience(oldest):
            self._overdue = oldest.key
            self._first = [oldest, *(demand for demand in in_time if demand is not oldest)]
        self._next, self._count = 0, len(self._waiting)

    def _next_late(self) -> _Late:
        """Of those who are late; there is one."""
        given_up, hopeless = self._given_up, self._hopeless
        if given_up and (self._next == len(hopeless) or given_up[-1] < hopeless[self._next]):
            return given_up.pop()
        self._next += 1
        return hopeless[self._next - 1]

    def _give_up(self, view: ClusterView) -> set[int]:
        """Places among the hopeful of those that cannot be in time if all others are to be; who cannot even alone is
        hopeful no longer."""
        count, now = len(view.instances), view.now
        hopeless = []
        given_up: set[int] = set()
        longest: list[tuple[float, int]] = []  # (-seconds, place) of those that are kept
        free_at = self._free_at.of(view.instances)
        end = sum((free_at[free_at > now] - now).tolist())
        place = 0
        for entry in self._hopeful:
            seconds, slack = entry.seconds, entry.latest - now
            if seconds > slack:
                hopeless.append(entry)
                continue
            heappush(longest, (-seconds, place))
            place += 1
            end += seconds
            while end / count > slack and longest:
                less, gone = heappop(longest)
                end += less
                given_up.add(gone)
        if hopeless:
            for entry in hopeless:
                insort(self._hopeless, _late(entry))
            self._hopeful = [entry for entry in self._hopeful if entry.seconds <= entry.latest - now]
        return given_up

    def _oldest(self) -> Demand | None:
        """Of all that are late, and of those without a target, who come after all that are in time: under overload
        that is never. Of each priority's hopeless the first has waited longest."""
        while self._hopeless and not self._waits(self._hopeless[0]):
            del self._hopeless[0]
        firsts = [*self._given_up, *(_late(entry) for entry in self._hopeful if entry.deadline == inf)]
        place = 0
        while place < len(self._hopeless):
            entry = self._hopeless[place]
            if self._waits(entry):
                firsts.append(entry)
                place = bisect_right(self._hopeless, (entry.priority, inf))
            else:
                place += 1
        return min(firsts, key=lambda entry: (entry.arrived, entry)).demand if firsts else None


def _late(entry: _Hopeful) -> _Late:
    return _Late(entry.priority, entry.arrived, entry.deadline, entry.number, entry.demand)


def _read_seconds(view: ClusterView, demand: Demand) -> float:
    """That its prompt makes the queue longer, at the best."""
    hit = max(demand.hits.values(), default=0)
    return view.instances[0].queued_seconds(max(1, demand.prompt_tokens - hit), hit)


def _history(view: ClusterView) -> object:
    """The same for as long as nothing but arrivals and departures has changed the queue."""
    return view.queue.history if isinstance(view.queue, ViewQueue) else None


def _patience(demand: Demand) -> float:
    return PATIENCE if demand.ttft == inf else max(PATIENCE, 2 * demand.ttft)
