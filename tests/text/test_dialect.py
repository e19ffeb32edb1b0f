"""How a model writes calls and reasoning, by its tokenizer, and what of that is in its text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from penstock.core.request import FinishReason, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.thinking import Thinking
from penstock.service.checkpoint import DEMO
from penstock.text.detokenizer import OutputStream
from penstock.text.dialect import make_dialect
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools import PARSERS


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """One with special tokens for calls, and others for reasoning that are not special."""
    backend = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    backend.add_tokens(["<think>", "</think>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    template = {"chat_template": "{{ tools }}[TOOL_CALLS]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(template))
    return Tokenizer(tmp_path)


def test_special_tokens_of_calls_are_seen_and_no_others(tokenizer: Tokenizer) -> None:
    dialect = make_dialect(tokenizer, "", "auto", True, "qwen3")
    assert dialect.tools is PARSERS["mistral"]
    assert set(dialect.tool_tokens) == {"[TOOL_CALLS]", "[ARGS]"}
    assert not dialect.reasoning_ids
    tokens = tokenizer.encode('Hi<|im_start|>[TOOL_CALLS]f[ARGS]{"a": 1}', False)
    for shown, text in ((frozenset(), 'Hif{"a": 1}'), (dialect.tool_tokens.values(), 'Hi[TOOL_CALLS]f[ARGS]{"a": 1}')):
        stream = OutputStream(0, tokenizer, SamplingParams(), frozenset(shown))
        assert stream.feed(TokenOutput("r", tokens, finish=FinishReason.LENGTH, start=0)).text == text


def test_markers_of_reasoning_as_tokens(tokenizer: Tokenizer) -> None:
    dialect = make_dialect(tokenizer, "", "hermes", True, "qwen3")
    assert not dialect.tool_tokens
    start, end = (tokenizer.token_id(marker) for marker in ("<think>", "</think>"))
    assert dialect.thinking(None, 3) == Thinking(start=(start,), end=(end,), budget=3)
    assert dialect.thinking(True, None) == Thinking(end=(end,))
    assert dialect.thinking(False, 3) is None
    spelled = make_dialect(tokenizer, "", "hermes", True, "seed_oss").thinking(True, 1)
    assert spelled is not None
    assert tokenizer.decode(spelled.end) == "</seed:think>"


def test_nothing_is_known_of_a_model_that_says_nothing() -> None:
    demo = Tokenizer(DEMO)
    assert make_dialect(demo, "qwen3", "auto", True, None).tools is PARSERS["hermes"]
    assert make_dialect(demo, "", "auto", True, None).thinking(None, None) is None
