"""Who exchanges what with whom among the ranks of one model."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from threading import Lock
from typing import Any

import torch
from torch.distributed.distributed_c10d import _abort_process_group

from penstock.core.parallel import Layout, Place
from penstock.engine.executor.groups import GroupMemory
from penstock.engine.options import EngineOptions, rank_device
from penstock.nn.helpers import Places
from penstock.nn.linear import Shard
from penstock.nn.ranks import DevicePipe, DistributedRanks, Pipe, Ranks, SharedMemoryPipe, SharedMemoryRanks
from penstock.nn.streams import DeviceStream, Stream

# Of plans that all ranks have read: as many are in flight as there are stages, or two, and one is being written. The
# memory is found when it is used.
SLOT_BYTES = 256 << 20
# Multiprocessors that exchanges may be kept to: NCCL's kernels have a block of threads for each, seldom more than 32.
UNITS = (4, 8, 16, 32)


class Desk:
    """Where plans lie for the ranks of a model, and what came of them for rank 0; behind what they exchange."""

    def __init__(self, memory: mmap.mmap, layout: Layout) -> None:
        self._memory = memory
        self._slots = _slots(layout)
        self._plans = Exchanges.bytes_for(layout)  # where they begin
        self._answers = self._plans + self._slots * SLOT_BYTES
        self._posted = self._read = self._answered = 0

    @staticmethod
    def bytes_for(layout: Layout) -> int:
        """Of the memory, with what is exchanged."""
        return Exchanges.bytes_for(layout) + (1 + (layout.pipeline > 1)) * _slots(layout) * SLOT_BYTES

    def put_plan(self, data: bytes) -> None:
        """At rank 0."""
        self._put(self._plans, self._posted, len(data).to_bytes(8, "little") + data)
        self._posted += 1

    def next_plan(self) -> bytes:
        """At the others, once it can be read."""
        at = self._plans + self._read % self._slots * SLOT_BYTES
        self._read += 1
        length = int.from_bytes(self._memory[at : at + 8], "little")
        return self._memory[at + 8 : at + 8 + length]

    def put_answer(self, data: bytes) -> None:
        """At the rank that knows it."""
        self._put(self._answers, self._answered, data)
        self._answered += 1

    def next_answer(self, size: int) -> bytes:
        """At rank 0."""
        at = self._answers + self._answered % self._slots * SLOT_BYTES
        self._answered += 1
        return self._memory[at : at + size]

    def _put(self, start: int, number: int, data: bytes) -> None:
        assert len(data) <= SLOT_BYTES, f"a plan, or what came of it, of {len(data)} bytes"
        at = start + number % self._slots * SLOT_BYTES
        self._memory[at : at + len(data)] = data


def _slots(layout: Layout) -> int:
    """More than plans that nobody has read: those of other groups go on with what each of these has begun."""
    return 2 + (layout.data if layout.meets else 1) * max(2, layout.pipeline)


def _meets(layout: Layout) -> bool:
    """Whether a group's ranks exchange what their experts make, without other groups."""
    return layout.experts and layout.tensor > 1 and layout.data == 1


class Exchanges:
    """What one rank of a model exchanges with the others of its group.

    Attributes:
        world: all of them, for plans and failures.
        ranks: those that share this one's layers; None where it is alone.
        before, after: pipes to the same shard of the stages beside its own; None where there is none.
        on_host: as `ranks`, but through this machine's memory whatever the device is.
        expert_ranks: for what experts make, the same ranks as `ranks`, or those of all groups of a stage; None where
            they have no whole ones.

    Args:
        memory: shared by all, `bytes_for(layout)` of it, zeros at first.
        layout: of the group.
        parent: see `SharedMemoryRanks`.
        groups: what it has in common with other groups, if anything.
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, layout: Layout, parent: int = 0, groups: GroupMemory | None = None
    ) -> None:
        self._parent, self._groups = parent, groups
        _, stage, shard = self.place = layout.place(rank)
        self.layout, self._memory = layout, memory
        self.world = SharedMemoryRanks(memory, rank, layout.group_size, parent)
        self.on_host: SharedMemoryRanks | None = None
        if layout.tensor > 1:
            self.on_host = self.world
            if layout.pipeline > 1:
                self.on_host = SharedMemoryRanks(memory, shard, layout.tensor, parent, self._start(stage))
        self.ranks: Ranks | None = self.on_host
        self.expert_ranks: Ranks | None = self._of_experts(stage, shard, parent) if _meets(layout) else None
        if groups is not None:
            self.expert_ranks = groups.ranks(stage, shard, parent)
        self._device: torch.device | None = None
        self._overlaps = False
        self._distributed, self._lock = False, Lock()
        self.before = self._pipe(stage - 1, shard, rank - layout.tensor) if stage > 0 else None
        self.after = self._pipe(stage, shard, rank + layout.tensor) if stage < layout.pipeline - 1 else None

    @property
    def shard(self) -> Shard:
        layout, (_, stage, shard) = self.layout, self.place
        experts, stream = None, Stream() if self._device is None else DeviceStream(self._device, self._overlaps)
        if self._groups is not None:
            experts = self._groups.experts(stage, shard, self.expert_ranks, stream)
        elif self.expert_ranks is not None:
            experts = Shard(shard, layout.tensor, self.expert_ranks, stream=stream)
        return Shard(shard, layout.tensor, self.ranks, experts, stage=stage, stages=layout.pipeline)

    @property
    def groups(self) -> GroupMemory | None:
        """What it has in common with other groups."""
        return self._groups

    def helpers(self) -> Places | None:
        """This rank among those of other groups that have the same layers and heads; None where there are none."""
        _, stage, shard = self.place
        return None if self._groups is None else self._groups.helpers(stage, shard, self._parent)

    @staticmethod
    def bytes_for(layout: Layout) -> int:
        """Of memory, in whole pages."""
        stages = layout.pipeline if layout.pipeline > 1 else 0
        sets = stages * SharedMemoryRanks.bytes_for(layout.tensor)
        pipes = (layout.pipeline - 1) * layout.tensor * SharedMemoryPipe.bytes_for()
        of_experts = layout.pipeline * SharedMemoryRanks.bytes_for(layout.tensor) if _meets(layout) else 0
        return SharedMemoryRanks.bytes_for(layout.group_size) + sets + pipes + of_experts

    def _start(self, stage: int) -> int:
        """Of the memory of those that share a stage."""
        layout = self.layout
        return SharedMemoryRanks.bytes_for(layout.group_size) + stage * SharedMemoryRanks.bytes_for(layout.tensor)

    def _of_experts(self, stage: int, shard: int, parent: int = 0) -> SharedMemoryRanks:
        """What those that share a stage meet in for experts, at the end of the memory."""
        size = self.layout.tensor
        start = self.bytes_for(self.layout) - (self.layout.pipeline - stage) * SharedMemoryRanks.bytes_for(size)
        return SharedMemoryRanks(self._memory, shard, size, parent, start)

    def _pipe(self, stage: int, shard: int, other: int) -> Pipe:
        """From a stage to the next."""
        number = stage * self.layout.tensor + shard
        start = self._start(self.layout.pipeline) + number * SharedMemoryPipe.bytes_for()
        return SharedMemoryPipe(self._memory, start, self.world, other)

    def on(self, device: torch.device, options: EngineOptions, meeting: str) -> Exchanges:
        """The same for a model on such devices; ranks of CUDA devices wait here for each other, in all groups. Once in
        a process until they have failed.

        Args:
            device: rank 0's.
            meeting: path of a file that is not there, by which these find each other.
        """
        if device.type == "cpu":
            return self
        from torch import distributed

        layout, (_, stage, shard) = self.layout, self.place
        groups, group = (1, 0) if self._groups is None else (layout.data, self._groups.group)
        number = layout.rank(Place(group, stage, shard))
        here = self._device = rank_device(options, device, self.world.rank)
        self._overlaps = options.enable_dbo
        torch.cuda.set_device(here)
        os.putenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # which ends a process where another one has ended
        if options.one_device:
            os.putenv("NCCL_HOSTID", f"rank-{number}")
        size = groups * layout.group_size
        distributed.init_process_group("nccl", init_method=f"file://{meeting}", rank=number, world_size=size)
        stages = [(of, at) for of in range(groups) for at in range(layout.pipeline)]
        shards = [[layout.rank(Place(*each, i)) for i in range(layout.tensor)] for each in stages]
        self.ranks = self._joined(number, shards, self.on_host, here)
        if self.expert_ranks is not None:
            by_stage = [[*chain(*shards[at :: layout.pipeline])] for at in range(layout.pipeline)]
            sizes = UNITS if options.enable_dbo else ()
            self.expert_ranks = self._joined(number, by_stage, self.expert_ranks.on_host, here, sizes)
        self.before = None if self.before is None else DevicePipe(here, number - layout.tensor)
        self.after = None if self.after is None else DevicePipe(here, number + layout.tensor)
        self._distributed = True
        return self

    def _joined(
        self,
        number: int,
        sets: Sequence[Sequence[int]],
        host: SharedMemoryRanks | None,
        device: torch.device,
        sizes: Sequence[int] = (),
    ) -> Ranks | None:
        """The set that a rank is in, of such that all ranks make together; None where each is alone.

        Args:
            sizes: how many multiprocessors what they exchange may be kept to.
        """
        from torch import distributed

        joined: DistributedRanks | None = None
        units = torch.cuda.get_device_properties(device).multi_processor_count
        for members in sets if len(sets[0]) > 1 else ():
            groups: dict[int, Any] = {0: distributed.new_group(list(members))}
            for size in (size for size in sizes if size <= units // 2):
                config = distributed.ProcessGroupNCCL.Options()
                config.config.max_ctas = size
                groups[size] = distributed.new_group(list(members), pg_options=config)
            if number in members:
                assert host is not None
                joined = DistributedRanks(members, number, host, groups, units)
        if joined is not None:
            joined.connect(device)
        return joined

    def fail(self, rank: int) -> None:
        """It has failed: every wait ends, on all ranks. What this one's device has of their exchanges is nothing then.
        From any thread."""
        self.world.fail(rank)
        for members in (*self._stage_sets, *self._expert_sets):
            members.fail(rank)
        if self._groups is not None:
            self._groups.fail()
        with self._lock:
            if self._distributed:
                self._distributed = False
                _abort_process_group()

    @cached_property
    def _stage_sets(self) -> list[SharedMemoryRanks]:
        """Views of what the shards of each stage meet in, where that is not `world`."""
        layout = self.layout
        if layout.tensor == 1 or layout.pipeline == 1:
            return []
        return [SharedMemoryRanks(self._memory, 0, layout.tensor, 0, self._start(i)) for i in range(layout.pipeline)]

    @cached_property
    def _expert_sets(self) -> list[SharedMemoryRanks]:
        if not _meets(self.layout):
            return []
        return [self._of_experts(stage, 0) for stage in range(self.layout.pipeline)]

    def awaits(self, rank: int) -> int | None:
        """Which rank one has been waiting for so long that it sleeps; -1 is one of another group. From any thread."""
        if (found := self.world.awaits(rank)) is not None:
            return found
        _, stage, shard = self.layout.place(rank)
        if self._groups is not None and (awaited := self._groups.awaits(stage, shard)) is not None:
            group, other = awaited
            return stage * self.layout.tensor + other if group == self._groups.group else -1
        for sets in filter(None, (self._stage_sets, self._expert_sets)):
            if (found := sets[stage].awaits(shard)) is not None:
                return stage * self.layout.tensor + found
        return None
