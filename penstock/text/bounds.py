"""Which texts certainly have too many tokens, found out without tokenising all of them.

Tokenising takes about 1 µs and, until it is done, 150 bytes of memory for each byte of text. Two lower bounds of a
text's number of tokens cost less:

- its size: no token spells more than so many bytes of text, unless something in the tokenizer drops text;
- the tokens of its pieces: where a text is cut, only a few tokens nearby change, unless something looks farther.

Both hold for the components that are known not to; with any other component there is no bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

PIECE_CHARS = 1 << 16
CUT_TOKENS = 64  # beside the longest token's length, what a cut may change at most
PROVEN = 1.125  # a text is refused when its pieces have so many times the tokens that are allowed
LIKELY_BYTES = 4  # of a token: texts of fewer bytes than that for each allowed token are not looked at in pieces
CASING = 4  # most bytes that normalising or lower-casing makes one of (U+1D7CE becomes "0")
MAX_WORD_PIECE_CHARS = 1000

_COMPOSING = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}  # a byte may stand for several, but none is dropped
_LOCAL = {"Strip", "StripAccents", "BertNormalizer", "Nmt", "Precompiled"}  # may drop text, each character for itself
_KEEPING_SPLITS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}
_DROPPING_SPLITS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"}


class TokenBounds:
    """Lower bounds of how many tokens a text has. Immutable.

    Attributes:
        bytes_per_token: no token stands for more bytes of text; None when text may be dropped.
        cut_tokens: by how many tokens a text may differ from the sum of two pieces of it; None when by any number.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = list(backend.get_added_tokens_decoder().values())
        normalizers = _flat(backend.normalizer, "normalizers")
        splits = _flat(backend.pre_tokenizer, "pretokenizers")
        vocabulary = backend.get_vocab(with_added_tokens=False)
        byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *splits))
        longest = max((len(piece) if byte_level else len(piece.encode()) for piece in vocabulary), default=1)
        for token in added:
            longest = max(longest, len(token.content.encode()))
            if token.normalized and backend.normalizer is not None:
                longest = max(longest, len(backend.normalizer.normalize_str(token.content).encode()))
        longest = max(longest, 4)  # an unknown character

        shrinking = _shrinking(normalizers)
        keeps = all(_keeps(step) for step in splits) and _spells_all(backend, vocabulary, byte_level)
        swallows = any(token.lstrip or token.rstrip for token in added)
        self.bytes_per_token = None if shrinking is None or swallows or not keeps else longest * shrinking

        local = all(_is_local(step) for step in normalizers) and all(
            _keeps(step) or step["type"] in _DROPPING_SPLITS or _splits_by_text(step) for step in splits
        )
        word = getattr(backend.model, "max_input_chars_per_word", 0)  # a longer word becomes one unknown token
        self.cut_tokens = longest + word + CUT_TOKENS if local and word <= MAX_WORD_PIECE_CHARS else None

    def exceeded_by(self, text: str, tokens: int) -> bool:
        """Whether a text certainly has more than so many tokens. False may mean that it is not known.

        Takes as long as tokenising the part of the text that proves it.
        """
        size = len(text.encode("utf-8", "replace"))
        if self.bytes_per_token is not None and size > tokens * self.bytes_per_token:
            return True
        if self.cut_tokens is None or size <= max(tokens * LIKELY_BYTES, PIECE_CHARS):
            return False
        found = 0
        for piece in _pieces(text):
            (encoding,) = self._backend.encode_batch_fast([piece], add_special_tokens=False)
            found += max(0, len(encoding) - 2 * self.cut_tokens)
            if found > tokens * PROVEN:
                return True
        return False


def _pieces(text: str) -> Iterator[str]:
    """Without white space at their ends, which a token beyond a cut may swallow."""
    for start in range(0, len(text), PIECE_CHARS):
        yield text[start : start + PIECE_CHARS].strip()


def _flat(component: Any, inner: str) -> list[dict[str, Any]]:
    def steps(state: dict[str, Any]) -> list[dict[str, Any]]:
        return [step for part in state[inner] for step in steps(part)] if state["type"] == "Sequence" else [state]

    return [] if component is None else steps(json.loads(component.__getstate__()))


def _shrinking(normalizers: list[dict[str, Any]]) -> int | None:
    """Into how many times fewer bytes a text may be normalised; None for any number."""
    times = 1
    for step in normalizers:
        if step["type"] in _COMPOSING:
            times *= CASING
        elif step["type"] == "Replace" and step["content"] and "String" in step["pattern"]:
            times *= -(-len(step["pattern"]["String"].encode()) // len(step["content"].encode()))
        elif step["type"] not in ("ByteLevel", "Prepend"):
            return None
    return times


def _is_local(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        return "String" in normalizer["pattern"]  # a regular expression may look at all of the text
    return normalizer["type"] in _COMPOSING | _LOCAL | {"ByteLevel", "Prepend"}


def _keeps(split: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps all text, and splits by what is near."""
    return split["type"] in _KEEPING_SPLITS or (_splits_by_text(split) and split["behavior"] != "Removed")


def _splits_by_text(split: dict[str, Any]) -> bool:
    if split["type"] == "Split":
        # an expression says where to cut: one that removes what it finds, or keeps only that, may drop all of a text
        return split["behavior"] != "Removed" or "String" in split["pattern"]
    return split["type"] == "Punctuation"


def _spells_all(backend: tokenizers.Tokenizer, vocabulary: dict[str, int], byte_level: bool) -> bool:
    """Whether the model has tokens for every text, so that it neither drops unknown characters nor joins them."""
    from tokenizers import models, pre_tokenizers

    if not isinstance(backend.model, models.BPE | models.Unigram):
        return False  # any unknown word is one token
    if byte_level and all(char in vocabulary for char in pre_tokenizers.ByteLevel.alphabet()):
        return True
    if isinstance(backend.model, models.BPE):
        falls_back, fuses = backend.model.byte_fallback, backend.model.fuse_unk
        if backend.model.unk_token is not None and not fuses:
            return True
    else:
        falls_back = bool(json.loads(backend.model.__getstate__()).get("byte_fallback"))
    return falls_back and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
