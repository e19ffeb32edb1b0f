"""Sequences that wait, at the master for a place and at a frontend for their first token, and recent rates. Under
overload ten thousands wait, so little here goes through them all."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Any

from penstock.core.wire.master import Outcome, Place, Placed
from penstock.sched.cluster import Demand, Key, Rates, Resident, Tally, ViewQueue
from penstock.service.flight import Flight
from penstock.service.session import InstanceSession

REMEMBERED = 8  # length of the history: changes for each waiting sequence, and at least MEMORY
MEMORY = 256
WINDOW = 10.0  # seconds
SURE = 1.0  # seconds after which a measured rate is better than the last one
SHOWN = 256  # offline sequences that policies see, of however many wait
TALLIED = 0.1  # seconds of a tally
TALLIES = 1200  # that are kept for whoever asks for them


@dataclass(slots=True, eq=False)
class Tracked:
    """A sequence that the master knows: it waits, and once it is placed it is in flight.

    Attributes:
        demand, place: as policies see it; the question that brought it.
        placed: the answer; None while it waits.
        prefiller, home: where it is prefilled, and where it stays after that; set when it is placed.
        open: whether it is still to be decided who decodes.
        since: when its first token was heard of; None before.
        moving: until when it counts as being handed over, so that it is not told again to go elsewhere.
        until: how long it waits when no instance can take it.
        counted: whether it was queued, and counted as an arrival.
    """

    demand: Demand
    place: Place
    until: float
    counted: bool = False
    placed: Placed | None = None
    open: bool = False
    since: float | None = None
    moving: float = -inf
    prefiller: InstanceSession = field(init=False)
    home: InstanceSession = field(init=False)

    @property
    def resident(self) -> Resident:
        """Of one that has its first token."""
        assert self.since is not None
        return Resident(demand=self.demand, at=self.home.name, since=self.since)


class WaitQueue(dict[Key, Tracked]):
    """Sequences in order of arrival. One that asks again must be removed before.

    Args:
        shown: how many of the first ones policies see; None is all.

    Attributes:
        priorities: how many wait, by priority.
    """

    def __init__(self, shown: int | None = None) -> None:
        super().__init__()
        self.priorities: Counter[int] = Counter()
        self._shown = shown
        self._demands: Sequence[Demand] | None = ()
        self._line: list[Demand] = []
        self._history: list[Demand | int] = []  # see `ViewQueue`
        self._order: list[int] = []  # their numbers, which rise
        self._numbers: dict[Key, int] = {}
        self._came = 0
        self._longest = 0  # tokens of the longest since the queue was last empty
        self._picky: dict[Key, None] = {}  # those that exclude an instance

    @property
    def demands(self) -> Sequence[Demand]:
        """What policies see; it does not change."""
        if self._demands is None:
            if len(self._history) > max(MEMORY, REMEMBERED * len(self._line)):
                self._history = []
            whole = self._shown is None
            self._demands = ViewQueue(self._line, self._history) if whole else self._line[: self._shown]
        return self._demands

    def doubtful(self, shortest: int) -> Iterable[Key]:
        """Those that some instance cannot take.

        Args:
            shortest: no instance takes fewer tokens.
        """
        if self._longest <= shortest:
            return list(self._picky)
        return [key for key, waiting in self.items() if waiting.demand.tokens > shortest or waiting.demand.exclude]

    def __setitem__(self, key: Key, waiting: Tracked) -> None:
        assert key not in self
        super().__setitem__(key, waiting)
        self._demands = None
        self._numbers[key] = self._came
        self._order.append(self._came)
        self._line.append(waiting.demand)
        self._history.append(waiting.demand)
        self._came += 1
        self.priorities[waiting.demand.priority] += 1
        self._longest = max(self._longest, waiting.demand.tokens)
        if waiting.demand.exclude:
            self._picky[key] = None

    def pop(self, key: Key) -> Tracked | None:  # type: ignore[override]
        """None when it is not there."""
        waiting = super().pop(key, None)
        if waiting is not None:
            self._demands = None
            place = bisect_left(self._order, self._numbers.pop(key))
            del self._order[place], self._line[place]
            self._history.append(place)
            self.priorities[waiting.demand.priority] -= 1
            self._picky.pop(key, None)
            if not self:
                self._longest = 0
        return waiting

    def renew(self, key: Key, demand: Demand) -> None:
        """Something is known of one that waits which was not. It keeps its place."""
        place = bisect_left(self._order, self._numbers[key])
        self[key].demand = self._line[place] = demand
        self._demands = None
        self._history = []  # which tells of arrivals and departures only

    def check(self) -> None:
        """Raise AssertionError unless everything is about those that wait."""
        assert self._line == [waiting.demand for waiting in self.values()]
        assert self._order == [self._numbers[key] for key in self] == sorted(self._numbers.values())
        assert list(self._picky) == [key for key, waiting in self.items() if waiting.demand.exclude]
        assert self.priorities == Counter(waiting.demand.priority for waiting in self.values())
        assert all(waiting.demand.tokens <= self._longest for waiting in self.values())


class MasterQueue:
    """Sequences that wait at the master for a place.

    Attributes:
        online, offline: of which policies are told.
        unplaceable: those that no instance can take now, of which they are not.
    """

    def __init__(self) -> None:
        self.online, self.offline = WaitQueue(), WaitQueue(shown=SHOWN)
        self.unplaceable: dict[Key, Tracked] = {}

    def __len__(self) -> int:
        return len(self.online) + len(self.offline) + len(self.unplaceable)

    def __iter__(self) -> Iterator[Key]:
        return chain(self.online, self.offline, self.unplaceable)

    def items(self) -> list[tuple[Key, Tracked]]:
        return [*self.online.items(), *self.offline.items(), *self.unplaceable.items()]

    def get(self, key: Key) -> Tracked | None:
        return self.online.get(key) or self.offline.get(key) or self.unplaceable.get(key)

    def pop(self, key: Key) -> Tracked | None:
        """None when it does not wait."""
        return self.online.pop(key) or self.offline.pop(key) or self.unplaceable.pop(key, None)

    def queue_for(self, sequence: Tracked) -> WaitQueue:
        """Where it waits while some instance can take it."""
        return self.offline if sequence.place.offline else self.online

    def doubtful(self, shortest: int) -> list[tuple[Key, Tracked]]:
        """Of those that policies are told of, those that some instance cannot take; see `WaitQueue`."""
        return [(key, queue[key]) for queue in (self.online, self.offline) for key in queue.doubtful(shortest)]

    def set_aside(self, key: Key) -> None:
        """No instance can take it now."""
        sequence = self.online.pop(key) or self.offline.pop(key)
        assert sequence is not None
        self.unplaceable[key] = sequence

    def check(self) -> None:
        """Raise AssertionError unless each waits in one place."""
        self.online.check()
        self.offline.check()
        keys = list(self)
        assert len(keys) == len(set(keys)), "a sequence waits twice"


class RateWindow:
    """What came and went, of online sequences, over the last `WINDOW` seconds, and since it was last asked."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[float, int]] = deque()  # when, prompt tokens
        # when, output tokens, whether it generated any, and whether it kept its targets
        self._ended: deque[tuple[float, int, bool, bool]] = deque()
        self._prompt_tokens = self._output_tokens = self._generated = self._attained = 0  # sums of these
        self._tallies: deque[Tally] = deque(maxlen=TALLIES)

    def arrive(self, now: float, demand: Demand) -> None:
        self._tally(now, arrivals=1, prompt_tokens=demand.prompt_tokens)
        self._arrived.append((now, demand.prompt_tokens))
        self._prompt_tokens += demand.prompt_tokens

    def end(self, now: float, demand: Demand, outcome: Outcome) -> None:
        kept = outcome.ttft_ms <= demand.ttft * 1e3 and (outcome.tpot_ms or 0.0) <= demand.tpot * 1e3
        self._tally(now, completions=1, attained=int(kept))
        generated = demand.max_tokens > 0
        self._ended.append((now, outcome.tokens, generated, kept))
        self._output_tokens += outcome.tokens
        self._generated += generated
        self._attained += kept

    def rates(self, now: float) -> Rates:
        while self._arrived and self._arrived[0][0] < now - WINDOW:
            self._prompt_tokens -= self._arrived.popleft()[1]
        while self._ended and self._ended[0][0] < now - WINDOW:
            _, tokens, generated, kept = self._ended.popleft()
            self._output_tokens -= tokens
            self._generated -= generated
            self._attained -= kept
        arrived, ended = len(self._arrived), len(self._ended)
        return Rates(
            window=WINDOW,
            arrivals=arrived,
            completions=ended,
            attained=self._attained,
            prompt_tokens=self._prompt_tokens / arrived if arrived else 0.0,
            output_tokens=self._output_tokens / self._generated if self._generated else 0.0,
        )

    def take(self) -> Sequence[Tally]:
        """Tallies since the last call, in order."""
        taken = list(self._tallies)
        self._tallies.clear()
        return taken

    def _tally(
        self, now: float, *, arrivals: int = 0, prompt_tokens: int = 0, completions: int = 0, attained: int = 0
    ) -> None:
        last = self._tallies.pop() if self._tallies and now < self._tallies[-1].at + TALLIED else Tally(now)
        self._tallies.append(
            Tally(
                last.at,
                last.arrivals + arrivals,
                last.prompt_tokens + prompt_tokens,
                last.completions + completions,
                last.attained + attained,
            )
        )


class RateMeter:
    """The rate of some work while there is any, over the last `WINDOW` seconds."""

    def __init__(self) -> None:
        self._done: deque[tuple[float, float]] = deque()  # when, how much
        self._sum = 0.0
        self._since: float | None = None  # when there began to be something to do
        self._last = 0.0

    def begin(self, now: float) -> None:
        """Work is available. No effect if it was before."""
        if self._since is None:
            self._since = now

    def count(self, now: float, amount: float) -> None:
        """Count work done."""
        self._done.append((now, amount))
        self._sum += amount

    def rest(self, now: float) -> None:
        """No work is left."""
        self._last = self.rate(now)
        self._done.clear()
        self._sum, self._since = 0.0, None

    def rate(self, now: float) -> float:
        """Per second; when there is nothing to do, of the last time that there was. 0 when nothing is known."""
        if self._since is None:
            return self._last
        while self._done and self._done[0][0] < now - WINDOW:
            self._sum -= self._done.popleft()[1]
        elapsed = min(now - self._since, WINDOW)
        if not self._done or (elapsed < SURE and self._last):
            return self._last
        return self._sum / max(elapsed, 0.1)


@dataclass(slots=True)
class OfflineWork:
    """Sequences of offline work.

    Attributes:
        held: that are not over.
        queued: of these, those whose first token has not come.
        begun: that have left the queue, ever.
    """

    held: int = 0
    queued: int = 0
    begun: int = 0


class FrontendQueue:
    """What a frontend holds: sequences that are not over, and of these those whose first token has not come.

    Attributes:
        held: sequences.
        tokens: of the prompts whose first token has not come.
        offline: of the sequences, those that are offline work.
        prefill_rate: how fast prompts get their first token, in their tokens.
        completion_rate: how fast sequences end.
    """

    def __init__(self) -> None:
        self.held = self.tokens = 0
        self.offline = OfflineWork()
        self.prefill_rate, self.completion_rate = RateMeter(), RateMeter()

    def add(self, flight: Flight[Any], now: float) -> None:
        self.prefill_rate.begin(now)
        self.completion_rate.begin(now)
        flight.queued = len(flight.request.prompt)
        self.tokens += flight.queued
        self.held += 1
        self.offline.held += flight.request.offline
        self.offline.queued += flight.request.offline

    def leave(self, flight: Flight[Any], now: float) -> None:
        """Its first token has come, or it is over. No effect if it had left."""
        self.tokens -= flight.queued
        if flight.queued and flight.request.offline:
            self.offline.queued -= 1
            self.offline.begun += 1
        if flight.queued and flight.first is not None:
            self.prefill_rate.count(now, flight.queued)
        flight.queued = 0
        if not self.tokens:
            self.prefill_rate.rest(now)

    def end(self, flight: Flight[Any], now: float, *, whole: bool) -> None:
        """It is over; `whole`: after all its tokens."""
        self.held -= 1
        self.offline.held -= flight.request.offline
        self.leave(flight, now)
        if whole:
            self.completion_rate.count(now, 1)
        if not self.held:
            self.completion_rate.rest(now)

    def check(self, flights: Collection[Flight[Any]]) -> None:
        """Raise AssertionError unless it counts these."""
        offline = [flight for flight in flights if flight.request.offline]
        assert self.held == len(flights)
        assert self.tokens == sum(flight.queued for flight in flights)
        assert self.offline.held == len(offline)
        assert self.offline.queued == sum(flight.queued > 0 for flight in offline)
