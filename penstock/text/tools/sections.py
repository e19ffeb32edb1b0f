"""Calls that are a name and then a JSON object, each between markers of its own, all of them in a section."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from penstock.text.tools.base import Frame, ToolParser, Tools
from penstock.text.tools.json_value import ValueEnd


class SectionTools(ToolParser):
    """
    Attributes:
        section: before the first call, and after the last one.
        around: before and after each.
        after_name: between name and arguments.
        head, tail: of a call, as `Frame` has them; within `around`.
        between: what is between two calls.
    """

    section: ClassVar[tuple[str, str]]
    around: ClassVar[tuple[str, str]]
    after_name: ClassVar[str]
    head: ClassVar[str]
    tail: ClassVar[str] = ""
    between: ClassVar[str] = ""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._raw: str | None = ""  # of a section: content if there is no call in it; None where there is one
        self._end = ValueEnd()

    @classmethod
    def frames(cls, special: Collection[str]) -> Sequence[Frame]:
        before, after = cls.around
        tail = cls.tail + after
        in_section = Frame(cls.section[0], before + cls.head, tail, "", cls.between, cls.section[1])
        return [in_section, Frame(before, cls.head, tail)]

    def name(self, header: str) -> str:
        """A function's, in what stands before `after_name`."""
        return header.strip()

    def outside(self) -> bool:
        before, marker = self.reader.seek(self.section[0], self.around[0])
        self.say(before)
        if not marker:
            return False
        self._raw = marker
        return self.go(self._between if marker == self.section[0] else self._header)

    def _between(self) -> bool:
        """In the section: what is no call is left out."""
        before, marker = self.reader.seek(self.around[0], self.section[1])
        self._keep(before + marker)
        if marker == self.around[0]:
            return self.go(self._header)
        if marker or self.reader.final:
            self.say(self._raw or "")
            self._raw = ""
        return self.go(self.outside) if marker else False

    def _header(self) -> bool:
        place, marker = self.reader.find(self.after_name, self.around[1])
        if place < 0:
            if self.reader.final:
                self._keep(self.reader.take(len(self.reader.text)))
                return self.go(self._between)
            return False
        header = self.reader.take(place + len(marker))
        name = self.name(header.removesuffix(marker))
        if marker == self.around[1] or not name:
            self._keep(header)
            return self.go(self._between)
        self._raw = None
        self.call(name)
        return self.go(self._opening)

    def _keep(self, text: str) -> None:
        if self._raw is not None:
            self._raw += text

    def _opening(self) -> bool:
        """Before the arguments' brace: a line break, or the beginning of a block of code."""
        place, marker = self.reader.find("{", self.around[1])
        if place < 0:
            return False
        if marker != "{":
            self.argue("{}")
            return self.go(self._between)
        self.reader.take(place)
        self._end = ValueEnd()
        return self.go(self._flow)

    def _flow(self) -> bool:
        if not self.reader.text:
            return False
        self.argue(self.reader.take(self._end.feed(self.reader.text)))
        return self.go(self._between) if self._end.ended else False
