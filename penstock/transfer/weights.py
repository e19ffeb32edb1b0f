"""Weights from a running engine to one that starts: mapped on one host, over TCP or by Mooncake between hosts, by
torch.distributed from the memory of one device into that of another.

Who asks connects, and both sides show that they belong to the deployment as on peer links (`frames.Handshake`, TLS
where links have it); on one host the folder of the socket is its user's alone. Every block has a digest, made when the
source had loaded its weights, and is compared where it arrives. A source that fails leaves the blocks that were right,
and the next one goes on behind them.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import selectors
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import msgspec
from msgspec import structs
from xxhash import xxh3_64, xxh3_64_intdigest

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.mappings import LARGE_PAGE, make_large
from penstock.core.memory import seal
from penstock.core.wire import PROTOCOL
from penstock.core.wire.codec import encode
from penstock.core.wire.weights import (
    BLOCK,
    AskThere,
    AskWeights,
    NoWeights,
    PairWay,
    SendFrom,
    Way,
    WeightMessage,
    Weights,
    decode_weight_message,
)
from penstock.transfer.addresses import listen, parse, remove_socket_file, socket_file, tune
from penstock.transfer.frames import (
    HEADER_BYTES,
    MAX_BODY,
    Challenge,
    Handshake,
    Signed,
    key_of,
    make_header,
    read_header,
)
from penstock.transfer.tls import TLS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger("penstock.transfer")
CONNECT_TIMEOUT = 1.5  # seconds
PATIENCE = 5.0  # seconds without progress
PAIR_WAYS = get_args(PairWay)
AT_ONCE = 32  # connections over which weights are given; more are sent to other sources
# From one source: while what has come over one is digested, or decrypted, the link is the other's.
CONNECTIONS = 2
HELD = 1 << 20  # bytes that have come; their digest, and their copy, are made while a core's cache has them
POPULATE = getattr(mmap, "MAP_POPULATE", 0)

Link = socket.socket | ssl.SSLSocket


class Given(Protocol):
    """Weights that an engine gives.

    Attributes:
        fd: of a file in which they are; None where they are in a device's memory.
        start: where they begin in it.
        address: of the first of them in this process's memory.
        device: that they are on.
        gpu: its name; "" for none.
    """

    fd: int | None
    start: int
    address: int
    device: torch.device
    gpu: str

    def describe(self) -> Weights:
        """Waits until the digests are known. Raises Unavailable where they cannot be given now."""

    def lending(self) -> AbstractContextManager[Callable[[int, int], Tensor]]:
        """Gives what gives bytes [start, stop) of them, [bytes] uint8 on the device, and raises Unavailable where they
        are not given any more. What is had of it is not kept for longer than this is entered."""


def digests(memory: memoryview, stopped: threading.Event | None = None, threads: int = 2) -> list[int] | None:
    """Of every block; see `Weights`. None when it was stopped before they are known."""

    def digest(at: int) -> int | None:
        if stopped is not None and stopped.is_set():
            return None
        return xxh3_64_intdigest(memory[at : at + BLOCK])

    with ThreadPoolExecutor(threads, "weight-digests") as pool:
        found = list(pool.map(digest, range(0, len(memory), BLOCK)))
    known = [value for value in found if value is not None]
    return known if len(known) == len(found) else None


def digests_on_device(memory: Callable[[int, int], Tensor], size: int) -> list[int]:
    """The same of what a device has.

    Args:
        memory: gives bytes [start, stop) of it.
    """
    from penstock.transfer.pair import Digests

    found = Digests()
    return [found.of(memory(at, min(at + BLOCK, size))) for at in range(0, size, BLOCK)]


class WeightServer:
    """Gives an engine's weights, in threads of its own.

    Args:
        addresses: "unix:/path" and "tcp:host:port" to listen at.
        given: key, see `AskWeights`, -> what is given of it; looked at anew whenever somebody asks.
        secret: the deployment's secret; None where every peer that reaches an address is trusted.
        mooncake: where others reach Mooncake's engine of this process; "" without one.
        there: key -> where another rank of this engine gives it by torch.distributed; looked at anew, too.
        pair: the way by torch.distributed; "" without it.

    Attributes:
        addresses: with port 0 resolved.

    Raises:
        ConfigError: an address cannot be had.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        given: Mapping[str, Given],
        secret: str | None = None,
        tls: TLS | None = None,
        mooncake: str = "",
        there: Mapping[str, list[str]] | None = None,
        pair: PairWay | Literal[""] = "",
    ) -> None:
        self._given, self._mooncake = given, mooncake
        self._there, self._pair = {} if there is None else there, pair
        self.addresses: list[str] = []
        self._key, self._tls = key_of(secret), tls
        self._selector = selectors.DefaultSelector()
        self._files: list[tuple[str, int] | None] = []
        self._room = threading.Semaphore(AT_ONCE)
        self._links: dict[Link, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._bell, self._ring = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ)
        try:
            for address in addresses:
                sock, where = listen(address)
                self._selector.register(sock, selectors.EVENT_READ)
                self.addresses.append(where)
                self._files.append(socket_file(where))
        except BaseException:
            self._close_listeners()
            raise
        self._thread = threading.Thread(target=self._accept, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Whoever is being given weights has to do with what it has."""
        with self._lock:
            self._closed = True
            for link in self._links:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
        self._ring.send(b"\0")
        self._thread.join()
        self._close_listeners()
        with self._lock:
            threads = list(self._links.values())
        for thread in threads:
            thread.join(PATIENCE)

    def _close_listeners(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._ring.close()
        for file in self._files:
            remove_socket_file(file)

    def _accept(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.fileobj is self._bell or not isinstance(key.fileobj, socket.socket):
                    return
                try:
                    sock, _ = key.fileobj.accept()
                except OSError:
                    continue
                if not self._room.acquire(blocking=False):
                    sock.close()
                    continue
                threading.Thread(target=self._attend, args=(sock,), name="weights", daemon=True).start()

    def _attend(self, sock: socket.socket) -> None:
        try:
            self._serve(sock)
        except (OSError, EOFError, ValueError, msgspec.DecodeError, Unavailable) as error:
            log.info("weights were not given: %s", error)
        finally:
            sock.close()
            self._room.release()

    def _serve(self, sock: socket.socket) -> None:
        local = sock.family == socket.AF_UNIX
        sock.settimeout(PATIENCE)
        link: Link = sock
        if not local:
            tune(sock)
            if self._tls is not None:
                link = self._tls.over_waiting(sock, dialled=False)
        with self._ended_by_close(link):
            handshake = Handshake(None if local else self._key, dialled=False)
            if (word := handshake.first_word()) is not None:
                _say(link, word)
            ask = _hear(link, handshake)
            if not isinstance(ask, AskWeights):
                raise ValueError(f"somebody said {type(ask).__name__} out of turn")
            given = self._given.get(ask.key)
            if given is None and ask.way in PAIR_WAYS and (addresses := self._there.get(ask.key)):
                _say(link, handshake.seal(AskThere(addresses), 0))
                return
            if why := self._objection(ask, given, local):
                _say(link, handshake.seal(NoWeights(why), 0))
                return
            assert given is not None
            try:
                description = given.describe()
            except Unavailable as error:
                _say(link, handshake.seal(NoWeights(str(error)), 0))
                return
            if ask.way == "mooncake":
                self._lend(link, handshake, given, description)
                return
            if ask.way in PAIR_WAYS:
                self._join(sock, handshake, given, description)
                return
            _say(link, handshake.seal(description, 0))
            assert given.fd is not None
            if ask.way == "map":
                socket.send_fds(sock, [b"\0"], [given.fd])
                return
            going = _asked_for(link)
            for start, stop in _spans(description, going.first, going.step):
                _send(link, given.fd, given.start + start, given.start + stop)

    def _lend(self, link: Link, handshake: Handshake, given: Given, description: Weights) -> None:
        """Let somebody read them as long as it goes on."""
        from penstock.transfer.mooncake_weights import lent

        with contextlib.ExitStack() as stack:
            try:
                where = stack.enter_context(lent(self._mooncake, given.address, description.bytes))
            except ConfigError as error:
                _say(link, handshake.seal(NoWeights(str(error)), 0))
                return
            _say(link, handshake.seal(structs.replace(description, lent=where), 0))
            while link.recv(1):
                pass

    def _join(self, link: socket.socket, handshake: Handshake, given: Given, description: Weights) -> None:
        """Send blocks from the memory that they are in."""
        from penstock.transfer.pair import AHEAD, Meeting

        with contextlib.ExitStack() as stack:
            meeting = stack.enter_context(contextlib.closing(Meeting(_own_host(link))))
            _say(link, handshake.seal(structs.replace(description, lent=meeting.where), 0))
            going = _asked_for(link)
            block = stack.enter_context(given.lending())
            pair = stack.enter_context(contextlib.closing(meeting.join(given.device, link)))
            for start, stop in _spans(description, going.first, going.step):
                if pair.under_way == AHEAD:
                    pair.wait()
                with pair.on_stream():
                    pair.send(block(start, stop))
            while pair.under_way:
                pair.wait()
            link.recv(1)  # nothing, when who asked has all

    def _objection(self, ask: AskWeights, given: Given | None, local: bool) -> str:
        if ask.protocol != PROTOCOL:
            return f"it speaks protocol {PROTOCOL}, and not {ask.protocol}"
        if given is None:
            return "its weights are others" if self._given else "it has no weights to give now"
        if ask.way in PAIR_WAYS:
            if ask.way != self._pair:
                return f"it gives weights by {self._pair}" if self._pair else f"it gives no weights by {ask.way}"
            if self._tls is not None and not local:
                return "it gives weights under TLS alone"
            return "both are on one GPU" if ask.gpu and ask.gpu == given.gpu else ""
        if given.fd is None:
            return "its weights are in the memory of a GPU"
        if ask.way == "map" and not local:
            return "only who is on its host can map its memory"
        return "it has no Mooncake" if ask.way == "mooncake" and not self._mooncake else ""

    @contextlib.contextmanager
    def _ended_by_close(self, link: Link) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise EOFError("it is over")
            self._links[link] = threading.current_thread()
        try:
            yield
        finally:
            with self._lock:
                del self._links[link]
            link.close()


def _send(link: Link, fd: int, start: int, stop: int) -> None:
    if isinstance(link, ssl.SSLSocket):
        with mmap.mmap(fd, stop - start, mmap.MAP_SHARED | POPULATE, mmap.PROT_READ, offset=start) as block:
            link.sendall(block)
    else:
        with open(os.dup(fd), "rb", buffering=0) as file:
            link.sendfile(file, start, stop - start)


def _asked_for(link: Link) -> SendFrom:
    """Raises as `_hear`."""
    going = _hear(link, None)
    if not isinstance(going, SendFrom) or going.first < 0 or going.step < 1:
        raise ValueError("somebody asked for blocks that there are not")
    return going


def _own_host(link: socket.socket) -> str:
    """This process's address, for who is at the other end."""
    return "127.0.0.1" if link.family == socket.AF_UNIX else str(link.getsockname()[0])


def _spans(weights: Weights, first: int, step: int) -> Iterator[tuple[int, int]]:
    """(first byte, end) of a block, and of every `step`-th from there on."""
    for start in range(first * BLOCK, weights.bytes, step * BLOCK):
        yield start, min(start + BLOCK, weights.bytes)


# --- who wants weights


class _IsThere(Exception):
    """Another rank of the engine has the weights.

    Args:
        address: where it gives them, on the same kind of link.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


@contextlib.contextmanager
def _asked(
    address: str, key: str, way: Way, secret: str | None, tls: TLS | None, gpu: str = ""
) -> Iterator[tuple[Link, Weights]]:
    """A connection, and what follows on it. Raises Unavailable, there and inside, and `_IsThere`."""
    try:
        family, where = parse(address)
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            local = family == socket.AF_UNIX
            sock.settimeout(CONNECT_TIMEOUT)
            sock.connect(where)
            sock.settimeout(PATIENCE)
            link: Link = sock
            if not local:
                tune(sock)
                if tls is not None:
                    link = tls.over_waiting(sock, dialled=True)
            with contextlib.nullcontext() if link is sock else contextlib.closing(link):
                handshake = Handshake(None if local else key_of(secret), dialled=True)
                if not handshake.may_greet:
                    handshake.open(_body(link), 0)
                _say(link, handshake.seal(AskWeights(key, way, gpu), 0))
                answer = _hear(link, handshake)
                if isinstance(answer, AskThere):
                    raise _IsThere(_of_kind(address, answer.addresses))
                if isinstance(answer, NoWeights):
                    raise Unavailable(answer.message)
                if not isinstance(answer, Weights):
                    raise ValueError(f"it said {type(answer).__name__} out of turn")
                if len(answer.digests) != -(-answer.bytes // BLOCK) or not answer.bytes:
                    raise ValueError("its weights have no digests")
                yield link, answer
    except (OSError, EOFError, ValueError, msgspec.DecodeError, ConfigError) as error:
        raise Unavailable(str(error) or type(error).__name__) from error


def _of_kind(address: str, addresses: Sequence[str]) -> str:
    """Raises ValueError where there is none."""
    kind = address.partition(":")[0]
    if (found := next((each for each in addresses if each.partition(":")[0] == kind), None)) is None:
        raise ValueError(f"its other rank does not listen at {kind}")
    return found


def ask_to_map(address: str, key: str) -> tuple[Weights, int]:
    """What weights an engine of this host has, and a file descriptor of them, to be closed. Raises Unavailable."""
    with _asked(address, key, "map", None, None) as (link, weights):
        _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        if len(descriptors) != 1:
            raise EOFError("it hung up")
        fd = descriptors[0]
        if os.fstat(fd).st_size < weights.start + weights.bytes:
            os.close(fd)
            raise ValueError("its memory is smaller than what is said to be in it")
        return weights, fd


def check(memory: memoryview, weights: Weights) -> None:
    """Raises Unavailable unless it is what the source had loaded."""
    for number, (found, expected) in enumerate(zip(digests(memory) or [], weights.digests, strict=True)):
        if found != expected:
            raise Unavailable(_corrupt(number, weights))


def _corrupt(number: int, weights: Weights) -> str:
    begins = {offset: name for name, (_, _, offset) in weights.weights.items() if offset < (number + 1) * BLOCK}
    name = begins[max(begins)] if begins else ""
    return f"block {number} of {len(weights.digests)}, which {name!r} is the last to begin in or before, is corrupt"


class Landing:
    """Memory for weights that come from other processes, from one source after the other.

    Args:
        device: whose memory it is; None for that of the host, which others can map.

    Attributes:
        weights: that come; None before the first answer.
        right: blocks, from the first one on, that are there and as they should be.
        fd: of the memory; -1 before the first answer, and on a device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.weights: Weights | None = None
        self.right = 0
        self.fd = -1
        self._device = device
        self._memory: Tensor | None = None  # all of it, [bytes] uint8
        self._beyond: set[int] = set()  # blocks that are right, behind one that is not there yet
        self._lock = threading.Lock()

    def pull(self, address: str, key: str, secret: str | None = None, tls: TLS | None = None) -> Weights:
        """Returns when all are there. Raises Unavailable; then another source may go on."""
        with contextlib.ExitStack() as stack:
            link, weights = stack.enter_context(_asked(address, key, "tcp", secret, tls))
            self._prepare(weights)
            links, first = [link], self.right
            while len(links) < CONNECTIONS:
                try:
                    link, again = stack.enter_context(_asked(address, key, "tcp", secret, tls))
                except Unavailable:  # it gives weights to as many as it can
                    break
                if again.digests != weights.digests:
                    raise Unavailable("its weights have just changed")
                links.append(link)
            with ThreadPoolExecutor(len(links), "weights-come") as pool:
                coming = [
                    pool.submit(self._take, link, weights, SendFrom(first + i, len(links)))
                    for i, link in enumerate(links)
                ]
                done, _ = wait(coming, return_when=FIRST_EXCEPTION)
                if failed := [each for each in done if each.exception() is not None]:
                    for link in links:
                        with contextlib.suppress(OSError):  # that of TLS would have the rest read as it is
                            socket.socket.shutdown(link, socket.SHUT_RDWR)
                    failed[0].result()
            return weights

    def _take(self, link: Link, weights: Weights, asked: SendFrom) -> None:
        """Raises Unavailable, EOFError, OSError."""
        _say(link, asked)
        flags = _waits_for_all(link)
        buffer = memoryview(bytearray(HELD))
        for number, (start, stop) in enumerate(self._places(weights, asked.first, asked.step)):
            digest, at = xxh3_64(), start
            while at < stop:
                part = buffer[: stop - at]
                _fill(link, part, flags)
                digest.update(part)
                while part:  # cheaper than to map new pages, and have them cleared
                    written = os.pwrite(self.fd, part, at)
                    at, part = at + written, part[written:]
            self._compare(asked.first + number * asked.step, digest.intdigest(), weights)

    def read(self, address: str, key: str, host: str, secret: str | None = None) -> Weights:
        """The same by Mooncake.

        Args:
            host: this one's address.
        """
        from penstock.transfer.mooncake_weights import spans_read

        with _asked(address, key, "mooncake", secret, None) as (link, weights):
            self._prepare(weights)
            with mmap.mmap(self.fd, weights.bytes) as memory:
                coming = spans_read(host, weights.lent, memory, self._places(weights, self.right, 1))
                with contextlib.closing(coming):
                    for span in coming:
                        link.sendall(b"\0")  # it goes on
                        self._compare(self.right, _digest(self.fd, *span), weights)
            return weights

    def receive(self, address: str, key: str, way: PairWay, secret: str | None = None) -> Weights:
        """The same by torch.distributed, straight to the memory."""
        from penstock.transfer.pair import gpu_of

        gpu = "" if self._device is None else gpu_of(self._device)
        for _ in range(2):
            try:
                with _asked(address, key, way, secret, None, gpu) as (link, weights):
                    self._prepare(weights)
                    self._receive(link, weights, address)
                    return weights
            except _IsThere as there:
                address = there.address
        raise Unavailable("its ranks know of one another, and none of the weights")

    def _receive(self, link: socket.socket, weights: Weights, address: str) -> None:
        """Raises Unavailable."""
        from penstock.transfer.pair import AHEAD, Digests, join

        memory = self._all()
        host = "127.0.0.1" if link.family == socket.AF_UNIX else str(link.getpeername()[0])
        _say(link, SendFrom(self.right, 1))
        digests = Digests()
        places = self._places(weights, self.right, 1)
        with contextlib.closing(join(weights.lent, host, _own_host(link), memory.device, link)) as pair:
            begun = list(islice(places, AHEAD))
            for start, stop in begun:
                pair.receive(memory[start:stop])
            for start, stop in chain(places, [(0, 0)] * len(begun)):
                block = pair.wait()
                if stop:
                    pair.receive(memory[start:stop])
                with pair.on_stream():
                    self._compare(self.right, digests.of(block), weights)

    def _places(self, weights: Weights, first: int, step: int) -> Iterator[tuple[int, int]]:
        """Spans of blocks, whose memory is in large pages when they are told. Not all at once: who gives does not wait
        for long."""
        for start, stop in _spans(weights, first, step):
            begin, end = -(-start // LARGE_PAGE) * LARGE_PAGE, stop // LARGE_PAGE * LARGE_PAGE
            if self._device is None and begin < end:
                make_large(self.fd, begin, end)
            yield start, stop

    def _all(self) -> Tensor:
        """The memory, to be written to."""
        import torch

        if self._memory is None:
            assert self.weights is not None
            if self._device is None:
                self._memory = torch.frombuffer(mmap.mmap(self.fd, self.weights.bytes), dtype=torch.uint8)
            else:
                try:
                    self._memory = torch.zeros(self.weights.bytes, dtype=torch.uint8, device=self._device)
                except torch.OutOfMemoryError as error:
                    raise MemoryError(str(error).splitlines()[0]) from None
        return self._memory

    def _compare(self, number: int, digest: int, weights: Weights) -> None:
        """Raises Unavailable."""
        if digest != weights.digests[number]:
            raise Unavailable(_corrupt(number, weights))
        with self._lock:
            self._beyond.add(number)
            while self.right in self._beyond:
                self._beyond.remove(self.right)
                self.right += 1

    def _prepare(self, weights: Weights) -> None:
        if self.weights is None or (self.weights.digests, self.weights.weights) != (weights.digests, weights.weights):
            self.close()
            if self._device is None:
                self.fd = os.memfd_create("penstock-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(self.fd, weights.bytes)
            self.weights, self.right = weights, 0
        self._beyond.clear()

    def take(self) -> int:
        """The memory's file descriptor, which is the caller's then; nobody can write to it any more."""
        self._check_whole()
        fd, self.fd = self.fd, -1
        self.close()
        seal(fd)
        return fd

    def take_from_device(self) -> Tensor:
        """The memory, which is the caller's then."""
        self._check_whole()
        memory = self._all()
        self.close()
        return memory

    def _check_whole(self) -> None:
        assert self.weights is not None
        assert self.right == len(self.weights.digests)

    def close(self) -> None:
        self._memory = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.weights, self.right = None, 0


def _digest(fd: int, start: int, stop: int) -> int:
    with mmap.mmap(fd, stop - start, mmap.MAP_SHARED | POPULATE, mmap.PROT_READ, offset=start) as block:
        return int(xxh3_64_intdigest(block))


# --- frames on sockets that are waited for


def _say(link: Link, message: WeightMessage | Challenge | Signed) -> None:
    body = encode(message)
    link.sendall(make_header(body) + body)


def _hear(link: Link, handshake: Handshake | None) -> WeightMessage:
    """Raises EOFError, OSError, ValueError, msgspec.DecodeError."""
    body = _body(link)
    said = body if handshake is None else handshake.open(body, 0)
    if said is None:
        raise ValueError("it challenges out of turn")
    message: WeightMessage = decode_weight_message(said)
    return message


def _body(link: Link) -> bytearray:
    head = bytearray(HEADER_BYTES)
    _fill(link, memoryview(head))
    header = read_header(head)
    if header.body > MAX_BODY or header.payload:
        raise ValueError(f"a frame of {header.body} and {header.payload} bytes")
    body = bytearray(header.body)
    _fill(link, memoryview(body))
    if not header.intact(body):
        raise ValueError("a frame that was damaged")
    return body


def _waits_for_all(link: Link) -> int:
    """Have the kernel wait until all has come that is asked for: fewer turns of this process, a fifth of its time.
    Returns the flags to read with."""
    if isinstance(link, ssl.SSLSocket):
        return 0
    link.settimeout(None)  # with one Python takes what there is
    seconds, micros = divmod(round(PATIENCE * 1e6), 10**6)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, micros))
    return socket.MSG_WAITALL


def _fill(link: Link, view: memoryview, flags: int = 0) -> None:
    done = 0
    while done < len(view):
        try:
            count = link.recv_into(view[done:], 0, flags)
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        if not count:
            raise EOFError("it hung up")
        done += count
