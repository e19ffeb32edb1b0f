"""A scenario's workload: requests, arrivals and targets; and slices of it in time.

A long simulation can be cut into slices, which are simulated beside each other. A slice is about the requests that come
in its time. It begins earlier, with those that came before them, so that its own meet queues, batches and caches as
they would be; and others go on coming after its own, until those are over. What a cluster learned before the warm-up is
not known in a slice: prefix caches need the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """What a request must keep to count: time to first token, and mean time per token after it, in seconds."""

    ttft: float = inf
    tpot: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Traffic put together from distributions; see `workload.synthetic`. Lengths are log-normal, in tokens.

    Attributes:
        images: of a request, in the mean.
    """

    requests: int
    rate: float
    burstiness: float
    prompt: int
    prompt_cv: float
    output: int
    output_cv: float
    prefixes: int
    prefix_tokens: int
    prefix_zipf: float
    images: float = 0.0
    image_tokens: int = 650
    image_cv: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A class of requests, which arrive as a Poisson process.

    Lengths are log-normal, in tokens: that keeps both a mean and a standard deviation, is never negative, is close to a
    normal distribution where the deviation is small, and has the long tail that one larger than its mean asks for.

    Attributes:
        rate: requests per second before scaling.
        prompt, prompt_sd, output, output_sd: means and standard deviations. Without any output prompts are embedded.
        slo: by which they are judged.
        priority: lower runs first.
        priority_only: the cluster knows the priority and not the targets.
        start: when the first may arrive, in seconds.
        duration: for so many seconds they arrive; None is to the end.
    """

    name: str
    rate: float
    prompt: float
    prompt_sd: float
    output: float
    output_sd: float
    slo: SLO
    priority: int
    priority_only: bool
    start: float
    duration: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    """Offline requests.

    Attributes:
        rate: requests per second, a Poisson process for as long as online requests arrive; None with a backlog.
        backlog: requests that are there from the start; None with a rate.
        like_online: their lengths are those of online requests, drawn with replacement.
        prompt, prompt_sd, output, output_sd: else; see `Task`.
    """

    rate: float | None
    backlog: int | None
    like_online: bool
    prompt: float
    prompt_sd: float
    output: float
    output_sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Online requests from one of `trace`, `synthetic` and `tasks`, and offline ones beside them.

    Attributes:
        trace: a file in the folder of traces; "" when there is none.
        tasks: a mix; see `Task`. A trace that is given in its place keeps its arrivals and lengths, comes at the mix's
            rate, and its requests become tasks in proportion to their rates.
        slo: of requests that have no task.
        rate_scale: factor on their rate.
        start: seconds of the trace, at its own rate, that are left out.
        duration: seconds of arrivals, at the scaled rate, for which the trace is repeated if need be; None is all of it
            once.
        spread: seconds over which arrivals of one tick of the trace's clock are spread.
        max_tokens: limit on outputs that clients set; policies see this and not how long outputs will be.
        exact: whether clients limit each output to its own length, as load generators do, so that policies know it.
        chats: whether requests of a trace that share a beginning are turns of a chat; see `requests.follow_chats`.
        tide: factor from the lowest rate to the highest, of a day that takes `duration`; None is no such day.
        image_repeats: share of the images that came before; see `requests.repeat_images`.
        vary: whose rate the scale of a simulation is a factor on; that of the others stays.
        most_scale: beyond which no greater scale is sought.
    """

    trace: str
    synthetic: Synthetic | None = None
    tasks: tuple[Task, ...] = ()
    offline: Offline | None = None
    slo: SLO
    rate_scale: float
    start: float
    duration: float | None
    spread: float
    max_tokens: int
    exact: bool = False
    chats: bool = False
    tide: float | None = None
    image_repeats: float = 0.0
    vary: Literal["online", "offline"] = "online"
    most_scale: float = inf

    @property
    def scale(self) -> float:
        """The scale that the file asks for, of what is varied."""
        return self.rate_scale if self.vary == "online" else 1.0


@dataclass(frozen=True, slots=True)
class Slice:
    """
    Attributes:
        number: of it; 0 is the first.
        of: how many there are.
        seconds: of arrivals in all of them; only where there are several.
        warm_up: seconds of arrivals that it sees before its own and, at most, after them.
    """

    number: int
    of: int
    seconds: float
    warm_up: float

    @property
    def last(self) -> bool:
        return self.number + 1 == self.of

    @property
    def length(self) -> float:
        return self.seconds / self.of

    @property
    def begin(self) -> float:
        """It is about the arrivals of [begin, end), in seconds."""
        return self.seconds * self.number / self.of

    @property
    def end(self) -> float:
        return inf if self.last else self.seconds * (self.number + 1) / self.of

    @property
    def since(self) -> float:
        """It sees those of [since, until)."""
        return max(0.0, self.begin - self.warm_up)

    @property
    def until(self) -> float:
        return self.end + self.warm_up


WHOLE = Slice(0, 1, 0.0, 0.0)


def cut(seconds: float, count: int, warm_up: float) -> Iterator[Slice]:
    """All of them, in order."""
    return (Slice(number, count, seconds, warm_up) for number in range(count))
