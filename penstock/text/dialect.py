"""How a model writes what is not plain text: tool calls, and what it thinks before it answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.core.thinking import Thinking
from penstock.text.reasoning import REASONING, Reasoning
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools import PARSERS, detected
from penstock.text.tools.base import ToolParser


@dataclass(frozen=True, slots=True)
class Dialect:
    """
    Attributes:
        tools: how calls are read; None where nobody knows.
        free_calls: whether they are looked for where a request leaves the choice to the model.
        reasoning: None where what the model thinks is part of its answers.
        tool_tokens: of texts that calls are marked with, those that are special tokens.
        reasoning_ids: special tokens that reasoning is marked with.
        reasoning_start, reasoning_end: the tokens of these markers.
    """

    tools: type[ToolParser] | None = None
    free_calls: bool = True
    reasoning: Reasoning | None = None
    tool_tokens: Mapping[str, int] = field(default_factory=dict)
    reasoning_ids: frozenset[int] = frozenset()
    reasoning_start: tuple[int, ...] = ()
    reasoning_end: tuple[int, ...] = ()

    def thinking(self, opened: bool | None, budget: int | None) -> Thinking | None:
        """Of an output, whose answer is to be told from what comes before; None where nothing does.

        Args:
            opened: see `Reasoning.opened`.
        """
        if self.reasoning is None or opened is False:
            return None
        return Thinking(start=() if opened else self.reasoning_start, end=self.reasoning_end, budget=budget)


PLAIN = Dialect()


def make_dialect(tokenizer: Tokenizer, model_type: str, tools: str, free_calls: bool, reasoning: str | None) -> Dialect:
    """
    Args:
        model_type: in config.json.
        tools: a parser's name; "auto" is the one that the chat template is written for, or else the architecture's.
        reasoning: a parser's name.
    """
    parser = detected(tokenizer.template_text, model_type) if tools == "auto" else PARSERS[tools]
    family = None if reasoning is None else REASONING[reasoning]
    marks = () if family is None else (family.start, family.end)
    return Dialect(
        parser,
        free_calls,
        family,
        _special(tokenizer, () if parser is None else parser.markers),
        frozenset(_special(tokenizer, marks).values()),
        *(_tokens(tokenizer, mark) for mark in marks),
    )


def _special(tokenizer: Tokenizer, markers: Iterable[str]) -> dict[str, int]:
    """Those that are special tokens."""
    tokens = {marker: tokenizer.token_id(marker) for marker in markers}
    return {marker: token for marker, token in tokens.items() if token is not None and token in tokenizer.special_ids}


def _tokens(tokenizer: Tokenizer, marker: str) -> tuple[int, ...]:
    one = tokenizer.token_id(marker)
    return tuple(tokenizer.encode(marker, False)) if one is None else (one,)
