"""Ranks of data-parallel groups attend for each other, over long contexts (xLLM, section 4.4.3; native/helpers.h).

All groups wait in every layer with experts for the slowest. Of a long context a group posts pieces of which another
one, its helper, has copies; the helper takes them when it would only wait, and the group computes what nobody has
taken. A piece is HELPED_BLOCKS blocks, as attention sums them up in any case, so no bit depends on who computed it, nor
on whether copies came.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.plan import HELPED_BLOCKS, Helped
from penstock.nn.batch import Batch
from penstock.nn.kv import LayerKV
from penstock.nn.native import Cache, cached, dense_rows, of_layer, value
from penstock.nn.ranks import PAGE, SharedMemoryRanks

FEW_ROWS = 8  # of a sequence that decodes, with its drafts


class _Part(ctypes.Structure):
    """`penstock::Part` (helpers.h)."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("span", "first", "end", "helper")),
        ("blocks", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Places:
    """Of one rank among those of all groups that have the same layers and heads.

    Attributes:
        memory: that all share, zeros at first; `Helpers.bytes_for(count)` of it from `start` on are these ranks'.
        number: this rank's group, of `count`.
        ranks: those that share experts, of which group g's is g * stride + offset.
        words: of all groups: for each group, and each other one, how many tokens this one has copies of for that.
    """

    memory: mmap.mmap
    start: int
    number: int
    count: int
    ranks: SharedMemoryRanks
    stride: int
    offset: int
    words: memoryview


class Helpers:
    """This rank among those that help each other.

    Args:
        copies: of each layer that helps, in memory of this group.
        layers: the same layers of this rank's own cache.

    Attributes:
        seconds, tokens: of attention in such layers, and what it was over, with decodes alone and nobody to help.
        posted: times that there was something to help with; `helped`: pieces that others have computed for this rank.
    """

    def __init__(
        self, places: Places, copies: Sequence[LayerKV], layers: Sequence[LayerKV], dtype: torch.dtype
    ) -> None:
        self.seconds, self.tokens, self.posted, self.helped = 0.0, 0, 0, 0
        self._places, self._held = places, (copies, layers)
        self._numbers = {layer.values.data_ptr(): number for number, layer in enumerate(layers)}
        self._copies = (Cache * len(copies))(*(of_layer(layer, dtype) for layer in copies))
        address = ctypes.addressof(ctypes.c_char.from_buffer(places.memory, places.start))
        how = places.ranks.handle, places.number, places.count, places.stride, places.offset
        self._handle = value("penstock_helpers_open", "ppnnnnpn")(address, *how, addressof(self._copies), len(copies))
        self._calls = value("penstock_attention_with", "pnpnpnppnpnpfp")

    @staticmethod
    def bytes_for(count: int) -> int:
        """Of memory, in whole pages."""
        return -(-value("penstock_helpers_bytes", "n")(count) // PAGE) * PAGE

    def meet(self, *, wait: bool) -> None:
        """This rank has attended, and will meet those of all groups. Attend for others until they have, too.

        Args:
            wait: for these, where it has copies for any; else it only says so. Raises RankFailed.
        """
        own = self._places.number * self._places.count
        helps = wait and any(self._places.words[own : own + self._places.count])
        self._places.ranks.expect(value("penstock_helpers_pass", "pn")(self._handle, helps))

    def attend(
        self, parts: Sequence[tuple[int, Helped]], q: Tensor, cache: LayerKV, batch: Batch, scale: float
    ) -> Tensor | None:
        """As `Batch.together`, and to the bit as attention alone. Raises RankFailed.

        Args:
            parts: numbers of spans, and what others have copies of.
        """
        number = self._numbers.get(cache.values.data_ptr())
        if number is None or not cached(cache, q):
            return None
        began = time.perf_counter()
        q, layer = dense_rows(q), of_layer(cache, q.dtype)
        out = q.new_empty(*q.shape[:2], cache.value_dim)
        spans, ids = batch.places
        blocks = [(ctypes.c_int64 * len(part.blocks))(*part.blocks) for _, part in parts]
        posted = (_Part * len(parts))(
            *(
                _Part(span, part.first, part.first + len(part.blocks) // HELPED_BLOCKS, part.group, addressof(own))
                for (span, part), own in zip(parts, blocks, strict=True)
            )
        )
        helped = ctypes.c_int64()
        status = self._calls(
            self._handle,
            number,
            addressof(posted),
            len(parts),
            spans.data_ptr(),
            len(spans),
            ids.data_ptr(),
            addressof(layer),
            q.shape[1],
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            scale,
            addressof(helped),
        )
        self._places.ranks.expect(status)
        self.posted += len(parts) > 0
        self.helped += helped.value
        if not parts and all(span.rows <= FEW_ROWS for span in batch.spans):
            self.seconds += time.perf_counter() - began
            self.tokens += sum([span.length for span in batch.spans])
        return out
