"""What a model makes of images, kept for the steps that need it."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.plan import Encode, StepPlan
from penstock.nn.batch import Batch, to_device
from penstock.nn.models.decoder import Decoder


class MediaEmbeddings:
    """The embeddings of images and videos, by their digest: those that plans say (`sched.local.encodes`).

    Each is computed by itself, and is the same whatever else a step has. All ranks of a model are given the same plans,
    and so keep the same.

    Attributes:
        looked: how many were computed; `brought`: how many other instances have made.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, Tensor] = {}
        self.looked = self.brought = 0

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        self._kept.clear()

    def get(self, digest: bytes) -> Tensor | None:
        """[tokens, hidden], of what was not forgotten."""
        return self._kept.get(digest)

    def follow(self, model: Decoder, plan: StepPlan) -> None:
        """Let go of what a plan says, and make what it is to look at."""
        for digest in plan.forgotten:
            self._kept.pop(digest, None)
        for encode in plan.encodes:
            if encode.span.digest not in self._kept:
                self._kept[encode.span.digest] = self._of(model, encode)

    def wanted(self, plan: StepPlan) -> dict[bytes, bytes]:
        """See `StepResult.embeddings`."""
        digests = [encode.span.digest for encode in plan.encodes if encode.wanted]
        return {digest: self._kept[digest].cpu().contiguous().view(torch.uint8).numpy().tobytes() for digest in digests}

    def _of(self, model: Decoder, encode: Encode) -> Tensor:
        """[length, hidden]."""
        span, hidden = encode.span, model.config.hidden_size
        if encode.made:
            self.brought += 1
            made = torch.frombuffer(bytearray(encode.made), dtype=model.dtype).view(span.length, hidden)
            return made.to(model.device)
        self.looked += 1
        image = torch.frombuffer(bytearray(encode.pixels), dtype=torch.uint8).view(*span.shape, 3)
        made = model.look_at(span, image.to(model.device))
        assert made.shape == (span.length, hidden)
        return made

    def seen(self, model: Decoder, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Of a step's rows those that stand for something seen, and what is to stand there; see `Batch`."""
        rows: list[int] = []
        parts: list[Tensor] = []
        for own, step in batch.media:
            end = step.start + len(step.tokens)
            for span in step.media:
                first, last = max(span.start, step.start), min(span.start + span.length, end)
                if first < last:
                    rows += range(own.start + first - step.start, own.start + last - step.start)
                    parts.append(self._kept[span.digest][first - span.start : last - span.start])
        return (to_device(rows, model.device), torch.cat(parts)) if rows else None
