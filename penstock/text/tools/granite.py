"""Granite 3: <|tool_call|> and a list of objects."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.text.tools.base import Frame
from penstock.text.tools.json_tools import JsonTools, listed


class Granite(JsonTools):
    begin = "<|tool_call|>"
    markers = (begin,)
    signs = (begin,)

    @classmethod
    def frames(cls, special: Collection[str]) -> Sequence[Frame]:
        return [listed(cls.begin, "[", ", ", "]")]
