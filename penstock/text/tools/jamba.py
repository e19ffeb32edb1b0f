"""Jamba, Hunyuan A13B, MiniMax M1: <tool_calls> and a list of objects, or one object for each line."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.text.tools.base import Frame
from penstock.text.tools.json_tools import JsonTools, listed


class Jamba(JsonTools):
    begin, end = "<tool_calls>", "</tool_calls>"
    markers = (begin, end)
    signs = (begin,)

    @classmethod
    def frames(cls, special: Collection[str]) -> Sequence[Frame]:
        return [listed(cls.begin, "[\n", ",\n", f"\n]{cls.end}")]
