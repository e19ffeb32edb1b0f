from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.core.sampling import SamplingParams
from penstock.text.detokenizer import DecodeStream, IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer

from .conftest import FAMILIES, TEXTS


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    stream = DecodeStream(tokenizer, skip)
    return [*(stream.push(token) for token in ids), stream.flush()]


# the low ids are special and byte tokens: drawing them more often makes runs that other tokens interrupt
tokens = st.one_of(st.integers(0, 450), st.integers(0, 260), st.integers(0, 3))


@given(st.sampled_from(sorted(FAMILIES)), st.lists(tokens, max_size=40), st.booleans())
def test_random_ids(loaded: dict[str, Tokenizer], name: str, ids: list[int], skip: bool) -> None:
    assert "".join(pieces_of(loaded[name], ids, skip)) == loaded[name].decode(ids, skip)


@given(st.sampled_from(["byte_level", "llama", "gemma"]), st.lists(st.binary(max_size=6), max_size=6))
def test_random_bytes(loaded: dict[str, Tokenizer], name: str, words: list[bytes]) -> None:
    """Almost-valid UTF-8: single byte tokens with text and special tokens between."""
    tokenizer = loaded[name]
    of_byte = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    between = [*tokenizer.encode("a", add_special_tokens=False), tokenizer.eos_id or 0]
    ids = []
    for i, word in enumerate(words):
        ids += [of_byte[bytes([byte])] for byte in word if bytes([byte]) in of_byte] + between[i % 2 :]
    for skip in (True, False):
        assert "".join(pieces_of(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@given(st.sampled_from(["byte_level", "llama", "gemma"]), st.text(max_size=30))
def test_valid_text_never_shows_a_broken_character(loaded: dict[str, Tokenizer], name: str, text: str) -> None:
    assume("�" not in text)
    tokenizer = loaded[name]
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    assert "�" not in whole
    shown = ""
    for piece in pieces_of(tokenizer, ids):
        shown += piece
        assert whole.startswith(shown)
    assert shown == whole


def test_text_comes_as_soon_as_it_is_certain(loaded: dict[str, Tokenizer]) -> None:
    byte_level, llama = loaded["byte_level"], loaded["llama"]
    ids = byte_level.encode("aꙮb")
    assert pieces_of(byte_level, ids) == ["a", *[""] * (len(ids) - 3), "ꙮ", "b", ""]
    ids = llama.encode("aꙮ.", add_special_tokens=False)
    assert [piece for piece in pieces_of(llama, ids) if piece] == ["a", "ꙮ."]
    assert pieces_of(llama, ids[:-1])[-1] == "ꙮ"


@pytest.mark.parametrize("text", TEXTS)
def test_flush_starts_over_only_what_is_held(loaded: dict[str, Tokenizer], text: str) -> None:
    """A flush between characters changes nothing that comes after it."""
    tokenizer = loaded["byte_level"]
    ids = tokenizer.encode(text)
    stream = DecodeStream(tokenizer, skip_special_tokens=False)
    shown = "".join(stream.push(token) for token in ids) + stream.flush()
    shown += "".join(stream.push(token) for token in ids) + stream.flush()
    assert shown == text * 2


TEXT = "The dog sleeps; 你好 🙂 the fox does not."


def detokenizer(tokenizer: Tokenizer, **params: Any) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokenizer, SamplingParams(**params))


@pytest.fixture(params=["byte_level", "llama"])
def tokenizer(loaded: dict[str, Tokenizer], request: pytest.FixtureRequest) -> Tokenizer:
    return loaded[request.param]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_without_stop_strings(tokenizer: Tokenizer) -> None:
    output = detokenizer(tokenizer)
    ids = ids_of(tokenizer, TEXT)
    texts = [output.push(ids[:5]), output.push([]), output.push(ids[5:], last=True)]
    assert "".join(texts) == TEXT
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
        output = detokenizer(tokenizer, stop=stop, include_stop_str_in_output=include)
        ends = sorted({cut for cut in cuts if cut < len(ids)} | {0, len(ids)})
        text = "".join(output.push(ids[start:end], last=end == len(ids)) for start, end in pairwise(ends))
        place = TEXT.find(stop)
        expected = TEXT if place < 0 else TEXT[: place + len(stop) * include]
        assert text == expected
        assert output.stop_match == (None if place < 0 else stop)
        one_by_one = detokenizer(tokenizer, stop=stop)
        for i, token in enumerate(ids):
            one_by_one.push([token], last=i == len(ids) - 1)
        assert output.consumed == one_by_one.consumed


def test_tokens_after_a_stop_string_are_not_consumed(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    before, after = ids_of(tokenizer, "The dog sleeps"), ids_of(tokenizer, "; the fox does not.")
    output = detokenizer(tokenizer, stop="sleeps")
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
    output = detokenizer(tokenizer, **params)
    tokens = [*ids_of(tokenizer, "a b"), eos]
    assert output.push(tokens, last=True, stop_token=eos) == shown.format(eos=tokenizer.token_text(eos))
    assert output.consumed == len(tokens)


@pytest.mark.parametrize("include", [False, True])
def test_an_ordinary_stop_token(tokenizer: Tokenizer, include: bool) -> None:
    tokens = ids_of(tokenizer, "a b.")
    output = detokenizer(tokenizer, stop_token_ids=(tokens[-1],), include_stop_str_in_output=include)
    assert output.push(tokens, last=True, stop_token=tokens[-1]) == ("a b." if include else "a b")


def test_the_end_lets_go_of_what_was_held_back(tokenizer: Tokenizer) -> None:
    """Held by the stop string, by the detokenizer (half a character), and then found to be a stop string after all."""
    output = detokenizer(tokenizer, stop="bbb")
    assert output.push(ids_of(tokenizer, "a b")) == "a "
    assert output.push([], last=True) == "b"

    half = ids_of(tokenizer, "aꙮ")[:-1]
    output = detokenizer(tokenizer)
    assert output.push(half) == "a"
    rest = output.push([], last=True)
    assert rest == tokenizer.decode(half)[1:]
    assert rest.endswith("�")

    output = detokenizer(tokenizer, stop="�")
    assert output.push(half, last=True) == "a"
    assert output.stop_match == "�"


def test_a_stop_token_must_be_the_last(tokenizer: Tokenizer) -> None:
    with pytest.raises(AssertionError):
        detokenizer(tokenizer).push([1, 2], last=True, stop_token=1)
    with pytest.raises(AssertionError):
        detokenizer(tokenizer).push([1], stop_token=1)


@pytest.mark.parametrize("min_tokens", range(8))
def test_stop_strings_are_passed_over_before_min_tokens(tokenizer: Tokenizer, min_tokens: int) -> None:
    ids = ids_of(tokenizer, "a b a b a b a b")
    output = detokenizer(tokenizer, stop="b", min_tokens=min_tokens, max_tokens=None)
    text = "".join(output.push([token]) for token in ids)
    ends = [i + 1 for i in range(len(ids)) if tokenizer.decode(ids[: i + 1]).endswith("b")]
    expected = next((end for end in ends if end > min_tokens), None)
    assert output.consumed == (expected or len(ids))
    assert (output.stop_match == "b") == (expected is not None)
    if expected is not None:
        assert text == tokenizer.decode(ids[:expected])[:-1]
