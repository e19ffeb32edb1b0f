from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.core.errors import InvalidRequest
from penstock.text.bad_words import bad_word_tokens
from penstock.text.tokenizer import Tokenizer


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
@pytest.mark.parametrize("word", ["fox", " fox", "\n fox", "lazy dog", "Grüße", "ꙮ"])
def test_a_word_is_found_where_a_text_begins_and_after_a_space(
    loaded: dict[str, Tokenizer], kind: str, word: str
) -> None:
    tokenizer = loaded[kind]
    found = bad_word_tokens(tokenizer, [word])
    assert 1 <= len(found) <= 2
    assert {tokenizer.decode(tokens).lstrip() for tokens in found} == {word.lstrip()}
    for text in (word.lstrip(), "The " + word.lstrip()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert any(tuple(ids[len(ids) - len(tokens) :]) == tokens for tokens in found)


def test_words_with_the_same_tokens_come_once(loaded: dict[str, Tokenizer]) -> None:
    found = bad_word_tokens(loaded["byte_level"], ["fox", " fox", "dog"])
    assert len(set(found)) == len(found)
    assert all(a != b for a, b in pairwise(found))
    assert bad_word_tokens(loaded["byte_level"], []) == ()


def test_a_word_that_is_no_unicode_is_named(loaded: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match=r"^bad_words: not valid Unicode"):
        bad_word_tokens(loaded["byte_level"], ["\ud800"])
