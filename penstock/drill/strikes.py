"""How faults are done, and undone whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager

from penstock.core.errors import PenstockError
from penstock.drill.faults import Strike, cut_by
from penstock.drill.launched import Deployed, Grip

LOOK = 0.05  # seconds
CYCLE = 0.2  # seconds: a slow process runs for a share of each. Long beside a step, short beside a heartbeat's timeout


async def strike_one(deployed: Deployed, strike: Strike, begun: Callable[[], object]) -> str:
    """Do it and undo it; why it could not be done, or "". Raises PenstockError where it cannot be undone.

    Args:
        begun: called as soon as it is done.
    """
    hosts = deployed.hosts
    match strike.kind:
        case "partition":
            return await _held(hosts.cut(*cut_by(strike.target)), strike, begun)
        case "disk-full":
            return await _held(hosts.full(deployed.host_of(strike.target)), strike, begun)
    grip = deployed.grip(strike.target)
    if grip is None:
        return f"{strike.target} does not run"
    try:
        if strike.kind == "unmount":
            folder = deployed.checkpoint_of(strike.target)
            return await _held(hosts.away(deployed.host_of(strike.target), folder), strike, begun, grip)
        return await _signalled(strike, grip, begun)
    finally:
        grip.close()


async def _held(
    fault: AbstractContextManager[None], strike: Strike, begun: Callable[[], object], victim: Grip | None = None
) -> str:
    """It lasts as long as it is to.

    Args:
        victim: is killed in the meantime, at once.
    """
    done = False
    try:
        with fault:
            if victim is not None and not victim.send(signal.SIGKILL):
                return f"{strike.target} has just ended"
            done = True
            begun()
            await asyncio.sleep(strike.lasts)
    except PenstockError as error:
        if done:
            raise
        return str(error)
    return ""


async def _signalled(strike: Strike, grip: Grip, begun: Callable[[], object]) -> str:
    if not grip.send(signal.SIGKILL if strike.kind == "kill" else signal.SIGSTOP):
        return f"{strike.target} has just ended"
    begun()
    if strike.kind == "freeze":
        async with _continued(grip):
            await _frozen(grip, strike)
    elif strike.kind == "slow":
        async with _continued(grip):
            await _slowed(grip, strike)
    return ""


@contextlib.asynccontextmanager
async def _continued(grip: Grip) -> AsyncIterator[None]:
    """It runs again at the end, if it is still there."""
    try:
        yield
    finally:
        grip.send(signal.SIGCONT)


async def _frozen(grip: Grip, strike: Strike) -> None:
    """It stays stopped, until the time is over or somebody has ended it for that."""
    clock = asyncio.get_running_loop()
    end = clock.time() + strike.lasts
    while clock.time() < end and grip.send(0):
        await asyncio.sleep(min(LOOK, max(0.0, end - clock.time())))


async def _slowed(grip: Grip, strike: Strike) -> None:
    """It is stopped and goes on, again and again, until it ends or the time is over."""
    clock = asyncio.get_running_loop()
    end = clock.time() + strike.lasts
    while clock.time() < end:
        await asyncio.sleep(CYCLE * (1 - strike.speed))
        if not grip.send(signal.SIGCONT):
            return
        await asyncio.sleep(CYCLE * strike.speed)
        if not grip.send(signal.SIGSTOP):
            return
