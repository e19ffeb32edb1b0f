"""An assistant's message, of an output's text: its reasoning, its content and its tool calls, whole or in deltas."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from penstock.text.reasoning import ReasoningParser
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools.base import Arguments, Call, Event, ToolParser

Fields = dict[str, Any]


def plain_message(content: str) -> Fields:
    return {"role": "assistant", "content": content, "refusal": None, "reasoning_content": None, "reasoning": None}


class MessageReader:
    """One output's message. What deltas say, put together, is what `whole` says.

    Args:
        reasoning: None where it is part of the content.
        tools: None where nothing is called.
        several: whether there may be more than one call; others are left out.
        shows_reasoning: else it is left out.

    Attributes:
        calls: how many have begun.
        thought: its reasoning, in pieces, also where it is not shown; None where it is part of the content.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, several: bool, shows_reasoning: bool
    ) -> None:
        self.calls = 0
        self.thought: list[str] | None = None if reasoning is None else []
        self._reasoning, self._tools = reasoning, tools
        self._several, self._shows_reasoning = several, shows_reasoning
        self._dropping = False  # the newest call

    def push(self, text: str, *, last: bool = False) -> Fields:
        """The fields of a delta, possibly none, for what this text brings.

        Args:
            last: no more comes; what was held back is in it, too.
        """
        thought, answer = "", text
        if self._reasoning is not None:
            thought, answer = self._reasoning.push(text)
            if last:
                held = self._reasoning.finish()
                thought, answer = thought + held[0], answer + held[1]
        events: Sequence[Event] = [answer]
        if self._tools is not None:
            events = [*self._tools.push(answer), *(self._tools.finish() if last else ())]
        return self._fields(thought, events)

    def whole(self, text: str) -> Fields:
        """The message's fields, of all of its text."""
        fields = self.push(text, last=True)
        calls = [{key: call[key] for key in ("id", "type", "function")} for call in fields.get("tool_calls", ())]
        message = plain_message(fields.get("content", ""))
        if thought := fields.get("reasoning"):
            message |= {"reasoning_content": thought, "reasoning": thought, "content": message["content"] or None}
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return message

    def _fields(self, thought: str, events: Sequence[Event]) -> Fields:
        fields: Fields = {}
        if thought and self.thought is not None:
            self.thought.append(thought)
        if thought and self._shows_reasoning:
            fields |= {"reasoning_content": thought, "reasoning": thought}
        content = "".join(event for event in events if isinstance(event, str))
        if content:
            fields["content"] = content
        calls: list[Fields] = []
        for event in events:
            if isinstance(event, Call):
                self._begin(event.name, calls)
            elif isinstance(event, Arguments) and not self._dropping:
                if not calls:
                    calls.append({"index": self.calls - 1, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += event.text
        if calls:
            fields["tool_calls"] = calls
        return fields

    def _begin(self, name: str, calls: list[Fields]) -> None:
        assert self._tools is not None
        self._dropping = self.calls > 0 and not self._several
        if self._dropping:
            return
        call_id = self._tools.call_id(name, self.calls, secrets.token_hex(12))
        function = {"name": name, "arguments": ""}
        calls.append({"index": self.calls, "id": call_id, "type": "function", "function": function})
        self.calls += 1


def reasoning_tokens(tokenizer: Tokenizer, readers: Sequence[MessageReader]) -> int | None:
    """How long outputs' reasoning is, in tokens; None where it is part of the content."""
    thoughts = ["".join(reader.thought) for reader in readers if reader.thought is not None]
    return sum(len(tokenizer.encode(thought, False)) for thought in thoughts if thought) if thoughts else None
