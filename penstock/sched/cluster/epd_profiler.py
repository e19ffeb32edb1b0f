"""Which stages of requests with images are together, and how many instances each role has (xLLM, section 3.3).

The search looks for the layout that carries most traffic within its targets: a bisection on the rate, over every
route and split, each judged by a small model of the stages (`sched.cluster.media_stages`). A layout is dropped when
its roles' work alone says that it cannot beat the best so far, or when it fails at a rate a little above that. The
profiler repeats it on the latest traffic, and applies what it finds when that is worth a change.

All that it goes by is seen: an instance's steps as they are predicted and its images as it measured them, the targets
that requests came with, and how fast KV came from one instance to another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from math import inf
from statistics import median, median_low
from typing import NamedTuple

from penstock.core.wire.engine import MediaRoute, Role
from penstock.sched.cluster.base import ClusterView, Demand, InstanceLoad, Move
from penstock.sched.cluster.media_stages import Layout, Machine, MediaRequest, Targets, attainment, layouts, most
from penstock.sched.steptime import StepTime

STEP = 1.03  # from one rate to the next that is told apart
EVERY = 30.0  # seconds from the end of one search to the next
WINDOW = 400  # requests that are looked at
FEWEST = 100  # with fewer, nothing is said
GAIN = 0.1  # by which another layout has to carry more, to be worth a change
IMAGES = 0.25  # images to look at per request, below which it is not worth a search: all requests are like text
LONGEST = 256  # tokens that outputs are taken for, before any has ended
PACE = 16  # rounds of the model in one decision; each is some tens of events
LINK = 1e9  # bytes per second between instances, as long as nobody has measured it
SEEN = 512  # tokens of an image, of which a step's are made up
MOST_IMAGES = 64  # of these in a step


class Profile(NamedTuple):
    """What was found.

    Attributes:
        factor: on the traffic's rate, that the layout carries.
        tried: factor by layout, of those that were looked at; a bound above it where it was dropped.
    """

    layout: Layout
    factor: float
    tried: Mapping[Layout, float]


def search(
    machine: Machine,
    traffic: Sequence[MediaRequest],
    targets: Targets,
    candidates: Sequence[Layout],
    now: Layout | None = None,
) -> Generator[None, None, Profile]:
    """Find the layout of most goodput; yields now and then.

    Args:
        now: the layout there is, whose factor is to be known, too.
    """
    bounds = {layout: most(machine, layout, traffic, targets) for layout in candidates}
    order = sorted(candidates, key=lambda layout: (layout != now, -bounds[layout]))
    tried: dict[Layout, float] = {}
    best, carried = order[0], 0.0
    for layout in order:
        high = bounds[layout]
        if high <= carried * STEP:
            tried[layout] = high
            continue
        low = carried * STEP
        if low and (yield from attainment(machine, layout, traffic, low, targets)) < targets.share:
            tried[layout] = low
            continue
        low = low or high / 64
        while high / low > STEP:
            middle = (low * high) ** 0.5
            if (yield from attainment(machine, layout, traffic, middle, targets)) >= targets.share:
                low = middle
            else:
                high = middle
        tried[layout] = low
        best, carried = layout, low
    return Profile(best, carried, tried)


class EPDProfiler:
    """A `MediaPolicy` and a `RolePolicy` in one: it thinks a little whenever it is asked, and applies what it has found
    by moves of instances and the route of what comes next.

    It says nothing where no instance says what its vision tower takes, or no request has targets.

    Attributes:
        route: of requests with images; None until something was found.
        why: it is this route.
        found: the last profile.
    """

    name = "epd"
    dynamic = True

    def __init__(self, *, every: float = EVERY, gain: float = GAIN) -> None:
        self._every, self._gain = every, gain
        self._traffic: deque[MediaRequest] = deque(maxlen=WINDOW)
        self._targets: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._search: Generator[None, None, Profile] | None = None
        self._next = -inf
        self._now: Layout | None = None
        self._given: MediaRoute | None = None  # as it was set
        self._rate = 0.0  # of the traffic that the search is about
        self.route: MediaRoute | None = None
        self.why = ""
        self.found: Profile | None = None

    def observe(self, now: float, demand: Demand, images: Sequence[int], seen: int) -> None:
        text = max(1, demand.prompt_tokens - sum(images) - seen)
        self._traffic.append(MediaRequest(now, text, tuple(images), demand.max_tokens, seen))
        self._targets.append((demand.ttft, demand.tpot))

    def choose(self, view: ClusterView, given: MediaRoute | None) -> MediaRoute | None:
        self._given = given
        return self.route or given

    def decide(self, view: ClusterView) -> Sequence[Move]:
        """Think on; where that has come to an end and another layout is worth it, the moves that make it."""
        if self._search is None and (view.now < self._next or not self._begin(view)):
            return ()
        assert self._search is not None
        for _ in range(PACE):
            try:
                next(self._search)
            except StopIteration as ended:
                self._search, self._next = None, view.now + self._every
                return self._apply(view, ended.value)
        return ()

    def _begin(self, view: ClusterView) -> bool:
        """A search, if there is something to be found."""
        instances = [*view.instances, *view.encoders]
        targets = targets_of(self._targets)
        if not self._worth_it() or targets is None or len(instances) < 2:
            return False
        if (machine := machine_of(instances)) is None:
            return False
        self._now = layout_of(view, self.route or self._given)
        start, end = self._traffic[0].at, self._traffic[-1].at
        self._rate = len(self._traffic) / max(end - start, 1e-9)
        longest = round(view.rates.output_tokens) or LONGEST  # nobody knows how long outputs will be
        traffic = [r._replace(at=r.at - start, output=min(r.output, longest)) for r in self._traffic]
        self._search = search(machine, traffic, targets, layouts(len(instances)), self._now)
        return True

    def _worth_it(self) -> bool:
        """Whether there are images enough; what was applied for their sake is also looked at again without."""
        images = sum(len(r.images) for r in self._traffic)
        enough = images >= IMAGES * len(self._traffic) or self.route is not None
        return len(self._traffic) >= FEWEST and enough

    def _apply(self, view: ClusterView, found: Profile) -> Sequence[Move]:
        if sum(found.layout[1:]) != len(view.instances) + len(view.encoders):
            return ()  # instances have come or gone meanwhile
        self.found = found
        had = found.tried.get(self._now, 0.0) if self._now is not None else 0.0
        if found.layout == self._now or found.factor < had * (1 + self._gain):
            return ()
        self.route, self.why = found.layout.route, self._reason(found, had)
        return moves(view, found.layout, self.why)

    def _reason(self, found: Profile, had: float) -> str:
        text = f"epd: {found.layout.title} carries {found.factor * self._rate:.3g} requests/s"
        if self._now is not None:
            text += f", {self._now.title} {had * self._rate:.3g}"
        images = sum(len(r.images) for r in self._traffic) / len(self._traffic)
        return f"{text}; {self._rate:.3g} came, with {images:.2g} images to look at each"


def machine_of(instances: Sequence[InstanceLoad]) -> Machine | None:
    """What instances are in the middle, of those that say what their towers take; None where none does.

    A step is bounded by time: images may take as long in one as a prompt may.
    """
    seeing = [i for i in instances if i.times.shape.vision is not None]
    if not seeing:
        return None
    load = _middle(seeing)
    predicted = load.times.encode_ms([SEEN]) / load.times.factors.get("encode", 1.0) / SEEN
    measured = [i.encode_ms for i in seeing if i.encode_ms]
    factors = {**load.times.factors}
    if measured and predicted:
        factors["encode"] = median(measured) / predicted
    times = StepTime(load.times.device, load.times.shape, factors)
    fetches = [i.fetch_ms for i in instances if i.fetch_ms]
    limit = times.step_ms([(load.token_budget, 0)])
    return Machine(
        times=times,
        token_budget=load.token_budget,
        encode_budget=SEEN * times.largest_encode(limit, SEEN, MOST_IMAGES),
        max_sequences=load.max_sequences,
        link=times.shape.block_bytes / median(fetches) * 1e3 if fetches else LINK,
    )


def _middle(instances: Sequence[InstanceLoad]) -> InstanceLoad:
    ordered = sorted(instances, key=lambda i: (i.times.step_ms([(SEEN, 0)]), i.token_budget, i.name))
    return ordered[(len(ordered) - 1) // 2]


def targets_of(given: Sequence[tuple[float, float]]) -> Targets | None:
    """The medians of those of requests that have some; None where none has."""
    ttfts, tpots = ([t for t in each if t < inf] for each in zip(*given, strict=True)) if given else ([], [])
    if not ttfts and not tpots:
        return None
    return Targets(median_low(ttfts) if ttfts else inf, median_low(tpots) if tpots else inf)


def layout_of(view: ClusterView, route: MediaRoute | None) -> Layout | None:
    """As it is now; None where instances of "any" are beside others, which no layout has."""
    roles = [instance.role for instance in (*view.instances, *view.encoders)]
    counts = {role: roles.count(role) for role in ("encode", "prefill", "decode", "any")}
    if counts["any"]:
        return Layout("EPD", any=counts["any"]) if counts["any"] == len(roles) else None
    if route is None or (route == "E+P+D") != bool(counts["encode"]):
        route = "E+P+D" if counts["encode"] else "EP+D"
    return Layout(route, counts["encode"], counts["prefill"], counts["decode"])


def moves(view: ClusterView, layout: Layout, reason: str) -> list[Move]:
    """The fewest that make a layout of what there is; those with least to do move first."""
    instances: list[InstanceLoad] = sorted(
        (*view.instances, *view.encoders), key=lambda i: (i.requests, i.held_tokens, i.name)
    )
    wanted: dict[Role, int] = {
        "encode": layout.encode,
        "prefill": layout.prefill,
        "decode": layout.decode,
        "any": layout.any,
    }
    left = []
    for instance in reversed(instances):
        if wanted[instance.role]:
            wanted[instance.role] -= 1
        else:
            left.append(instance)
    lacking = [role for role, count in wanted.items() for _ in range(count)]
    return [
        Move(name=instance.name, role=role, reason=reason)
        for instance, role in zip(reversed(left), lacking, strict=False)
    ]
