"""The clairvoyant bound: an upper bound on any scheduler, even one that knows all arrivals and output lengths in
advance.

Two kinds of machine time are bought, by each request that is kept: to prefill its prompt, between its arrival and the
target of its first token; and to decode, between then and the end of its last token's. All instances together are one
machine of that many instance-seconds per second. So for any prices of machine time, one for each moment and none below
0, the count of requests that can be kept is at most (linear programming's weak duality)

    sum over moments of price * capacity
    + sum over requests of max(0, 1 - time to prefill * least price while it may be prefilled
                                    - time to decode * least price while it may decode)

whatever the prices are. They are sought by gradient descent: good ones make the bound tight, and bad ones only loose.

Relaxations, each of which can only raise the bound:

- Work is divisible: it may run on all instances at once, be interrupted, and move for nothing. Only what could not keep
  its targets alone on the best instance is given up. Messages, hand-offs and decisions take no time.
- A request may be kept in part. Moments are slots of a few tens of ms that windows fill wholly.
- A step's time is convex in the tokens that it computes and in those that it draws, so any tangent is below it. What is
  left of the tangent at no tokens, the fixed part F of a step's t seconds, is paid in the shares of one of these:
  sequences of the most that may run; private KV of what fits; tokens of the budget; or work x of t - F. The last is
  what a target for the time per token costs, since t stays below it on average: over a request's steps, with works x_j
  and a target T, sum F * x_j / (t_j - F) >= F * (sum sqrt(x_j))**2 / (steps * (T - F)), by Cauchy and Schwarz. All
  requests of an instance pay in the same way, whichever takes most.
- The prefix cache is endless and shared: a token is computed once, on behalf of the first request to arrive that has
  it. (It is computed after that arrival and, if that request is kept, before its deadline.) Outputs are in
  no other request's prompt, as in the simulator.
- Offline requests ask for nothing. Nothing fails.

Of the noise in step times, whose mean is 1, the bound knows the mean only: a run may exceed it by the deviation of the
sum over its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.plan import BLOCK_TOKENS
from penstock.sim.scenario import InstanceGroup
from penstock.workload.requests import WorkRequest

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SLOTS_PER_WINDOW = 32  # of the shorter ones that work may be done in
MOST_SLOTS = 20_000
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the tangent at one token, the rest being the tangent at very many
STEPS = 600  # of the search for prices
RATE = 0.03  # of its first step, in prices of a typical request
LARGEST_SCALE = 2.0**16
EVEN = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)  # prices to begin with, in those of a typical request
COARSE, FINE = 1.5, 0.01  # of the search for a scale: first factor, and width at the end


def bound_attainment(
    requests: Sequence[WorkRequest], groups: Sequence[InstanceGroup], *, max_tokens: int | None = None
) -> float:
    """An upper bound on the share of online requests that meet both targets, for any scheduler.

    Args:
        requests: in order of arrival, with their targets.
        groups: all instances that there may ever be.
        max_tokens: the limit on outputs that clients set.
    """
    work = _work(requests, groups, max_tokens)
    return work.bound() if work.total else 1.0


def bound_scale(
    make_requests: Callable[[float], Sequence[WorkRequest]],
    groups: Sequence[InstanceGroup],
    target: float = 0.9,
    *,
    max_tokens: int | None = None,
) -> float:
    """A scale of the traffic beyond which no scheduler keeps `target` of the online requests, to 1 %.

    Args:
        make_requests: scale -> requests, as `make_traffic` does. More traffic is taken to be harder.
        groups, max_tokens: as in `bound_attainment`.

    Returns:
        0 when no scale can be kept, inf when all can.
    """

    def kept(scale: float) -> bool:
        work = _work(make_requests(scale), groups, max_tokens)
        return not work.total or work.bound(enough=target) >= target

    load = _work(make_requests(1.0), groups, max_tokens).load
    scale = min(1 / load, LARGEST_SCALE) if load else LARGEST_SCALE
    low, high = 0.0, math.inf
    while high == math.inf or low == 0.0:
        if kept(scale):
            low = scale
            if scale >= LARGEST_SCALE:
                return math.inf
            scale *= COARSE
        else:
            high = scale
            if scale <= 1 / LARGEST_SCALE:
                return 0.0
            scale /= COARSE
    while high > low * (1 + FINE):
        scale = math.sqrt(low * high)
        low, high = (scale, high) if kept(scale) else (low, scale)
    return high


# --- how long a step takes at least


@dataclass(frozen=True, slots=True)
class _Line:
    """What is in a step takes at least so many seconds; linear in it.

    Attributes:
        step: in every step.
        drawing: in every step that draws a token, besides that.
        token: that is computed.
        row: of the head, for a token that is drawn.
        pair: a token of a prompt that looks at one before it.
        kv: a token that a decoding sequence looks at.
    """

    step: float
    drawing: float
    token: float
    row: float
    pair: float
    kv: float


def _line(group: InstanceGroup, share: float) -> _Line:
    """
    Args:
        share: how much of the tangents at one token and row; the rest is those at very many.
    """
    times, many = group.times, 1 << 20
    seconds = 1e-3

    def tangent(ms: Callable[[int], float]) -> tuple[float, float]:
        """(constant, slope); nothing whole lies between 1 and 2, and at `many` the time is linear."""
        few_slope, many_slope = ms(2) - ms(1), (ms(2 * many) - ms(many)) / many
        few, far = ms(1) - few_slope, max(0.0, ms(many) - many_slope * many)
        return (
            seconds * (share * few + (1 - share) * far),
            seconds * (share * few_slope + (1 - share) * many_slope),
        )

    def prompt(tokens: int) -> float:
        return times.step_ms([(tokens, 0)], logit_rows=0)

    alone = times.step_ms(decodes=1, logit_rows=0)
    step, token = tangent(lambda tokens: times.step_ms(decodes=tokens, logit_rows=0))
    drawing, row = tangent(lambda rows: times.step_ms(decodes=1, logit_rows=rows) - alone)
    kv = (times.step_ms(decodes=1, kv_tokens=many) - times.step_ms(decodes=1)) / many
    pair = (prompt(3 * many) - 2 * prompt(2 * many) + prompt(many)) / many**2  # of n tokens: n**2 / 2 pairs
    return _Line(step, drawing, token, row, seconds * pair, seconds * kv)


# --- what requests need


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Of the online requests, one entry each. Times in seconds.

    Attributes:
        new: tokens of the prompt to be computed, at least 1.
        cached: tokens before them.
        private: tokens of the prompt that no other request has.
        decodes: tokens after the first.
    """

    at: Floats
    ttft: Floats
    tpot: Floats
    new: Floats
    cached: Floats
    private: Floats
    decodes: Floats

    @property
    def prompt(self) -> Floats:
        return self.new + self.cached


def _lengths(requests: Sequence[WorkRequest], longest: int, max_tokens: int | None, cache: bool) -> _Lengths:
    reusable = reusable_by_request(requests) if cache else [0] * len(requests)
    limit = longest if max_tokens is None else max_tokens
    rows = [
        (
            r.at,
            r.ttft,
            r.tpot,
            r.prompt_tokens - min(hit, r.prompt_tokens - 1),
            min(hit, r.prompt_tokens - 1),
            r.prompt_tokens - r.prefix_tokens,
            max(1, min(r.output_tokens, limit, longest - r.prompt_tokens)) - 1,
        )
        for r, hit in zip(requests, reusable, strict=True)
        if not r.offline
    ]
    return _Lengths(*np.array(rows, dtype=np.float64).reshape(-1, 7).T)


def reusable_by_request(requests: Sequence[WorkRequest]) -> list[int]:
    """Leading tokens of each prompt that are in an earlier one; see `workload.requests.reusable_tokens`."""
    paths: dict[tuple[int, int], int] = {}  # (path so far, block) -> path
    found = []
    for request in requests:
        path, left, hit, known = 0, request.prefix_tokens, 0, True
        for block in request.prefix:
            if left <= 0:
                break
            known = known and (path, block) in paths
            path = paths.setdefault((path, block), len(paths) + 1)
            hit += min(request.block_tokens, left) if known else 0
            left -= request.block_tokens
        found.append(hit)
    return found


def _seconds(group: InstanceGroup, lengths: _Lengths) -> tuple[Floats, Floats]:
    """Least machine time to prefill each prompt, and to decode; with the tangent and the way to pay for the fixed part
    that take most."""
    best: tuple[float, Floats, Floats] | None = None
    for line in (_line(group, share) for share in SHARES):
        prefill, decode = _variable(line, lengths)
        for pay_prefill, pay_decode in _fixed(line, group, lengths):
            need = prefill + pay_prefill, decode + pay_decode
            # of those that are likely to be kept
            total = float(np.sort(need[0] + need[1])[: max(1, int(0.9 * len(prefill)))].sum())
            if best is None or total > best[0]:
                best = total, *need
    assert best is not None
    return best[1], best[2]


def _variable(line: _Line, lengths: _Lengths) -> tuple[Floats, Floats]:
    """Without the fixed parts of steps."""
    new, d = lengths.new, lengths.decodes
    prefill = line.token * new + line.row + line.pair * new * (lengths.cached + new / 2)
    decode = d * (line.token + line.row) + line.kv * d * (lengths.prompt + (d + 1) / 2)
    return prefill, decode


def _fixed(line: _Line, group: InstanceGroup, lengths: _Lengths) -> list[tuple[Floats, Floats]]:
    """Each request's part of the fixed parts of steps, by each of the ways to share them."""
    drawing, d = line.step + line.drawing, lengths.decodes
    nothing = np.zeros_like(d)
    by_sequence = drawing * d / group.max_num_seqs
    by_kv = drawing * d * (lengths.private + (d + 1) / 2) / (group.kept_blocks * BLOCK_TOKENS)
    by_token = line.step / group.token_budget
    first, last = (line.token + line.row + line.kv * (lengths.prompt + at) for at in (1, d))
    root = (np.sqrt(first) + np.sqrt(np.maximum(first, last))) / 2  # the mean of concave roots is above their chord
    left = np.maximum(lengths.tpot - drawing, 1e-12)  # what cannot be kept is left out elsewhere
    by_work = drawing * d * root**2 / left
    return [
        (nothing, by_sequence),
        (nothing, by_kv),
        (by_token * lengths.new, by_token * d),
        (nothing, by_work),
    ]


def _alone(group: InstanceGroup, lengths: _Lengths) -> tuple[Floats, Floats]:
    """Least seconds to a first token, and per token after it, of each request on an instance of its own."""
    first, each = np.zeros_like(lengths.at), np.zeros_like(lengths.at)
    for line in (_line(group, share) for share in SHARES):
        prefill, decode = _variable(line, lengths)
        chunks = np.ceil(lengths.new / group.token_budget)
        first = np.maximum(first, prefill + chunks * line.step + line.drawing)
        each = np.maximum(each, decode / np.maximum(lengths.decodes, 1) + line.step + line.drawing)
    return first, np.where(lengths.decodes > 0, each, 0.0)


def _work(requests: Sequence[WorkRequest], groups: Sequence[InstanceGroup], max_tokens: int | None) -> _Work:
    longest = max(group.max_model_len for group in groups)
    lengths = _lengths(requests, longest, max_tokens, any(group.prefix_cache for group in groups))
    needs = [_seconds(group, lengths) for group in groups]
    # an instance-second of a group is worth so many of the first group's; any numbers are right, these make it tight
    sums = [float(prefill.sum() + decode.sum()) for prefill, decode in needs]
    worth = [sums[0] / each if each else 1.0 for each in sums]
    prefill, decode = (
        np.min([w * need[kind] for w, need in zip(worth, needs, strict=True)], axis=0) for kind in (0, 1)
    )
    alone = [_alone(group, lengths) for group in groups]
    first, each = (np.min([times[kind] for times in alone], axis=0) for kind in (0, 1))
    free = np.isinf(lengths.ttft)  # whenever it runs, it is not late
    possible = ~free & (first <= lengths.ttft * (1 + 1e-9)) & (each <= lengths.tpot * (1 + 1e-9))
    ready = lengths.at + lengths.ttft
    ended = ready + np.where(lengths.decodes > 0, lengths.tpot, 0.0) * lengths.decodes
    return _Work(
        total=len(lengths.at),
        free=int(np.sum(free & (each <= lengths.tpot * (1 + 1e-9)))),
        capacity=sum(w * group.count for w, group in zip(worth, groups, strict=True)),
        windows=[
            _Window(lengths.at[possible], ready[possible], prefill[possible]),
            _Window((lengths.at + first)[possible], ended[possible], decode[possible]),
        ],
    )


# --- how much of it there is room for


@dataclass(frozen=True, slots=True)
class _Window:
    """Work that is to be done between two moments. Seconds; an end may be inf."""

    start: Floats
    end: Floats
    work: Floats


@dataclass(frozen=True, slots=True)
class _Work:
    """
    Attributes:
        total: online requests, with those that cannot be kept even alone.
        free: those that can always be kept.
        capacity: instance-seconds per second.
        windows: of what each other request that could be kept needs; one entry each.
    """

    total: int
    free: int
    capacity: float
    windows: list[_Window]

    @property
    def load(self) -> float:
        """Work over capacity while requests arrive."""
        starts = self.windows[0].start
        span = float(np.ptp(starts)) if len(starts) else 0.0
        return sum(float(w.work.sum()) for w in self.windows) / span / self.capacity if span else 0.0

    def bound(self, enough: float = 0.0) -> float:
        """The share of all that can be kept at most; sought no lower than `enough`."""
        count = len(self.windows[0].start)
        if not count:
            return self.free / self.total
        starts = np.concatenate([w.start for w in self.windows])
        ends = np.concatenate([w.end for w in self.windows])
        limited = np.isfinite(ends)
        spans = (ends - starts)[limited]
        begin, last = float(starts.min()), float(max(starts.max(), ends[limited].max()))
        width = max(float(np.quantile(spans, 0.1)) / SLOTS_PER_WINDOW, (last - begin) / MOST_SLOTS, 1e-9)
        slots = math.ceil((last - begin) / width) + 1
        jobs = [_Job.make(w, begin, width, slots) for w in self.windows]
        kept = _search(jobs, self.capacity * width, slots, count, enough * self.total - self.free)
        return (self.free + kept) / self.total


@dataclass(frozen=True, slots=True)
class _Job:
    """One kind of work of every request, by slots.

    Attributes:
        first, last: slots that it may be done in, [first, last).
        spans: level -> requests whose windows two stretches of 2**level slots cover.
    """

    first: Ints
    last: Ints
    work: Floats
    spans: dict[int, Ints]

    @classmethod
    def make(cls, window: _Window, begin: float, width: float, slots: int) -> _Job:
        """Slot `slots` is what comes after all slots, where there is room for everything."""
        first = np.floor((window.start - begin) / width).astype(np.int64)
        last = np.minimum(np.ceil((window.end - begin) / width), slots + 1).astype(np.int64)
        last = np.maximum(last, first + 1)
        levels = np.frexp(last - first)[1] - 1
        return cls(first, last, window.work, {int(level): np.flatnonzero(levels == level) for level in set(levels)})

    def cheapest(self, prices: Floats, table: Sequence[Ints]) -> Ints:
        """The cheapest slot of each request's window."""
        found = np.empty_like(self.first)
        for level, which in self.spans.items():
            left = table[level][self.first[which]]
            right = table[level][self.last[which] - (1 << level)]
            found[which] = np.where(prices[right] < prices[left], right, left)
        return found


def _search(jobs: Sequence[_Job], room: float, slots: int, count: int, enough: float) -> float:
    """The least bound on the count of requests kept that was found; see the head of the file.

    Args:
        room: instance-seconds in a slot.
        count: of requests.
    """
    needed = sum(job.work for job in jobs)
    assert isinstance(needed, np.ndarray)
    typical = 1 / max(float(np.median(needed)), 1e-12)
    levels = max(max(job.spans) for job in jobs)
    best, prices = float(count), np.zeros(slots + 1)
    for price in typical * np.array(EVEN):  # the same everywhere: right when the load is even
        even = np.full(slots + 1, price)
        even[slots] = 0.0
        value, _ = _dual(jobs, even, room, levels)
        if value < best:
            best, prices = value, even
    mean, square = np.zeros(slots), np.zeros(slots)
    for step in range(1, STEPS + 1):  # Adam, ever slower
        pace = RATE * typical * (1 - step / (STEPS + 1))
        value, slope = _dual(jobs, prices, room, levels)
        best = min(best, value)
        if best < enough:
            break
        mean += (slope - mean) * 0.1
        square += (slope * slope - square) * 0.001
        move = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.999**step)) + 0.05)
        prices[:slots] = np.maximum(0.0, prices[:slots] - pace * move)
    return best


def _dual(jobs: Sequence[_Job], prices: Floats, room: float, levels: int) -> tuple[float, Floats]:
    """(the bound at these prices, its slope in each slot's over `room`)."""
    table = [np.arange(len(prices))]  # level -> the cheapest slot of the 2**level from here on
    for level in range(levels):
        left, right = table[-1][: -(1 << level)], table[-1][1 << level :]
        table.append(np.where(prices[right] < prices[left], right, left))
    slots = [job.cheapest(prices, table) for job in jobs]
    gain = np.ones(len(jobs[0].work))
    for job, slot in zip(jobs, slots, strict=True):
        gain -= job.work * prices[slot]
    kept = gain > 0
    slope = np.ones(len(prices))
    for job, slot in zip(jobs, slots, strict=True):
        slope -= np.bincount(slot[kept], job.work[kept], len(prices)) / room
    return room * float(prices.sum()) + float(gain[kept].sum()), slope[:-1]
