"""Tool calls in a model's text, as it comes: what parsers bring, and what all of them are made of.

A parser is a machine over one buffer: its state is a method that takes something from the buffer, and says whether it
could. So what comes of a text does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

Parameters = Mapping[str, Any]  # a function's JSON Schema
Tools = Mapping[str, Parameters]  # by name


@dataclass(frozen=True, slots=True)
class Call:
    """A call of this function begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the newest call's arguments, as JSON, go on with."""

    text: str


Event = str | Call | Arguments  # a str is content

# in a frame: a function's name, the same as JSON, and a number that the model counts
NAME, QUOTED, NUMBER = "\0name", "\0quoted", "\0number"


@dataclass(frozen=True, slots=True)
class Frame:
    """How calls are written whose arguments are JSON: `begin`, `opening`, calls with `between` between them, `closing`.

    Attributes:
        begin: with which nothing but calls begins.
        head, tail: of each call, before and after its arguments.
        between: None where there is one call.
    """

    begin: str
    head: str
    tail: str = ""
    opening: str = ""
    between: str | None = None
    closing: str = ""

    def named(self, name: str) -> str:
        """The head of a call of this function."""
        return self.head.replace(QUOTED, json.dumps(name, ensure_ascii=False)).replace(NAME, name)


class Reader:
    """Text that has come and is not used yet.

    Attributes:
        text: it.
        final: no more will come.
    """

    def __init__(self) -> None:
        self.text = ""
        self.final = False
        self._looked = 0  # characters at its beginning in which no marker begins

    def add(self, text: str) -> None:
        self.text += text

    def take(self, count: int) -> str:
        """Its first characters, which are used now."""
        taken, self.text = self.text[:count], self.text[count:]
        self._looked = max(0, self._looked - count)
        return taken

    def skip_blank(self) -> bool:
        """Whether something else than white space follows it."""
        self.take(len(self.text) - len(self.text.lstrip()))
        return bool(self.text)

    def begins(self, *markers: str) -> str | None:
        """The first of these that it begins with; "" for none of them, None where that is not known yet."""
        for marker in markers:
            if self.text.startswith(marker):
                return marker
            if not self.final and marker.startswith(self.text):
                return None
        return ""

    def seek(self, *markers: str) -> tuple[str, str]:
        """Use up what comes before the first of these, and that marker; or, and then the second is "", what certainly
        is not the beginning of one."""
        place, marker = self.find(*markers)
        if marker:
            before = self.take(place)
            self.take(len(marker))
            return before, marker
        return self.take(len(self.text) - self._beginning(markers)), ""

    def find(self, *markers: str) -> tuple[int, str]:
        """Where the first of these is, which is not used up; -1 and "" where there is none. While there is none it is
        to be asked for the same ones."""
        longest = max(map(len, markers))
        start = max(0, self._looked - longest + 1)
        found = [(place, marker) for marker in markers if (place := self.text.find(marker, start)) >= 0]
        self._looked = 0 if found else len(self.text)
        return min(found, key=lambda one: one[0]) if found else (-1, "")

    def _beginning(self, markers: Sequence[str]) -> int:
        """Characters at its end with which a marker may begin."""
        if self.final:
            return 0
        longest = max(map(len, markers))
        for count in range(min(longest - 1, len(self.text)), 0, -1):
            if any(marker.startswith(self.text[-count:]) for marker in markers):
                return count
        return 0


class ToolParser:
    """One output's text as content and calls. Of a call that is cut off, or not well-formed after its name, the
    arguments are what the model wrote of them; what looks like a call but names no function is content.

    White space around calls is no content.

    Args:
        tools: that may be called.

    Attributes:
        markers: texts that are special tokens in such models' vocabularies, and that it has to see.
        signs: texts of chat templates that are written for it, all of which one has.
        bare: whether a call may be a JSON object with "name" and "parameters", and nothing around it.
        called: whether a call has begun.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    signs: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[bool] = False

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.called = False
        self.reader = Reader()
        self.state: Callable[[], bool] = self.outside
        self._events: list[Event] = []
        self._blank = ""  # white space that is content if more content follows

    def push(self, text: str) -> list[Event]:
        """What this text brings, possibly nothing."""
        self.reader.add(text)
        return self._run()

    def finish(self) -> list[Event]:
        """The rest, when no more text comes."""
        self.reader.final = True
        events = self._run()
        if self._blank and not self.called:
            events.append(self._blank)
        return events

    @staticmethod
    def call_id(name: str, index: int, unique: str) -> str:
        """A call's id.

        Args:
            index: of the call in its message.
            unique: letters and digits, at least 24 of them.
        """
        return f"call_{unique}"

    @classmethod
    def frames(cls, special: Collection[str]) -> Sequence[Frame]:
        """All ways to write calls, which begin differently; none where arguments are no JSON, or nothing marks calls.

        Args:
            special: markers that are special tokens.
        """
        return ()

    @classmethod
    def openings(cls, names: Iterable[str]) -> list[str]:
        """Texts with which an output begins that calls these functions, and not with anything else before."""
        return list(cls.signs[:1])

    # --- for the machines

    def outside(self) -> bool:
        """The state at the beginning, and between calls. Returns False when it waits for more text."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """It is content."""
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._events.append(shown)

    def call(self, name: str) -> None:
        self._blank = ""
        self.called = True
        self._events.append(Call(name))

    def argue(self, text: str) -> None:
        if text:
            self._events.append(Arguments(text))

    def go(self, state: Callable[[], bool]) -> bool:
        """That is the state now."""
        self.state = state
        return True

    def say_rest(self) -> bool:
        """A state: all that follows is content."""
        self.say(self.reader.take(len(self.reader.text)))
        return False

    def _run(self) -> list[Event]:
        while self.state():
            pass
        events, self._events = self._events, []
        return events
