"""Which stages of requests with images are together, and how many instances each role has (xLLM, section 3.3).

The search looks for the layout that carries most traffic within its targets: a bisection on the rate, over every
route and split, each judged by a small model of the stages (`sched.cluster.media_stages`). A layout is dropped when
its roles' work alone says that it cannot beat the best so far, or when it fails at a rate a little above that. The
profiler repeats it on the latest traffic, with what instances say of themselves, and applies what it finds when that is
worth a change.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from statistics import fmean, median, median_low
from typing import NamedTuple

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import MediaRoute, Role
from penstock.sched.cluster.base import ClusterView, Demand, InstanceLoad, Key, Move
from penstock.sched.cluster.lengths import Lengths
from penstock.sched.cluster.media_stages import Layout, Machine, MediaRequest, Targets, attainment, layouts, most
from penstock.sched.steptime import GRAIN

STEP = 1.03  # from one rate to the next that is told apart
EVERY = 30.0  # seconds from the end of one search to the next, and until the first
WINDOW = 1000  # requests that are looked at
MEMORY = 4 * WINDOW  # requests whose outputs tell how long others will be: long ones take longer than a window
FEWEST = 100  # with fewer, or with fewer that have ended, nothing is said
GAIN = 0.05  # by which another layout has to carry more, to be worth a change
IMAGES = 0.25  # images to look at per request, below which it is not worth a search: all requests are like text
SURE = 2.0  # standard deviations of the share that is kept, by which it has to be above its target: else it is luck
LOOK = 1.0  # seconds until what is not worth a search is looked at again
TURN = (5**0.5 - 1) / 2  # golden ratio: its multiples are spread evenly between whole numbers
PACE = 16  # rounds of the model in one decision; each is some tens of events
LINK = 1e9  # bytes per second between instances, as long as nobody has measured it
MOST_IMAGES = 64  # in a step


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


@dataclass(eq=False, slots=True)
class _Known:
    """A request that has come.

    Attributes:
        request: whose `output` is what it may have at most.
        ttft, tpot: its targets.
        began: when it had its first token; None before.
        over: when it had its last one; inf as long as it goes on.
        tokens: that it got; None where it goes on, or nobody knows, as it has failed.
    """

    request: MediaRequest
    ttft: float
    tpot: float
    began: float | None = None
    over: float = inf
    tokens: int | None = None

    def so_far(self, now: float, pace: float) -> int:
        """Tokens that it has at least, where one takes so many seconds."""
        return 0 if self.began is None else 1 + int((min(now, self.over) - self.began) / pace)


class EPDProfiler:
    """A `MediaPolicy` and a `RolePolicy` in one: it thinks a little whenever it is asked, and applies what it has found
    by moves of instances and the route of what comes next.

    All instances are taken to be alike, and all requests to have the targets of the one in the middle; without targets,
    or a model of what a tower takes, it says nothing.

    Args:
        route: as it is at first.
        every: seconds until the first search, and from the end of one to the next.
        gain: by which another layout has to carry more, to be worth a change.

    Attributes:
        route: of requests with images; None is as roles are.
        why: it is so; "" as long as nothing was applied.
        found: the last profile.
    """

    name = "epd"
    dynamic = True

    def __init__(self, route: MediaRoute | None = None, *, every: float = EVERY, gain: float = GAIN) -> None:
        self._every, self._gain = every, gain
        self._known: dict[Key, _Known] = {}  # in order of arrival
        self._search: Generator[None, None, Profile] | None = None
        self._next: float | None = None  # None before anything has come
        self._now: Layout | None = None
        self.route = route
        self.why = ""
        self.found: Profile | None = None

    def observe(self, now: float, demand: Demand, images: Sequence[int], seen: int) -> None:
        if self._next is None:
            self._next = now + self._every
        text = max(1, demand.prompt_tokens - sum(images) - seen)
        request = MediaRequest(now, text, tuple(images), demand.max_tokens, seen)
        self._known.pop(demand.key, None)
        self._known[demand.key] = _Known(request, demand.ttft, demand.tpot)
        if len(self._known) > MEMORY:
            del self._known[next(iter(self._known))]

    def began(self, now: float, key: Key) -> None:
        if (known := self._known.get(key)) is not None and known.began is None:
            known.began = now

    def ended(self, now: float, key: Key, tokens: int | None) -> None:
        if (known := self._known.get(key)) is not None:
            known.over, known.tokens = now, tokens

    def choose(self, view: ClusterView) -> MediaRoute | None:
        return self.route

    def decide(self, view: ClusterView) -> Sequence[Move]:
        """Think on; where that has come to an end and another layout is worth it, the moves that make it."""
        if self._search is None:
            if self._next is None or view.now < self._next:
                return ()
            self._next = view.now + LOOK
            latest = list(self._known.values())[-WINDOW:]
            if self._worth_it(view, latest):
                self._search = self._begin(view, latest)
            if self._search is None:
                return ()
        for _ in range(PACE):
            try:
                next(self._search)
            except StopIteration as ended:
                self._search, self._next = None, view.now + self._every
                return self._apply(view, ended.value)
        return ()

    def _worth_it(self, view: ClusterView, latest: Sequence[_Known]) -> bool:
        """Whether requests have images, or instances are kept for those that had."""
        images = sum(len(known.request.images) for known in latest)
        ended = sum(known.tokens is not None for known in self._known.values())
        return min(len(latest), ended) >= FEWEST and (bool(view.encoders) or images >= IMAGES * len(latest))

    def _begin(self, view: ClusterView, latest: Sequence[_Known]) -> Generator[None, None, Profile] | None:
        """A search among what there could be; None where nothing can be said."""
        ttft = median_low(known.ttft for known in latest)
        tpot = median_low(known.tpot for known in latest)
        images = [tokens for known in latest for tokens in known.request.images]
        machine = machine_of([*view.instances, *view.encoders], round(fmean(images)) if images else 0)
        if machine is None or min(ttft, tpot) == inf:
            return None
        self._now = layout_of(view, self.route)
        candidates = layouts(len(view.instances) + len(view.encoders))
        targets = Targets(ttft, tpot)
        spread = sqrt(targets.share * (1 - targets.share) / len(latest))
        targets = targets._replace(share=min(targets.share + SURE * spread, 1.0))
        return search(machine, self._traffic(view.now, latest), targets, candidates, self._now)

    def _traffic(self, now: float, latest: Sequence[_Known]) -> list[MediaRequest]:
        """These from their first one on, with their outputs: what goes on will be as long as others that came so far.

        A mean would hide that a short output has no time to make up for one step that encodes.
        """
        ended = [k for k in self._known.values() if k.tokens is not None]
        paced = [(k.over - k.began, k.tokens - 1) for k in ended if k.tokens and k.began is not None]
        pace = sum(seconds for seconds, _ in paced) / max(1, sum(tokens for _, tokens in paced)) or inf
        going = [k.so_far(now, pace) for k in self._known.values() if k.tokens is None]
        lengths = Lengths([k.tokens for k in ended if k.tokens is not None], going)
        start, traffic = latest[0].request.at, []
        for place, known in enumerate(latest, 1):
            tokens = known.tokens
            if tokens is None:
                tokens = lengths.above(known.so_far(now, pace), place * TURN % 1)
            request = known.request
            traffic.append(request._replace(at=request.at - start, output=min(request.output, tokens)))
        return traffic

    def _apply(self, view: ClusterView, found: Profile) -> Sequence[Move]:
        self.found = found
        had = found.tried.get(self._now, 0.0) if self._now is not None else 0.0
        if found.layout == self._now or found.factor < had * (1 + self._gain):
            return ()
        if sum(found.layout[1:]) != len(view.instances) + len(view.encoders):
            return ()  # some have come or gone meanwhile
        self.route = found.layout.route
        than = f", {self._now.title} {had:.2f}" if self._now is not None else ""
        self.why = f"{found.layout.title} carries {found.factor:.2f} of the latest traffic{than}"
        return moves(view, found.layout, self.why)


def machine_of(instances: Sequence[InstanceLoad], image: int) -> Machine | None:
    """What each of them is, by the one in the middle of those that say what they are; None where none says that of its
    tower.

    Args:
        image: tokens of a typical image; 0 where there are none.
    """
    able = [load for load in instances if load.times.shape.vision is not None]
    if not able:
        return None
    load = sorted(able, key=lambda load: (load.times.step_ms([(load.token_budget, 0)]), load.name))[len(able) // 2]
    times = load.times
    measured = [each.encode_ms for each in able if each.encode_ms is not None]
    if measured and image:
        factor = times.factors.get("encode", 1.0) * median(measured) * image / times.encode_ms([image])
        times = replace(times, factors={**times.factors, "encode": factor})
    # a step has as many tokens as are within its limit, and in whole grains
    limit = times.step_ms([(load.token_budget + GRAIN // 2, 0)])
    fetched = [each.fetch_ms for each in able if each.fetch_ms]
    block = BLOCK_TOKENS * times.shape.kv_bytes_per_token
    return Machine(
        times=times,
        token_budget=load.token_budget,
        encode_budget=image * times.largest_encode(limit, image, MOST_IMAGES) if image else 0,
        max_sequences=load.max_sequences,
        limit_ms=limit,
        link=block / (median(fetched) / 1e3) if fetched else LINK,
    )


def layout_of(view: ClusterView, route: MediaRoute | None) -> Layout | None:
    """As it is now; None where instances of "any" are beside others, which no layout has."""
    roles = [instance.role for instance in (*view.instances, *view.encoders)]
    counts = {role: roles.count(role) for role in ("encode", "prefill", "decode", "any")}
    if counts["any"]:
        return Layout("EPD", any=counts["any"]) if counts["any"] == len(roles) else None
    if route is None or (route == "E+P+D") != bool(counts["encode"]):
        route = "E+P+D" if counts["encode"] else "EP+D"
    return Layout(route, counts["encode"], counts["prefill"], counts["decode"])


def moves(view: ClusterView, layout: Layout, reason: str = "") -> list[Move]:
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
        Move(name=instance.name, role=role, reason=f"epd: {reason or layout.title}")
        for instance, role in zip(reversed(left), lacking, strict=False)
    ]
