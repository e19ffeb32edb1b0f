from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.sampling import SamplingParams
from penstock.text.assembler import TextAssembler
from penstock.text.tokenizer import Tokenizer

TEXT = "The dog sleeps; 你好 🙂 the fox does not."


def assembler(tokenizer: Tokenizer, **params: Any) -> TextAssembler:
    return TextAssembler(tokenizer, SamplingParams(**params))


@pytest.fixture(params=["byte_level", "llama"])
def tokenizer(loaded: dict[str, Tokenizer], request: pytest.FixtureRequest) -> Tokenizer:
    return loaded[request.param]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_without_stop_strings(tokenizer: Tokenizer) -> None:
    output = assembler(tokenizer)
    ids = ids_of(tokenizer, TEXT)
    texts = [output.push(ids[:5]), output.push([]), output.push(ids[5:], last=True)]
    assert "".join(texts) == output.text == TEXT
    assert output.consumed == len(ids)
    assert output.stop_match is None


@given(
    st.sets(st.integers(0, 60)),
    st.sampled_from(["dog", "好", "🙂 the", "T", "not.", "cat", "The dog s"]),
    st.booleans(),
)
def test_any_steps_give_the_same(loaded: dict[str, Tokenizer], cuts: set[int], stop: str, include: bool) -> None:
    for name in ("byte_level", "llama"):
        tokenizer = loaded[name]
        ids = ids_of(tokenizer, TEXT)
        output = assembler(tokenizer, stop=stop, include_stop_str_in_output=include)
        ends = sorted({cut for cut in cuts if cut < len(ids)} | {0, len(ids)})
        text = "".join(output.push(ids[start:end], last=end == len(ids)) for start, end in pairwise(ends))
        place = TEXT.find(stop)
        expected = TEXT if place < 0 else TEXT[: place + len(stop) * include]
        assert text == output.text == expected
        assert output.stop_match == (None if place < 0 else stop)
        one_by_one = assembler(tokenizer, stop=stop)
        for i, token in enumerate(ids):
            one_by_one.push([token], last=i == len(ids) - 1)
        assert output.consumed == one_by_one.consumed


def test_tokens_after_a_stop_string_are_not_consumed(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    before, after = ids_of(tokenizer, "The dog sleeps"), ids_of(tokenizer, "; the fox does not.")
    output = assembler(tokenizer, stop="sleeps")
    assert output.push(before + after) == "The dog "
    assert (output.consumed, output.stop_match) == (len(before), "sleeps")
    assert output.push(after, last=True) == ""
    assert output.consumed == len(before)


@pytest.mark.parametrize(
    ("params", "shown"),
    [
        ({}, "a b"),
        ({"skip_special_tokens": False}, "a b"),
        ({"include_stop_str_in_output": True}, "a b"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a b{eos}"),
    ],
)
def test_a_special_stop_token(tokenizer: Tokenizer, params: dict[str, Any], shown: str) -> None:
    eos = tokenizer.eos_id
    assert eos is not None
    output = assembler(tokenizer, **params)
    tokens = [*ids_of(tokenizer, "a b"), eos]
    assert output.push(tokens, last=True, stop_token=eos) == shown.format(eos=tokenizer.token_text(eos))
    assert output.consumed == len(tokens)


@pytest.mark.parametrize("include", [False, True])
def test_an_ordinary_stop_token(tokenizer: Tokenizer, include: bool) -> None:
    tokens = ids_of(tokenizer, "a b.")
    output = assembler(tokenizer, stop_token_ids=(tokens[-1],), include_stop_str_in_output=include)
    assert output.push(tokens, last=True, stop_token=tokens[-1]) == ("a b." if include else "a b")


def test_the_end_lets_go_of_what_was_held_back(tokenizer: Tokenizer) -> None:
    """Held by the stop string, by the detokenizer (half a character), and then found to be a stop string after all."""
    output = assembler(tokenizer, stop="bbb")
    assert output.push(ids_of(tokenizer, "a b")) == "a "
    assert output.push([], last=True) == "b"

    half = ids_of(tokenizer, "aꙮ")[:-1]
    output = assembler(tokenizer)
    assert output.push(half) == "a"
    assert output.push([], last=True) == tokenizer.decode(half)[1:]
    assert output.text.endswith("�")

    output = assembler(tokenizer, stop="�")
    assert output.push(half, last=True) == "a"
    assert output.stop_match == "�"


def test_a_stop_token_must_be_the_last(tokenizer: Tokenizer) -> None:
    with pytest.raises(AssertionError):
        assembler(tokenizer).push([1, 2], last=True, stop_token=1)
    with pytest.raises(AssertionError):
        assembler(tokenizer).push([1], stop_token=1)


@pytest.mark.parametrize("min_tokens", range(8))
def test_stop_strings_are_passed_over_before_min_tokens(tokenizer: Tokenizer, min_tokens: int) -> None:
    ids = ids_of(tokenizer, "a b a b a b a b")
    output = assembler(tokenizer, stop="b", min_tokens=min_tokens, max_tokens=None)
    text = "".join(output.push([token]) for token in ids)
    ends = [i + 1 for i in range(len(ids)) if tokenizer.decode(ids[: i + 1]).endswith("b")]
    expected = next((end for end in ends if end > min_tokens), None)
    assert output.consumed == (expected or len(ids))
    assert (output.stop_match == "b") == (expected is not None)
    if expected is not None:
        assert text == tokenizer.decode(ids[:expected])[:-1]
