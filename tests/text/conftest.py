"""Small tokenizers of the families that language models use, as checkpoint directories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "Grüße aus Köln, naïve café: 你好，世界！ 今日は。 Привет, мир! 🙂🙃 नमस्ते",
    "def main():\n    print('hello world')\n\n\treturn 0x0A <think> about it </think>",
] * 4

# plain, mixed scripts, whitespace, specials in the text, characters that no corpus has, byte tokens written out
TEXTS = [
    "",
    " ",
    "hello world",
    "  two  spaces \n\n\ttab ",
    "Grüße, 世界 🙂!",
    "👩‍👩‍👧 ꙮ 𝔘𝔫𝔦",
    "<s>the dog</s> sleeps<|end|>.",
    "a <think> b </think> <0x0A> ▁x",
]


def _byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>", "</think>", "élan ｜"])
    return backend


def _byte_fallback(prefix_space: bool) -> tokenizers.Tokenizer:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=160, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [name for name in learned["vocab"] if name not in "你好世界"]
    merges = [tuple(merge) for merge in learned["merges"] if all(part in names for part in [*merge, "".join(merge)])]
    vocab = {name: i for i, name in enumerate(names)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens(["<think>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def _metaspace() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _word_piece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


FAMILIES: dict[str, tuple[Callable[[], tokenizers.Tokenizer], dict[str, Any]]] = {
    "byte_level": (_byte_level, {"bos_token": "<|begin|>", "eos_token": "<|end|>"}),
    "llama": (lambda: _byte_fallback(True), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "gemma": (lambda: _byte_fallback(False), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "metaspace": (_metaspace, {"eos_token": "</s>", "unk_token": "<unk>"}),
    "word_piece": (_word_piece, {"eos_token": "[SEP]", "unk_token": "[UNK]"}),
}


def write_config(directory: Path, **config: Any) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def read_by_transformers(directory: Path) -> Any:
    """Its tokenizer. Whoever does not run these tests need not wait for the import."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint directory per family; not to be written to."""
    made = {}
    for name, (build, config) in FAMILIES.items():
        made[name] = tmp_path_factory.mktemp(name)
        build().save(str(made[name] / "tokenizer.json"))
        write_config(made[name], **config)
    return made


@pytest.fixture(scope="session")
def loaded(directories: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer(directory) for name, directory in directories.items()}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokenizer(loaded: dict[str, Tokenizer], family: str) -> Tokenizer:
    return loaded[family]


@pytest.fixture
def checkpoint(directories: dict[str, Path], tmp_path: Path) -> Path:
    """A byte-level checkpoint without a tokenizer_config.json, to be written to."""
    (tmp_path / "tokenizer.json").write_bytes((directories["byte_level"] / "tokenizer.json").read_bytes())
    return tmp_path
