"""An engine's weight manager: from which running engines its weights may come, and to whom it gives them (HFX, 3.4)."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec import structs
from torch import Tensor

from penstock.core.device import DeviceModel
from penstock.core.errors import Unavailable
from penstock.core.wire.codec import encode
from penstock.core.wire.rank import Gives, WeightSources
from penstock.core.wire.weights import PairWay, Way, Weights, decode_weight_message
from penstock.nn import native
from penstock.nn.image import DeviceImage, Image, mapped
from penstock.transfer.pair import gpu_of
from penstock.transfer.tls import TLS
from penstock.transfer.weights import Landing, WeightServer, ask_to_map, check, digests, digests_on_device

log = logging.getLogger("penstock.weights")
DIGESTS = 4.0  # seconds to wait for digests of weights that were just loaded
LOOK = 0.02  # seconds between two looks for a file
LENT = 5.0  # seconds in which who is being given weights of a device has to do with what it has


@dataclass(frozen=True, slots=True)
class Source:
    """An engine that may have the weights.

    Attributes:
        address: "unix:/path" of one of this host, else "tcp:host:port".
    """

    name: str
    address: str

    @property
    def here(self) -> bool:
        return self.address.startswith("unix:")


class Neighbours:
    """Engines that may have the weights, as they are known when one asks: first those of this host.

    Args:
        own: address of the engine that asks.
        sockets: pattern of the paths of those of this host, of which only this user's are asked.
        givers: the file in which a launcher keeps those of other hosts, name -> address; None without other hosts.
        within: seconds in which it comes, where it may be on its way.
    """

    def __init__(self, own: str, sockets: str, givers: Path | None = None, within: float = 0.0) -> None:
        self._own, self._sockets, self._givers = own, sockets, givers
        self._by = time.monotonic() + within

    def __iter__(self) -> Iterator[Source]:
        for path in sorted(glob(self._sockets)):
            if f"unix:{path}" != self._own and _is_ours(path):
                yield Source(Path(path).name.partition(".")[0], f"unix:{path}")
        if self._givers is not None:
            while not self._givers.exists() and time.monotonic() < self._by:
                time.sleep(LOOK)
            if self._givers.exists():
                yield from (Source(name, where) for name, where in json.loads(self._givers.read_text()).items())


class Offer:
    """An image, as `transfer.weights.Given`."""

    def __init__(self, image: Image | DeviceImage, device: DeviceModel | None, is_current: Callable[[], bool]) -> None:
        self.image, self.device = image, image.device
        self.fd, self.start, self.address = None, 0, 0
        if isinstance(image, Image):
            self.fd, self.start, self.address = image.fd, image.start, image.memory.data_ptr()
        self.gpu = "" if image.device.type == "cpu" else gpu_of(image.device)
        self._is_current = is_current
        self.measured = device
        self._lent, self._settled = 0, threading.Condition()
        self._known, self._closed = threading.Event(), threading.Event()
        self._learning: threading.Thread | None = None
        if image.digests:
            self._known.set()
        elif isinstance(image, Image):
            self._learning = threading.Thread(target=self._learn, name="weight-digests", daemon=True)
            self._learning.start()
        else:  # at once: what a thread does with a device may end the capture of a CUDA graph
            image.digests = digests_on_device(image.block, image.bytes)
            self._known.set()

    def _learn(self) -> None:
        assert isinstance(self.image, Image)
        found = digests(_bytes(self.image.memory), self._closed)
        if found is not None:
            self.image.digests = found
        self._known.set()

    def close(self) -> None:
        """Nothing is given any more. An interpreter that ends while a thread of it works may abort its process."""
        self._closed.set()
        if self._learning is not None:
            self._learning.join()
        if self.fd is None:  # its memory is wanted for something else
            with self._settled:
                self._settled.wait_for(lambda: not self._lent, LENT)

    @contextlib.contextmanager
    def lending(self) -> Iterator[Callable[[int, int], Tensor]]:
        def block(start: int, stop: int) -> Tensor:
            if self._closed.is_set():
                raise Unavailable("it gives these weights no more")
            return self.image.block(start, stop)

        with self._settled:
            self._lent += 1
        try:
            yield block
        finally:
            with self._settled:
                self._lent -= 1
                self._settled.notify_all()

    def describe(self) -> Weights:
        if not self._is_current():
            raise Unavailable("its checkpoint has changed since it was loaded")
        if not self._known.wait(DIGESTS) or not self.image.digests:
            raise Unavailable("the digests of its weights are not known yet")
        return structs.replace(_described(self.image), device=self.measured, threads=native.threads())


class WeightManager:
    """`nn.image.Peers`, and what such a peer has to be.

    Args:
        addresses: where others are given this engine's weights, as `WeightServer` has them; of a rank other than 0
            those that rank 0 tells them of.
        sources: in the order in which they are asked; looked at anew each time.
        secret: of the deployment.
        tls: arguments of `TLS`; None without.
        mooncake: this host's address for Mooncake to read at, before TCP is tried; "" without it.
        pass_on: takes what is to be given, for another process to give it, and where this one gives it by
            torch.distributed; None where this one does all.
        pair: the way by torch.distributed, which is tried first; "" without it.

    Attributes:
        place: what weights are loaded to.
        device: what an engine of this host has measured that it got its weights from, with as many threads.
        told: what it was made of by `of`; the other ranks of its engine make theirs of that.
        is_current: whether the files of the weights are those that were loaded, which their key does not say: it is of
            the first bytes of every tensor. Others are given none where they are not.

    Raises:
        ConfigError: certificates that cannot be used.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        sources: Iterable[Source] = (),
        secret: str | None = None,
        tls: Mapping[str, Any] | None = None,
        mooncake: str = "",
        pass_on: Callable[[Image | DeviceImage, Sequence[str]], None] | None = None,
        pair: PairWay | Literal[""] = "",
    ) -> None:
        self.place = torch.device("cpu")
        self.device: DeviceModel | None = None
        self.told: WeightSources | None = None
        self.is_current: Callable[[], bool] = lambda: True
        self._pass_on = pass_on
        self._mooncake = mooncake if mooncake and _has_mooncake() else ""
        self._addresses, self._sources, self._secret = addresses, sources, secret
        self._tls = None if tls is None else TLS(**tls)
        self._server: WeightServer | None = None
        self._offers: dict[str, Offer] = {}
        self._pair, self._there = pair, dict[str, list[str]]()

    @classmethod
    def of(
        cls,
        told: WeightSources,
        addresses: Sequence[str] = (),
        pass_on: Callable[[Image | DeviceImage, Sequence[str]], None] | None = None,
    ) -> WeightManager:
        """Raises ConfigError as the class does."""
        givers = None if told.givers is None else Path(told.givers)
        neighbours = Neighbours(told.own, told.sockets, givers, told.within)
        manager = cls(addresses, neighbours, told.secret, told.tls, told.mooncake, pass_on, told.pair)
        manager.told = told
        return manager

    # --- to get

    @property
    def maps(self) -> bool:
        return self.place.type == "cpu"

    def by_pair(self, key: str) -> Iterator[Image | DeviceImage]:
        if not self._pair:
            return
        landing = Landing(None if self.maps else self.place)
        try:
            for source in self._sources:
                try:
                    weights = landing.receive(source.address, key, self._pair, self._secret)
                    image = self._landed(key, weights, landing, source.name)
                except (Unavailable, OSError, MemoryError) as error:
                    _tell(source, error, self._pair)
                    continue
                image.way = self._pair
                yield image
        finally:
            landing.close()

    def _landed(self, key: str, weights: Weights, landing: Landing, giver: str) -> Image | DeviceImage:
        if self.maps:
            return _image(key, weights, landing.take(), 0, giver)
        image = DeviceImage(key, weights.weights, weights.bytes, [(0, landing.take_from_device())])
        image.digests, image.giver = weights.digests, giver
        return image

    def here(self, key: str) -> Iterator[Image]:
        for source in self._sources:
            if source.here and self.maps:
                try:
                    weights, fd = ask_to_map(source.address, key)
                    image = _image(key, weights, fd, weights.start, source.name)
                    check(_bytes(image.memory), weights)
                except (Unavailable, OSError) as error:
                    _tell(source, error, "map")
                    continue
                if weights.threads == native.threads():
                    self.device = weights.device
                yield image

    def elsewhere(self, key: str) -> Iterator[Image]:
        landing = Landing()
        try:
            for source in self._sources:
                for way in () if source.here or not self.maps else self._ways:
                    try:
                        if way == "mooncake":
                            weights = landing.read(source.address, key, self._mooncake, self._secret)
                        else:
                            weights = landing.pull(source.address, key, self._secret, self._tls)
                        image = _image(key, weights, landing.take(), 0, source.name)
                    except (Unavailable, OSError, MemoryError) as error:
                        _tell(source, error, way)
                        continue
                    image.way = way
                    yield image
                    break
        finally:
            landing.close()

    @property
    def _ways(self) -> tuple[Way, ...]:
        return ("mooncake", "tcp") if self._mooncake else ("tcp",)

    # --- to give

    def give(self, image: Image | DeviceImage | None) -> None:
        """Give this from now on, beside what has other keys; None ends all giving. From any thread."""
        if image is None:
            self._there.clear()
            while self._offers:
                self._offers.popitem()[1].close()
            return
        if self._pass_on is None or self._pair:
            self._offers[image.key] = Offer(image, self.device, self._is_current)
        if self._pass_on is not None:
            if self._pair and self._server is None:
                self.serve(None)
            self._pass_on(image, [] if self._server is None else self._server.addresses)

    def give_there(self, key: str, addresses: Sequence[str]) -> None:
        """Another rank of this engine gives these weights by torch.distributed. From any thread."""
        self._there[key] = list(addresses)

    def _is_current(self) -> bool:
        return self.is_current()  # which may be known later than the weights of another rank

    def serve(self, device: DeviceModel | None) -> str:
        """Begin to give. Returns the address for other hosts, "" without one. Raises ConfigError.

        Args:
            device: what was measured.
        """
        self.device = device
        for offer in self._offers.values():
            offer.measured = device
        self._server = WeightServer(
            self._addresses, self._offers, self._secret, self._tls, self._mooncake, self._there, self._pair
        )
        return next((address for address in self._server.addresses if address.startswith("tcp:")), "")

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.give(None)


def _has_mooncake() -> bool:
    from penstock.transfer.mooncake import missing

    if why := missing():
        log.warning("weights come over TCP alone: %s", why)
    return not why


def _is_ours(path: str) -> bool:
    try:
        return os.stat(path).st_uid == os.geteuid()
    except OSError:  # it has just ended
        return False


def pass_to_rank_0(link: socket.socket, image: Image | DeviceImage, at: Sequence[str]) -> None:
    """A rank's weights, for rank 0 to give them beside its own, or to say where they are. Raises OSError."""
    told = [encode(Gives(image.key, isinstance(image, Image), list(at)))]
    if isinstance(image, DeviceImage):
        socket.send_fds(link, told, [])
        return
    with os.fdopen(os.memfd_create("penstock-weights", os.MFD_CLOEXEC), "wb") as file:
        file.write(encode(_described(image)))
        file.flush()
        socket.send_fds(link, told, [image.fd, file.fileno()])


def passed(key: str, fds: Sequence[int]) -> Image:
    """What came with a `Gives`; its file descriptors are the image's, or closed. Raises OSError."""
    if len(fds) != 2:  # the system leaves out those that this process has no room for
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    fd, described = fds
    with os.fdopen(described, "rb") as file:
        file.seek(0)
        weights = decode_weight_message(file.read())
    return _image(key, weights, fd, weights.start, "", present=False)


def _described(image: Image | DeviceImage) -> Weights:
    return Weights(
        dict(image.weights), image.bytes, image.start if isinstance(image, Image) else 0, list(image.digests)
    )


def _image(key: str, weights: Weights, fd: int, start: int, giver: str, *, present: bool = True) -> Image:
    """The file descriptor is the image's, or closed. Raises OSError."""
    try:
        memory = mapped(fd, start, weights.bytes, present=present)
    except BaseException:
        os.close(fd)
        raise
    image = Image(key, weights.weights, fd, start, memory)
    image.digests, image.giver = weights.digests, giver
    return image


def _bytes(memory: Tensor) -> memoryview:
    return memory.numpy().data


def _tell(source: Source, error: Exception, way: Way) -> None:
    by = {"mooncake": " by Mooncake", "gloo": " by gloo", "nccl": " by NCCL"}.get(way, "")
    log.warning("weights do not come from %s%s, others are asked: %s", source.name, by, error)
