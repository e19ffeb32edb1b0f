"""An assistant's message, of an output's text: its reasoning, its content and its tool calls, whole or in deltas."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from penstock.text.reasoning import ReasoningParser
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools.base import Arguments, Call, Event, ToolParser

Fields = dict[str, Any]


class MessageReader:
    """One output's message. What deltas say, put together, is what `whole` says.

    Args:
        reasoning: None where it is part of the content.
        tools: None where nothing is called.
        several: whether there may be more than one call; others are left out.
        shows_reasoning: else it is left out.

    Attributes:
        calls: how many have begun.
        reasons: whether reasoning is told from content.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, several: bool, shows_reasoning: bool
    ) -> None:
        self.calls = 0
        self.reasons = reasoning is not None
        self._thought: list[str] = []
        self._reasoning, self._tools = reasoning, tools
        self._several, self._shows_reasoning = several, shows_reasoning
        self._dropping = False  # the newest call

    def push(self, text: str) -> Fields:
        """The fields of a delta, possibly none, for what this text brings."""
        thought, answer = self._reasoning.push(text) if self._reasoning is not None else ("", text)
        events: Sequence[Event] = [answer] if self._tools is None else self._tools.push(answer)
        return self._fields(thought, events)

    def finish(self) -> Fields:
        """The same of what was held back, when no more text comes."""
        thought, answer = self._reasoning.finish() if self._reasoning is not None else ("", "")
        events: Sequence[Event] = [answer]
        if self._tools is not None:
            events = [*self._tools.push(answer), *self._tools.finish()]
        return self._fields(thought, events)

    def whole(self, text: str) -> Fields:
        """The message's fields, of all of its text."""
        first, last = self.push(text), self.finish()
        content = first.get("content", "") + last.get("content", "")
        calls: list[Fields] = []
        for part in (*first.get("tool_calls", ()), *last.get("tool_calls", ())):
            if "id" in part:
                calls.append({key: part[key] for key in ("id", "type", "function")})
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        message: Fields = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning is not None and self._shows_reasoning:
            thought = first.get("reasoning", "") + last.get("reasoning", "")
            message |= {"reasoning_content": thought or None, "reasoning": thought or None}
            if thought and not content:
                message["content"] = None
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return message

    @property
    def thought(self) -> str:
        """All of the reasoning so far, shown or not."""
        return "".join(self._thought)

    def _fields(self, thought: str, events: Sequence[Event]) -> Fields:
        fields: Fields = {}
        if thought:
            self._thought.append(thought)
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
    """What outputs' reasoning is long, in tokens; None where it is not told from content."""
    if not any(reader.reasons for reader in readers):
        return None
    thoughts = [reader.thought for reader in readers]
    return sum(len(tokenizer.encode(thought, False)) for thought in thoughts if thought)
