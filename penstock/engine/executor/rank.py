"""A rank's process: python -m penstock.engine.executor.rank JSON. Started by `executor/processes.py`.

JSON:
    rank, parent        which one; the process id of rank 0, without which this one ends
    meeting             path of a file by which ranks of CUDA devices find each other
    memory, link        file descriptors: of the memory that ranks share, of the socket to rank 0
    groups              likewise of what all data-parallel groups share; null where this one is alone
    threads             that kernels run on
    asks                whether other engines may have its weights; the first message says which
    log_level           of what is sent to rank 0's log
    options             fields of EngineOptions
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
import socket
import sys
import threading
from contextlib import ExitStack, suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError, RankFailed
from penstock.core.wire.codec import encode
from penstock.core.wire.rank import (
    MAX_MESSAGE,
    Brought,
    Computed,
    Counted,
    CountExperts,
    DropExperts,
    Ended,
    Loaded,
    LoadExperts,
    Logged,
    OpenCache,
    Opened,
    Rest,
    Resume,
    ToRank,
    WeightSources,
    decode_to_rank,
)

if TYPE_CHECKING:
    from penstock.engine.executor.exchanges import Desk, Exchanges
    from penstock.engine.options import EngineOptions
    from penstock.engine.worker import Worker


class LinkHandler(logging.Handler):
    """Sends log lines to rank 0."""

    def __init__(self, link: socket.socket) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)[: MAX_MESSAGE // 8]
        with suppress(OSError):  # rank 0 has ended
            self._link.send(encode(Logged(record.name, record.levelno, text)))


def main(settings: dict[str, Any]) -> int:
    """Returns 0 when rank 0 has ended, 1 after a failure."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which reach the whole group; rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=settings["link"])
    logging.basicConfig(level=settings["log_level"], handlers=[LinkHandler(link)], format="%(message)s")
    try:
        with ExitStack() as stack:
            run(settings, link, stack)
    except RankFailed:
        return 0  # rank 0 knows of it, or is no more
    except ConfigError as error:
        link.send(encode(Ended(str(error), True, error.field)))
        return 1
    except Exception as error:
        logging.getLogger("penstock.engine").exception("a step failed")
        link.send(encode(Ended(f"{type(error).__name__}: {error}")))
        return 1
    return 0


def run(settings: dict[str, Any], link: socket.socket, stack: ExitStack) -> None:
    """Load, and run plans until rank 0 ends. Raises RankFailed then.

    Args:
        stack: closes what is to be closed at the end.
    """
    import torch

    from penstock.engine.executor.plans import Answer, PlanDecoder, encode_answer
    from penstock.engine.options import EngineOptions, engine_device
    from penstock.engine.weights import WeightManager, pass_to_rank_0
    from penstock.engine.worker import Worker
    from penstock.nn import native
    from penstock.transfer.pool import memfd_pool, pool_over

    options = EngineOptions(**settings["options"])
    if options.isa is not None:
        native.use(options.isa)
    torch.set_num_threads(settings["threads"])
    native.set_threads(settings["threads"])
    others, desk = connect(settings, options)
    peers = None
    if settings["asks"]:
        if not (data := link.recv(MAX_MESSAGE)):
            return
        told = decode_to_rank(data)
        assert isinstance(told, WeightSources)
        own = [f"{told.own}.{settings['rank']}", *([told.public] if told.public else [])] if told.pair else []
        peers = WeightManager.of(told, own, partial(pass_to_rank_0, link))
        stack.callback(peers.close)
    worker = Worker(options, others.on(engine_device(options), options, settings["meeting"]), peers=peers)
    if worker.experts is not None:
        worker.experts.tell = partial(answer_rank_0, link)
    link.send(encode(Loaded(worker.room())))
    data, fds, *_ = socket.recv_fds(link, MAX_MESSAGE, 1)
    if not data:
        return
    wanted = decode_to_rank(data)
    assert isinstance(wanted, OpenCache)
    worker.open(wanted.num_blocks, wanted.max_model_len, pool_over(fds[0]) if fds else memfd_pool)
    link.send(encode(Opened()))
    worker.save_weights()
    orders: SimpleQueue[ToRank | None] = SimpleQueue()
    threading.Thread(target=listen, args=(link, worker, orders), name="penstock-orders", daemon=True).start()
    decode, runner = PlanDecoder(), worker.runner
    answers = others.layout.pipeline > 1 and settings["rank"] == others.layout.answering
    while True:
        others.world.await_plan()
        if plan := desk.next_plan():
            result = runner.run(decoded := decode(plan))
            if answers and not decoded.empty:
                answer = encode_answer(Answer(result, runner.mask_costs, runner.counts()))
                desk.put_answer(answer)
                link.send(encode(Computed(len(answer))))
        elif (order := orders.get()) is not None:
            obey(worker, order)
            link.send(encode(Opened()))


def connect(settings: dict[str, Any], options: EngineOptions) -> tuple[Exchanges, Desk]:
    """What this rank exchanges with the others, and where plans lie."""
    from penstock.engine.executor.exchanges import Desk, Exchanges
    from penstock.engine.executor.groups import GroupMemory

    layout, shared = options.layout, settings["groups"]
    memory = mmap.mmap(settings["memory"], os.fstat(settings["memory"]).st_size)
    groups = None if shared is None else GroupMemory(shared, options)
    return Exchanges(memory, settings["rank"], layout, settings["parent"], groups), Desk(memory, layout)


def answer_rank_0(link: socket.socket, answer: Brought | Counted) -> None:
    """From any thread."""
    with suppress(OSError):  # rank 0 has ended
        link.send(encode(answer))


def listen(link: socket.socket, worker: Worker, orders: SimpleQueue[ToRank | None]) -> None:
    """Take what does not wait for plans to the worker, and all else to `orders`; None is their end."""
    with suppress(OSError):
        while data := link.recv(MAX_MESSAGE):
            match decode_to_rank(data):
                case LoadExperts() | DropExperts() | CountExperts() as order:
                    assert worker.experts is not None
                    worker.experts.hear(order)
                case order:
                    orders.put(order)
    orders.put(None)


def obey(worker: Worker, order: ToRank) -> None:
    """Raises ConfigError as `Worker.wake_up` does."""
    match order:
        case Rest(level=level):
            worker.sleep(level, ())  # what ranks share rank 0 gives back
        case Resume(parts=parts):
            worker.wake_up(parts)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
