"""Calls whose function and parameters have tags of their own: families differ in these alone."""

from __future__ import annotations

from typing import ClassVar

from penstock.text.tools.tagged import TaggedTools


class FunctionTags(TaggedTools):
    """
    Attributes:
        around: before and after calls.
        function: before a function's name, after it, and at the end of the call.
        parameter: before a parameter's name, after it, and after its value.
    """

    around: ClassVar[tuple[str, str]]
    function: ClassVar[tuple[str, str, str]]
    parameter: ClassVar[tuple[str, str, str]]
    _raw = ""  # what is content if no call follows
    _parameter = ""

    def outside(self) -> bool:
        before, marker = self.reader.seek(self.around[0], self.function[0])
        self.say(before)
        self._raw = marker
        if not marker:
            return False
        return self.go(self._function if marker == self.around[0] else self._function_name)

    def _function(self) -> bool:
        text = self.reader.text.lstrip()
        if not text.startswith(self.function[0]):
            if self.function[0].startswith(text) and not self.reader.final:
                return False
            self.say(self.around[0])
            return self.go(self.outside)
        self._raw += self.reader.take(self.reader.text.index(self.function[0]) + len(self.function[0]))
        return self.go(self._function_name)

    def _function_name(self) -> bool:
        place, _ = self.reader.find(self.function[1])
        if place < 0:
            if self.reader.final:
                self.say(self._raw + self.reader.take(len(self.reader.text)))
            return False
        self.begin_call(self.reader.take(place).strip())
        self.reader.take(len(self.function[1]))
        return self.go(self._parameters)

    def _parameters(self) -> bool:
        """Before a parameter, or the end. What is neither is left out."""
        _, marker = self.reader.seek(self.parameter[0], self.function[2], self.around[1])
        if marker == self.parameter[0]:
            return self.go(self._parameter_name)
        if not marker:
            return False
        self.end_call()
        return self.go(self._after if marker == self.function[2] else self.outside)

    def _parameter_name(self) -> bool:
        place, _ = self.reader.find(self.parameter[1])
        if place < 0:
            return False
        self._parameter = self.reader.take(place).strip()
        self.reader.take(len(self.parameter[1]))
        return self.go(self._value)

    def _value(self) -> bool:
        place, marker = self.reader.find(self.parameter[2], f"\n{self.parameter[0]}", f"\n{self.function[2]}")
        if place < 0:
            return False
        text = self.reader.take(place)
        self.argument(self._parameter, text.removeprefix("\n").removesuffix("\n"))
        if marker == self.parameter[2]:
            self.reader.take(len(marker))
        return self.go(self._parameters)

    def _after(self) -> bool:
        if not self.reader.skip_blank():
            return False
        marker = self.reader.begins(self.around[1])
        if marker is None:
            return False
        self.reader.take(len(marker))
        return self.go(self.outside)
