"""The data-parallel groups of a model whose experts are spread over all of them: engines of one host, each with ranks,
sequences and a KV cache of its own.

Every layer with experts is a meeting of all groups, so all compute the same number of steps: who has nothing to compute
takes part in what another one has begun (`pipeline.py`). They are there together or not at all: where one ends, all do,
and meet again when they have been started anew.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import msgspec

from penstock.core.errors import ConfigError, RankFailed, Unavailable
from penstock.core.parallel import Layout
from penstock.core.wire.codec import encode
from penstock.core.wire.rank import MAX_MESSAGE, FromGroup, Joins, Leaves, Refused, decode_from_group
from penstock.engine.options import EngineOptions
from penstock.nn.helpers import Helpers, Places
from penstock.nn.linear import Shard
from penstock.nn.ranks import PAGE, Ranks, SharedMemoryRanks
from penstock.nn.streams import Stream, Turns
from penstock.sched.local.speculation import make_speculation

log = logging.getLogger("penstock.engine")
LOOK = 0.5  # seconds between two looks whether the parent process is there
AGAIN = 0.1  # seconds between two knocks at a door that is not open yet
TOLD = 10.0  # seconds between two lines about who is waited for
LEAVING = 60.0  # seconds that one that ends takes part in what others still compute


class GroupMemory:
    """What all ranks of all groups share, as one rank has it.

    Args:
        fd: of the memory, zeros at first.

    Attributes:
        group: this one's number.
        steps: this group among all; by it is known which steps were begun.
        ahead: steps that another group may have begun before this one has ended one that it has not begun.
        loads: of each group, tokens of KV that its sequences attend over.
        copied: for each group, and each other one, of how many tokens this one has copies for that.
        computed: of each group, nanoseconds of a step of late in which it did not wait for others.
    """

    def __init__(self, fd: int, options: EngineOptions) -> None:
        self.fd, self._options, self._layout = fd, options, options.layout
        self.group, layout = options.data_parallel_rank, self._layout
        self._copies = _copy_bytes(options)
        self._memory = mmap.mmap(fd, self.bytes_for(options))
        self.steps = SharedMemoryRanks(self._memory, self.group, layout.data)
        self._first = SharedMemoryRanks.bytes_for(layout.data)
        self.ahead = layout.data * max(2, layout.pipeline)
        self._words_at = self._first + layout.pipeline * SharedMemoryRanks.bytes_for(layout.tensor * layout.data)
        words = memoryview(self._memory)[self._words_at : self._words_at + _word_bytes(layout)].cast("q")
        sizes = 2, layout.data, layout.data, layout.data**2, layout.pipeline * layout.expert_ranks
        ends = list(accumulate(sizes))
        parts = [words[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self._word, self.loads, self.computed, self.copied, self._turns = parts

    @property
    def switch_at(self) -> int:
        """Before which step experts are switched that all groups know of."""
        return self._word[0]

    @switch_at.setter
    def switch_at(self, step: int) -> None:
        self._word[0] = step

    @property
    def two(self) -> bool:
        """Whether steps are two micro-batches, by what the group that computes longest has decided of its own."""
        return bool(self._word[1])

    @two.setter
    def two(self, two: bool) -> None:
        self._word[1] = two

    @staticmethod
    def bytes_for(options: EngineOptions) -> int:
        layout, copies = options.layout, _copy_bytes(options)
        of_stage = SharedMemoryRanks.bytes_for(layout.tensor * layout.data)
        size = SharedMemoryRanks.bytes_for(layout.data) + layout.pipeline * of_stage + _word_bytes(layout)
        if copies:
            size += layout.group_size * Helpers.bytes_for(layout.data) + layout.data * copies
        return size

    def helpers(self, stage: int, shard: int, parent: int = 0) -> Places:
        """A rank of this group among those of all that have the same layers and heads."""
        layout, size = self._layout, Helpers.bytes_for(self._layout.data)
        start = self._words_at + _word_bytes(layout) + (stage * layout.tensor + shard) * size
        ranks = self.ranks(stage, shard, parent)
        return Places(self._memory, start, self.group, layout.data, ranks, layout.tensor, shard, self.copied)

    def copies(self, group: int) -> memoryview:
        """Of others' KV, as a group has them."""
        end = self.bytes_for(self._options) - (self._layout.data - 1 - group) * self._copies
        return memoryview(self._memory)[end - self._copies : end]

    def ranks(self, stage: int, shard: int, parent: int = 0) -> SharedMemoryRanks:
        """A rank of this group among all that share a stage's experts."""
        return self._ranks(stage, self.group * self._layout.tensor + shard, parent)

    def experts(self, stage: int, shard: int, ranks: Ranks | None, stream: Stream) -> Shard:
        """What such a rank has of the experts.

        Args:
            ranks, stream: by which they exchange.
        """
        number, size = self.group * self._layout.tensor + shard, self._layout.expert_ranks
        words = self._turns[stage * size : (stage + 1) * size]
        turns = Turns(words, number) if self._options.enable_dbo else None
        return Shard(number, size, ranks, stream=stream, apart=True, turns=turns)

    def _ranks(self, stage: int, number: int, parent: int = 0) -> SharedMemoryRanks:
        size = self._layout.expert_ranks
        start = self._first + stage * SharedMemoryRanks.bytes_for(size)
        return SharedMemoryRanks(self._memory, number, size, parent, start)

    def awaits(self, stage: int, shard: int) -> tuple[int, int] | None:
        """Which group, and which shard of it, a rank of this one has been waiting for so long that it sleeps."""
        number = self.group * self._layout.tensor + shard
        found = self._ranks(stage, number).awaits(number)
        return None if found is None else divmod(found, self._layout.tensor)

    def fail(self) -> None:
        """This group has failed: every wait ends, in all groups. From any thread."""
        self.steps.fail(self.group)
        for stage in range(self._layout.pipeline):
            self._ranks(stage, 0).fail(self.group * self._layout.tensor)


def _copy_bytes(options: EngineOptions) -> int:
    """That each group has for copies of others' KV."""
    return (options.helper_kv_memory or 0) // PAGE * PAGE


def _word_bytes(layout: Layout) -> int:
    """In whole pages."""
    words = 2 + 2 * layout.data + layout.data**2 + layout.pipeline * layout.expert_ranks
    return -(-8 * words // PAGE) * PAGE


class Groups:
    """This engine among them, once all are there. Group 0 has a door at which the others knock.

    Raises:
        ConfigError: the groups are not of the same model.
        Unavailable: the parent process has ended.
    """

    def __init__(self, options: EngineOptions) -> None:
        assert options.data_parallel_address is not None
        self._layout, self._group = options.layout, options.data_parallel_rank
        self._door, self._parent = Path(options.data_parallel_address), os.getppid()
        self._joins = Joins(self._group, os.getpid(), _what(options))
        self._links: dict[int, tuple[int, socket.socket]] = {}  # group -> process and link
        fd = self._open_door(GroupMemory.bytes_for(options)) if self._group == 0 else self._knock()
        self.memory = GroupMemory(fd, options)
        self.heard: Callable[[FromGroup], None] = _nobody  # of all but who joins and leaves; from a thread
        self._left: set[int] = set()
        self._over = threading.Event()
        self._closing = False

    @property
    def meeting(self) -> str:
        """Path of a file by which all ranks find each other, which no others have had."""
        first = self._joins.process if self._group == 0 else self._links[0][0]
        return f"{self._door}.{first}"

    # --- until all are there

    def _open_door(self, size: int) -> int:
        """Returns the memory, of so many bytes."""
        self._door.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self._door))
            listener.listen(self._layout.data)
            told = time.monotonic()
            while missing := set(range(1, self._layout.data)) - self._links.keys():
                if time.monotonic() - told > TOLD:
                    told = time.monotonic()
                    log.info("waiting for data-parallel groups %s", ", ".join(map(str, sorted(missing))))
                links = {link.fileno(): group for group, (_, link) in self._links.items()}
                for fd in self._readable([listener.fileno(), *links]):
                    if fd == listener.fileno():
                        self._let_in(listener.accept()[0])
                    else:
                        self._links.pop(links[fd])[1].close()  # it has ended, and will come again
        memory = os.memfd_create("penstock-groups", os.MFD_CLOEXEC)
        os.ftruncate(memory, size)
        for _, link in self._links.values():
            with suppress(OSError):  # the watch will notice
                socket.send_fds(link, [encode(self._joins)], [memory])
        return memory

    def _let_in(self, link: socket.socket) -> None:
        link.settimeout(LOOK)
        with suppress(OSError, msgspec.DecodeError):  # it has ended, or is no engine
            if isinstance(joins := decode_from_group(link.recv(MAX_MESSAGE)), Joins):
                if joins.what != self._joins.what:
                    link.send(encode(Refused(f"group {joins.group} is {joins.what}, group 0 is {self._joins.what}")))
                    link.close()
                    return
                if (before := self._links.get(joins.group)) is not None:
                    before[1].close()
                self._links[joins.group] = joins.process, link
                return
        link.close()

    def _knock(self) -> int:
        """Returns the memory."""
        while True:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                link.connect(str(self._door))
                link.send(encode(self._joins))
                while not self._readable([link.fileno()]):
                    pass
                data, fds, *_ = socket.recv_fds(link, MAX_MESSAGE, 1)
                answer = decode_from_group(data) if data else None
            except OSError:
                answer = None
            if isinstance(answer, Refused):
                raise ConfigError(f"data-parallel-address: {answer.why}", "data-parallel-address")
            if isinstance(answer, Joins):
                self._links[answer.group] = answer.process, link
                return fds[0]
            link.close()
            self._readable([])
            time.sleep(AGAIN)

    def _readable(self, fds: list[int]) -> list[int]:
        """After a while at the latest. Raises Unavailable."""
        if os.getppid() != self._parent:
            raise Unavailable("the parent process has ended")
        waiter = select.poll()
        for fd in fds:
            waiter.register(fd, select.POLLIN)
        return [fd for fd, _ in waiter.poll(LOOK * 1e3 if fds else 0)]

    # --- while they compute

    def watch(self, failed: Callable[[RankFailed], None]) -> None:
        """Tell when a group has ended, from a thread."""
        threading.Thread(target=self._watch, args=(failed,), name="penstock-groups", daemon=True).start()

    def _watch(self, failed: Callable[[RankFailed], None]) -> None:
        waiter, groups = select.poll(), dict[int, int]()
        for group, (_, link) in self._links.items():
            waiter.register(link, select.POLLIN)
            groups[link.fileno()] = group
        while not self._over.is_set():
            for fd, _ in waiter.poll():
                process, link = self._links[groups[fd]]
                data = b""
                with suppress(OSError):  # it has ended, or this one closes it
                    link.setblocking(False)
                    data = link.recv(MAX_MESSAGE)
                if data:
                    self._hear(groups[fd], data)
                elif self._over.is_set() or self._closing:
                    return
                else:
                    self.memory.fail()
                    failed(RankFailed(f"data-parallel group {groups[fd]} (process {process}) has ended"))
                    self._over.set()
                    return

    def _hear(self, group: int, data: bytes) -> None:
        match decode_from_group(data):
            case Leaves():
                self._leave(group)
            case Joins() | Refused():
                log.warning("data-parallel group %d has joined already", group)
            case message:
                self.heard(message)

    def tell(self, message: FromGroup) -> None:
        """All groups that this one is linked with: of group 0 all others, of these group 0. From any thread."""
        data = encode(message)
        for _, link in self._links.values():
            waiter = select.poll()
            waiter.register(link, select.POLLOUT)
            with suppress(OSError):  # the watch will notice
                while not waiter.poll(LOOK * 1e3) and not self._over.is_set():
                    pass
                link.send(data)

    def _leave(self, group: int) -> None:
        """It will begin nothing any more. Group 0 hears it of all, the others of it, when all have said so."""
        self._left.add(group)
        if self._group == 0 and len(self._left) == self._layout.data:
            for _, link in self._links.values():
                with suppress(OSError):
                    link.send(encode(Leaves()))
        elif self._group == 0 or group != 0:
            return
        self._over.set()

    def leave(self) -> None:
        """Begin nothing any more, and return when no other group will either; meanwhile what they begin goes on."""
        if self._group == 0:
            self._leave(0)
        else:
            with suppress(OSError):
                self._links[0][1].send(encode(Leaves()))
        if not self._over.wait(LEAVING):
            log.warning("the other data-parallel groups compute on, without this one")

    def close(self) -> None:
        self._closing = True
        self.memory.fail()
        for _, link in self._links.values():
            link.close()


def _what(options: EngineOptions) -> str:
    """What all groups have to have in common."""
    drafts = make_speculation(options.speculative_config)
    heads = "" if drafts is None or drafts.head is None else f", {drafts.most} drafts of {drafts.head}"
    copies = ""
    if options.helper_kv_memory:  # which all lay out alike
        copies = f", {options.helper_kv_memory} bytes for copies of KV in {options.kv_cache_dtype} {options.kv_layout}"
    turns = ", two micro-batches" if options.enable_dbo else ""
    return f"{options.layout} {options.model} {options.dtype}{heads}{copies}{turns}"


def _nobody(message: FromGroup) -> None:
    log.warning("%s of another data-parallel group was dropped", type(message).__name__)
