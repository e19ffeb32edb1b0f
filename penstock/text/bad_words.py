"""Words that must not be generated, as the tokens that would spell them."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.text.tokenizer import Tokenizer


def bad_word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences, none of them empty and none twice: each word as it begins a text, and as it follows a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            found[tuple(tokenizer.encode_word(text))] = None
    found.pop((), None)
    return tuple(found)
