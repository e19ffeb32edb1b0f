"""Waiting until something is so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


def eventually(condition: Callable[[], Any], timeout: float = 40, what: Callable[[], str] = lambda: "") -> Any:
    """The first true value of the condition; AssertionError with `what()` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"it never came true {what()}"
        time.sleep(0.005)
    return value


async def until(condition: Callable[[], Any]) -> None:
    """The same in an event loop."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)
