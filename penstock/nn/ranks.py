"""The ranks that compute one model together, and how they exchange what they have.

Every rank runs the same steps on its shard of the weights. Each calls the same exchanges in the same order, and has the
same bits after each, so all come to the same tokens without being told.
"""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import RankFailed
from penstock.nn import native

PAGE = 4096
DISAGREE, ORPHANED = -1, -2  # what a meeting comes to besides success, 0, and 1 + the rank that failed (native/ranks.h)


class Ranks(ABC):
    """This process as one of several ranks.

    Attributes:
        rank: from 0.
        size: how many there are.
    """

    rank: int
    size: int

    @property
    @abstractmethod
    def on_host(self) -> SharedMemoryRanks:
        """The same ranks, exchanging through this machine's memory."""

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """[...] of the same shape and dtype on each rank -> [size, ...], what each has. Raises RankFailed."""


class SharedMemoryRanks(Ranks):
    """Ranks on one machine's CPU.

    Args:
        memory: of `bytes_for(size)`, shared with the others; zeros at first.
        parent: process id whose end ends every wait, or 0.

    Attributes:
        handle: for native functions.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, parent: int = 0) -> None:
        self.rank, self.size = rank, size
        self._memory = memory
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.handle = native.value("penstock_ranks_open", "pnnn")(address, rank, size, parent)

    @property
    def on_host(self) -> SharedMemoryRanks:
        return self

    @staticmethod
    def bytes_for(size: int) -> int:
        """Of memory, in whole pages."""
        return -(-native.value("penstock_ranks_bytes", "n")(size) // PAGE) * PAGE

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty(self.size, *x.shape, dtype=x.dtype)
        gather = native.value("penstock_all_gather", "ppnp")
        self.expect(gather(self.handle, x.data_ptr(), x.nbytes, out.data_ptr()))
        return out

    def expect(self, status: int) -> None:
        """What a native function returned is to be success. Raises RankFailed."""
        if status == DISAGREE:
            raise RankFailed("the ranks do not compute the same step")
        if status == ORPHANED:
            raise RankFailed("rank 0 has ended")
        if status:
            raise RankFailed(f"rank {status - 1} has failed")

    def fail(self, rank: int) -> None:
        """It has failed: every wait ends, on all ranks. From any thread."""
        native.function("penstock_ranks_fail", "pn")(self.handle, rank)

    @property
    def awaits(self) -> int | None:
        """Which rank this one has been waiting for so long that it sleeps. From any thread."""
        awaited = native.value("penstock_ranks_awaits", "p")(self.handle)
        return awaited - 1 if awaited else None

    # --- plans, from rank 0 to the others

    def post(self) -> None:
        """The next plan can be read."""
        native.function("penstock_plan_post", "p")(self.handle)

    def await_plan(self) -> None:
        """Return when the next plan can be read. Raises RankFailed."""
        self.expect(native.value("penstock_plan_await", "p")(self.handle))


class DistributedRanks(Ranks):
    """Ranks on CUDA devices, the n-th on the n-th device, joined by NCCL. Only once in a process.

    Args:
        meeting: path of a file that is not there, by which they find each other.
        host: the same ranks, as processes of this machine.
    """

    def __init__(self, meeting: str, host: SharedMemoryRanks) -> None:
        from torch import distributed

        self.rank, self.size, self._host = host.rank, host.size, host
        self._group: Any = distributed
        torch.cuda.set_device(self.rank)
        distributed.init_process_group("nccl", init_method=f"file://{meeting}", rank=self.rank, world_size=self.size)

    @property
    def on_host(self) -> SharedMemoryRanks:
        return self._host

    def gather(self, x: Tensor) -> Tensor:
        out = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        self._group.all_gather(list(out), x.contiguous())
        return out

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place."""
        self._group.all_reduce(x)
        return x


def joined(device: torch.device, ranks: SharedMemoryRanks, meeting: str) -> Ranks:
    """What the model of such a device exchanges through; ranks of CUDA devices wait here for each other."""
    return ranks if device.type == "cpu" else DistributedRanks(meeting, ranks)
