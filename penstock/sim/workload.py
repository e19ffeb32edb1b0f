"""What a scenario asks of a cluster: who sends which requests, when, and what they expect."""

from __future__ import annotations

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
    """Traffic put together from distributions; see `workload.synthetic`. Lengths are log-normal, in tokens."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A class of requests, which arrive as a Poisson process.

    Lengths are log-normal, in tokens: that keeps both a mean and a standard deviation, is never negative, is close to a
    normal distribution where the deviation is small, and has the long tail that one larger than its mean asks for.

    Attributes:
        rate: requests per second before scaling.
        prompt, prompt_sd, output, output_sd: means and standard deviations.
        slo: by which they are judged.
        priority: lower runs first.
        priority_only: the cluster is told the priority and not the targets.
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
    """Requests that nobody waits for.

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
        chats: whether requests of a trace that share a beginning are turns of a chat; see `requests.follow_chats`.
        tide: factor from the lowest rate to the highest, of a day that takes `duration`; None is no such day.
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
    chats: bool = False
    tide: float | None = None
    vary: Literal["online", "offline"] = "online"
    most_scale: float = inf

    @property
    def scale(self) -> float:
        """The scale that the file asks for, of what is varied."""
        return self.rate_scale if self.vary == "online" else 1.0
