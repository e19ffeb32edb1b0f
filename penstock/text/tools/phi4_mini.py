"""Phi 4 mini: functools and a list of objects."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.text.tools.base import Frame
from penstock.text.tools.json_tools import JsonTools, listed


class Phi4Mini(JsonTools):
    begin = "functools["  # the word alone is one of Python's modules
    signs = ("functools",)

    def begins_calls(self, marker: str) -> bool:
        super().begins_calls(marker)
        self._listed = True
        return True

    @classmethod
    def frames(cls, special: Collection[str]) -> Sequence[Frame]:
        return [listed(cls.begin, "", ", ", "]")]
