"""Mistral: [TOOL_CALLS] and a list of objects, or, since tokenizer version 11, [TOOL_CALLS]name{...} for each call,
perhaps with [CALL_ID] or [ARGS] between name and arguments."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.text.tools.base import NAME, Frame
from penstock.text.tools.json_tools import JsonTools, listed
from penstock.text.tools.json_value import ValueEnd

CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"


class Mistral(JsonTools):
    begin = "[TOOL_CALLS]"
    markers = (begin, CALL_ID, ARGS)
    signs = (begin,)
    _end: ValueEnd

    @staticmethod
    def call_id(name: str, index: int, unique: str) -> str:
        return unique[:9]  # which its chat templates insist on

    @classmethod
    def frames(cls, special: Collection[str]) -> Sequence[Frame]:
        """As the tokenizer's version has it."""
        return [Frame(cls.begin, NAME + ARGS) if ARGS in special else listed(cls.begin, " [", ", ", "]")]

    def begins_calls(self, marker: str) -> bool:
        self._marker = marker
        return self.go(self._kind)

    def _kind(self) -> bool:
        """A list, or a name."""
        kept = self.reader.text.lstrip()
        if not kept and not self.reader.final:
            return False
        if kept[:1] in ("[", "{", ""):
            return super().begins_calls(self._marker)
        place, _ = self.reader.find("{", self.begin)
        if place < 0 or not self.reader.text.startswith("{", place):
            if place < 0 and not self.reader.final:
                return False
            self.say(self._marker)
            return self.go(self.outside)
        name = self.reader.take(place).split(CALL_ID)[0].split(ARGS)[0].strip()
        self.call(name)
        self._end = ValueEnd()
        return self.go(self._flow)

    def _flow(self) -> bool:
        if not self.reader.text:
            return False
        self.argue(self.reader.take(self._end.feed(self.reader.text)))
        return self.go(self.outside) if self._end.ended else False
