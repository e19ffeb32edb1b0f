"""A model's weights as one piece of memory, each at the beginning of a page: what is kept on disk, and what engines of
a deployment give to one another.

A process that is given the file behind it maps it, and has the weights without a copy. Nothing is written to it after a
model was loaded.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from penstock.core.mappings import LARGE_PAGE, is_large, make_large, map_file, remove
from penstock.core.memory import seal, total_memory
from penstock.nn.bounded_logits import BoundedLogits, can_bound
from penstock.nn.config import DTYPES
from penstock.nn.models.decoder import Decoder
from penstock.nn.packed import PackedWeight

if TYPE_CHECKING:
    from penstock.core.wire.weights import Way

PAGE = 4096
OF_IMAGES = {**DTYPES, "uint8": torch.uint8, "int8": torch.int8, "int32": torch.int32}
NAMES = {dtype: name for name, dtype in OF_IMAGES.items()}
HEAD = "lm_head."  # there also when config.json says that embeddings are the head
BOUNDED = "bounded_logits."  # there where they can be computed with

Placed = Mapping[str, tuple[str, list[int], int]]  # name -> its dtype, its shape, and its first byte


class Image:
    """
    Args:
        key: names the weights by everything that they are made from; see `identity.image_key`.
        fd: of the file; owned.
        start: of the first weight, in the file.
        memory: all weights, mapped; [bytes] uint8.

    Attributes:
        digests: of its blocks, where they are known; see `transfer.weights`.
        giver: the peer that gave it; "" where none did.
        way: by which it came from there.
    """

    def __init__(self, key: str, weights: Placed, fd: int, start: int, memory: Tensor) -> None:
        self.key, self.weights, self.fd, self.start, self.memory = key, weights, fd, start, memory
        self.digests: Sequence[int] = ()
        self.giver = ""
        self.way: Way = "map"
        self.close = weakref.finalize(self, os.close, fd)  # mappings stay

    @property
    def bytes(self) -> int:
        return self.memory.nbytes

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def block(self, start: int, stop: int) -> Tensor:
        """Bytes [start, stop)."""
        return self.memory[start:stop]

    def fill(self, model: Decoder) -> None:
        """Give a model on "meta" its weights. Raises ValueError, with nothing changed, unless they are the model's."""
        adopt(model, self.weights, self.memory)


class DeviceImage:
    """Weights in a device's memory, which no other process maps; placed as they would be in one piece.

    Args:
        key, weights: as of an `Image`.
        size: bytes of all, with what is between them.
        memory: first byte of each piece, and the piece, [bytes] uint8; in ascending order.

    Attributes:
        digests, giver, way: as of an `Image`.
    """

    def __init__(self, key: str, weights: Placed, size: int, memory: Sequence[tuple[int, Tensor]]) -> None:
        self.key, self.weights, self.bytes, self.memory = key, weights, size, memory
        self.digests: Sequence[int] = ()
        self.giver = ""
        self.way: Way = "nccl"

    @classmethod
    def of(cls, key: str, model: Decoder) -> DeviceImage:
        """Of a model that is loaded; waits until it is."""
        weights, memory, end = {}, [], 0
        for name, tensor in parts(model).items():
            weights[name] = NAMES[tensor.dtype], list(tensor.shape), end
            memory.append((end, tensor.detach().contiguous().view(-1).view(torch.uint8)))
            end += padded(max(1, tensor.nbytes))
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # others read it on streams of their own
        return cls(key, weights, end, memory)

    @property
    def device(self) -> torch.device:
        return self.memory[0][1].device

    def block(self, start: int, stop: int) -> Tensor:
        """Bytes [start, stop), zeros between weights."""
        if len(self.memory) == 1:
            return self.memory[0][1][start:stop]
        block = torch.zeros(stop - start, dtype=torch.uint8, device=self.device)
        for first, piece in self.memory:
            begin, end = max(start, first), min(stop, first + len(piece))
            if begin < end:
                block[begin - start : end - start] = piece[begin - first : end - first]
        return block

    def fill(self, model: Decoder) -> None:
        """As of an `Image`, with what is in one piece."""
        ((_, memory),) = self.memory
        adopt(model, self.weights, memory)


class Peers(Protocol):
    """Running engines with weights to give. What they give is checked; who fails is passed over, and logged."""

    @property
    def maps(self) -> bool:
        """Whether what is loaded is to be in memory that processes map; else it is in the device's."""

    def by_pair(self, key: str) -> Iterator[Image | DeviceImage]:
        """Of whom a process group is had with, one after the other."""

    def here(self, key: str) -> Iterator[Image]:
        """The same, mapped, of this host; of none where nothing is to be mapped."""

    def elsewhere(self, key: str) -> Iterator[Image]:
        """The same, over the network, of other hosts."""


class Arena:
    """Memory for a model that is about to be loaded, which becomes an image. In large pages, where that can be."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("penstock-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._memory = mapped(self._fd, 0, total_memory(), writable=True, present=False)  # of addresses, so far
        self._end = self._size = 0
        self._taken: dict[int, int] = {}  # address -> first byte
        self.is_large = True

    def take(self, like: Tensor) -> Tensor:
        """Zeros. Raises OSError or MemoryError where there is no room."""
        first, last = self._end, self._end + padded(max(1, like.nbytes))
        if last > self._memory.nbytes:
            raise MemoryError(f"weights of {last} bytes and more")
        if last > self._size:
            size = -(-last // LARGE_PAGE) * LARGE_PAGE
            os.ftruncate(self._fd, size)
            self.is_large = self.is_large and make_large(self._fd, self._size, size)
            self._size = size
        self._end = last
        tensor = self._memory[first : first + like.nbytes].view(like.dtype).view(like.shape)
        self._taken[tensor.data_ptr()] = first
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """It is not needed, and takes no memory any more."""
        del self._taken[tensor.data_ptr()]
        remove(tensor.data_ptr(), padded(tensor.nbytes))

    def image(self, key: str, model: Decoder) -> Image:
        """Of a model all of whose weights are in it. It takes no more."""
        weights = {}
        for name, tensor in parts(model).items():
            weights[name] = NAMES[tensor.dtype], list(tensor.shape), self._taken[tensor.data_ptr()]
        return self.sealed(key, weights)

    def sealed(self, key: str, weights: Placed) -> Image:
        """Of weights that lie in it like this. It takes no more."""
        seal(self._fd)
        return Image(key, weights, os.dup(self._fd), 0, mapped(self._fd, 0, self._end, present=False))


def parts(model: Decoder) -> dict[str, Tensor]:
    """Everything of a model that takes long to be made, by name."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    if (bounded := model.bounded_logits) is not None:
        found |= {BOUNDED + "codes": bounded.codes.memory, BOUNDED + "bounds": bounded.bounds}
    return found


def adopt(model: Decoder, weights: Placed, memory: Tensor) -> None:
    """Give a model on "meta" its weights. Raises ValueError, with nothing changed, unless they are the model's.

    Args:
        memory: in which they lie; it is not written to.
    """
    tied = model.lm_head is None
    if tied and any(name.startswith(HEAD) for name in weights):
        model.untie()
    try:
        values = _matched(model, weights, memory)
    except (ValueError, KeyError, TypeError):
        if tied:
            model.lm_head = None
        raise
    for name in list(dict(model.named_parameters())):
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(values[name], requires_grad=False))
    if BOUNDED + "codes" not in values:
        return
    weight = model.head.weight
    if isinstance(weight, PackedWeight) and can_bound(weight.shape[1]):
        model.bounded_logits = BoundedLogits(weight, values[BOUNDED + "codes"], values[BOUNDED + "bounds"])


def _matched(model: Decoder, weights: Placed, memory: Tensor) -> dict[str, Tensor]:
    """Views of a memory. Raises ValueError, KeyError or TypeError."""
    places: dict[str, Tensor] = dict(model.named_parameters())
    bounded = {name for name in weights if name.startswith(BOUNDED)}
    if weights.keys() - bounded != places.keys():
        raise ValueError("it holds other weights")
    if bounded and model.shard.is_last and isinstance(head := model.head.weight, PackedWeight):
        places |= zip((BOUNDED + "codes", BOUNDED + "bounds"), BoundedLogits.like(head), strict=True)
    found = {}
    for name, place in places.items():
        dtype, shape, offset = weights[name]
        if (dtype, list(shape)) != (NAMES[place.dtype], list(place.shape)):
            raise ValueError(f"{name} is {list(shape)} of {dtype}")
        if offset % PAGE or not 0 <= offset <= memory.nbytes - place.nbytes:
            raise ValueError(f"{name} cannot be where it should be")
        found[name] = memory[offset : offset + place.nbytes].view(place.dtype).view(place.shape)
    return found


def in_large_pages(image: Image) -> Image:
    """The same, copied where the system keeps its file in small pages and could keep it in large ones."""
    memory = image.memory
    if is_large(memory.data_ptr(), memory.nbytes):
        return image
    copy = (arena := Arena()).take(memory)
    if not arena.is_large:
        return image
    copy.copy_(memory)
    return arena.sealed(image.key, image.weights)


def mapped(fd: int, start: int, size: int, *, writable: bool = False, present: bool = True) -> Tensor:
    """Bytes of a file, see `mappings.map_file`. Raises OSError.

    Args:
        present: at once: the first step must not wait for pages one by one.
    """
    return torch.frombuffer(map_file(fd, start, size, writable=writable, present=present), dtype=torch.uint8)


def padded(size: int) -> int:
    return -(-size // PAGE) * PAGE
