"""What proves that a process makes progress: a counter in a mapped file, and how long one beat may take.

A turn of its loop is a beat. Of an engine, the beginning and the end of a step are too; the step itself is one call
into the model, so there the limit is what no working step takes: it grows with the step's tokens.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import inf
from pathlib import Path

EVERY = 0.5  # seconds between the beats of an event loop
TURN = 60.0  # seconds that one turn of a loop may take, aside from a step's tokens
STILL_LOADING = 60.0  # seconds that a process may do nothing while it loads, which may be from a slow disk or network
TOKEN_ON_CPU = 1.0  # seconds per token, beyond which a step counts as hung
TOKEN_ELSEWHERE = 0.01

_LAYOUT = struct.Struct("=Qdd")  # beats, limit, still


@dataclass(frozen=True, slots=True)
class Beat:
    """
    Attributes:
        number: of the beat; 0 while the process loads.
        limit: seconds within which the next one comes, if all is well.
        still: seconds that it may do nothing until then; 0 where whoever watches sets the limit.
    """

    number: int
    limit: float
    still: float = 0.0


LOADING = Beat(0, inf, STILL_LOADING)


def step_limit(tokens: int, device: str) -> float:
    """Seconds that a step of so many tokens takes at the very most.

    Args:
        device: such as "cpu", "cuda:0" or "modelled:h200".
    """
    return TURN + tokens * (TOKEN_ELSEWHERE if device.startswith("cuda") else TOKEN_ON_CPU)


class Heartbeat:
    """The side that beats.

    Args:
        path: of the file, which is made anew.
        device: where an engine computes its steps.
    """

    def __init__(self, path: Path, device: str = "cpu") -> None:
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._number = 0
        self._device = device

    def beat(self, tokens: int = 0) -> None:
        """It gets on.

        Args:
            tokens: of the step that begins; 0 where none does.
        """
        self._number += 1
        limit = step_limit(tokens, self._device)
        # others than a CPU compute, or are waited for, without this process doing anything
        still = 0.0 if not tokens or self._device == "cpu" else limit
        _LAYOUT.pack_into(self._map, 0, self._number, limit, still)


async def keep_beating(path: Path) -> None:
    """The heartbeat of a process that is an event loop; runs until it is cancelled."""
    import asyncio  # not at the top: an engine starts without it

    heartbeat = Heartbeat(path)
    while True:
        heartbeat.beat()
        await asyncio.sleep(EVERY)


def read_heartbeat(path: Path) -> Beat:
    """The newest beat."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return LOADING
    beat = Beat(*_LAYOUT.unpack(data)) if len(data) == _LAYOUT.size else LOADING
    return beat if beat.number else LOADING
