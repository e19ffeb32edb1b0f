"""The requests of a scenario: from its trace or its distributions, at some multiple of their own rate.

Tokens are placeholders, of which only matters which are equal. Every token of a shared block is that block's id, every
other token of a prompt and an output is the request's own. So two prompts begin alike exactly as far as they share
blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from penstock.core.errors import ConfigError
from penstock.core.request import MediaSpan
from penstock.sim.workload import SLO, WHOLE, Offline, Slice, Synthetic, Task, Workload
from penstock.workload.arrivals import before_tide, poisson_times, with_tide
from penstock.workload.lengths import Empirical, Fixed, Independent, LengthPairs, LogNormal, log_normal
from penstock.workload.requests import (
    WorkImage,
    WorkRequest,
    between,
    follow_chats,
    limit_context,
    offered_rate,
    repeat_images,
    scale_rate,
    spread_ticks,
)
from penstock.workload.synthetic import synthesise

ROUNDING = 1e-3  # seconds, far more than it can be
CHAT_BLOCKS = 2  # blocks of a prompt that only the next turn of its chat repeats; the first may be common to all


@dataclass(frozen=True, slots=True)
class Traffic:
    """
    Attributes:
        requests: online and offline ones in order of arrival, numbered by it.
        native_rate: requests per second before scaling, of what the scale is a factor on; inf when all come at once.
        judged: numbers of those that the slice is about.
        cut: of these, requests that were made to fit the model's length.
    """

    requests: list[WorkRequest]
    native_rate: float
    judged: range
    cut: int


def make_traffic(
    workload: Workload,
    trace: Sequence[WorkRequest] | None,
    rng: np.random.Generator,
    *,
    scale: float,
    max_model_len: int,
    part: Slice = WHOLE,
) -> Traffic:
    """
    Args:
        trace: what was read from `workload.trace`, or from another file in place of whatever the workload has.
        scale: factor on the native rate of what the workload varies.
        part: whose requests are wanted, with times from its beginning on. All slices together are about the requests
            that the whole is, of equal lengths at equal times.

    Raises:
        ConfigError: nothing is left of the trace, or it has no rate.
    """
    assert part.of == 1 or workload.offline is None, part
    spread_rng, synthetic_rng, task_rng, offline_rng, image_rng = rng.spawn(5)
    offline_varies = workload.vary == "offline"
    online_scale = workload.rate_scale if offline_varies else scale
    span = _span(workload, part)
    if trace is None and workload.tasks:
        online, rate = _mix(workload, online_scale, task_rng, span)
    else:
        if trace is None:
            assert workload.synthetic is not None
            trace = _synthesise(workload.synthetic, synthetic_rng)
        elif workload.spread:
            trace = spread_ticks(trace, workload.spread, spread_rng)
        if workload.image_repeats:
            trace = repeat_images(trace, workload.image_repeats, image_rng)
        online, rate, left_out = _replayed(workload, trace, online_scale, span)
        online = _judged(workload, online, task_rng, left_out)
    if not online and part.of == 1:
        raise ConfigError(f"workload: no request comes at {online_scale:g} times its rate", "workload")
    if workload.tide is not None:
        assert workload.duration is not None
        moved = with_tide(np.array([work.at for work in online]), workload.duration, workload.tide)
        online = [replace(work, at=float(at)) for work, at in zip(online, moved, strict=True)]
    if part.of > 1:
        online = [work for work in online if part.since <= work.at < part.until]
    times = [work.at for work in online]
    judged = range(bisect_left(times, part.begin), bisect_left(times, part.end))
    if part.since:
        online = [replace(work, at=work.at - part.since) for work in online]
    if workload.chats:
        online = follow_chats(_numbered(online), CHAT_BLOCKS)
    requests = online
    if workload.offline is not None:
        until = online[-1].at if workload.duration is None else workload.duration
        rest = _offline(workload.offline, online, until, scale if offline_varies else 1.0, offline_rng)
        requests = sorted([*online, *rest], key=lambda work: work.at)
        if offline_varies:
            assert workload.offline.rate is not None
            rate = workload.offline.rate
        judged = range(len(requests))
    fitting, cut = limit_context(_numbered(requests), max_model_len)
    if part.of > 1:
        cut = limit_context(requests[judged.start : judged.stop], max_model_len)[1]
    return Traffic(fitting, rate, judged, cut)


def _span(workload: Workload, part: Slice) -> tuple[float, float]:
    """[from, to) seconds, before a tide moves them, outside of which nothing comes that the slice sees."""
    since, until = part.since, part.until
    if workload.tide is not None:
        assert workload.duration is not None
        ends = np.array([since, min(until, workload.duration)])
        since, until = before_tide(ends, workload.duration, workload.tide).tolist()
    return since - ROUNDING, until + ROUNDING


def _numbered(requests: Sequence[WorkRequest]) -> list[WorkRequest]:
    return [replace(work, number=number) for number, work in enumerate(requests)]


# --- recorded requests, and those of `synthesise`


def _replayed(
    workload: Workload, trace: Sequence[WorkRequest], scale: float, span: tuple[float, float]
) -> tuple[list[WorkRequest], float, int]:
    """(requests of the span at the scaled rate, their native rate, how many come before the span)."""
    rest = between(trace, workload.start)
    if not rest:
        raise ConfigError(f"workload.start: {workload.start:g} s, no request comes after that", "start")
    native = offered_rate(rest)
    if workload.tasks and math.isfinite(native):
        wanted = sum(task.rate for task in workload.tasks)
        rest, native = scale_rate(rest, wanted / native), wanted
    if workload.duration is not None:
        if math.isinf(native):
            raise ConfigError("workload.duration: given, and all requests come at once: there is no rate to keep up")
        rest, earlier = _repeated(rest, 1 / native, span[0] * scale, min(workload.duration, span[1]) * scale)
    else:
        earlier = sum(work.at / scale < span[0] for work in rest)
        rest = [work for work in rest[earlier:] if work.at / scale < span[1]]
    return scale_rate(rest, scale), native, earlier


def _repeated(requests: Sequence[WorkRequest], gap: float, since: float, until: float) -> tuple[list[WorkRequest], int]:
    """What arrives in [since, until) seconds when the requests come again and again, `gap` seconds after the last one,
    and how many came before. Each repetition has new shared prefixes and images."""
    lap = requests[-1].at + gap
    blocks = 1 + max((max(work.prefix) for work in requests if work.prefix), default=0)
    pictures = 1 + max((image.number for work in requests for image in work.images), default=0)
    found: list[WorkRequest] = []
    turn = max(0, int(since / lap))
    earlier = turn * len(requests)
    while turn * lap < until:
        earlier += sum(work.at + turn * lap < since for work in requests)
        found += [
            replace(
                work,
                at=work.at + turn * lap,
                prefix=tuple(block + turn * blocks for block in work.prefix),
                images=tuple(WorkImage(number + turn * pictures, tokens) for number, tokens in work.images),
            )
            for work in requests
            if since <= work.at + turn * lap < until
        ]
        turn += 1
    return found, earlier


def _synthesise(synthetic: Synthetic, rng: np.random.Generator) -> list[WorkRequest]:
    lengths = Independent(
        LogNormal(synthetic.prompt, synthetic.prompt_cv), LogNormal(synthetic.output, synthetic.output_cv)
    )
    return synthesise(
        synthetic.requests,
        lengths,
        rng,
        rate=synthetic.rate,
        cv=synthetic.burstiness,
        prefixes=synthetic.prefixes,
        prefix_tokens=synthetic.prefix_tokens,
        zipf=synthetic.prefix_zipf,
        images=synthetic.images,
        image_tokens=LogNormal(synthetic.image_tokens, synthetic.image_cv) if synthetic.images else None,
    )


def _judged(
    workload: Workload, requests: Sequence[WorkRequest], rng: np.random.Generator, left_out: int
) -> list[WorkRequest]:
    """With the targets of the workload, or each as one of its tasks, drawn in order after those that are left out."""
    if not workload.tasks:
        targets = _targets(workload.slo)
        return [replace(work, **targets) for work in requests]
    rates = np.array([task.rate for task in workload.tasks])
    which = rng.choice(len(rates), size=left_out + len(requests), p=rates / rates.sum())[left_out:]
    fields = [_fields(task) for task in workload.tasks]
    return [replace(work, **fields[i]) for work, i in zip(requests, which, strict=True)]


# --- a mix of tasks


def _mix(
    workload: Workload, scale: float, rng: np.random.Generator, span: tuple[float, float]
) -> tuple[list[WorkRequest], float]:
    """(requests of the span at the scaled rate, their native rate with every task there)."""
    assert workload.duration is not None
    requests: list[WorkRequest] = []
    for task, task_rng in zip(workload.tasks, rng.spawn(len(workload.tasks)), strict=True):
        left = workload.duration - task.start
        seconds = left if task.duration is None else min(task.duration, left)
        lengths = _lengths(task)
        requests += _arriving(task.rate * scale, seconds, lengths, task_rng, task.start, span, **_fields(task))
    return sorted(requests, key=lambda work: work.at), sum(task.rate for task in workload.tasks)


def _fields(task: Task) -> dict[str, Any]:
    """Of its requests, besides lengths."""
    priority = {"priority": task.priority, "priority_only": task.priority_only}
    return {"task": task.name, **_targets(task.slo), **priority}


def _targets(slo: SLO) -> dict[str, Any]:
    return {"ttft": slo.ttft, "tpot": slo.tpot}


def _lengths(given: Task | Offline) -> LengthPairs:
    output = log_normal(given.output, given.output_sd) if given.output else Fixed(0)
    return Independent(log_normal(given.prompt, given.prompt_sd), output)


# --- offline requests


def _offline(
    offline: Offline, online: Sequence[WorkRequest], seconds: float, scale: float, rng: np.random.Generator
) -> list[WorkRequest]:
    lengths = _lengths(offline)
    if offline.like_online:
        lengths = Empirical(
            np.array([work.prompt_tokens for work in online]), np.array([work.output_tokens for work in online])
        )
    if offline.rate is not None:
        return _arriving(offline.rate * scale, seconds, lengths, rng, offline=True)
    assert offline.backlog is not None
    return _requests(np.zeros(offline.backlog), lengths, rng, offline=True)


# --- requests without shared prefixes


def _arriving(
    rate: float,
    seconds: float,
    lengths: LengthPairs,
    rng: np.random.Generator,
    start: float = 0.0,
    span: tuple[float, float] = (0.0, math.inf),
    **fields: Any,
) -> list[WorkRequest]:
    """Those of the span, of a Poisson process. The same generator state gives the same requests at every rate, and only
    their number and times differ."""
    arrival_rng, length_rng = rng.spawn(2)
    times = start + poisson_times(rate, seconds, arrival_rng)
    return _requests(times, lengths, length_rng, span, **fields)


def _requests(
    times: npt.NDArray[np.float64],
    lengths: LengthPairs,
    rng: np.random.Generator,
    span: tuple[float, float] = (0.0, math.inf),
    **fields: Any,
) -> list[WorkRequest]:
    """Those of the span, whose times are ascending."""
    drawn = [times, *lengths.draw(len(times), rng)]
    low, high = np.searchsorted(times, span)
    return [
        WorkRequest(number=0, at=float(at), prompt_tokens=int(p), output_tokens=int(o), **fields)
        for at, p, o in zip(*(column[low:high] for column in drawn), strict=True)
    ]


FIRST_OWN = 1 << 30
IMAGE = (1 << 32) - 2  # stands for a part of any image
STOP = (1 << 32) - 1  # ends an output


def own_token(number: int) -> int:
    """Of the request with that number."""
    return FIRST_OWN + number


def prompt_of(work: WorkRequest) -> list[int]:
    """Token ids, as many as the prompt has."""
    tokens: list[int] = []
    blocks = -(-work.prefix_tokens // work.block_tokens) if work.prefix_tokens else 0
    for block in work.prefix[:blocks]:
        assert 0 <= block < FIRST_OWN
        tokens += [block] * work.block_tokens
    seen = work.image_tokens
    del tokens[work.prompt_tokens - seen :]
    return tokens + [own_token(work.number)] * (work.prompt_tokens - seen - len(tokens)) + [IMAGE] * seen


def media_of(work: WorkRequest) -> tuple[MediaSpan, ...]:
    """The images of a prompt."""
    spans, start = [], work.prompt_tokens - work.image_tokens
    for image in work.images:
        spans.append(MediaSpan(start, image.tokens, image.number.to_bytes(8, "little")))
        start += image.tokens
    return tuple(spans)
