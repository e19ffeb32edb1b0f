"""What a model makes of images, kept for the steps that need it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.core.plan import Encode, StepPlan
from penstock.engine.executor.inline import Job, StepThread
from penstock.nn.batch import Batch, to_device
from penstock.nn.models.decoder import Decoder


@dataclass(slots=True)
class Looked:
    """What a model makes of an image beside steps.

    Attributes:
        embedding: [tokens, hidden]; None until it is there.
        data: its bytes, where they are wanted; `seconds`: that it took.
    """

    encode: Encode
    embedding: Tensor | None = None
    data: bytes | None = None
    seconds: float = 0.0


class LookingThread:
    """Looks at images beside steps, one after the other (dual stream; xLLM, section 3.3): in a thread, and on a
    device in a stream too. On a CPU the kernels' other threads are those of whose loop comes first.

    One thread gives, and another one takes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: StepThread[Looked] = StepThread()
        self._under_way: deque[Job[Looked]] = deque()
        self._lock = threading.Lock()  # what was given is in there

    def fileno(self) -> int:
        """Readable when something may be there to take."""
        return self._thread.fileno()

    def give(self, encode: Encode, look: Callable[[], Tensor]) -> Looked:
        """Look at something, after what was given before."""
        looked = Looked(encode)
        with self._lock:
            self._under_way.append(self._thread.give(lambda: self._look(looked, look)))
        return looked

    def take(self) -> list[Looked]:
        """What has ended. Raises what that raised."""
        taken: list[Looked] = []
        with self._lock:
            while self._under_way and self._under_way[0].done():
                taken.append(self._under_way.popleft().result())
        return taken

    def settle(self) -> None:
        """Return when nothing is under way. It can still be taken."""
        self._thread.settle()

    def drop(self) -> None:
        """Wait for what is under way, and take nothing of it."""
        self.settle()
        self._under_way.clear()

    def _look(self, looked: Looked, look: Callable[[], Tensor]) -> Looked:
        self._thread.bell.computing()  # tells of the one before
        if self._stream is not None:
            torch.cuda.set_device(self._device)
        began = time.perf_counter()
        with torch.inference_mode(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            made = look()
            if looked.encode.wanted:
                looked.data = _bytes_of(made)
        if self._stream is not None:
            self._stream.synchronize()
            made.record_stream(torch.cuda.default_stream(self._device))  # of steps, which read it
        looked.embedding, looked.seconds = made, time.perf_counter() - began
        return looked


class MediaEmbeddings:
    """The embeddings of images and videos, by their digest: those that plans say (`sched.local.encodes`).

    Each is computed by itself, and is the same whatever else a step has. All ranks of a model are given the same plans,
    and so keep the same.

    Args:
        thread: looks at what plans say is `beside` steps; None where none is.

    Attributes:
        looked: how many were computed; `brought`: how many other instances have made.
    """

    def __init__(self, thread: LookingThread | None = None) -> None:
        self.thread = thread
        self._kept: dict[bytes, Tensor | Looked] = {}
        self._took: dict[bytes, Callable[[], float]] = {}  # of the newest plan
        self.looked = self.brought = 0

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        self._kept.clear()

    def get(self, digest: bytes) -> Tensor | None:
        """[tokens, hidden], of what was not forgotten."""
        kept = self._kept.get(digest)
        return kept.embedding if isinstance(kept, Looked) else kept

    def follow(self, model: Decoder, plan: StepPlan) -> None:
        """Let go of what a plan says, and make what it is to look at, or begin to."""
        self._took.clear()
        for digest in plan.forgotten:
            self._kept.pop(digest, None)
        for encode in plan.encodes:
            digest = encode.span.digest
            if encode.beside:
                assert self.thread is not None
                assert digest not in self._kept
                self._kept[digest] = self.thread.give(encode, partial(self._of, model, encode))
            elif digest not in self._kept:
                self._kept[digest], took = _timed(model.device, partial(self._of, model, encode))
                if not encode.made:
                    self._took[digest] = took

    def wanted(self, plan: StepPlan) -> dict[bytes, bytes]:
        """See `StepResult.embeddings`."""
        digests = [encode.span.digest for encode in plan.encodes if encode.wanted and not encode.beside]
        return {digest: _bytes_of(self._there(digest)) for digest in digests}

    @property
    def encoding(self) -> dict[bytes, float]:
        """See `StepResult.encoding`; of the newest plan, and on a device once that is done."""
        return {digest: took() for digest, took in self._took.items()}

    def _there(self, digest: bytes) -> Tensor:
        made = self.get(digest)
        assert made is not None, "it is not there"
        return made

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
                    parts.append(self._there(span.digest)[first - span.start : last - span.start])
        return (to_device(rows, model.device), torch.cat(parts)) if rows else None


def _timed(device: torch.device, look: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], float]]:
    """What it makes, and what tells the seconds that this took."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        made = look()
        end.record()
        return made, partial(_between, begin, end)
    began = time.perf_counter()
    made = look()
    took = time.perf_counter() - began
    return made, lambda: took


def _between(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Seconds."""
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _bytes_of(made: Tensor) -> bytes:
    return made.cpu().contiguous().view(torch.uint8).numpy().tobytes()
