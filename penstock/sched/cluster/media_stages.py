"""A small model of instances that encode, prefill and decode: which rate of requests with images they keep up with.

It is what the EPD profiler (`sched.cluster.epd_profiler`) looks ahead with, and knows less than a simulation of the
whole service: requests come first to whoever has least to do, steps take what `StepTime` says, KV and embeddings
travel at the speed of a link, and there is room for all KV. A step has all decodes, then the prompt that is partly
computed; then what has waited longest, prompts or images (xLLM, section 3.3), as much of a prompt as keeps the step
within its limit; without `by_stage` all images that wait and whole prompts.

All of it is generators that yield now and then, so that whoever has something else to do can stop in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf
from typing import NamedTuple, get_args

from penstock.core.wire.engine import MediaRoute
from penstock.sched.steptime import StepTime

ROUTES: tuple[MediaRoute, ...] = get_args(MediaRoute)
LONG, MOST = 30.0, 3000  # TTFT targets that traffic is to take at least, with so many requests at most
BREATH = 64  # events between two yields
STRETCH = 1.5  # times what decodes take alone, that a step may take for prompts whatever its limit
BLOCKS_LAST = 64  # tokens whose KV is still to travel when a prompt ends: the others went as they were computed


class MediaRequest(NamedTuple):
    """
    Attributes:
        at: seconds from the start of the traffic.
        text: tokens of its prompt besides images.
        images: tokens of each image that is to be looked at; `seen`: tokens of those whose embeddings are there.
        output: tokens.
    """

    at: float
    text: int
    images: tuple[int, ...]
    output: int
    seen: int = 0

    @property
    def prompt(self) -> int:
        return self.text + self.seen + sum(self.images)


class Layout(NamedTuple):
    """A route of requests with images, and instances of each role; those of "EPD" have the role "any"."""

    route: MediaRoute
    encode: int = 0
    prefill: int = 0
    decode: int = 0
    any: int = 0

    @property
    def title(self) -> str:
        """As in "E+P+D 1:3:4"."""
        return f"{self.route} {':'.join(str(n) for n in self[1:] if n)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What every instance is.

    Attributes:
        times: of a model with a vision tower.
        token_budget: of a step; `encode_budget`: tokens of images in a step beyond the first.
        limit_ms: of a step with prompts.
        link: bytes per second between instances; `latency`: seconds of a message.
        by_stage: whether stages are scheduled as such.
    """

    times: StepTime
    token_budget: int
    encode_budget: int
    max_sequences: int = 256
    limit_ms: float = inf
    link: float = 50e9
    latency: float = 1e-3
    by_stage: bool = True


class Targets(NamedTuple):
    """In seconds, and the share of requests that is to keep both."""

    ttft: float
    tpot: float
    share: float = 0.9


@dataclass(eq=False, slots=True)
class _Job:
    """A request on its way. `left`: prompt tokens to compute; `done`: tokens decoded."""

    request: MediaRequest
    at: float
    left: int
    images: deque[int]
    done: int = 0
    first: float = inf
    decoder: _Station | None = None


@dataclass(eq=False, slots=True)
class _Station:
    """An instance.

    Attributes:
        joining: that decode here from the next step on; of `incoming`, what is still on its way is the rest.
        load: seconds of work that it was given and has not done, for balance.
    """

    name: int
    encodes: deque[_Job] = field(default_factory=deque)
    prompts: deque[_Job] = field(default_factory=deque)
    decodes: list[_Job] = field(default_factory=list)
    joining: list[_Job] = field(default_factory=list)
    incoming: int = 0
    load: float = 0.0
    busy: bool = False
    turn: int = 0
    chunks: list[tuple[_Job, int]] = field(default_factory=list)
    looking: list[tuple[_Job, int]] = field(default_factory=list)
    began: float = 0.0
    each: float = 0.0  # seconds of a step of decodes alone
    steps: int = 0  # of these, taken together


class _Run:
    """Traffic on one layout."""

    def __init__(self, machine: Machine, layout: Layout, targets: Targets) -> None:
        self.machine, self.targets, self.layout = machine, targets, layout
        stations = iter(_Station(i) for i in range(sum(layout[1:])))
        groups = [[next(stations) for _ in range(count)] for count in layout[1:]]
        encode, prefill, decode, both = groups
        self.prefill, self.decode = prefill or both, decode or both
        self.encode = {"E+P+D": encode, "EP+D": prefill, "ED+P": decode, "EPD": both}[layout.route]
        self.events: list[tuple[float, int, _Station | _Job, int]] = []
        self.kept = self.missed = self.numbers = 0
        self._token_ms = machine.times.step_ms([(1024, 0)]) / 1024
        self._seen_ms: dict[int, float] = {}

    def run(self, traffic: Sequence[MediaRequest], factor: float) -> Generator[None, None, float]:
        """Share that kept its targets, with traffic so many times as fast; roughly, once too many have not."""
        allowed = int((1 - self.targets.share) * len(traffic) + 1e-9)
        coming = iter([_Job(r, r.at / factor, r.prompt, deque(r.images)) for r in traffic])
        nxt = next(coming, None)
        count = 0
        while self.missed <= allowed and (nxt is not None or self.events):
            count += 1
            if count % BREATH == 0:
                yield
            if nxt is not None and (not self.events or nxt.at <= self.events[0][0]):
                self._arrive(nxt.at, nxt)
                nxt = next(coming, None)
                continue
            now, _, what, turn = heappop(self.events)
            if isinstance(what, _Job):
                self._reach(now, what)
            elif what.turn == turn:
                self._finish(now, what)
                self._begin(now, what)
        return self.kept / (self.kept + self.missed) if self.missed > allowed else self.kept / max(1, len(traffic))

    def _push(self, at: float, what: _Station | _Job, turn: int = 0) -> None:
        self.numbers += 1
        heappush(self.events, (at, self.numbers, what, turn))

    def encode_seconds(self, tokens: int) -> float:
        ms = self._seen_ms.get(tokens)
        if ms is None:
            ms = self._seen_ms[tokens] = self.machine.times.encode_ms([tokens])
        return ms / 1e3

    # --- requests

    def _arrive(self, now: float, job: _Job) -> None:
        if job.images:
            work = sum(map(self.encode_seconds, job.images))
            if self.encode is self.prefill:
                work += job.left * self._token_ms / 1e3
            station = min(self.encode, key=lambda s: (s.load, len(s.decodes) + s.incoming))
            station.load += work
            station.encodes.append(job)
            self._wake(now, station)
        else:
            self._to_prefill(now, job)

    def _encoded(self, now: float, job: _Job, station: _Station) -> None:
        if self.encode is self.prefill:
            station.prompts.append(job)
            return
        tower = self.machine.times.shape.vision
        assert tower is not None
        sent = sum(job.request.images) * tower.token_bytes / self.machine.link
        self._push(now + sent + self.machine.latency, job)

    def _to_prefill(self, now: float, job: _Job) -> None:
        station = min(self.prefill, key=lambda s: (s.load, len(s.decodes) + s.incoming))
        station.load += job.left * self._token_ms / 1e3
        station.prompts.append(job)
        self._wake(now, station)

    def _prefilled(self, now: float, job: _Job, station: _Station) -> None:
        job.first, job.done = now, 1
        if job.request.output <= 1 or now - job.at > self.targets.ttft:
            self._end(now, job)
        elif self.decode is self.prefill:
            station.decodes.append(job)
        else:
            job.decoder = min(self.decode, key=lambda s: (len(s.decodes) + s.incoming, s.load))
            job.decoder.incoming += 1
            sent = BLOCKS_LAST * self.machine.times.shape.kv_bytes_per_token / self.machine.link
            self._push(now + sent + self.machine.latency, job)

    def _reach(self, now: float, job: _Job) -> None:
        """What travelled is there: what was seen, or KV."""
        station = job.decoder
        if station is None:
            self._to_prefill(now, job)
            return
        station.joining.append(job)
        self._wake(now, station)

    def _end(self, now: float, job: _Job) -> None:
        late = job.first - job.at > self.targets.ttft
        between = (now - job.first) / (job.request.output - 1) if job.request.output > 1 else 0.0
        if late or between > self.targets.tpot:
            self.missed += 1
        else:
            self.kept += 1

    # --- steps

    def _wake(self, now: float, station: _Station) -> None:
        if not station.busy:
            self._begin(now, station)
        elif station.steps > 1:
            # steps of decodes alone that were taken together: the next one is another
            done = int((now - station.began) / station.each) + 1
            if done < station.steps:
                station.steps, station.turn = done, station.turn + 1
                self._push(station.began + done * station.each, station, station.turn)

    def _begin(self, now: float, station: _Station) -> None:
        station.decodes += station.joining
        station.incoming -= len(station.joining)
        station.joining.clear()
        station.busy = bool(station.decodes or station.prompts or station.encodes)
        if not station.busy:
            return
        machine, times = self.machine, self.machine.times
        decodes = station.decodes[: machine.max_sequences]
        kv = sum([job.request.prompt + job.done for job in decodes])
        prefills, images = self._fill(station, len(decodes), kv)
        ms = times.step_ms(prefills, len(decodes), kv)
        if images:
            ms += times.encode_ms(images)
        station.began, station.each, station.turn = now, ms / 1e3, station.turn + 1
        station.steps = 1
        if not prefills and not images:
            station.steps = max(1, min([job.request.output - job.done for job in decodes]))
        self._push(now + station.steps * station.each, station, station.turn)

    def _fill(self, station: _Station, decodes: int, kv: int) -> tuple[list[tuple[int, int]], list[int]]:
        """What of prompts (new tokens, those before) and of images is in its next step, with decodes that read so many
        tokens of KV."""
        prompts, encodes = station.prompts, station.encodes
        if not self.machine.by_stage:
            self._look(station, inf)
            # what is looked at in this step is prefilled in it, too, where that is here
            whole = [*prompts] + ([job for job, _ in station.looking] if self.encode is self.prefill else [])
            station.chunks = [(job, job.left) for job in dict.fromkeys(whole)]
            return [(job.left, 0) for job, _ in station.chunks], [tokens for _, tokens in station.looking]
        begun = prompts and prompts[0].left < prompts[0].request.prompt
        if encodes and not begun and (not prompts or encodes[0].at < prompts[0].at):
            self._look(station, self.machine.encode_budget)
            return [], [tokens for _, tokens in station.looking]
        prefills: list[tuple[int, int]] = []
        rows, budget = decodes, self.machine.token_budget
        limit = self._limit_ms(decodes, kv) if prompts else inf
        for job in prompts:
            cached, count = job.request.prompt - job.left, min(budget - rows, job.left)
            if count > 0 and limit < inf:
                count = self.machine.times.largest_chunk(limit, cached, rows, kv, count) or int(not prefills)
            if count <= 0:
                break
            prefills.append((count, cached))
            station.chunks.append((job, count))
            rows += count
        return prefills, []

    def _limit_ms(self, decodes: int, kv: int) -> float:
        """Of a step with so many, and prompts; as `StepLimit` has it."""
        times, limit = self.machine.times, self.machine.limit_ms
        if limit == inf:
            return inf
        return times.margin * max(limit, STRETCH * times.step_ms((), decodes, kv) if decodes else 0.0)

    def _look(self, station: _Station, budget: float) -> None:
        """Take images, the first whatever its size."""
        for job in station.encodes:
            for tokens in job.images:
                if station.looking and tokens > budget:
                    return
                budget -= tokens
                station.looking.append((job, tokens))

    def _finish(self, now: float, station: _Station) -> None:
        """Its step, or all that were taken together, are over."""
        running, station.decodes = station.decodes, []
        for place, job in enumerate(running):
            if place < self.machine.max_sequences:
                job.done += station.steps
            if job.done >= job.request.output:
                self._end(now, job)
            else:
                station.decodes.append(job)
        station.steps = 0
        looked, station.looking = station.looking, []
        for job, tokens in looked:
            job.images.popleft()
            station.load -= self.encode_seconds(tokens)
            if not job.images:
                station.encodes.remove(job)
                self._encoded(now, job, station)
        chunks, station.chunks = station.chunks, []
        for job, count in chunks:
            job.left -= count
            station.load -= count * self._token_ms / 1e3
            if not job.left:
                station.prompts.remove(job)
                self._prefilled(now, job, station)


def attainment(
    machine: Machine, layout: Layout, traffic: Sequence[MediaRequest], factor: float, targets: Targets
) -> Generator[None, None, float]:
    """Share of the requests that keep their targets, when they come so many times as fast; again and again for so long
    that queues would show."""
    span = max(traffic[-1].at * len(traffic) / max(1, len(traffic) - 1), 1e-9)
    laps = ceil(min(LONG * targets.ttft * factor / span, MOST / len(traffic)))
    repeated = [r._replace(at=r.at + lap * span) for lap in range(max(1, laps)) for r in traffic]
    return _Run(machine, layout, targets).run(repeated, factor)


def layouts(instances: int) -> list[Layout]:
    """Every route with every split of so many instances, at least one of each role."""
    found = [Layout("EPD", any=instances)]
    for prefill in range(1, instances):
        for route in ("EP+D", "ED+P"):
            found.append(Layout(route, prefill=prefill, decode=instances - prefill))
        for encode in range(1, instances - prefill):
            found.append(Layout("E+P+D", encode, prefill, instances - prefill - encode))
    return found


def most(machine: Machine, layout: Layout, traffic: Sequence[MediaRequest], targets: Targets) -> float:
    """A factor on the traffic's rate that no layout like this can keep up with, whatever waits: some role has more to
    do than time."""
    span = max(traffic[-1].at - traffic[0].at, 1e-9)
    times = machine.times
    encode = sum(times.encode_ms([tokens]) for r in traffic for tokens in r.images) / 1e3
    prefill = sum(r.prompt for r in traffic) * times.step_ms([(machine.token_budget, 0)]) / machine.token_budget / 1e3
    context = sum(r.prompt + r.output / 2 for r in traffic) / len(traffic)
    sizes = range(1, machine.max_sequences + 1)
    fitting = [n for n in sizes if times.step_ms((), n, int(n * context)) / 1e3 <= targets.tpot]
    batch = max(fitting, default=1)
    each = times.step_ms((), batch, int(batch * context)) / 1e3 / batch
    decode = sum(r.output for r in traffic) * each
    needs = {
        "EPD": [(encode + prefill + decode, layout.any)],
        "EP+D": [(encode + prefill, layout.prefill), (decode, layout.decode)],
        "ED+P": [(prefill, layout.prefill), (encode + decode, layout.decode)],
        "E+P+D": [(encode, layout.encode), (prefill, layout.prefill), (decode, layout.decode)],
    }[layout.route]
    return min((span * count / need for need, count in needs if need), default=inf) / targets.share
