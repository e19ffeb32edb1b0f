"""What a model makes of images: computed when the first of their tokens is, and kept as long as there is room."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from penstock.core.request import MediaSpan
from penstock.core.sizes import MEDIA_CACHE
from penstock.nn.batch import Batch, to_device
from penstock.nn.models.decoder import Decoder


class MediaEmbeddings:
    """The embeddings of images and videos that were looked at last, by their digest.

    A step whose tokens stand for some brings their pixels, so nothing has to be kept: what is not here is computed
    again, after a preemption or in the next chunk of a prompt. Each is computed by itself, and is the same whatever
    else the step has. All ranks of a model are given the same steps, and so keep the same.

    Args:
        most: bytes that are kept.

    Attributes:
        looked: how often something was computed; `found`: how often it was here.
    """

    def __init__(self, most: int = MEDIA_CACHE) -> None:
        self._most, self._bytes = most, 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.looked = self.found = 0

    def forget(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def seen(self, model: Decoder, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Of a step's rows those that stand for something seen, and what is to stand there; see `Batch`."""
        rows: list[int] = []
        parts: list[Tensor] = []
        for own, step in batch.media:
            if not step.pixels:
                continue
            pixels = dict(step.pixels)
            end = step.start + len(step.tokens)
            for span in step.media:
                first, last = max(span.start, step.start), min(span.start + span.length, end)
                if first < last and span.digest in pixels:
                    rows += range(own.start + first - step.start, own.start + last - step.start)
                    parts.append(self._of(model, span, pixels[span.digest])[first - span.start : last - span.start])
        return (to_device(rows, model.device), torch.cat(parts)) if rows else None

    def _of(self, model: Decoder, span: MediaSpan, pixels: bytes) -> Tensor:
        """[length, hidden]."""
        if (kept := self._kept.get(span.digest)) is not None:
            self._kept.move_to_end(span.digest)
            self.found += 1
            return kept
        if span.embedded:
            made = torch.frombuffer(bytearray(pixels), dtype=model.dtype).view(span.length, -1).to(model.device)
        else:
            self.looked += 1
            image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(*span.shape, 3)
            made = model.look_at(span, image.to(model.device))
        assert made.shape == (span.length, model.config.hidden_size)
        self._kept[span.digest] = made
        self._bytes += made.nbytes
        while self._bytes > self._most:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes
        return made

    def check(self) -> None:
        """Raise AssertionError unless what is kept is within its bounds."""
        assert self._bytes == sum(kept.nbytes for kept in self._kept.values()) <= self._most
