"""Hermes 2 Pro and later, Qwen 2.5, Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call> for each call."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.text.tools.base import QUOTED, Frame
from penstock.text.tools.json_tools import JsonTools


class Hermes(JsonTools):
    begin, end = "<tool_call>", "</tool_call>"
    markers = (begin, end)
    signs = (begin,)

    @classmethod
    def frames(cls, special: Collection[str]) -> Sequence[Frame]:
        return [Frame(cls.begin, f'\n{{"name": {QUOTED}, "arguments": ', f"}}\n{cls.end}")]
