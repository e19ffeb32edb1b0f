"""Granite 3: <|tool_call|> and a list of objects."""

from __future__ import annotations

from penstock.text.tools.json_tools import JsonTools


class Granite(JsonTools):
    begin = "<|tool_call|>"
    markers = (begin,)
    signs = (begin,)
