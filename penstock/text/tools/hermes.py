"""Hermes 2 Pro and later, Qwen 2.5, Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call> for each call."""

from __future__ import annotations

import json

from penstock.text.tools.json_tools import JsonTools


class Hermes(JsonTools):
    begin, end = "<tool_call>", "</tool_call>"
    markers = (begin, end)
    signs = (begin,)

    @staticmethod
    def frame(name: str) -> tuple[str, str, str] | None:
        head = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        return "<tool_call>", head, "}\n</tool_call>"
