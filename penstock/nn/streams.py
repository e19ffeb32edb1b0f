"""What a rank exchanges with others while it computes: a stream of exchanges beside that of computation (xLLM, section
4.4.1).

What waits for exchanges is a generator that yields whenever it has begun one: whoever runs it may compute something
else until it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from penstock.nn.ranks import Ranks

Result = TypeVar("Result")
Steps = Generator[None, None, Result]


class StepTimes(NamedTuple):
    """Of a step.

    Attributes:
        took: seconds.
        waited: of these, for which what computes has waited for exchanges.
        busy: in which there was an exchange.
        worked: of these, in which what exchanges had its units (`Ranks.sizes`) at work.
    """

    took: float
    waited: float
    busy: float
    worked: float


class Stream:
    """Exchanges of one rank, in the order in which they were begun.

    Args:
        throttle: seconds that an exchange of so many bytes takes besides, for measurements.

    Attributes:
        waited, busy, worked: as of a step, of all so far.
        apart: of a rank's units, that exchanges are to have to themselves when they are beside what is computed.
    """

    def __init__(self, throttle: Callable[[int], float] | None = None) -> None:
        self.waited = self.busy = self.worked = 0.0
        self.apart = 0
        self._throttle = throttle
        self._is_beside = False
        self._thread: ThreadPoolExecutor | None = None
        self._last = StepTimes(0.0, 0.0, 0.0, 0.0)

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is computed and exchanged meanwhile is a step."""
        began, before = time.perf_counter(), (self.waited, self.busy, self.worked)
        try:
            yield
        finally:
            now = self.waited, self.busy, self.worked
            took = time.perf_counter() - began
            self._last = StepTimes(took, *(end - start for start, end in zip(before, now, strict=True)))

    def last(self) -> StepTimes:
        """Of the last step."""
        return self._last

    @property
    def is_beside(self) -> bool:
        return self._is_beside

    def begin(self, exchange: Callable[[], Result], size: int) -> Callable[[], Result]:
        """
        Args:
            exchange: what to call, of so many bytes.

        Returns what waits for its result. Raises RankFailed then, or at once.
        """
        if self._is_beside:
            assert self._thread is not None
            return partial(self._await, self._thread.submit(self._run, exchange, size))
        began = time.perf_counter()
        found = self._run(exchange, size)
        self.waited += time.perf_counter() - began
        return lambda: found

    @contextmanager
    def beside(self, ranks: Ranks) -> Iterator[None]:
        """What is begun meanwhile, by these ranks, is done by a thread of its own."""
        self._thread = self._thread or ThreadPoolExecutor(1, "penstock-exchange")
        self._is_beside = True
        ranks.set_apart(self.apart)
        try:
            yield
        finally:
            ranks.set_apart(0)
            self._is_beside = False

    @torch.inference_mode()
    def _run(self, exchange: Callable[[], Result], size: int) -> Result:
        began, worked = time.perf_counter(), time.thread_time()
        found = exchange()
        self.worked += time.thread_time() - worked
        if self._throttle is not None:
            time.sleep(self._throttle(size))
        self.busy += time.perf_counter() - began
        return found

    def _await(self, coming: Future[Result]) -> Result:
        began = time.perf_counter()
        found = coming.result()
        self.waited += time.perf_counter() - began
        return found


class DeviceStream(Stream):
    """Of a rank whose tensors are on a CUDA device: beside what it computes, exchanges are on a stream of its own, and
    times are the device's. What is sent has to be held until what comes is taken.

    Args:
        timed: whether `last` is asked for.
    """

    def __init__(self, device: torch.device, timed: bool) -> None:
        super().__init__()
        self._device, self._stream, self._timed = device, torch.cuda.Stream(device), timed
        self._span = self._mark(self._stream), self._mark(self._stream)
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # from here to there
        self._exchanges: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=self._timed)
        event.record(stream)
        return event

    @property
    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    @contextmanager
    def step(self) -> Iterator[None]:
        self._waits, self._exchanges, began = [], [], self._mark(self._computing)
        try:
            yield
        finally:
            self._span = began, self._mark(self._computing)

    def last(self) -> StepTimes:
        assert self._timed
        self._span[1].synchronize()
        took, waited, busy = (
            sum(max(0.0, start.elapsed_time(end)) for start, end in spans) / 1000
            for spans in ([self._span], self._waits, self._exchanges)
        )
        return StepTimes(took, waited, busy, busy)

    def begin(self, exchange: Callable[[], Result], size: int) -> Callable[[], Result]:
        after = self._mark(self._computing)
        if not self._is_beside:
            found = exchange()
            self._waits.append((after, self._mark(self._computing)))
            self._exchanges.append(self._waits[-1])
            return lambda: found
        assert self._thread is not None
        coming = self._thread.submit(self._beside, exchange, after)
        return lambda: self._take(*coming.result())

    @torch.inference_mode()
    def _beside(
        self, exchange: Callable[[], Result], after: torch.cuda.Event
    ) -> tuple[Result, torch.cuda.Event, torch.cuda.Event]:
        """In a thread of its own."""
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            began = self._mark(self._stream)
            found = exchange()
            return found, began, self._mark(self._stream)

    def _take(self, found: Result, began: torch.cuda.Event, there: torch.cuda.Event) -> Result:
        """For what computes, which waits for it; the host does not."""
        computing = self._computing
        self._exchanges.append((began, there))
        self._waits.append((self._mark(computing), there))
        computing.wait_event(there)
        for tensor in [found] if isinstance(found, Tensor) else found if isinstance(found, list) else []:
            tensor.record_stream(computing)
        return found


def run(steps: Steps[Result]) -> Result:
    """To its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Result = end.value
            return found


def by_turns(lanes: Sequence[Steps[Result]]) -> list[Result]:
    """Each goes on when those before it wait; results in their order."""
    found: dict[int, Result] = {}
    while len(found) < len(lanes):
        for i, steps in enumerate(lanes):
            if i not in found:
                try:
                    next(steps)
                except StopIteration as end:
                    found[i] = end.value
    return [found[i] for i in range(len(lanes))]


class Turns:
    """Ranks of several groups, each of which has steps of its own: where one has two micro-batches all take part in
    two, in the same order, if only with no rows.

    Args:
        words: one of each rank, that all share.
        number: which is this one's.

    Attributes:
        two: whether the last step was two micro-batches anywhere.
    """

    def __init__(self, words: memoryview[int], number: int) -> None:
        self.two = False
        self._words, self._number = words, number

    def run(
        self, lanes: Sequence[Steps[Result]], another: Callable[[], Steps[Result]], stream: Stream, ranks: Ranks
    ) -> list[Result]:
        """Results of one's own micro-batches, one or two.

        Args:
            another: makes one without rows.
            ranks: of these exchanges. Behind the first one as many of their units are set apart as any of them says.
        """
        # Who says so does it before the first exchange of all, and nobody says anything else before the last.
        self._words[self._number] = 0 if len(lanes) == 1 else 1 + stream.apart
        try:
            next(lanes[0])
        except StopIteration as end:  # there is no exchange
            return [end.value, *map(run, lanes[1:])]
        said = max(self._words)
        self.two = said > 0
        if not self.two:
            return [run(lanes[0])]
        stream.apart = said - 1
        with stream.beside(ranks):
            second = lanes[1] if len(lanes) > 1 else another()
            next(second)
            return by_turns([lanes[0], second])[: len(lanes)]
