"""Several workers that compute one model together: rank 0 in the engine's process, the others in their own.

Every rank runs every plan on its part of the model. Plans go to them through shared memory. The shards of a stage have
the same at its end (`nn/ranks.py`); with one stage nothing comes back, and with several what the last has drawn does. A
rank that ends or stands still ends all waits for it, and the engine. The other ranks end with the engine.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.core.clock import Clock
from penstock.core.errors import ConfigError, RankFailed
from penstock.core.heartbeat import FATAL
from penstock.core.memory import Part
from penstock.core.plan import StepPlan
from penstock.core.wire.codec import encode
from penstock.core.wire.rank import (
    MAX_MESSAGE,
    Brought,
    Computed,
    Counted,
    CountExperts,
    DropExperts,
    Ended,
    FromGroup,
    Gives,
    Holds,
    Loaded,
    LoadExperts,
    Logged,
    OpenCache,
    Opened,
    Rest,
    Resume,
    SwitchExperts,
    WeightSources,
    decode_from_rank,
)
from penstock.engine.executor.base import NO_LOAD, Computes, ExpertLoad, MaskCosts, Pending, Ran
from penstock.engine.executor.exchanges import Desk, Exchanges
from penstock.engine.executor.groups import Groups
from penstock.engine.executor.inline import InlineExecutor
from penstock.engine.executor.pipeline import Answers, PipelineExecutor
from penstock.engine.executor.plans import decode_answer, encode_plan
from penstock.engine.experts import ExpertBalance, ExpertLoader, ExpertOrder, SwitchGate, expert_layers, expert_ranks
from penstock.engine.helping import HelpWanted
from penstock.engine.micro_batches import SplitSteps
from penstock.engine.options import EngineOptions
from penstock.engine.weights import WeightManager, passed
from penstock.sched.parallel.rebalancing import Rebalancer, make_eplb
from penstock.transfer.memory import PoolMemory

if TYPE_CHECKING:
    from penstock.engine.runner import Runner
    from penstock.engine.worker import Worker
    from penstock.nn.config import DecoderConfig
    from penstock.nn.helpers import Helpers

log = logging.getLogger("penstock.engine")
LOOK = 1.0  # seconds between two looks at a rank that is waited for
STUCK = 4  # looks in a row at which one has used no processor
GOES = 5.0  # seconds that a process has to end after it was killed


class Rank:
    """Another rank's process, as its starter sees it.

    Attributes:
        room: bytes that its part of the KV cache may take; None while it loads.
        opened: it runs plans.
    """

    def __init__(self, rank: int, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self.rank, self.process, self.link = rank, process, link
        self.room: int | None = None
        self.opened = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def processor_time(self) -> int:
        """In clock ticks."""
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])
        return -1

    def ending(self) -> str:
        """How its process ended."""
        try:
            code = self.process.wait(GOES)
        except subprocess.TimeoutExpired:
            return "does not answer"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"


class RankProcesses:
    """Starts all ranks but rank 0, and watches them. From any thread.

    Args:
        options: of the engine; `layout` of them says which ranks there are.
        device: rank 0's; on a CPU all have the same.
        threads: that each rank's kernels run on.
        peers: gives the other ranks' weights too, and they ask whom it asks; None without any.
        groups: among which this is one; None where it is alone.

    Attributes:
        exchanges: rank 0's own.
        failure: what has happened to one of them.
        balance: of experts, where it is kept even.
        helping: says what other groups help with, where they do.
        split_steps: rank 0's runner, where steps may be two micro-batches.
    """

    def __init__(
        self,
        options: EngineOptions,
        device: torch.device,
        threads: int,
        peers: WeightManager | None = None,
        groups: Groups | None = None,
    ) -> None:
        self._options, self._device, self._peers, self.groups = options, device, peers, groups
        alone = f"{tempfile.gettempdir()}/penstock-ranks-{secrets.token_hex(8)}"
        self._meeting = alone if groups is None else groups.meeting  # made where it is used
        self._layout = layout = options.layout
        fd = os.memfd_create("penstock-ranks", os.MFD_CLOEXEC)
        os.ftruncate(fd, Desk.bytes_for(layout))
        memory = mmap.mmap(fd, Desk.bytes_for(layout))
        self._desk = Desk(memory, layout)
        self.exchanges = Exchanges(memory, 0, layout, groups=None if groups is None else groups.memory)
        self._answers: Answers | None = None  # that somebody waits for
        self.failure: RankFailed | ConfigError | None = None
        self.balance: ExpertBalance | None = None
        self._gate: SwitchGate | None = None
        self._answer: Callable[[Brought | Counted], None] | None = None  # of what ranks say of experts
        self.helping: HelpWanted | None = None
        self.split_steps: SplitSteps | None = None
        self._closing = False
        self._changed = threading.Condition()
        try:
            told = None if peers is None else peers.told
            numbers = range(1, layout.group_size)
            shared = None if groups is None else groups.memory.fd
            self.others = [_start(rank, (fd, shared), options, threads, self._meeting, told) for rank in numbers]
        finally:
            os.close(fd)
        self._thread = threading.Thread(target=self._watch, name="penstock-ranks", daemon=True)
        self._thread.start()
        if groups is not None:
            groups.watch(partial(self.fail, 0))

    def executor(self, own: InlineExecutor) -> ProcessExecutor:
        """Of rank 0's own and these."""
        return ProcessExecutor(own, self)

    def pipeline(self, own: Computes, clock: Clock, *, ahead: bool) -> PipelineExecutor:
        """The same where these are several stages, or there are other groups."""
        executor = PipelineExecutor(own, self, clock, stages=self._layout.pipeline, groups=self.groups, ahead=ahead)
        self._answers = executor.answers
        return executor

    def memory(self, own: Worker) -> ProcessMemory:
        """Of rank 0's worker and these."""
        return ProcessMemory(own, self)

    def join(self) -> Exchanges:
        """What rank 0's model exchanges with the others."""
        return self.exchanges.on(self._device, self._options, self._meeting)

    def room(self) -> int:
        """Wait until all have loaded their weights. Returns the bytes that the part of the KV cache of the one with the
        least room may take. Raises RankFailed or ConfigError."""
        self._await(lambda rank: rank.room is not None)
        return min((rank.room or 0 for rank in self.others), default=sys.maxsize)

    def open(self, num_blocks: int, max_model_len: int, memory: PoolMemory | None) -> None:
        """Have all make their KV cache. Raises RankFailed or ConfigError.

        Args:
            memory: of the blocks, which all have in common; None where each has its part of them on its device.
        """
        count, fds = (num_blocks, []) if memory is None else (memory.num_blocks, [memory.fd])
        for rank in self.others:
            with suppress(OSError):  # whoever watches has noticed, or will
                socket.send_fds(rank.link, [encode(OpenCache(count, max_model_len))], fds)

    def balance_experts(self, own: ExpertLoader, options: EngineOptions) -> None:
        """Keep the load of experts even from now on."""
        groups, layout = self.groups, self._layout

        def here(order: LoadExperts | DropExperts | CountExperts) -> None:
            own.hear(order)
            for rank in self.others:
                # ranks of a group count the same rows, unless each sends other groups some of them
                if groups is not None or not isinstance(order, CountExperts) or layout.place(rank.rank).shard == 0:
                    with suppress(OSError):  # whoever watches will notice
                        rank.link.send(encode(order))

        if groups is not None:
            self._gate = SwitchGate(groups.memory)
        if groups is not None and options.data_parallel_rank > 0:
            self._answer = groups.tell
            groups.heard = partial(self._obey, here, groups)
        else:
            self.balance = self._balance(here, options, own.config)
            self._answer = self.balance.hear
            if groups is not None:
                groups.heard = self._hear_group
        own.tell = self._answer

    def _balance(
        self,
        here: Callable[[LoadExperts | DropExperts | CountExperts], None],
        options: EngineOptions,
        config: DecoderConfig,
    ) -> ExpertBalance:
        ranks, groups = expert_ranks(options, config), self.groups

        def tell(order: ExpertOrder) -> None:
            if groups is not None:
                groups.tell(order)
            if not isinstance(order, SwitchExperts):
                here(order)

        rebalancer, steps = Rebalancer(ranks), make_eplb(options.eplb_config)
        if groups is None:
            return ExpertBalance(rebalancer, steps, tell)
        return ExpertBalance(rebalancer, steps, tell, ranks.ranks, self._gate, options.data_parallel_size - 1)

    def _hear_group(self, message: FromGroup) -> None:
        """At group 0."""
        assert isinstance(message, Brought | Counted | Holds)
        assert self.balance is not None
        self.balance.hear(message)

    def _obey(
        self, here: Callable[[LoadExperts | DropExperts | CountExperts], None], groups: Groups, message: FromGroup
    ) -> None:
        """At the others, what group 0 has said."""
        match message:
            case SwitchExperts(switch):
                assert self._gate is not None
                self._gate.hold(switch)
                groups.tell(Holds(switch.version))
            case LoadExperts() | DropExperts() | CountExperts():
                here(message)

    def want_help(self, helpers: Helpers, own: Worker) -> None:
        """Have plans say from now on what other groups may help with. Raises ConfigError."""
        assert self.groups is not None
        memory, layers = self.groups.memory, len(expert_layers(own.model.config))
        self.helping = HelpWanted(memory, own.runner.cache, helpers, layers, memory.ahead + 2)

    def split_steps_of(self, runner: Runner) -> SplitSteps:
        """Rank 0's runner, with which steps are two micro-batches where that pays."""
        self.split_steps = SplitSteps(runner, None if self.groups is None else self.groups.memory)
        return self.split_steps

    def opened(self) -> None:
        """Wait until all can run plans. Raises RankFailed or ConfigError."""
        self._await(lambda rank: rank.opened)

    def order(self, order: Rest | Resume) -> None:
        """Have all do this after the plans that were posted; `opened` waits for it."""
        for rank in self.others:
            rank.opened = False
            with suppress(OSError):
                rank.link.send(encode(order))
        self._post(b"")

    def post(self, plan: StepPlan) -> StepPlan:
        """Have all run a plan, and return what of it this rank has to run. Of those that were posted before, all but
        the last ones have been run: two, or as many as there are stages."""
        if self.balance is not None:
            plan = self.balance.next(plan)
        elif self._gate is not None:
            plan = self._gate.next(plan)
        if self.helping is not None:
            plan = self.helping.next(plan)
        if self.split_steps is not None:
            plan = self.split_steps.next(plan)
        self._post(encode_plan(plan))
        return plan

    @property
    def expert_load(self) -> ExpertLoad:
        load = NO_LOAD if self.balance is None else self.balance.load
        splits = 0 if self.split_steps is None else self.split_steps.splits
        return replace(load, splits=splits, helped=0 if self.helping is None else self.helping.helped)

    def _post(self, data: bytes) -> None:
        """Empty: there is an order."""
        self._desk.put_plan(data)
        self.exchanges.world.post()

    def expect_alive(self) -> None:
        """Raises RankFailed when one has failed."""
        if self.failure is not None:
            raise self.failure

    def fail(self, rank: int, error: RankFailed | ConfigError) -> None:
        """All waits end, and the engine does."""
        with self._changed:
            if self.failure is None and not self._closing:
                self.failure = error
            self._changed.notify_all()
        self.exchanges.fail(rank)
        if self._answers is not None:
            self._answers.put(None)

    def close(self) -> None:
        """End all. No thread may be in an exchange that it is to come out of whole."""
        self._closing = True
        if self.helping is not None:
            self.helping.close()
        if self.groups is not None:
            self.groups.close()
        self.exchanges.fail(0)
        for rank in self.others:
            rank.process.kill()
        for rank in self.others:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(GOES)
        if self._thread is not threading.current_thread():
            self._thread.join(GOES)
        Path(self._meeting).unlink(missing_ok=True)

    def _await(self, condition: Callable[[Rank], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or all(map(condition, self.others)))
        self.expect_alive()

    # --- the thread that watches

    def _watch(self) -> None:
        links = {rank.link.fileno(): rank for rank in self.others}
        waiter = select.poll()
        for fd in links:
            waiter.register(fd, select.POLLIN)
        watched: tuple[int, int] | None = None  # the rank that is waited for, and the time it had used
        looks = 0
        next_look = time.monotonic() + LOOK
        while links:
            for fd, _ in waiter.poll(max(0.0, next_look - time.monotonic()) * 1e3):
                rank = links[fd]
                if not self._hear(rank):
                    waiter.unregister(fd)
                    rank.link.close()
                    del links[fd]
            if time.monotonic() < next_look:  # messages may come by the hundred between two ticks of a rank's clock
                continue
            next_look = time.monotonic() + LOOK
            number = self._awaited()
            if not number or not self.others[number - 1].opened:  # one that loads may wait long for a disk
                watched, looks = None, 0
                continue
            awaited = self.others[number - 1]
            seen = number, awaited.processor_time()
            looks = looks + 1 if seen == watched else 0
            watched = seen
            if looks == STUCK:
                self._failed(awaited, "stands still")

    def _awaited(self) -> int:
        """The rank that others wait for, while it waits for none; 0 where nobody waits."""
        number = self._layout.answering if self._answers is not None and self._answers.awaited else 0
        for _ in range(self._layout.group_size):
            if (other := self.exchanges.awaits(number)) is None:
                break
            if other < 0:
                return 0  # who is to be blamed is in another group
            number = other
        return number

    def _hear(self, rank: Rank) -> bool:
        """One message; False when there will be no more."""
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(rank.link, MAX_MESSAGE, 2)
        except OSError:
            data = b""
        if not data:
            if not self._closing:
                self._failed(rank, rank.ending())
            return False
        match decode_from_rank(data):
            case Gives(key, mapped, at):
                assert self._peers is not None
                if at:
                    self._peers.give_there(key, at)
                try:
                    if mapped:
                        self._peers.give(passed(key, fds))
                except OSError as error:
                    log.warning("weights of %s are not given to others: %s", rank.name, error)
            case Loaded(room):
                rank.room = room
            case Opened():
                rank.opened = True
            case Computed(size):
                assert self._answers is not None
                self._answers.put(decode_answer(self._desk.next_answer(size)))
            case Brought() | Counted() as answer:
                assert self._answer is not None
                self._answer(answer)
            case Logged(logger, level, text):
                logging.getLogger(logger).log(level, "rank %d: %s", rank.rank, text)
            case Ended(text, wrong_option, field):
                failed = RankFailed(f"{rank.name} has failed: {text}", broken=True)
                self.fail(rank.rank, ConfigError(text, field) if wrong_option else failed)
        with self._changed:
            self._changed.notify_all()
        return True

    def _failed(self, rank: Rank, how: str) -> None:
        if self.failure is None:
            log.error("%s %s", rank.name, how)
        self.fail(rank.rank, RankFailed(f"{rank.name} {how}", broken=-(rank.process.poll() or 0) in FATAL))


def _start(
    rank: int,
    memory: tuple[int, int | None],
    options: EngineOptions,
    threads: int,
    meeting: str,
    told: WeightSources | None,
) -> Rank:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings = {
        "rank": rank,
        "memory": memory[0],
        "groups": memory[1],
        "link": theirs.fileno(),
        "parent": os.getpid(),
        "threads": threads,
        "meeting": meeting,
        "log_level": log.getEffectiveLevel(),
        "asks": told is not None,
        "options": asdict(options),
    }
    command = [sys.executable, "-m", "penstock.engine.executor.rank", json.dumps(settings)]
    passed_on = [theirs.fileno(), *(fd for fd in memory if fd is not None)]
    process = subprocess.Popen(command, pass_fds=passed_on, stdin=subprocess.DEVNULL)
    theirs.close()
    if told is not None:
        with suppress(OSError):  # whoever watches will notice
            ours.send(encode(told))
    return Rank(rank, process, ours)


class ProcessExecutor:
    """Computes with rank 0's worker as an inline executor does, and with the other ranks beside it.

    A step that fails leaves the ranks at different places, so that nothing can be launched after it. None is stopped:
    ranks that had looked at different times would wait for each other.
    """

    def __init__(self, own: InlineExecutor, others: RankProcesses) -> None:
        self._own, self._others = own, others
        self._close = weakref.finalize(self, others.close)

    @property
    def ahead(self) -> bool:
        return self._own.ahead

    @property
    def mask_costs(self) -> MaskCosts:
        return self._own.mask_costs

    @property
    def expert_load(self) -> ExpertLoad:
        return self._others.expert_load

    def launch(self, plan: StepPlan, *, stoppable: bool = False) -> Pending:
        self._others.expect_alive()
        plan = self._others.post(plan)
        return _Together(self._own.launch(plan), self._others, beside=self._own.ahead)

    def fileno(self) -> int | None:
        return self._own.fileno()

    def expect_alive(self) -> None:
        self._others.expect_alive()

    def settle(self) -> None:
        self._own.settle()

    def close(self) -> None:
        self._own.close()
        self._close()

    def counts(self) -> dict[str, int]:
        return self._own.counts()

    def check(self) -> None:
        self._own.check()
        if self._others.helping is not None:
            self._others.helping.check()


class ProcessMemory:
    """The memory of all ranks: each gives back, and takes up again, its part of it."""

    def __init__(self, own: Worker, others: RankProcesses) -> None:
        self._own, self._others = own, others

    def sleep(self, level: int, blocks: Sequence[int] | None = None) -> None:
        """As `Worker.sleep`. Raises RankFailed."""
        self._others.order(Rest(level))
        self._own.sleep(level, blocks)
        self._others.opened()

    def wake_up(self, parts: Sequence[Part]) -> None:
        """As `Worker.wake_up`. Raises RankFailed: where one of them cannot, the others wait for it in vain."""
        self._others.order(Resume(list(parts)))
        try:
            self._own.wake_up(parts)
            self._others.opened()
        except ConfigError as error:
            self._others.fail(0, RankFailed(f"a rank cannot wake up: {error}"))
            raise RankFailed(f"a rank cannot wake up: {error}") from error


class _Together:
    """A step of all ranks.

    Args:
        beside: rank 0 computes it in a thread, which an interrupt of the caller does not reach.
    """

    def __init__(self, own: Pending, others: RankProcesses, *, beside: bool) -> None:
        self._own, self._others, self._beside = own, others, beside

    def done(self) -> bool:
        return self._own.done()

    def stop(self) -> bool:
        return False

    def result(self) -> Ran:
        try:
            ran = self._own.result()
            self._others.expect_alive()  # else a device has what ranks that are no more have sent it
            return ran
        except BaseException as error:
            lost = self._others.failure is not None
            if isinstance(error, Exception) or not self._beside:
                self._others.fail(0, RankFailed(f"rank 0 has failed: {type(error).__name__}: {error}"))
            if isinstance(error, RankFailed) or (lost and isinstance(error, Exception)):
                self._others.expect_alive()  # which says more of it
            raise
