"""When requests are sent: on a schedule (open loop) or one after another (closed loop).

An open loop stands for users who do not know of each other: it never waits for an answer before it sends the next
request. A closed loop stands for a fixed number of users who each wait for their answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from penstock.bench.client import Call
from penstock.bench.record import RequestRecord
from penstock.core.clock import Clock

Send = Callable[[Call, float], Awaitable[RequestRecord]]
Progress = Callable[[RequestRecord], None]


async def open_loop(
    calls: Sequence[Call],
    send: Send,
    clock: Clock,
    *,
    max_concurrency: int | None = None,
    progress: Progress | None = None,
) -> list[RequestRecord]:
    """Sends each call when it is due; returns the records in the order of `calls`, which ascend in `at`.

    A record's `start` is when the call was due, so a late client, or a wait for one of `max_concurrency` places,
    counts as latency and shows as lag; the schedule itself never slips.
    """
    places = asyncio.Semaphore(max_concurrency or len(calls) or 1)

    async def one(call: Call, due: float) -> RequestRecord:
        async with places:
            record = await send(call, due)
        if progress:
            progress(record)
        return record

    origin = clock.now()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for call in calls:
            due = origin + call.at
            while (wait := due - clock.now()) > 0:  # timers may fire early by part of a millisecond
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(call, due)))
    return [task.result() for task in tasks]


async def closed_loop(
    calls: Sequence[Call],
    send: Send,
    clock: Clock,
    *,
    concurrency: int,
    progress: Progress | None = None,
) -> list[RequestRecord]:
    """Keeps `concurrency` calls in flight until all were sent; returns the records in the order of `calls`."""
    records: dict[int, RequestRecord] = {}
    waiting = iter(enumerate(calls))

    async def user() -> None:
        for index, call in waiting:  # shared by all users: each takes the next call
            record = records[index] = await send(call, clock.now())
            if progress:
                progress(record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(calls))):
            group.create_task(user())
    return [records[index] for index in range(len(calls))]
