from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer

from .conftest import FAMILIES, TEXTS


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


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
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    shown = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    shown += "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    assert shown == text * 2
