from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.outputs import Outputs
from penstock.core.errors import EngineFailure
from penstock.core.sampling import SamplingParams
from penstock.core.service_level import NO_LEVEL
from penstock.service.output import Delta, merge

pytestmark = pytest.mark.anyio


@given(st.lists(st.tuples(st.integers(0, 3), st.text(max_size=3), st.lists(st.integers(), max_size=3)), min_size=1))
def test_merging_keeps_every_outputs_text_and_tokens(parts: list[tuple[int, str, list[int]]]) -> None:
    merged = merge([Delta(index, text, list(tokens)) for index, text, tokens in parts])
    assert len({delta.index for delta in merged}) == len(merged)
    for delta in merged:
        assert delta.text == "".join(text for index, text, _ in parts if index == delta.index)
        assert delta.tokens == [token for index, _, tokens in parts if index == delta.index for token in tokens]
        assert delta.logprobs is None


def open_outputs(frontend: Any, prompts: int = 1, n: int = 1) -> Outputs:
    frontend.script = lambda generation: None
    of = {"request_id": "r", "model": "tiny", "arrival": 0.0}
    return Outputs(frontend, [[1]] * prompts, SamplingParams(n=n), level=NO_LEVEL, **cast(Any, of))


async def test_a_delta_never_waits_for_the_next(frontend: Any) -> None:
    with open_outputs(frontend) as outputs:
        (generation,) = frontend.submitted
        for word in ("a", "b"):
            generation.say(word)
            assert [delta.text for delta in await outputs.next()] == [word]
        generation.say("c")
        generation.say("d", finish="stop")
        (last,) = await outputs.next()
        assert (last.text, last.finish_reason) == ("cd", "stop")
        assert await outputs.next() == []
        assert await outputs.next() == []


async def test_several_prompts_share_one_stream(frontend: Any) -> None:
    with open_outputs(frontend, prompts=2, n=2) as outputs:
        first, second = frontend.submitted
        second.say("x", 1)
        assert [delta.index for delta in await outputs.next()] == [3]
        for generation in (first, second):
            for index in range(2):
                generation.say("y", index, finish="stop")
        assert [delta.index for delta in await outputs.whole()] == [0, 1, 2, 3]
        assert outputs.usage.completion_tokens == 5


async def test_a_failure_comes_after_what_came_before_it(frontend: Any) -> None:
    with open_outputs(frontend, prompts=2) as outputs:
        first, second = frontend.submitted
        second.say("x")
        first.fail(EngineFailure("dead"))
        assert [delta.text for delta in await outputs.next()] == ["x"]
        with pytest.raises(EngineFailure):
            await outputs.next()
    assert first.cancelled.is_set()
    assert second.cancelled.is_set()


async def test_leaving_lets_go_of_everything(frontend: Any) -> None:
    before = asyncio.all_tasks()
    with open_outputs(frontend, prompts=3) as outputs:
        waiting = asyncio.create_task(outputs.next())
        await asyncio.sleep(0)
        assert asyncio.all_tasks() - before == {waiting}  # nobody works for it but who asks
        waiting.cancel()
    assert all(generation.cancelled.is_set() for generation in frontend.submitted)
