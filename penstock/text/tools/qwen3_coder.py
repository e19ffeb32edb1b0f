"""Qwen 3 Coder, Qwen 3.5: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>."""

from __future__ import annotations

from penstock.text.tools.function_tags import FunctionTags


class Qwen3Coder(FunctionTags):
    around = ("<tool_call>", "</tool_call>")
    function = ("<function=", ">", "</function>")
    parameter = ("<parameter=", ">", "</parameter>")
    markers = around
    signs = (around[0], function[0])
