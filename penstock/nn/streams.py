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
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Steps = Generator[None, None, Result]


class Stream:
    """Exchanges of one rank, in the order in which they were begun.

    Args:
        throttle: seconds that an exchange of so many bytes takes besides, for measurements.
        device: whose tensors are exchanged; beside what a CUDA device computes they are on a stream of its own.

    Attributes:
        waited: seconds for which what computes has waited for exchanges.
        busy: seconds in which there was one.
        worked: of these, seconds of a processor.
    """

    def __init__(self, throttle: Callable[[int], float] | None = None, device: torch.device | None = None) -> None:
        self.waited = self.busy = self.worked = 0.0
        self._throttle = throttle
        self._lane = None if device is None or device.type == "cpu" else _DeviceLane(device)
        self._is_beside = False
        self._thread: ThreadPoolExecutor | None = None

    @property
    def times(self) -> tuple[float, float, float]:
        """waited, busy, worked"""
        return self.waited, self.busy, self.worked

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
            if self._lane is None:
                return partial(self._await, self._thread.submit(self._run, exchange, size))
            after, lane = self._lane.reached(), self._lane
            coming = self._thread.submit(self._run, partial(lane.exchange, exchange, after), size)
            return lambda: lane.take(self._await(coming))
        began = time.perf_counter()
        found = self._run(exchange, size)
        self.waited += time.perf_counter() - began
        return lambda: found

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is begun meanwhile is done by a thread of its own."""
        self._thread = self._thread or ThreadPoolExecutor(1, "penstock-exchange")
        self._is_beside = True
        try:
            yield
        finally:
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


class _DeviceLane:
    """A CUDA device's stream for exchanges. What is sent has to be held until what comes is taken."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def reached(self) -> torch.cuda.Event:
        """Where what computes is."""
        return torch.cuda.current_stream(self._device).record_event()

    def exchange(self, exchange: Callable[[], Result], after: torch.cuda.Event) -> tuple[Result, torch.cuda.Event]:
        """In a thread of its own."""
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            found = exchange()
            return found, self._stream.record_event()

    def take(self, came: tuple[Result, torch.cuda.Event]) -> Result:
        """For what computes, which waits for it; the host does not."""
        found, there = came
        computing = torch.cuda.current_stream(self._device)
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

    def run(self, lanes: Sequence[Steps[Result]], another: Callable[[], Steps[Result]], stream: Stream) -> list[Result]:
        """Results of one's own micro-batches, one or two.

        Args:
            another: makes one without rows.
        """
        # Who says so does it before the first exchange of all, and nobody says anything else before the last.
        self._words[self._number] = len(lanes) > 1
        own = len(lanes)
        if own == 1:
            try:
                next(lanes[0])
            except StopIteration as end:
                return [end.value]
        self.two = own > 1 or any(self._words)
        if not self.two:
            return [run(lanes[0])]
        with stream.beside():
            if own == 1:
                lanes = [lanes[0], another()]
                next(lanes[1])
            return by_turns(lanes)[:own]
