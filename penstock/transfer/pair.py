"""Two processes that are a process group of torch.distributed for one transfer: NCCL between GPUs, gloo between CPUs.

They meet at a store of who sends, at a port of the system's choice that is told over their own link; who does not know
its word finds nothing there. No group that a process may have besides, as of ranks, knows of it. It ends with the
transfer, whatever becomes of that.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from penstock.core.errors import Unavailable

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import PrefixStore, TCPStore

AHEAD = 4  # blocks under way
BEGIN = 20.0  # seconds until the first block is there: NCCL looks for a way before
PATIENCE = 5.0  # seconds until the next one is
NEVER = timedelta(days=1)  # what takes too long is not for NCCL's own watch to say
LOOK_EVERY = 0.0005  # seconds between two looks at a device
SENDER, RECEIVER = 0, 1  # ranks


def gpu_of(device: torch.device) -> str:
    """Its name, which no other has; "" for none."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


class Meeting:
    """A store at which a receiver finds this process. To be closed.

    Args:
        host: address of this process at which the receiver reaches it.

    Attributes:
        where: what the receiver has to know.

    Raises:
        Unavailable: it cannot be had.
    """

    def __init__(self, host: str) -> None:
        word = secrets.token_hex(16)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, 0), family=family) as listener:
                port = listener.getsockname()[1]
                self._store: Any = _store(host, port, listener)
        except (OSError, RuntimeError) as error:
            raise Unavailable(f"no store for the process group: {said(error)}") from None
        self.where = f"{port}/{word}"
        self._host, self._word = host, word

    def join(self, device: torch.device, link: socket.socket) -> Pair:
        """As who sends. Raises Unavailable as `join`."""
        return _pair(self._store, self._word, SENDER, self._host, device, link)

    def close(self) -> None:
        self._store = None  # its thread and its port end with it


def join(where: str, host: str, own: str, device: torch.device, link: socket.socket) -> Pair:
    """As who receives; waits for who sends.

    Args:
        where: what the sender has told.
        host: where it is reached.
        own: address of this process at which the sender reaches it.
        device: that the blocks come to.
        link: to the sender, of which nothing is read: its end is the end.

    Raises:
        Unavailable: it is not to be had, or does not come in time.
    """
    port, _, word = where.partition("/")
    guard = Guard(host, int(port))
    try:
        pair = _pair(_store(host, int(port)), word, RECEIVER, own, device, link)
    except (OSError, RuntimeError, Unavailable) as error:
        raise Unavailable("timed out" if guard.cut else said(error)) from None
    finally:
        guard.close()
    return pair


class Guard:
    """Ends waits for a store that is reached and does not answer, as of a process that stands still: of those torch
    knows no end.

    Attributes:
        cut: whether it has.
    """

    def __init__(self, host: str, port: int) -> None:
        self._place, self.cut = (ip_address(host), port), False
        self._timer = threading.Timer(BEGIN, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def _cut(self) -> None:
        self.cut = True
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError):
                sock = socket.socket(fileno=int(fd))
                try:
                    peer, port = sock.getpeername()[:2]
                    address = ip_address(peer)
                    if (getattr(address, "ipv4_mapped", None) or address, port) == self._place:
                        sock.shutdown(socket.SHUT_RDWR)
                finally:
                    sock.detach()  # it is torch's

    def close(self) -> None:
        self._timer.cancel()
        self._timer.join()


def _store(host: str, port: int, listener: socket.socket | None = None) -> TCPStore:
    from torch.distributed import TCPStore

    fd = None if listener is None else listener.detach()
    return TCPStore(host, port, None, fd is not None, timedelta(seconds=BEGIN), False, False, fd)


def _pair(store: TCPStore, word: str, rank: int, host: str, device: torch.device, link: socket.socket) -> Pair:
    from torch.distributed import PrefixStore

    try:
        return Pair(_group(PrefixStore(word, store), rank, host, device), rank, device, link)
    except (OSError, RuntimeError, AttributeError) as error:  # the last of a torch without NCCL
        raise Unavailable(f"no process group: {said(error)}") from None


def _group(store: PrefixStore, rank: int, host: str, device: torch.device) -> Any:
    import torch
    from torch import distributed

    if device.type == "cuda":
        nccl: Any = distributed.ProcessGroupNCCL.Options()
        nccl._timeout = NEVER
        with torch.cuda.device(device):
            return distributed.ProcessGroupNCCL(store, rank, 2, nccl)
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._threads = timedelta(seconds=BEGIN), 1
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, 2, options)


class Pair:
    """One end. From one thread; to be closed.

    Args:
        group: of two.
        rank: of this process.
    """

    def __init__(self, group: Any, rank: int, device: torch.device, link: socket.socket) -> None:
        self._group, self._other, self._device, self._link = group, 1 - rank, device, link
        self._count = 0
        self._over = 0  # of those, that are there
        self._stream: Any = None
        if device.type == "cuda":  # steps that the process computes meanwhile are on another one
            import torch

            self._stream = torch.cuda.Stream(device)
        self._moving: list[tuple[Any, Tensor, Any]] = []  # work, what it moves, and the event behind it

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """What is done with blocks, of a device, is done here."""
        if self._stream is None:
            yield
            return
        import torch

        with torch.cuda.stream(self._stream):
            yield

    @property
    def under_way(self) -> int:
        return len(self._moving)

    def send(self, block: Tensor) -> None:
        """Begin to. Raises Unavailable."""
        self._begin(self._group.send, block)

    def receive(self, block: Tensor) -> None:
        """Begin to, into this memory. Raises Unavailable."""
        self._begin(self._group.recv, block)

    def _begin(self, call: Any, block: Tensor) -> None:
        try:
            with self.on_stream():
                work, event = call([block], self._other, self._count), None
                if self._stream is not None:
                    work.wait()  # the stream does, for the one that NCCL computes on
                    event = self._stream.record_event()
        except RuntimeError as error:
            raise Unavailable(said(error)) from None
        self._count += 1
        self._moving.append((work, block, event))

    def wait(self) -> Tensor:
        """The first block that is under way, when it is over. Raises Unavailable, also where that takes too long."""
        work, block, event = self._moving[0]
        patience = PATIENCE if self._over else BEGIN
        try:
            if event is None:
                work.wait(timedelta(seconds=patience))
            else:
                self._await(event, patience)
        except RuntimeError as error:
            raise Unavailable(said(error)) from None
        self._over += 1
        del self._moving[0]
        return block

    def _await(self, event: Any, patience: float) -> None:
        """NCCL waits for ever for who is no more."""
        until = time.monotonic() + patience
        while not event.query():
            if time.monotonic() >= until:
                raise Unavailable("timed out")
            if is_over(self._link):
                raise Unavailable("it hung up")
            time.sleep(LOOK_EVERY)

    def close(self) -> None:
        """Nothing is written to any block any more."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()
        self._moving.clear()


class Digests:
    """Of blocks wherever they are, of which the first is as large as any. From one thread."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def of(self, block: Tensor) -> int:
        if block.device.type == "cuda":
            import torch

            if self._memory is None:
                self._memory = torch.empty_like(block, device="cpu", pin_memory=True)
            block = self._memory[: len(block)].copy_(block)  # waits
        return int(xxh3_64_intdigest(block.numpy().data))


def is_over(link: socket.socket) -> bool:
    """Whether the other end has closed it; it says nothing."""
    readable, _, _ = select.select([link], [], [], 0)
    try:
        return bool(readable) and not link.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def said(error: BaseException) -> str:
    """The first sentence of torch's, without the line of its code."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^\]]*\] ", "", lines[0]).partition(". ")[0]
