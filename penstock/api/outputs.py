"""The outputs of one HTTP request, which may have several prompts, as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.request import FinishReason
from penstock.core.sampling import SamplingParams
from penstock.core.service_level import ServiceLevel
from penstock.service.output import Delta, Usage, merge

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Generation


class Outputs:
    """Generates for every prompt at once. Leaving its context cancels whatever still runs.

    An output's index is that of its prompt times `params.n`, plus its own.

    Args:
        model: the name that the client called it by.
        arrival: when the request came, by the frontend's clock.
        cache_salt: cached prefixes are shared among requests with the same one.
        prompts_only: what is known of the prompts is all that is wanted, and what is generated is dropped.

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
        cache_salt: str = "",
        prompts_only: bool = False,
    ) -> None:
        self._offset = params.n
        self._prompts_only = prompts_only
        self._generations: list[Generation] = []
        self._error: Exception | None = None
        self._wake: asyncio.Future[None] | None = None
        self._fresh: list[int] = []  # those that have said something
        try:
            for i, prompt in enumerate(prompts):
                part_id = request_id if len(prompts) == 1 else f"{request_id}-{i}"
                self._generations.append(
                    frontend.submit(
                        prompt,
                        params,
                        request_id=part_id,
                        model=model,
                        level=level,
                        arrival=arrival,
                        cache_salt=cache_salt,
                    )
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
            completion_tokens=0 if self._prompts_only else sum(u.completion_tokens for u in used),
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
                    arrived += map(_of_prompt, deltas) if self._prompts_only else deltas
            except Exception as error:
                self._error = self._error or error
            if generation.over:
                self._running.discard(number)
        return arrived

    def _cancel(self) -> None:
        for generation in self._generations:
            generation.cancel()


def _of_prompt(delta: Delta) -> Delta:
    """What it says of the prompt, and whether that was all."""
    return Delta(
        delta.index,
        "",
        [],
        None if delta.logprobs is None else [],
        None if delta.finish_reason is None else FinishReason.LENGTH.value,
        prompt_logprobs=delta.prompt_logprobs,
    )
