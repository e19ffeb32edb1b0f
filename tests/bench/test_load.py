import asyncio
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.client import Call
from penstock.bench.metrics import ClientRecord
from penstock.bench.serve import closed_loop, open_loop
from penstock.core.clock import SystemClock

CLOCK = SystemClock()


def calls(times):
    return [Call(number, at, b"", 1, 1) for number, at in enumerate(times)]


def record(call, start):
    return ClientRecord(number=call.number, start=start, sent=CLOCK.now(), end=CLOCK.now())


def test_open_loop_never_waits_for_an_answer():
    async def main():
        all_sent = asyncio.Event()
        sent = 0

        async def send(call, start):
            nonlocal sent
            answer = record(call, start)
            sent += 1
            if sent == 5:
                all_sent.set()
            await all_sent.wait()  # would never come if a request waited for the one before it
            return answer

        return await asyncio.wait_for(open_loop(calls([0.0, 0.0, 0.01, 0.02, 0.03]), send, CLOCK), 10)

    records = asyncio.run(main())
    assert [r.number for r in records] == [0, 1, 2, 3, 4]
    first = records[0].start
    assert [r.start - first for r in records] == pytest.approx([0.0, 0.0, 0.01, 0.02, 0.03])
    assert all(r.lag >= 0 for r in records)


def test_a_stalled_client_shows_as_lag_and_the_schedule_does_not_slip():
    async def send(call, start):
        answer = record(call, start)
        if call.number == 0:
            time.sleep(0.05)  # the client itself is busy, past the due times of the others
        return answer

    records = asyncio.run(open_loop(calls([0.0, 0.01, 0.02]), send, CLOCK))
    assert [r.start - records[0].start for r in records] == pytest.approx([0.0, 0.01, 0.02])
    assert records[1].lag >= 0.03
    assert records[2].lag >= 0.02


def test_a_wait_for_a_place_is_latency():
    async def main():
        free = asyncio.Event()

        async def send(call, start):
            answer = record(call, start)
            if call.number == 0:
                asyncio.get_running_loop().call_later(0.03, free.set)
                await free.wait()
            return answer

        return await open_loop(calls([0.0, 0.0]), send, CLOCK, max_concurrency=1)

    first, second = asyncio.run(main())
    assert second.start == first.start
    assert second.lag >= 0.02


@given(st.integers(1, 20), st.integers(1, 8), st.booleans())
def test_concurrency_is_kept_and_never_passed(count, concurrency, closed):
    in_flight = peak = 0
    ended: list[ClientRecord] = []

    async def send(call, start):
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        await asyncio.sleep(0)
        in_flight -= 1
        return record(call, start)

    if closed:
        run = closed_loop(calls([0.0] * count), send, CLOCK, concurrency=concurrency, progress=ended.append)
    else:
        run = open_loop(calls([0.0] * count), send, CLOCK, max_concurrency=concurrency, progress=ended.append)
    records = asyncio.run(run)
    assert [r.number for r in records] == list(range(count))
    assert sorted(r.number for r in ended) == list(range(count))
    assert peak == min(count, concurrency)


def test_closed_loop_counts_from_sending():
    async def send(call, start):
        return record(call, start)

    records = asyncio.run(closed_loop(calls([0.0] * 3), send, CLOCK, concurrency=1))
    assert all(earlier.end <= later.start <= later.sent for earlier, later in pairwise(records))


def test_a_defect_of_the_client_ends_the_run():
    async def send(call, start):
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        asyncio.run(open_loop(calls([0.0]), send, CLOCK))
