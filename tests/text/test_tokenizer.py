from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders

from penstock.core.errors import ConfigError, InvalidRequest
from penstock.text.tokenizer import Tokenizer

from .conftest import TEXTS, read_by_transformers, write_config


def assert_agrees(directory: Path) -> Tokenizer:
    ours, theirs = Tokenizer(directory), read_by_transformers(directory)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_id == theirs.eos_token_id
    return ours


def test_agrees_with_transformers(directories: dict[str, Path], family: str) -> None:
    assert_agrees(directories[family])


def test_llama_adds_bos_and_spells_unknown_characters_in_bytes(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["llama"]
    ids = tokenizer.encode("世")
    assert ids[0] == tokenizer.encode("")[0]
    assert [tokenizer.token_bytes(token) for token in ids[-3:]] == [b"\xe4", b"\xb8", b"\x96"]


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_the_post_processor_decides_about_bos(checkpoint: Path, add_bos_token: bool) -> None:
    write_config(checkpoint, bos_token="<|begin|>", eos_token="<|end|>", add_bos_token=add_bos_token)
    assert_agrees(checkpoint)


def test_tokens_of_the_configuration(checkpoint: Path) -> None:
    token = {"lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
    write_config(
        checkpoint,
        added_tokens_decoder={
            "900": token | {"content": "sleeps", "special": False},
            "800": token | {"content": "the dog", "special": True},
            "421": token | {"content": "</think>", "special": True},
        },
        eos_token={"__type": "AddedToken", "content": "<s>", **token},
        pad_token="</s>",
        image_token="hello",
        additional_special_tokens=["<think>", "world"],
    )
    tokenizer = assert_agrees(checkpoint)
    assert tokenizer.decode(tokenizer.encode("The<think>world</think>, <s>the dog sleeps")) == "The<think>, sleeps"
    assert tokenizer.token_text(tokenizer.eos_id or 0) == "<s>"


def test_older_files(checkpoint: Path) -> None:
    write_config(checkpoint, eos_token="ignored, the map goes before it")
    names = {"eos_token": {"content": "</s>"}, "additional_special_tokens": ["fox"]}
    (checkpoint / "special_tokens_map.json").write_text(json.dumps(names))
    (checkpoint / "added_tokens.json").write_text(json.dumps({"dog": 999, "</s>": 998}))
    tokenizer = Tokenizer(checkpoint)
    end, dog, fox = range(tokenizer.vocab_size - 3, tokenizer.vocab_size)
    assert tokenizer.encode("dogfox</s>") == [dog, fox, end]
    assert tokenizer.eos_id == end
    assert {end, fox} < tokenizer.special_ids
    assert dog not in tokenizer.special_ids


def test_without_a_configuration(checkpoint: Path) -> None:
    tokenizer = Tokenizer(checkpoint)
    assert tokenizer.eos_id is None
    assert tokenizer.decode(tokenizer.encode("hello<|end|>")) == "hello"
    assert tokenizer.decode(tokenizer.encode("hello<|end|>"), skip_special_tokens=False) == "hello<|end|>"


def test_truncation_and_padding_of_the_file_are_off(checkpoint: Path) -> None:
    file = checkpoint / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(file))
    tokenizer = Tokenizer(checkpoint)
    assert tokenizer.encode("") == []
    assert tokenizer.decode(tokenizer.encode("fox " * 20)) == "fox " * 20


def test_tokens_spell_the_text(tokenizer: Tokenizer, family: str) -> None:
    text = "the dog 你好 🙂\n" if family in ("byte_level", "llama", "gemma") else "the dog sleeps"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip(" ") == text


def test_token_text(loaded: dict[str, Tokenizer]) -> None:
    llama, byte_level = loaded["llama"], loaded["byte_level"]
    newline = llama.encode("\n", add_special_tokens=False)[-1]
    assert (llama.token_text(newline), llama.token_bytes(newline)) == ("\n", b"\n")
    assert llama.token_text(llama.encode("the", add_special_tokens=False)[0]) == " the"
    assert llama.token_text(llama.eos_id or 0) == "</s>"
    assert llama.token_text(llama.vocab_size) == ""
    first = byte_level.encode("ꙮ")[0]
    assert (byte_level.token_text(first), byte_level.token_bytes(first)) == ("�", b"\xea")
    assert byte_level.token_text(byte_level.encode("<think>")[0]) == "<think>"


def test_missing_and_broken_files(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        Tokenizer(tmp_path_factory.mktemp("empty"))
    (checkpoint / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not valid JSON"):
        Tokenizer(checkpoint)
    write_config(checkpoint, added_tokens_decoder={"1": "text"})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        Tokenizer(checkpoint)
    (checkpoint / "tokenizer_config.json").write_bytes(b'"\xff"')
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: cannot be read"):
        Tokenizer(checkpoint)
    (checkpoint / "tokenizer_config.json").unlink()
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a valid tokenizer"):
        Tokenizer(checkpoint)


@pytest.mark.parametrize(
    "decoder", [decoders.CTC(), decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])], ids=["CTC", "Strip"]
)
def test_a_decoder_that_cannot_stream_is_refused(checkpoint: Path, decoder: decoders.Decoder) -> None:
    file = checkpoint / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.decoder = decoder
    backend.save(str(file))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: decoder: \w+"):
        Tokenizer(checkpoint)


def test_wrong_input(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt.*U\+D83D.*character 2") as caught:
        tokenizer.encode("ab\ud83d!")
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest, match="tokens"):
        tokenizer.decode([-1])
    assert tokenizer.decode([2**31]) == ""


def test_threads(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    texts = [text * n for n in range(20) for text in TEXTS]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected
        assert list(pool.map(lambda ids: tokenizer.decode(ids, False), expected)) == texts


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
@pytest.mark.parametrize("word", ["fox", " fox", "\n fox", "lazy dog", "Grüße", "ꙮ"])
def test_a_bad_word_is_found_where_a_text_begins_and_after_a_space(
    loaded: dict[str, Tokenizer], kind: str, word: str
) -> None:
    tokenizer = loaded[kind]
    found = tokenizer.encode_bad_words([word])
    assert 1 <= len(found) <= 2
    assert {tokenizer.decode(tokens).lstrip() for tokens in found} == {word.lstrip()}
    for text in (word.lstrip(), "The " + word.lstrip()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert any(tuple(ids[len(ids) - len(tokens) :]) == tokens for tokens in found)


def test_bad_words_with_the_same_tokens_come_once(loaded: dict[str, Tokenizer]) -> None:
    found = loaded["byte_level"].encode_bad_words(["fox", " fox", "dog"])
    assert len(set(found)) == len(found)
    assert all(a != b for a, b in pairwise(found))
    assert loaded["byte_level"].encode_bad_words([]) == ()


def test_a_bad_word_that_is_no_unicode_is_named(loaded: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match=r"^bad_words: not valid Unicode"):
        loaded["byte_level"].encode_bad_words(["\ud800"])
