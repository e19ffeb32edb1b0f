"""The outputs of one HTTP request, which may have several prompts, as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.core.sampling import SamplingParams
from penstock.service.output import Delta, Usage

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Generation


class Outputs:
    """Generates for every prompt at once. Leaving its context cancels whatever still runs.

    An output's index is that of its prompt times `params.n`, plus its own.

    Args:
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
        priority: int | None,
        arrival: float,
    ) -> None:
        self._arrived: list[Delta] = []
        self._wake = asyncio.Event()
        self._generations: list[Generation] = []
        try:
            for i, prompt in enumerate(prompts):
                part_id = request_id if len(prompts) == 1 else f"{request_id}-{i}"
                self._generations.append(
                    frontend.submit(prompt, params, request_id=part_id, priority=priority or 0, arrival=arrival)
                )
        except BaseException:
            self._cancel()
            raise
        collectors = (self._collect(generation, i * params.n) for i, generation in enumerate(self._generations))
        self._end = asyncio.gather(*collectors)
        self._end.add_done_callback(self._ended)

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *error: object) -> None:
        self._cancel()
        self._end.cancel()

    async def next(self) -> list[Delta]:
        """What came since the last call, one delta per output; waits only when nothing did. [] is the end.

        Raises `EngineFailure` or `Unavailable`, after everything that came before the failure.
        """
        while not self._arrived:
            if self._end.done():
                self._end.result()
                return []
            self._wake.clear()
            await self._wake.wait()
        arrived, self._arrived = self._arrived, []
        return merge(arrived)

    async def whole(self) -> list[Delta]:
        """Every output in full, in order. Raises as `next` does."""
        await self._end
        return sorted(merge(self._arrived), key=lambda delta: delta.index)

    @property
    def usage(self) -> Usage:
        """Of all prompts together, so far."""
        used = [generation.usage for generation in self._generations]
        return Usage(
            prompt_tokens=sum(u.prompt_tokens for u in used),
            cached_tokens=sum(u.cached_tokens for u in used),
            completion_tokens=sum(u.completion_tokens for u in used),
        )

    async def _collect(self, generation: Generation, first_index: int) -> None:
        async for delta in generation:
            delta.index += first_index
            self._arrived.append(delta)
            self._wake.set()

    def _ended(self, end: asyncio.Future[list[None]]) -> None:
        if not end.cancelled():
            end.exception()  # asyncio would complain if nobody stayed to hear it
        self._wake.set()

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
