"""What is refused without tokenising all of it is too long; what fits is never refused."""

from __future__ import annotations

import random
import unicodedata
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from penstock.core.errors import PromptTooLong
from penstock.service.checkpoint import DEMO
from penstock.text.bounds import CASING, TokenBounds
from penstock.text.tokenizer import Tokenizer
from tests.text.conftest import TEXTS

WORDS = [*TEXTS, "a", "\u212b", "K", "\u1100\u1161\u11a8", "\U0001d7ce", "\u0301", "\n", "aaaa", "ꙮ", "\x00", "x" * 120]
words = st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=12).map("".join)


def small(
    normalizer: normalizers.Normalizer | None = None,
    split: pre_tokenizers.PreTokenizer | None = None,
    model: models.Model | None = None,
    added: AddedToken | None = None,
) -> TokenBounds:
    """Bounds of a byte-level tokenizer with what is given in place of its own."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocab = {char: i for i, char in enumerate(sorted(alphabet))}
    backend = tokenizers.Tokenizer(model or models.BPE(vocab=vocab, merges=[]))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = bytes_of if split is None else pre_tokenizers.Sequence([split, bytes_of])
    if added is not None:
        backend.add_tokens([added])
    return TokenBounds(backend)


def test_the_families_have_the_bounds_that_they_can_have(loaded: dict[str, Tokenizer]) -> None:
    by_size = {name for name, tokenizer in loaded.items() if tokenizer.bounds.bytes_per_token is not None}
    by_piece = {name for name, tokenizer in loaded.items() if tokenizer.bounds.cut_tokens is not None}
    assert by_size == {"byte_level", "llama", "gemma"}  # the others join unknown characters, or drop spaces
    assert by_piece == set(loaded)


@given(text=words)
@settings(max_examples=100, deadline=None)
def test_no_token_stands_for_more_bytes(loaded: dict[str, Tokenizer], text: str) -> None:
    for tokenizer in loaded.values():
        per_token = tokenizer.bounds.bytes_per_token
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert per_token is None or len(text.encode()) <= per_token * len(tokens)


@given(left=words, right=words)
@settings(max_examples=200, deadline=None)
def test_a_cut_changes_few_tokens(loaded: dict[str, Tokenizer], left: str, right: str) -> None:
    for tokenizer in loaded.values():
        whole, *parts = (
            len(tokenizer.encode(text, add_special_tokens=False))
            for text in (left + right, left.strip(), right.strip())
        )
        assert tokenizer.bounds.cut_tokens is not None
        assert sum(parts) - whole <= tokenizer.bounds.cut_tokens


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.StripAccents()},
        {"normalizer": normalizers.BertNormalizer()},
        {"normalizer": normalizers.Nmt()},
        {"normalizer": normalizers.Replace(Regex(" +"), " ")},
        {"normalizer": normalizers.Replace("x", "")},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])},
        {"split": pre_tokenizers.Whitespace()},
        {"split": pre_tokenizers.WhitespaceSplit()},
        {"split": pre_tokenizers.BertPreTokenizer()},
        {"split": pre_tokenizers.CharDelimiterSplit(",")},
        {"split": pre_tokenizers.Punctuation("removed")},
        {"split": pre_tokenizers.Split(Regex(r"\s"), "removed")},
        {"model": models.BPE(vocab={"a": 0}, merges=[])},
        {"model": models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True)},
        {"model": models.WordLevel({"?": 0}, unk_token="?")},
        {"added": AddedToken("<mask>", lstrip=True)},
        {"added": AddedToken("<mask>", rstrip=True)},
    ],
    ids=str,
)
def test_a_tokenizer_that_may_drop_text_has_no_bound_by_size(parts: dict[str, Any]) -> None:
    assert small(**parts).bytes_per_token is None


def test_a_component_that_looks_at_all_of_the_text_leaves_no_bound() -> None:
    for parts in (
        {"normalizer": normalizers.Replace(Regex("(?m)a.*b"), "c")},
        {"split": pre_tokenizers.Split(Regex("(?m)a.*b"), "removed")},
        {"model": models.WordPiece({"?": 0}, unk_token="?", max_input_chars_per_word=10**6)},
    ):
        bounds = small(**parts)
        assert (bounds.bytes_per_token, bounds.cut_tokens) == (None, None)
        assert not bounds.exceeded_by("a" * 10**6, 1)


def test_shrinking_normalizers_loosen_the_bound() -> None:
    longest = small().bytes_per_token
    assert longest is not None
    assert small(normalizers.NFC()).bytes_per_token == longest * CASING
    assert small(normalizers.Replace("abcdefg", "xy")).bytes_per_token == longest * 4
    assert small(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])).bytes_per_token == (
        longest * CASING**2
    )
    assert small(added=AddedToken("<a long token>")).bytes_per_token == len("<a long token>")


def test_normalising_makes_one_byte_of_four_at_most() -> None:
    for form in ("NFC", "NFKC", "NFD", "NFKD"):
        for code in (*range(0xD800), *range(0xE000, 0x30000)):
            char = chr(code)
            if not unicodedata.is_normalized(form, char):  # type: ignore[arg-type]
                shorter = unicodedata.normalize(form, char)  # type: ignore[arg-type]
                assert len(char.encode()) <= CASING * len(shorter.encode())


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend, self.chars = backend, 0

    def encode_batch_fast(self, texts: list[str], **named: Any) -> list[tokenizers.Encoding]:
        self.chars += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.fixture
def demo() -> tuple[Tokenizer, Counting]:
    tokenizer = Tokenizer(DEMO)
    counting = Counting(tokenizer._backend)
    tokenizer._backend = tokenizer.bounds._backend = counting  # type: ignore[assignment]
    return tokenizer, counting


def test_a_text_far_beyond_the_context_is_hardly_tokenised(demo: tuple[Tokenizer, Counting]) -> None:
    tokenizer, counting = demo
    text = "".join(random.Random(1).choices("abcdefghij XYZ.,;-+*", k=7_000_000))
    with pytest.raises(PromptTooLong, match="has more than 4095 tokens"):
        tokenizer.encode(text, max_model_len=4096)
    assert counting.chars == 0
    with pytest.raises(PromptTooLong, match="has more than 40959 tokens"):
        tokenizer.encode(text, max_model_len=40960)
    assert counting.chars < 2**18


def test_a_long_text_of_few_tokens_is_taken_up_to_the_last_one(demo: tuple[Tokenizer, Counting]) -> None:
    tokenizer, _ = demo
    dense = "".join(random.Random(2).choices("abcdefghij XYZ", k=30_000))
    text = dense + "    " * 60_000 + dense
    tokens = tokenizer.encode(text)
    assert len(text) > 4 * len(tokens)  # so that its pieces are looked at
    assert tokenizer.encode(text, max_model_len=len(tokens) + 1) == tokens
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.encode_chat(messages)
    assert tokenizer.encode_chat(messages, max_model_len=len(chat) + 1) == chat
