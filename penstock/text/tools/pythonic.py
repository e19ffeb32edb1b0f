"""Calls as Python has them: the output is a list, [name(key=value, ...), ...], as of Llama 3.2 and Llama 4."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

from penstock.text.tools.base import ToolParser, Tools
from penstock.text.tools.json_value import ValueEnd
from penstock.text.tools.typed_value import of_literal, spelled

HEADER = re.compile(r"\s*([^\W\d][\w.-]*)\s*\(")
HEADER_SO_FAR = re.compile(r"\s*(?:[^\W\d][\w.-]*\s*)?")
KEY = re.compile(r"([^\W\d]\w*)\s*=\s*(?=\S)")
KEY_SO_FAR = re.compile(r"(?:[^\W\d]\w*\s*(?:=\s*)?)?")


class Pythonic(ToolParser):
    """
    Attributes:
        around: before and after the calls.
        inner: markers that may be around that.
    """

    around: ClassVar[tuple[str, str]] = ("[", "]")
    inner: ClassVar[tuple[str, str]] = ("<|python_start|>", "<|python_end|>")
    markers = inner
    signs = inner

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._raw = ""  # what is content if no call follows
        self._count = 0  # arguments of the newest call
        self._key = ""
        self._value = ""
        self._end = ValueEnd()

    @classmethod
    def openings(cls, names: Iterable[str]) -> list[str]:
        return [f"[{name}(" for name in names]

    def outside(self) -> bool:
        text = self.reader.text
        blank = len(text) - len(text.lstrip())
        for marker in (self.inner[0], self.around[0]):
            if text.startswith(marker, blank):
                self._raw += self.reader.take(blank + len(marker))
                return self.go(self._header) if marker == self.around[0] else True
            if marker.startswith(text[blank:]) and not self.reader.final:
                return False
        return self._no_call()

    def _no_call(self) -> bool:
        self.say(self._raw)
        self._raw = ""
        return self.go(self.say_rest)

    def _header(self) -> bool:
        """Before a call."""
        text = self.reader.text
        found = HEADER.match(text)
        if found is None:
            if HEADER_SO_FAR.fullmatch(text) and not self.reader.final:
                return False
            return self.go(self._lost) if self.called else self._no_call()
        name = found[1]
        if not self.called and name not in self.tools:
            return self._no_call()
        self.reader.take(found.end())
        self._raw, self._count = "", 0
        self.call(name)
        self.argue("{")
        return self.go(self._argument)

    def _argument(self) -> bool:
        """Before an argument, or the end of them."""
        if not self.reader.skip_blank():
            return False
        char = self.reader.text[0]
        if char == ",":
            self.reader.take(1)
            return True
        if char == ")":
            self.reader.take(1)
            self.argue("}")
            return self.go(self._after)
        found = KEY.match(self.reader.text)
        if found is None:
            if KEY_SO_FAR.fullmatch(self.reader.text) and not self.reader.final:
                return False
            return self.go(self._lost)
        self._key = found[1]
        self.reader.take(found.end())
        self._value, self._end = "", ValueEnd("\"'")
        return self.go(self._read_value)

    def _read_value(self) -> bool:
        if not self.reader.text:
            return False
        self._value += self.reader.take(self._end.feed(self.reader.text))
        if not self._end.ended:
            return False
        before = ", " if self._count else ""
        self._count += 1
        self.argue(f"{before}{spelled(self._key)}: {of_literal(self._value)}")
        return self.go(self._argument)

    def _after(self) -> bool:
        """After a call."""
        if not self.reader.skip_blank():
            return False
        closing = self.reader.begins(self.around[1])
        if closing is None:
            return False
        if closing:
            self.reader.take(len(closing))
            return self.go(self._done)
        if self.reader.text[0] == ",":
            self.reader.take(1)
        return self.go(self._header)

    def _done(self) -> bool:
        text = self.reader.text.lstrip()
        if self.inner[1].startswith(text) and text != self.inner[1] and not self.reader.final:
            return False
        if text.startswith(self.inner[1]):
            self.reader.skip_blank()
            self.reader.take(len(self.inner[1]))
        return self.go(self.say_rest)

    def _lost(self) -> bool:
        """What follows is no Python: it is left out."""
        self.reader.take(len(self.reader.text))
        return False
