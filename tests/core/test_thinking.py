"""Where an answer begins, by tokens, against the same said in another way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest
from penstock.core.sampling import SamplingParams
from penstock.core.thinking import Thinking

TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(
    start=st.lists(st.integers(0, 2), max_size=2), end=st.lists(st.integers(0, 2), min_size=1, max_size=2), out=TOKENS
)
def test_where_the_answer_begins(start: list[int], end: list[int], out: list[int]) -> None:
    thinking = Thinking(start=tuple(start), end=tuple(end))
    if out[: len(start)] != start:
        assert thinking.answer(out) == 0
    else:
        ends = (i for i in range(len(start) + len(end), len(out) + 1) if out[i - len(end) : i] == end)
        assert thinking.answer(out) == next(ends, None)
    assert (thinking.opening(out) is not None) == (len(out) < len(start) and start[: len(out)] == out)


@given(end=st.lists(st.integers(0, 3), min_size=1, max_size=3), budget=st.integers(0, 6), data=st.data())
def test_a_budget_is_kept(end: list[int], budget: int, data: st.DataObject) -> None:
    thinking = Thinking(start=(9,), end=tuple(end), budget=budget)
    out = [9]
    while (begin := thinking.answer(out)) is None:
        forced = thinking.forced(out)
        out.append(data.draw(st.integers(4, 8)) if forced is None else forced)
    assert begin == len(out) == 1 + budget + len(end)
    assert thinking.forced(out) is None


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        (1, "thinking: 1, allowed is an object with start, end and budget"),
        ({"end": [1], "x": 1}, "thinking: "),
        ({"end": []}, "thinking.end: "),
        ({"end": [-1]}, "thinking.end: "),
        ({"end": [1], "start": "a"}, "thinking.start: 'a', allowed is a list of 0 to 64 token ids"),
        ({"end": [1], "budget": -1}, "thinking.budget: -1"),
        ({"end": [1], "budget": True}, "thinking.budget: True"),
        ({"end": [1], "budget": 2**31}, "thinking.budget: 2147483648, allowed is a whole number from 0"),
    ],
)
def test_what_is_wrong_is_named(given_: object, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(thinking=given_)  # type: ignore[arg-type]
    assert str(caught.value).startswith(says)
    assert says.startswith(str(caught.value.field))


def test_it_may_be_an_object() -> None:
    found = SamplingParams(thinking={"end": [3.0], "budget": 4.0}).thinking  # type: ignore[arg-type]
    assert found == Thinking(end=(3,), budget=4)
