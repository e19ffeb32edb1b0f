"""Jamba, Hunyuan A13B, MiniMax M1: <tool_calls> and a list of objects, or one object for each line."""

from __future__ import annotations

from penstock.text.tools.json_tools import JsonTools


class Jamba(JsonTools):
    begin, end = "<tool_calls>", "</tool_calls>"
    markers = (begin, end)
    signs = (begin,)
