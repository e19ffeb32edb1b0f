"""JSON, and values of Python, that come in pieces: where a value ends, and a call written as an object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from penstock.text.tools.base import Reader

OPENING, CLOSING = "{[(", "}])"
_SCALAR_ENDS = re.compile(r"[\s,;:}\])<\[({]")


class ValueEnd:
    """Finds where a value ends that began with the first character it is given.

    Args:
        quotes: that strings are in.

    Attributes:
        ended: whether it has.
    """

    def __init__(self, quotes: str = '"') -> None:
        self.ended = False
        self._quotes = quotes
        self._quote = ""  # of the string that it is in
        self._escaped = False
        self._depth = 0
        self._scalar = False

    def feed(self, text: str) -> int:
        """How many of these characters belong to the value: all of them until it has ended."""
        for i, char in enumerate(text):
            if self._quote:
                self._in_string(char)
            elif self._scalar:
                self.ended = _SCALAR_ENDS.match(char) is not None
                if self.ended:
                    return i
                continue
            elif char in self._quotes:
                self._quote = char
            elif char in OPENING:
                self._depth += 1
            elif char in CLOSING:
                self._depth -= 1
            elif not self._depth:
                self._scalar = True
                continue
            if not self._quote and self._depth <= 0:
                self.ended = True
                return i + 1
        return len(text)

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""


class JsonCall:
    """A call that is a JSON object, with its function's name under "name". What is under "arguments" or "parameters"
    goes on as it comes, once the name is known; if it is a string, what that spells.

    Args:
        reader: at the object's brace.
        known: names that there are; with others it is no call. None takes any.
        call, argue: told of the name, and of arguments.

    Attributes:
        ended: nothing more is to be read.
        named: whether there was a name. If it has ended without one, it is no call, and `raw` is what was read.
    """

    NAMES = ("name",)
    ARGUMENTS = ("arguments", "parameters")

    def __init__(
        self,
        reader: Reader,
        known: Collection[str] | None,
        call: Callable[[str], None],
        argue: Callable[[str], None],
    ) -> None:
        self.ended = self.named = False
        self.raw = ""
        self._reader, self._known = reader, known
        self._call, self._argue = call, argue
        self._key = ""
        self._value = ""  # read so far, where it does not go on as it comes
        self._end: ValueEnd | None = None
        self._argued = False
        self._early: str | None = None  # arguments that came before the name
        self._step: Callable[[], bool] = self._opening

    def run(self) -> bool:
        """Read on. Returns False where it waits for more text."""
        while not self.ended:
            if not self._step():
                self.ended = self._reader.final  # cut off
                if self.ended and self._step == self._read_value and self._key in self.ARGUMENTS and self.named:
                    self._argue("" if self._argued else self._value)
                return self.ended
        return True

    def _opening(self) -> bool:
        if not self._reader.text:
            return False
        if not self._reader.text.startswith("{"):
            return self._close()
        self._take(1)
        return self._go(self._member)

    def _member(self) -> bool:
        """A key, or the end."""
        if not self._skip():
            return False
        char = self._reader.text[0]
        if char == ",":
            self._take(1)
            return True
        if char != '"':
            if char == "}":
                self._take(1)
            return self._close()
        self._end, self._value = ValueEnd(), ""
        return self._go(self._read_key)

    def _read_key(self) -> bool:
        if not self._whole():
            return False
        self._key = _spelled(self._value)
        return self._go(self._colon)

    def _colon(self) -> bool:
        if not self._skip():
            return False
        if self._reader.text[0] != ":":
            return self._close()
        self._take(1)
        return self._go(self._begin_value)

    def _begin_value(self) -> bool:
        if not self._skip():
            return False
        if self._reader.text[0] in ",}":
            return self._close()
        self._end, self._value = ValueEnd(), ""
        flows = self.named and self._key in self.ARGUMENTS and self._reader.text[0] in "{["
        return self._go(self._flow if flows and not self._argued else self._read_value)

    def _flow(self) -> bool:
        """Arguments as they come."""
        assert self._end is not None
        if not self._reader.text:
            return False
        self._argued = True
        self._argue(self._take(self._end.feed(self._reader.text)))
        return self._go(self._member) if self._end.ended else False

    def _read_value(self) -> bool:
        if not self._whole():
            return False
        if self._key in self.NAMES and not self.named:
            name = _spelled(self._value)
            if not self._value.startswith('"') or not name or (self._known is not None and name not in self._known):
                return self._close()
            self.named, self.raw = True, ""
            self._call(name)
            if self._early is not None:
                self._argue_whole(self._early)
        elif self._key in self.ARGUMENTS and not self._argued:
            if self.named:
                self._argue_whole(self._value)
            else:
                self._early = self._value
        return self._go(self._member)

    def _argue_whole(self, value: str) -> None:
        self._argued = True
        text = _spelled(value) if value.startswith('"') else value
        self._argue("{}" if text in ("null", "") else text)

    def _close(self) -> bool:
        """It is over, well or not."""
        self.ended = True
        if self.named and not self._argued:
            self._argue("{}")
        return True

    def _whole(self) -> bool:
        """Whether the value is complete."""
        assert self._end is not None
        if self._end.ended:
            return True
        self._value += self._take(self._end.feed(self._reader.text))
        return self._end.ended

    def _skip(self) -> bool:
        text = self._reader.text
        self._take(len(text) - len(text.lstrip()))
        return bool(self._reader.text)

    def _take(self, count: int) -> str:
        taken = self._reader.take(count)
        if not self.named:
            self.raw += taken
        return taken

    def _go(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True


def _spelled(text: str) -> str:
    """A JSON string's text; what is none stays as it is."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return text
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else text  # no lone surrogates
