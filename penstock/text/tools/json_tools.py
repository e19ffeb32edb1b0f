"""Calls that are JSON objects, or a list of them, between two markers. Families differ in the markers alone."""

from __future__ import annotations

from typing import ClassVar

from penstock.text.tools.base import QUOTED, Frame, ToolParser, Tools
from penstock.text.tools.json_value import JsonCall


def listed(begin: str, opening: str, between: str, closing: str) -> Frame:
    """Of calls that are a list of objects."""
    return Frame(begin, f'{{"name": {QUOTED}, "arguments": ', "}", opening, between, closing)


class JsonTools(ToolParser):
    """
    Attributes:
        begin: before calls; "" where the output itself begins with them, or has none.
        end: after them; "" where nothing is.
        trusting: whether a name that no tool has makes a call, too.
    """

    begin: ClassVar[str] = ""
    end: ClassVar[str] = ""
    trusting: ClassVar[bool] = True

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._raw = ""  # what is content if no call follows
        self._listed = False
        self._one: JsonCall | None = None

    def outside(self) -> bool:
        if not self.begin:
            return self.begins_calls("")
        before, marker = self.reader.seek(self.begin)
        self.say(before)
        return self.begins_calls(marker) if marker else False

    def begins_calls(self, marker: str) -> bool:
        """Calls may follow this, which was used up."""
        self._raw, self._listed = marker, False
        return self.go(self._first)

    def _first(self) -> bool:
        """Before the first call."""
        text = self.reader.text
        self._raw += self.reader.take(len(text) - len(text.lstrip()))
        opened = self.reader.begins("[", "{")
        if not self.reader.text or opened is None:
            if self.reader.final:
                self.say(self._raw)
                self._raw = ""
            return False
        if opened == "[" and not self._listed:
            self._listed = True
            self._raw += self.reader.take(1)
            return True
        if opened == "{":
            return self._begin_call()
        return self._no_call("")

    def _begin_call(self) -> bool:
        known = None if self.trusting else self.tools
        self._one = JsonCall(self.reader, known, self.call, self.argue)
        return self.go(self._within)

    def _within(self) -> bool:
        assert self._one is not None
        if not self._one.run():
            return False
        if not self._one.named:
            return self._no_call(self._one.raw)
        self._raw = ""
        return self.go(self._after)

    def _no_call(self, raw: str) -> bool:
        self.say(self._raw + raw)
        self._raw = ""
        return self.go(self.outside if self.begin else self.say_rest)

    def _after(self) -> bool:
        """After a call: another, or the end of all. What is neither is left out."""
        if not self.reader.skip_blank():
            return False
        if self.reader.text[0] in ",;":
            self.reader.take(1)
            return True
        if self.reader.text[0] == "{":
            return self._begin_call()
        if self._listed and self.reader.text[0] == "]":
            self.reader.take(1)
            self._listed = False
            return True
        if not self.end:
            return self.go(self.outside if self.begin else self.say_rest)
        return self.go(self._closing)

    def _closing(self) -> bool:
        _, marker = self.reader.seek(self.end, self.begin)
        if not marker:
            return False
        return self.go(self.outside) if marker == self.end else self.begins_calls(marker)
