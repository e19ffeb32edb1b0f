"""MiniMax M2: <minimax:tool_call>, and <invoke name="NAME"><parameter name="KEY">VALUE</parameter> for each call."""

from __future__ import annotations

from penstock.text.tools.function_tags import FunctionTags


class MiniMaxM2(FunctionTags):
    around = ("<minimax:tool_call>", "</minimax:tool_call>")
    function = ('<invoke name="', '">', "</invoke>")
    parameter = ('<parameter name="', '">', "</parameter>")
    markers = around
    signs = (around[0],)
