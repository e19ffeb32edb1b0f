"""A request's images and videos, from their URLs to what a model takes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeAlias

from penstock.core.errors import InvalidRequest, Overloaded, PromptTooLong
from penstock.core.request import MediaKind, MediaSpan
from penstock.media.limits import MediaLimits
from penstock.media.processor import AnyProcessor, Made, Refused
from penstock.media.prompt import MediaPart, Prompt
from penstock.media.sources import fetch, read_data
from penstock.media.workers import Worker

Loaded: TypeAlias = "tuple[Made, bytes]"  # an image as a model takes it, and the file that it came as
WORKERS = 2
FETCHES = 8
MOST_WAITING = 256 << 20  # bytes of images and videos that are fetched and decoded, or wait for it


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def _refusal(part: MediaPart, why: Refused) -> InvalidRequest:
    what = "the image" if part.kind == "image" else "the video"
    return InvalidRequest(f"{part.field}: {what} {why}", part.field)


class MediaLoader:
    """For one event loop; all that takes time is done elsewhere."""

    def __init__(self, processor: AnyProcessor, limits: MediaLimits) -> None:
        self.processor, self.limits = processor, limits
        self._waiting = 0
        self._fetchers = ThreadPoolExecutor(FETCHES, "media-fetch")
        self._threads = ThreadPoolExecutor(WORKERS, "media")
        self._all = [Worker() for _ in range(WORKERS)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._all:
            self._idle.put(worker)

    async def load(self, parts: Sequence[MediaPart]) -> list[Loaded]:
        """
        Raises:
            InvalidRequest: naming the part, and what is wrong with it.
            Overloaded: too many are waited for already.
        """
        limits = self.limits
        if len(parts) > limits.count:
            field = parts[limits.count].field
            problem = f"{len(parts)} images and videos, at most {limits.count} are allowed (--max-media-count)"
            raise InvalidRequest(f"{field}: {problem}", field)
        share = sum(len(part.url) if _is_data(part.url) else limits.bytes for part in parts)
        if self._waiting and self._waiting + share > MOST_WAITING:
            problem = f"{self._waiting} bytes of images wait to be decoded, at most {MOST_WAITING} are allowed"
            raise Overloaded(f"the queue is full: {problem}", retry_after=1.0)
        self._waiting += share
        try:
            alone = sum(part.kind == "image" for part in parts) == 1
            loading = [asyncio.ensure_future(self._one(part, alone)) for part in parts]
            try:
                return await asyncio.gather(*loading)
            finally:
                for one in loading:
                    one.cancel()
        finally:
            self._waiting -= share

    async def _one(self, part: MediaPart, alone: bool) -> Loaded:
        loop = asyncio.get_running_loop()
        try:
            data = await loop.run_in_executor(self._fetchers, self._read, part)
            return await loop.run_in_executor(self._threads, self._make, part.kind, data, alone), data
        except Refused as why:
            raise _refusal(part, why) from None

    def load_here(self, parts: Sequence[MediaPart]) -> list[Loaded]:
        """One after the other, for a caller who has no event loop and sets no bounds for himself. Raises
        InvalidRequest."""
        alone = sum(part.kind == "image" for part in parts) == 1
        made = []
        for part in parts:
            try:
                data = self._read(part)
                made.append((self._make(part.kind, data, alone), data))
            except Refused as why:
                raise _refusal(part, why) from None
        return made

    def _read(self, part: MediaPart) -> bytes:
        if part.data is not None:
            return part.data
        return read_data(part.url, self.limits) if _is_data(part.url) else fetch(part.url, self.limits)

    def _make(self, kind: MediaKind, data: bytes, alone: bool) -> Made:
        worker = self._idle.get()
        try:
            return worker.make(kind, data, self.processor, self.limits, alone=alone)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        for pool in (self._fetchers, self._threads):
            pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._all:
            worker.close()

    def places(self, tokens: Sequence[int]) -> list[tuple[int, MediaKind]]:
        """Where a chat template has written that there is an image or a video."""
        kinds: dict[int, MediaKind] = {self.processor.image_token: "image"}
        if self.processor.video_token is not None:
            kinds[self.processor.video_token] = "video"
        return [(place, kinds[token]) for place, token in enumerate(tokens) if token in kinds]

    def placed(self, tokens: Sequence[int], loaded: Sequence[Loaded], most: int, field: str = "messages") -> Prompt:
        """A prompt in which as many tokens stand for each image as it has, where the chat template wrote one.

        Args:
            most: tokens of a sequence.
            field: where the prompt came.

        Raises:
            InvalidRequest: the template has not written one for each, or the text has some of its own.
            PromptTooLong: with the images it is longer than that.
        """
        made = [one for one, _ in loaded]
        found = self.places(tokens)
        if [kind for _, kind in found] != [one.kind for one in made]:
            raise InvalidRequest(
                f"{field}: the prompt has {len(found)} places for images and videos, the request brings {len(made)}; "
                "allowed is one for each, in the same order, and no text that reads as one",
                field,
            )
        total = len(tokens) - len(made) + sum(one.length for one in made)
        if total >= most:
            raise PromptTooLong.of(total, most)
        result: list[int] = []
        spans: list[MediaSpan] = []
        known: dict[bytes, bytes] = {}  # so that what comes twice is held once
        pixels: list[bytes] = []
        done = 0
        for (place, _), one in zip(found, made, strict=True):
            result += tokens[done:place]
            spans.append(
                MediaSpan(len(result), one.length, one.digest, one.kind, one.grid, one.interval, one.shape, one.source)
            )
            pixels.append(known.setdefault(one.digest, one.pixels))
            result += [tokens[place]] * one.length
            done = place + 1
        return Prompt([*result, *tokens[done:]], tuple(spans), tuple(pixels), tuple(data for _, data in loaded))
