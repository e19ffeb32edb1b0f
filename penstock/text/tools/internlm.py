"""InternLM 2.5 and 3: an object between markers of a plugin's action."""

from __future__ import annotations

from penstock.text.tools.json_tools import JsonTools


class InternLm(JsonTools):
    begin, end = "<|action_start|><|plugin|>", "<|action_end|>"
    markers = ("<|action_start|>", "<|plugin|>", end)
    signs = ("<|action_start|>", "<|plugin|>")
