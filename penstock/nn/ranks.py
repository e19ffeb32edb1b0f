"""The ranks that compute one model together, and how they exchange what they have.

Every rank runs the same steps on its shard of the weights. Each calls the same exchanges in the same order, and has the
same bits after each, so all come to the same tokens without being told.
"""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

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
        sizes: how many of `units` exchanges may have to themselves, ascending.
    """

    rank: int
    size: int
    sizes: Sequence[int]

    @property
    @abstractmethod
    def units(self) -> int:
        """Of this rank: threads of a CPU, multiprocessors of a GPU."""

    @abstractmethod
    def set_apart(self, units: int) -> None:
        """From now on exchanges have so many to themselves, one of `sizes`; or share all, where it is 0, as at
        first."""

    @property
    @abstractmethod
    def on_host(self) -> SharedMemoryRanks:
        """The same ranks, exchanging through this machine's memory."""

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """[...] of the same shape and dtype on each rank -> [size, ...], what each has. Raises RankFailed."""

    @abstractmethod
    def all_to_all(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """For each rank a tensor [count, ...], which differ in their counts alone, on all ranks -> what each has for
        this one. Raises RankFailed."""


class SharedMemoryRanks(Ranks):
    """Ranks on one machine's CPU.

    Args:
        memory: shared with the others; `bytes_for(size)` of it are theirs, zeros at first.
        parent: process id whose end ends every wait, or 0.
        start: where these bytes begin.

    Attributes:
        handle: for native functions.
    """

    sizes = (1,)

    def __init__(self, memory: mmap.mmap, rank: int, size: int, parent: int = 0, start: int = 0) -> None:
        self.rank, self.size = rank, size
        self._memory, self._apart = memory, 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory, start))
        self.handle = native.value("penstock_ranks_open", "pnnn")(address, rank, size, parent)

    @property
    def on_host(self) -> SharedMemoryRanks:
        return self

    @property
    def units(self) -> int:
        return native.threads() + self._apart

    def set_apart(self, units: int) -> None:
        threads = self.units
        self._apart = min(units, threads - 1)  # another rank may have more of them
        native.set_threads(threads - self._apart)

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

    def all_to_all(self, xs: Sequence[Tensor]) -> list[Tensor]:
        x = torch.cat(list(xs))
        width = x.new_empty(1, *x.shape[1:]).nbytes
        sizes = (ctypes.c_int64 * self.size)(*(len(each) * width for each in xs))
        come = (ctypes.c_int64 * self.size)()
        offer, take = (native.value(f"penstock_all_to_all_{name}", "pppp") for name in ("offer", "take"))
        self.expect(offer(self.handle, ctypes.addressof(sizes), x.data_ptr(), ctypes.addressof(come)))
        counts = [size // width for size in come]
        out = x.new_empty(sum(counts), *x.shape[1:])
        self.expect(take(self.handle, ctypes.addressof(sizes), x.data_ptr(), out.data_ptr()))
        return list(out.split(counts))

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

    def awaits(self, rank: int) -> int | None:
        """Which rank one has been waiting for so long that it sleeps. From any thread."""
        awaited = native.value("penstock_ranks_awaits", "pn")(self.handle, rank)
        return awaited - 1 if awaited else None

    # --- plans, from rank 0 to the others

    def post(self) -> None:
        """The next plan can be read."""
        native.function("penstock_plan_post", "p")(self.handle)

    def await_plan(self) -> None:
        """Return when the next plan can be read. Raises RankFailed."""
        self.expect(native.value("penstock_plan_await", "p")(self.handle))

    # --- steps that all ranks compute together, whoever of them begins one

    def begin_step(self, number: int) -> None:
        """Counted from 1. From any thread."""
        native.function("penstock_step_begin", "pn")(self.handle, number)

    def await_step(self, number: int) -> None:
        """Return when somebody has begun it. Raises RankFailed."""
        self.expect(native.value("penstock_step_await", "pn")(self.handle, number))


class Pipe(Protocol):
    """One end of what two neighbouring stages have between them; what one sends the other receives, in order."""

    def send(self, x: Tensor) -> None:
        """Raises RankFailed."""
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What is sent next, of that shape and dtype. Raises RankFailed."""
        ...


class SharedMemoryPipe(Pipe):
    """
    Args:
        memory: shared with the other end; `bytes_for()` of it from `start` on are the pipe's, zeros at first.
        ranks: this rank among all, by which it is known who has failed.
        other: rank at the other end.
    """

    def __init__(self, memory: mmap.mmap, start: int, ranks: SharedMemoryRanks, other: int) -> None:
        self._memory, self._ranks = memory, ranks
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory, start))
        self._handle = native.value("penstock_pipe_open", "ppn")(address, ranks.handle, other)

    @staticmethod
    def bytes_for() -> int:
        """Of memory, in whole pages."""
        return -(-native.value("penstock_pipe_bytes")() // PAGE) * PAGE

    def send(self, x: Tensor) -> None:
        x = x.contiguous()
        self._ranks.expect(native.value("penstock_send", "ppn")(self._handle, x.data_ptr(), x.nbytes))

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype)
        self._ranks.expect(native.value("penstock_receive", "ppn")(self._handle, x.data_ptr(), x.nbytes))
        return x


class DistributedRanks(Ranks):
    """Ranks on CUDA devices that share the layers of a stage, joined by NCCL.

    Args:
        members: their numbers among all ranks.
        rank: this one's number there.
        host: the same as processes of this machine.
        groups: NCCL's of them, by how many multiprocessors their kernels may have; 0 for as many as NCCL likes.
        units: multiprocessors of this rank's device.
    """

    def __init__(
        self, members: Sequence[int], rank: int, host: SharedMemoryRanks, groups: Mapping[int, Any], units: int
    ) -> None:
        from torch import distributed

        self.rank, self.size, self._host = members.index(rank), len(members), host
        self.sizes = sorted(size for size in groups if size)
        self._groups, self._units, self._calls = groups, units, distributed
        self._group = groups[0]

    @property
    def units(self) -> int:
        return self._units

    def set_apart(self, units: int) -> None:
        self._group = self._groups[units]

    def connect(self, device: torch.device) -> None:
        """By all groups; else each would be when it is first used, in the middle of a step, and find no memory left."""
        for group in self._groups.values():
            self._calls.all_reduce(torch.zeros(1, device=device), group=group)

    @property
    def on_host(self) -> SharedMemoryRanks:
        return self._host

    def gather(self, x: Tensor) -> Tensor:
        out = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        self._calls.all_gather(list(out), x.contiguous(), group=self._group)
        return out

    def all_to_all(self, xs: Sequence[Tensor]) -> list[Tensor]:
        x = torch.cat(list(xs))
        sizes = torch.tensor([len(each) for each in xs], dtype=torch.int64, device=x.device)
        come = torch.empty_like(sizes)
        self._calls.all_to_all_single(come, sizes, group=self._group)
        counts = come.tolist()
        out = x.new_empty(sum(counts), *x.shape[1:])
        self._calls.all_to_all_single(out, x, counts, sizes.tolist(), group=self._group)
        return list(out.split(counts))

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place."""
        self._calls.all_reduce(x, group=self._group)
        return x


class DevicePipe(Pipe):
    """Between two CUDA devices, by NCCL."""

    def __init__(self, device: torch.device, other: int) -> None:
        from torch import distributed

        self._device, self._other, self._calls = device, other, distributed

    def send(self, x: Tensor) -> None:
        self._calls.send(x.contiguous(), self._other)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=self._device)
        self._calls.recv(x, self._other)
        return x
