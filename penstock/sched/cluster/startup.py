"""How an instance that starts comes to its weights, and how long that takes.

Fastest first, as in HFX (arXiv 2508.15919, section 3.4): a warm process, which has imported all and has no weights,
gets them from a running peer; a new process maps those of a peer on its host, or gets a peer's over the network; it
reads them from its host's memory, or from disk. Where one is not to be had it is the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Path = Literal["warm", "map", "tcp", "host", "disk"]
PATHS: tuple[Path, ...] = ("warm", "map", "tcp", "host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Of an instance that is to start.

    Attributes:
        warm: whether a warm process waits on its host.
        neighbour: whether a peer that has the weights runs on its host.
        peer: whether one runs anywhere.
        copy: whether its host's memory has the files.
    """

    warm: bool = False
    neighbour: bool = False
    peer: bool = False
    copy: bool = False

    @property
    def path(self) -> Path:
        if self.neighbour or self.peer:
            return "warm" if self.warm else "map" if self.neighbour else "tcp"
        return "host" if self.copy else "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSeconds:
    """From the order until an instance serves, in seconds by path. One that is not known takes as long as the next
    slower one."""

    disk: float
    host: float | None = None
    tcp: float | None = None
    map: float | None = None
    warm: float | None = None

    def of(self, path: Path) -> float:
        by_path = {"warm": self.warm, "map": self.map, "tcp": self.tcp, "host": self.host, "disk": self.disk}
        slower = (by_path[other] for other in PATHS[PATHS.index(path) :])
        return next(seconds for seconds in slower if seconds is not None)
