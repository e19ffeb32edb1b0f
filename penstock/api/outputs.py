"""The outputs of one HTTP request, which may have several prompts, as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.sampling import SamplingParams
from penstock.core.service_level import ServiceLevel
from penstock.service.output import Delta, Usage

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Generation


class Outputs:
    """Generates for every prompt at once. Leaving its context cancels whatever still runs.

    An output's index is that of its prompt times `params.n`, plus its own.

    Args:
        model: the name that the client called it by.
        arrival: when the request came, by the frontend's clock.

    Raises what `Frontend.submit` raises; then nothing runs.
    """

    def __init__(
        self,
        frontend: Frontend,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        request_id: str,
        model: str,
        level: ServiceLevel,
        arrival: float,
    ) -> None:
        self._offset = params.n
        self._generations: list[Generation] = []
        self._error: Exception | None = None
        self._wake: asyncio.Future[None] | None = None
        self._fresh: list[int] = []  # those that have said something
        try:
            for i, prompt in enumerate(prompts):
                part_id = request_id if len(prompts) == 1 else f"{request_id}-{i}"
                self._generations.append(
                    frontend.submit(prompt, params, request_id=part_id, model=model, level=level, arrival=arrival)
                )
                self._generations[-1].listen(partial(self._hear, i))
        except BaseException:
            self._cancel()
            raise
        self._fresh += range(len(self._generations))
        self._running = set(self._fresh)

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *error: object) -> None:
        self._cancel()

    async def next(self) -> list[Delta]:
        """What came since the last call, one delta per output; waits only when nothing did. [] is the end.

        Raises `EngineFailure` or `Unavailable`, after everything that came before the failure.
        """
        while not (arrived := self._take()):
            if self._error is not None:
                raise self._error
            if not self._running:
                return []
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return merge(arrived)

    async def whole(self) -> list[Delta]:
        """Every output in full, in order. Raises as `next` does."""
        arrived: list[Delta] = []
        while deltas := await self.next():
            arrived += deltas
        return sorted(merge(arrived), key=lambda delta: delta.index)

    @property
    def usage(self) -> Usage:
        """Of all prompts together, so far."""
        used = [generation.usage for generation in self._generations]
        return Usage(
            prompt_tokens=sum(u.prompt_tokens for u in used),
            cached_tokens=sum(u.cached_tokens for u in used),
            completion_tokens=sum(u.completion_tokens for u in used),
        )

    def _hear(self, number: int) -> None:
        self._fresh.append(number)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _take(self) -> list[Delta]:
        arrived: list[Delta] = []
        fresh, self._fresh = self._fresh, []
        for number in dict.fromkeys(fresh):
            generation = self._generations[number]
            try:
                while deltas := generation.take():
                    for delta in deltas:
                        delta.index += number * self._offset
                    arrived += deltas
            except Exception as error:
                self._error = self._error or error
            if generation.over:
                self._running.discard(number)
        return arrived

    def _cancel(self) -> None:
        for generation in self._generations:
            generation.cancel()


def merge(deltas: list[Delta]) -> list[Delta]:
    """One delta per output, in the order of their first ones."""
    if len(deltas) == 1:
        return deltas
    by_output: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_output.setdefault(delta.index, []).append(delta)
    return [_joined(parts) for parts in by_output.values()]


def _joined(parts: list[Delta]) -> Delta:
    last = parts[-1]
    wants_logprobs = any(part.logprobs is not None for part in parts)
    return Delta(
        index=last.index,
        text="".join(part.text for part in parts),
        tokens=[token for part in parts for token in part.tokens],
        logprobs=[entry for part in parts for entry in part.logprobs or ()] if wants_logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
