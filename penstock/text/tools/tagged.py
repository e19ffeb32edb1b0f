"""Calls whose arguments stand one by one between tags, as plain text: what parsers of them have in common."""

from __future__ import annotations

from penstock.text.tools.base import ToolParser, Tools
from penstock.text.tools.typed_value import of_schema, spelled


class TaggedTools(ToolParser):
    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._name = ""
        self._count = 0

    def begin_call(self, name: str) -> None:
        self._name, self._count = name, 0
        self.call(name)
        self.argue("{")

    def argument(self, name: str, text: str) -> None:
        before = ", " if self._count else ""
        self._count += 1
        self.argue(f"{before}{spelled(name)}: {of_schema(self.tools.get(self._name, {}), name, text)}")

    def end_call(self) -> None:
        self.argue("}")
